"""DP-SGD on a node, by record or by patient (Abadi et al. 2016, algorithm 1), with Opacus' gradients per record.

A step's gradient is (Σ_u clip(g_u, C) + noise) / (q·U) over the units u that take part, each by a coin with chance q;
g_u is the gradient of a record's loss, or the sum over all records of a patient, so that somebody with a thousand
scans counts as one. U, how many units the site has, is taken as public, as everywhere in the field: it only scales.

Two things that are often done and break the account are not done here: batches are no shuffled parts of an epoch, and
neither coins nor noise follow from the run's seed, which the server knows.

The noise is a discrete Gaussian on a grid of 2^12 to 2^16 steps a standard deviation, to which the clipped sum is
rounded first: floating-point normals give away what they were added to (Mironov 2012, "On Significance of the Least
Significant Bits for Differential Privacy"). Its Rényi divergences at whole orders, sampled or not, are those of the
Gaussian, since a shift by whole steps leaves the sum of its weights as it is. What rounding may add to a unit's part,
√d steps, counts in the sensitivity, and so does what float32 may lose in sums.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from fedward_common import batches
from fedward_common.algorithms.node_half import Local
from fedward_common.algorithms.training import checked_loss, seed_all
from fedward_common.errors import ConfigError, TaskError, UpdateError
from fedward_common.privacy.noise import DiscreteGaussian, Noise
from fedward_common.privacy.sampled import SampledSteps
from fedward_common.secagg.masks import Keystream

Indices = npt.NDArray[np.int64]

_FEWEST_BITS, _MOST_BITS = 12, 16
_SLACK = 2.0**-14
"""Relative; of norms and sums in float32."""
_PROBED, _TOLERANCE = 4, 1e-3
"""Records whose gradients are looked at before training, and how far they may be off, relative to the largest entry."""


def private_steps(local: Local, parameters: Sequence[nn.Parameter], asked: SampledSteps) -> Generator[None, None, None]:
    """Before each of `asked.steps` steps: leave its private gradient in `.grad` of all `parameters`.

    Close it when done: the model is then as it was. Raises `TaskError` for a model or task whose gradients are not
    sums over records, `UpdateError` for gradients that are not finite, `ConfigError` for noise that no grid holds.
    """
    units = _Units.of(local, asked.by_patient)
    noise = _GridNoise.of(asked, sum(parameter.numel() for parameter in parameters))
    scale = 1 / (asked.sampling_rate * units.count)
    buffers = [(buffer, buffer.clone()) for buffer in local.model.buffers()]
    with _ClippedSum(local, parameters, asked) as clipped:
        clipped.check()
        for _ in range(asked.steps):
            total = clipped.over(units, units.drawn(asked.sampling_rate))
            if not all(torch.equal(buffer, before) for buffer, before in buffers):
                raise TaskError(_GATHERS)
            noise.add(total)
            total *= scale
            _spread(total, parameters)
            yield


class _Units:
    """Which records are whose. `records` holds them unit by unit, unit u from starts[u] to starts[u + 1]."""

    def __init__(self, records: Indices, starts: Indices) -> None:
        self.records = records
        self.starts = starts

    @classmethod
    def of(cls, local: Local, by_patient: bool) -> _Units:
        # Public examples too, as if they were private.
        count = local.in_pass
        if not by_patient:
            return cls(np.arange(count), np.arange(count + 1))
        groups = local.data.groups
        if groups is None:
            raise TaskError(
                "privacy.unit = 'patient', but data() gave no groups: return Data(train=…, groups=…) with the patient "
                "of each training record, in the order of the records."
            )
        if len(groups) != count:
            raise TaskError(
                f"Data.groups has {len(groups)} entries for {count} training records: give the patient of each record."
            )
        _, unit = np.unique(np.asarray(groups), return_inverse=True)
        return cls(np.argsort(unit, kind="stable"), np.concatenate(([0], np.cumsum(np.bincount(unit)))))

    @property
    def count(self) -> int:
        return len(self.starts) - 1

    def drawn(self, rate: float) -> Indices:
        """The units whose coin fell so, in order."""
        words = Keystream().words(self.count)
        return np.flatnonzero(words < np.uint64(rate * 2.0**32))

    def parts(self, drawn: Indices, most: int) -> Iterator[Indices]:
        """`drawn` in parts of at most `most` records each, but for units that have more by themselves."""
        part: list[int] = []
        held = 0
        for unit in drawn.tolist():
            records = int(self.starts[unit + 1] - self.starts[unit])
            if part and held + records > most:
                yield np.array(part)
                part, held = [], 0
            part.append(unit)
            held += records
        if part:
            yield np.array(part)

    def of_part(self, part: Indices) -> tuple[Indices, Indices]:
        """The records of the units in `part`, and for each its unit's place in `part`."""
        sizes = self.starts[part + 1] - self.starts[part]
        records = [self.records[self.starts[unit] : self.starts[unit + 1]] for unit in part]
        return np.concatenate(records), np.repeat(np.arange(len(part)), sizes)


