"""Named tensors <-> flat vectors, what each tensor may do, and the update that a node contributes.

A model is seen as a `Layout`: its tensors in order, each with a kind. All tensors of one kind make one
flat vector, so that algorithms, the sum and (later) masks work on plain 1-D arrays.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedward_common.errors import TaskError, UpdateError

Vector = npt.NDArray[Any]
Vectors = Mapping[str, Vector]


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


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a model: its state-dict name, shape, NumPy dtype name and kind."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: Kind

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True)
class Layout:
    """The tensors of a model in state-dict order."""

    tensors: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, model: nn.Module, kinds: Mapping[str, Kind | str] | None = None) -> Layout:
        """The layout of `model`; `kinds` maps shell patterns over tensor names to kinds, first match wins.

        Raises `TaskError` for a pattern that matches nothing or a kind that does not fit the tensor's dtype.
        """
        patterns = {pattern: Kind(kind) for pattern, kind in (kinds or {}).items()}
        unmatched = set(patterns)
        parameters = {name for name, p in model.named_parameters() if p.requires_grad}
        specs = []
        for name, tensor in model.state_dict().items():
            floating = tensor.is_floating_point()
            if name in parameters:
                kind = Kind.TRAINABLE
            else:
                kind = Kind.STATISTIC if floating else Kind.COUNTER
            for pattern, wanted in patterns.items():
                if fnmatch.fnmatchcase(name, pattern):
                    unmatched.discard(pattern)
                    kind = wanted
                    break
            if kind in (Kind.TRAINABLE, Kind.STATISTIC) and not floating:
                raise TaskError(
                    f"tensor {name!r} has dtype {tensor.dtype} but kind {kind.value!r}: only float tensors can be "
                    "averaged. Declare it 'counter' or 'private' in the task's tensor_kinds."
                )
            dtype = str(tensor.dtype).removeprefix("torch.")
            specs.append(TensorSpec(name, tuple(tensor.shape), dtype, kind))
        if unmatched:
            raise TaskError(
                f"tensor_kinds has patterns that match no tensor: {sorted(unmatched)}. "
                f"The model's tensors are: {[s.name for s in specs]}."
            )
        if not any(s.kind is Kind.TRAINABLE for s in specs):
            raise TaskError("the model has no trainable tensor: give at least one parameter requires_grad=True.")
        return cls(tuple(specs))

    def of_kind(self, kind: Kind) -> tuple[TensorSpec, ...]:
        """The tensors of one kind, in order."""
        return tuple(spec for spec in self.tensors if spec.kind is kind)

    def size(self, kind: Kind) -> int:
        """Elements in the flat vector of `kind`."""
        return sum(spec.size for spec in self.of_kind(kind))

    def dtype(self, kind: Kind) -> np.dtype[Any]:
        """dtype of the flat vector of `kind`: float64 if any tensor of it is, int64 for counters, else float32."""
        if kind is Kind.COUNTER:
            return np.dtype(np.int64)
        wide = any(spec.dtype == "float64" for spec in self.of_kind(kind))
        return np.dtype(np.float64 if wide else np.float32)

    def pack(self, state: Mapping[str, torch.Tensor], kind: Kind) -> Vector:
        """The flat vector of all tensors of `kind` in `state` (a state dict); always a fresh copy."""
        out = np.empty(self.size(kind), dtype=self.dtype(kind))
        at = 0
        for spec in self.of_kind(kind):
            out[at : at + spec.size] = state[spec.name].detach().to("cpu").reshape(-1).numpy()
            at += spec.size
        return out

    def unpack(self, vector: Vector, kind: Kind) -> dict[str, torch.Tensor]:
        """The tensors of `kind`, each a view into `vector` where the dtype allows."""
        if vector.shape != (self.size(kind),):
            raise UpdateError(f"vector of {kind.value} has shape {vector.shape}, the layout needs ({self.size(kind)},)")
        out = {}
        at = 0
        for spec in self.of_kind(kind):
            part = vector[at : at + spec.size].reshape(spec.shape)
            out[spec.name] = torch.as_tensor(part.astype(spec.dtype, copy=False))
            at += spec.size
        return out

    def load(self, model: nn.Module, vector: Vector, kind: Kind) -> None:
        """Copy `vector` into `model`'s tensors of `kind`, in place."""
        state = model.state_dict()
        with torch.no_grad():
            for name, tensor in self.unpack(vector, kind).items():
                state[name].copy_(tensor)

    def to_json(self) -> str:
        """Canonical JSON: equal layouts give equal text."""
        return json.dumps([[s.name, list(s.shape), s.dtype, s.kind.value] for s in self.tensors], separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """The inverse of `to_json`."""
        return cls(tuple(TensorSpec(n, tuple(s), d, Kind(k)) for n, s, d, k in json.loads(text)))

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
        vector = update.groups[name]
        if vector.shape != (length,):
            raise UpdateError(f"group {name!r} has shape {vector.shape}, expected ({length},)")
        if vector.dtype != dtype:
            raise UpdateError(f"group {name!r} has dtype {vector.dtype}, expected {dtype}")
        if not np.isfinite(vector).all():
            raise UpdateError(f"group {name!r} holds values that are not finite")
    if not (np.isfinite(update.weight) and 0 < update.weight <= max_weight):
        raise UpdateError(f"weight {update.weight} is not in (0, {max_weight}]")
    if not all(np.isfinite(value) for value in update.metrics.values()):
        raise UpdateError("a metric is not finite")


def kinds_of(task: object) -> Mapping[str, Kind | str]:
    """The task's optional `tensor_kinds` attribute (shell pattern -> kind)."""
    kinds: Mapping[str, Kind | str] = getattr(task, "tensor_kinds", {})
    return kinds


def names(specs: Sequence[TensorSpec]) -> list[str]:
    """Names of the given tensors."""
    return [spec.name for spec in specs]
