"""Named tensors <-> flat vectors, what each tensor may do, and the update that a node contributes.

A model is seen as a `Layout`: its tensors in order, each with a kind. All tensors of one kind make one
flat vector, so that algorithms, the sum and (later) masks work on plain 1-D arrays.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedward_common.errors import TaskError, UpdateError

if TYPE_CHECKING:
    import torch
    from torch import nn

Vector = npt.NDArray[Any]
Vectors = Mapping[str, Vector]

_PART = 1 << 18


class Kind(StrEnum):
    """What may happen to a tensor."""

    TRAINABLE = "trainable"
    """Moved by the optimiser; its change is sent, corrected and averaged."""
    STATISTIC = "statistic"
    """A float buffer (a running mean): averaged, never touched by control variates or server optimisers."""
    COUNTER = "counter"
    """An integer buffer (`num_batches_tracked`): kept by each side, never averaged."""
    PRIVATE = "private"
    """Never leaves the node."""
    FROZEN = "frozen"
    """A parameter that nobody trains (a pre-trained base): the same on every side, never sent."""


Extent = Kind | int
"""How long a vector is: as the flat vector of a kind, or so many single numbers (a few: `scalar_groups`)."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a model: its state-dict name, shape, PyTorch dtype name and kind. value: SHA-256 of a frozen
    tensor's bytes, hex, so that sides whose bases differ have different layouts; "" for other kinds."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: Kind
    value: str = ""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """The tensors of a model in state-dict order."""

    tensors: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, model: nn.Module, kinds: Mapping[str, Kind | str] | None = None) -> Layout:
        """The layout of `model`; `kinds` maps shell patterns over tensor names to kinds, first match wins.

        A tensor that the model holds under two names (tied weights) stands once, under its first name.
        Raises `TaskError` for a pattern that matches nothing or a kind that does not fit the tensor.
        """
        patterns = {pattern: Kind(kind) for pattern, kind in (kinds or {}).items()}
        state = model.state_dict(keep_vars=True)
        unmatched = [p for p in patterns if not any(fnmatch.fnmatchcase(name, p) for name in state)]
        parameters = {name: p.requires_grad for name, p in model.named_parameters()}
        specs = []
        seen: set[int] = set()
        for name, tensor in state.items():
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            floating = tensor.is_floating_point()
            buffer = Kind.STATISTIC if floating else Kind.COUNTER
            kind = buffer if name not in parameters else Kind.TRAINABLE if parameters[name] else Kind.FROZEN
            for pattern, wanted in patterns.items():
                if fnmatch.fnmatchcase(name, pattern):
                    kind = wanted
                    break
            if kind in (Kind.TRAINABLE, Kind.STATISTIC) and not floating:
                raise TaskError(
                    f"tensor {name!r} has dtype {tensor.dtype} but kind {kind.value!r}: only float tensors "
                    "can be averaged. Declare it 'counter' or 'private' in the task's tensor_kinds."
                )
            if kind is Kind.TRAINABLE and not parameters.get(name):
                raise TaskError(
                    f"tensor {name!r} is declared 'trainable' but is no parameter with requires_grad=True: "
                    "no optimiser would move it. Make it such a parameter, or declare it 'statistic'."
                )
            if kind is Kind.COUNTER and floating:
                raise TaskError(
                    f"tensor {name!r} has dtype {tensor.dtype} but kind 'counter', which is for integers: "
                    "declare it 'statistic' (averaged) or 'private' (stays on the node)."
                )
            if kind is Kind.FROZEN and parameters.get(name):
                raise TaskError(
                    f"tensor {name!r} is declared 'frozen' but has requires_grad=True: the optimiser would move it. "
                    "Call requires_grad_(False) on it in model(), or declare it 'trainable' or 'private'."
                )
            dtype = str(tensor.dtype).removeprefix("torch.")
            value = _sha256(tensor) if kind is Kind.FROZEN else ""
            specs.append(TensorSpec(name, tuple(tensor.shape), dtype, kind, value))
        if unmatched:
            raise TaskError(
                f"tensor_kinds has patterns that match no tensor: {sorted(unmatched)}. "
                f"The model's tensors are: {[s.name for s in specs]}."
            )
        if not any(s.kind is Kind.TRAINABLE for s in specs):
            raise TaskError("the model has no trainable tensor: set requires_grad=True on a parameter.")
        return cls(tuple(specs))

    def of_kind(self, kind: Kind) -> tuple[TensorSpec, ...]:
        """The tensors of one kind, in order."""
        return tuple(spec for spec in self.tensors if spec.kind is kind)

    def size(self, kind: Kind) -> int:
        """Elements in the flat vector of `kind`."""
        return sum(spec.size for spec in self.of_kind(kind))

    def extent(self, what: Extent) -> tuple[int, np.dtype[Any]]:
        """Length and dtype of a vector: those of a kind's flat vector, or so many float64."""
        return (what, np.dtype(np.float64)) if isinstance(what, int) else (self.size(what), self.dtype(what))

    def dtype(self, kind: Kind) -> np.dtype[Any]:
        """dtype of the flat vector of `kind`: int64 for counters, float64 if any tensor of it needs that
        (float64, or an integer among private ones), else float32."""
        if kind is Kind.COUNTER:
            return np.dtype(np.int64)
        wide = any(spec.dtype not in ("float32", "float16", "bfloat16") for spec in self.of_kind(kind))
        return np.dtype(np.float64 if wide else np.float32)

    def pack(self, state: Mapping[str, torch.Tensor], kind: Kind) -> Vector:
        """The flat vector of all tensors of `kind` in `state` (a state dict); always a fresh copy."""
        import torch

        out = torch.from_numpy(np.empty(self.size(kind), dtype=self.dtype(kind)))
        at = 0
        for spec in self.of_kind(kind):
            size = spec.size
            out[at : at + size].copy_(state[spec.name].detach().reshape(-1))
            at += size
        vector: Vector = out.numpy()
        return vector

    def unpack(self, vector: Vector, kind: Kind) -> dict[str, torch.Tensor]:
        """The tensors of `kind`, each a view into `vector` where dtype and writability allow.

        Raises `UpdateError` for a vector of another length.
        """
        import torch

        out = {}
        # PyTorch knows no read-only tensors, and vectors that came over the wire are read-only.
        for spec, part in self._parts(vector if vector.flags.writeable else vector.copy(), kind):
            out[spec.name] = torch.from_numpy(part).to(getattr(torch, spec.dtype))
        return out

    @property
    def fits_numpy(self) -> bool:
        """Whether NumPy has every tensor's dtype (it lacks bfloat16 and its like)."""
        return all(hasattr(np, spec.dtype) for spec in self.tensors)

    def arrays(self, vector: Vector, kind: Kind) -> dict[str, Vector]:
        """As `unpack`, in NumPy arrays and without PyTorch, if the layout `fits_numpy`."""
        return {spec.name: part.astype(spec.dtype, copy=False) for spec, part in self._parts(vector, kind)}

    def _parts(self, vector: Vector, kind: Kind) -> Iterator[tuple[TensorSpec, Vector]]:
        if vector.shape != (self.size(kind),):
            needed = (self.size(kind),)
            raise UpdateError(f"vector of {kind.value} has shape {vector.shape}, the layout needs {needed}")
        at = 0
        for spec in self.of_kind(kind):
            yield spec, vector[at : at + spec.size].reshape(spec.shape)
            at += spec.size

    def load(self, model: nn.Module, vector: Vector, kind: Kind) -> None:
        """Copy `vector` into `model`'s tensors of `kind`, in place."""
        self.copy_into(model.state_dict(), vector, kind)

    def copy_into(self, state: Mapping[str, torch.Tensor], vector: Vector, kind: Kind) -> None:
        """Copy `vector` into the tensors of `kind` in `state` (a state dict), in place."""
        import torch

        with torch.no_grad():
            for name, tensor in self.unpack(vector, kind).items():
                state[name].copy_(tensor)

    def to_json(self) -> str:
        """Canonical JSON: equal layouts give equal text."""
        rows = [[s.name, list(s.shape), s.dtype, s.kind.value] + [s.value] * bool(s.value) for s in self.tensors]
        return json.dumps(rows, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """The inverse of `to_json`."""
        return cls(tuple(TensorSpec(n, tuple(s), d, Kind(k), *v) for n, s, d, k, *v in json.loads(text)))

    @property
    def frozen(self) -> str:
        """SHA-256, hex, of the names and values of all frozen tensors: what trained tensors were trained beside. "" if
        there are none."""
        rows = [[spec.name, spec.value] for spec in self.of_kind(Kind.FROZEN)]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest() if rows else ""

    def digest(self) -> str:
        """SHA-256 of the canonical JSON, hex: server and node compare it before the first round."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


@dataclass(frozen=True)
class Update:
    """What a node contributes to a round, or the cohort's weighted mean of it.

    groups: named flat vectors (`delta`, `statistic`, `delta_c` …), unweighted on a node.
    weight: the node's weight, or the sum of weights in a mean.
    metrics: sums over examples (`examples`, `loss`, …): plain addition over nodes, never weighted again.
    """

    groups: Vectors
    weight: float
    metrics: Mapping[str, float] = field(default_factory=dict)


def check_update(update: Update, shapes: Mapping[str, tuple[int, np.dtype[Any]]], max_weight: float) -> None:
    """The update gate: right groups, shapes and dtypes, finite values, a positive bounded weight.

    `shapes` maps each expected group to (length, dtype). Raises `UpdateError` with the first rule broken;
    the text names groups and numbers only, never data.
    """
    if set(update.groups) != set(shapes):
        raise UpdateError(f"update has groups {sorted(update.groups)}, expected {sorted(shapes)}")
    for name, (length, dtype) in shapes.items():
        check_vector(f"group {name!r}", update.groups[name], length, dtype)
    if not _finite(update.weight) or not 0 < update.weight <= max_weight:
        raise UpdateError(f"the weight is not in (0, {max_weight}]")
    check_metrics(update.metrics)


def check_vector(what: str, vector: object, length: int, dtype: np.dtype[Any]) -> None:
    """Raise `UpdateError` unless `vector` is a finite 1-D array of that length and dtype."""
    if not isinstance(vector, np.ndarray):
        raise UpdateError(f"{what} is a {type(vector).__name__}, expected an array")
    if vector.shape != (length,):
        raise UpdateError(f"{what} has shape {vector.shape}, expected ({length},)")
    if vector.dtype != dtype:
        raise UpdateError(f"{what} has dtype {vector.dtype}, expected {dtype}")
    if not all_finite(vector):
        raise UpdateError(f"{what} holds values that are not finite")


def all_finite(vector: Vector) -> bool:
    """Whether no element is infinite or NaN. In parts: a mask of the whole would be a quarter of a model more in
    memory."""
    return all(np.isfinite(vector[start : start + _PART]).all() for start in range(0, len(vector), _PART))


def check_metrics(metrics: Mapping[str, float]) -> None:
    """Raise `UpdateError` unless all sums are finite numbers and the count of examples is not negative."""
    if not all(_finite(value) for value in metrics.values()):
        raise UpdateError("a metric is not finite")
    if metrics.get("examples", 0) < 0:
        raise UpdateError("the count of examples is negative")


def _finite(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def _sha256(tensor: torch.Tensor) -> str:
    import torch

    # By way of bytes, since NumPy lacks some dtypes; a 0-d tensor has no other view of them.
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(raw.numpy().data).hexdigest()


def names(specs: Sequence[TensorSpec]) -> list[str]:
    """Names of the given tensors."""
    return [spec.name for spec in specs]