class _GridNoise:
    """Noise of standard deviation z·(C + √d·s) a coordinate, on a grid of step s."""

    def __init__(self, step: float, bits: int) -> None:
        self._step = step
        self._noise = Noise.of(DiscreteGaussian(4.0**bits))

    @classmethod
    def of(cls, asked: SampledSteps, length: int) -> _GridNoise:
        root = math.sqrt(length)
        bits = min(max(_FEWEST_BITS, math.ceil(math.log2(256 * root))), _MOST_BITS)
        # σ = z·(C + √d·σ/2^bits), solved for σ.
        left = 1 - asked.noise_multiplier * root * 2.0**-bits
        if left < 0.5:
            raise ConfigError(
                f"privacy.noise_multiplier = {asked.noise_multiplier:g} for {length:,} parameters: rounding to the "
                "grid of the noise would cost more than half of it. Use less noise, a smaller model or fewer trainable "
                "parameters."
            )
        sigma = asked.noise_multiplier * asked.clip * (1 + 2 * _SLACK) / left
        return cls(sigma * 2.0**-bits, bits)

    def add(self, total: npt.NDArray[np.float64]) -> None:
        """To a clipped sum, in place."""
        total /= self._step
        np.rint(total, out=total)
        total += self._noise.draw(total.size)
        total *= self._step


class _ClippedSum:
    """Sums over units of their clipped gradients. Its hooks are on the model for as long as the `with` block lasts."""

    def __init__(self, local: Local, parameters: Sequence[nn.Parameter], asked: SampledSteps) -> None:
        self._local = local
        self._parameters = list(parameters)
        self._asked = asked
        self._read = batches.reader(local.data.train, local.data.collate, local.device)
        self._length = sum(parameter.numel() for parameter in parameters)

    def __enter__(self) -> _ClippedSum:
        hooks = _hooks(self._asked.ghost)
        self._local.model.train()
        try:
            self._hooks = hooks(self._local.model, loss_reduction="mean")
        except (NotImplementedError, ValueError) as error:
            raise TaskError(f"the model has layers without gradients per record: {error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.cleanup()
        for parameter in self._parameters:
            parameter.grad = None

    def over(self, units: _Units, drawn: Indices) -> npt.NDArray[np.float64]:
        """Of the drawn units: float64, shape (d,)."""
        return (self._ghost_sum if self._asked.ghost else self._sum)(units, drawn)

    def _sum(self, units: _Units, drawn: Indices) -> npt.NDArray[np.float64]:
        total = np.zeros(self._length)
        most = self._local.options.batch_size
        for part in units.parts(drawn, most):
            records, owners = units.of_part(part)
            sums: list[torch.Tensor] | None = None
            for start in range(0, len(records), most):
                each = self._each(torch.from_numpy(records[start : start + most]))
                if len(part) == len(records):
                    sums = each
                    break
                owner = torch.from_numpy(owners[start : start + most]).to(each[0].device)
                if sums is None:
                    sums = [grad.new_zeros(len(part), grad.shape[1]) for grad in each]
                for into, grad in zip(sums, each, strict=True):
                    into.index_add_(0, owner, grad)
            assert sums is not None  # no unit is empty
            factors = self._factors(torch.stack([torch.linalg.vector_norm(x, dim=1) for x in sums]).norm(dim=0))
            total += torch.cat([factors @ x for x in sums]).double().cpu().numpy()
        return total

    def _each(self, records: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter's gradients by record, [records, numel]."""
        loss = checked_loss(self._local.task.loss(self._local.model, self._read(records)))
        loss.backward()  # type: ignore[no-untyped-call]
        found = []
        for parameter in self._parameters:
            grad = getattr(parameter, "grad_sample", None)
            if isinstance(grad, list):
                raise TaskError("loss() ran the model in several passes: run it once on the whole batch.")
            if grad is None:
                self._check_unused(parameter)
                grad = parameter.new_zeros(len(records), *parameter.shape)
            if len(grad) != len(records):
                raise TaskError(_NOT_BY_RECORD)
            found.append(grad.detach().reshape(len(records), -1))
            parameter.grad = None
        self._hooks.set_grad_sample_to_none()
        return found

    @staticmethod
    def _check_unused(parameter: nn.Parameter) -> None:
        """One that no layer gave gradients by record for must have none at all."""
        if parameter.grad is not None and bool(parameter.grad.any()):
            raise TaskError(_NOT_BY_RECORD)

    def _ghost_sum(self, units: _Units, drawn: Indices) -> npt.NDArray[np.float64]:
        """By two backward passes: one for the norms, one of the losses times what clipping leaves of each (Li et al.
        2022, "Large Language Models Can Be Strong Differentially Private Learners")."""
        total = np.zeros(self._length)
        for part in units.parts(drawn, self._local.options.batch_size):
            records, _ = units.of_part(part)
            losses = _losses(self._local, self._read(torch.from_numpy(records)), len(records))
            losses.mean().backward(retain_graph=True)  # type: ignore[no-untyped-call]
            factors = self._factors(self._ghost_norms(len(records)))
            for parameter in self._parameters:
                parameter.grad = None
            self._hooks.disable_hooks()
            (losses @ factors.to(losses.dtype)).backward()  # type: ignore[no-untyped-call]
            self._hooks.enable_hooks()
            flat = [
                torch.zeros_like(parameter).reshape(-1) if parameter.grad is None else parameter.grad.reshape(-1)
                for parameter in self._parameters
            ]
            total += torch.cat(flat).double().cpu().numpy()
        return total

    def _ghost_norms(self, records: int) -> torch.Tensor:
        norms = []
        for parameter in self._parameters:
            norm = parameter.__dict__.pop("_norm_sample", None)
            if norm is None:
                self._check_unused(parameter)
                norm = parameter.new_zeros(records)
            if norm.shape != (records,):
                raise TaskError(_NOT_BY_RECORD)
            norms.append(norm)
        together: torch.Tensor = torch.stack(norms).norm(dim=0)
        return together

    def check(self) -> None:
        """Raise `TaskError` if gradients of a few records within a batch are not those of each record alone: clipping
        would then bound something else. Not for a loss with chance of its own, on which two calls disagree."""
        model, count = self._local.model, min(_PROBED, self._local.in_pass)
        everyone = torch.arange(count)
        for module in model.modules():
            module.train(not isinstance(module, _DropoutNd))
        self._hooks.disable_hooks()
        if self._loss(everyone, 1) == self._loss(everyone, 2):
            alone = torch.stack([self._alone(record) for record in everyone.split(1)])  # type: ignore[no-untyped-call]
            self._hooks.enable_hooks()
            if self._asked.ghost:
                _losses(self._local, self._read(everyone), count).mean().backward()  # type: ignore[no-untyped-call]
                found, alone = self._ghost_norms(count), alone.norm(dim=1)
            else:
                found = torch.cat(self._each(everyone), dim=1)
            if bool(((found - alone).abs() > _TOLERANCE * alone.abs().max() + 1e-9).any()):
                raise TaskError(_NOT_BY_RECORD)
        self._hooks.enable_hooks()
        model.train()
        seed_all(self._local.seed, self._local.device)

    def _loss(self, records: torch.Tensor, seed: int) -> float:
        seed_all(seed, self._local.device)
        with torch.no_grad():
            return float(checked_loss(self._local.task.loss(self._local.model, self._read(records)), needs_grad=False))

    def _alone(self, record: torch.Tensor) -> torch.Tensor:
        """The gradient of one record's loss, flat."""
        loss = checked_loss(self._local.task.loss(self._local.model, self._read(record)))
        grads = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        pairs = zip(grads, self._parameters, strict=True)
        return torch.cat([(torch.zeros_like(p) if grad is None else grad).reshape(-1) for grad, p in pairs])

    def _factors(self, norms: torch.Tensor) -> torch.Tensor:
        """By which gradients of these norms are scaled to at most C."""
        if not bool(torch.isfinite(norms).all()):
            raise UpdateError("the gradient of a record is not finite: lower local.lr, or look for broken records")
        factors: torch.Tensor = (self._asked.clip * (1 - _SLACK) / norms).clamp(max=1.0)
        return factors


def check_model(model: nn.Module) -> None:
    """Raise `TaskError`, with the offending module and the usual replacement, for a model in which a record's gradient
    depends on other records, or that Opacus has none for."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            raise TaskError(
                f"model: {name or 'the model'} is {type(module).__name__}, which mixes the records of a batch, so no "
                "gradient belongs to one record. Use nn.GroupNorm or nn.LayerNorm."
            )
    try:
        from opacus.validators import ModuleValidator  # type: ignore[import-untyped]
    except ModuleNotFoundError:  # a data scientist's machine may lack it; nodes look again
        return
    for name, module in model.named_modules():
        check = ModuleValidator.VALIDATORS.get(type(module))
        for error in check(module) if check is not None else ():
            raise TaskError(f"model: {name or 'the model'} is {type(module).__name__}: {error}")


_GATHERS = (
    "a buffer of the model changed while it trained: what it gathers of the data has no noise, and shapes what is "
    "trained later. Use layers without running statistics, such as nn.GroupNorm, or choose privacy.unit = 'site'."
)
_NOT_BY_RECORD = (
    "loss() is not the mean over a batch of what each record alone would give, so no gradient belongs to one record "
    "(class weights that are normalised over the batch, contrastive terms, parameters used outside of a layer). Write "
    "it as such a mean, or choose privacy.unit = 'site'."
)


def _losses(local: Local, batch: Any, count: int) -> torch.Tensor:
    each = getattr(local.task, "losses", None)
    if not callable(each):
        raise TaskError(
            "privacy.ghost_clipping = true needs losses(model, batch) in the task: the loss of each record, a tensor "
            "of shape (records,). Add it, or set ghost_clipping = false."
        )
    found = each(local.model, batch)
    if not isinstance(found, torch.Tensor) or found.shape != (count,):
        shape = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        raise TaskError(f"losses() returned {shape} for {count} records: return a tensor of shape ({count},).")
    return found


def _hooks(ghost: bool) -> Any:
    try:
        from opacus import grad_sample  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise TaskError(
            "privacy by record or patient needs Opacus, which is not installed here: pip install 'fedward[client]'."
        ) from error
    # Opacus asks for gradients of outputs alone, as it means to.
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    return grad_sample.GradSampleHooksFastGradientClipping if ghost else grad_sample.GradSampleHooks


def _spread(total: npt.NDArray[np.float64], parameters: Sequence[nn.Parameter]) -> None:
    at = 0
    for parameter in parameters:
        piece = torch.from_numpy(total[at : at + parameter.numel()]).to(parameter.device, parameter.dtype)
        parameter.grad = piece.reshape(parameter.shape)
        at += parameter.numel()
