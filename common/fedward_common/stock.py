"""What the replies of a stock Flower app hold, as summands: arrays become differences to what was broadcast, metrics
become sums weighted as Flower's strategies weigh them.

Its names are not known before a first reply, so nodes tell the form of theirs, which holds no values, before the first
sum; and as neither is their size, a first sum of its own gives total weight and the ranges (`Form.peaks`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedward_common.errors import FedwardError, UpdateError
from fedward_common.secagg.graph import Parameters, choose
from fedward_common.summand import WEIGHT, on_grid
from fedward_common.update import Update

WEIGHT_KEY = "num-examples"
"""The metric that weighs a reply, unless the strategy names another."""

CONTENT = "content"
"""In a request's vectors: SHA-256 of the app's own records. In its settings:"""
KEPT = "kept"
"""whether the sum is over the result that the node kept back when it told its form,"""
WEIGHED_BY = "weight"
"""and the name of the metric that weighs it. In the reply that tells a form, its info:"""
FORM = "form"

_METRIC, _PEAK = "metric.", "peak."
"""What stands before names in a sum, so that no name of the app's is one of the sum's own."""

Arrays = Mapping[str, npt.NDArray[Any]]
Metrics = Mapping[str, int | float | list[int] | list[float]]


class FormError(FedwardError):
    """A reply holds something that has no weighted mean."""


@dataclass(frozen=True)
class Form:
    """A reply without its values.

    arrays: (name, shape, dtype) of the record `array_key` (empty in an evaluation). metrics: (name, elements; None for
    a single number) of the record `metric_key`, without `weight`, the one that weighs.
    """

    array_key: str
    arrays: tuple[tuple[str, tuple[int, ...], str], ...]
    metric_key: str
    metrics: tuple[tuple[str, int | None], ...]
    weight: str

    @classmethod
    def of(cls, array_key: str, arrays: Arrays, metric_key: str, metrics: Metrics, weight: str) -> Form:
        """The form of a reply. Raises `FormError`."""
        for name, value in arrays.items():
            if value.dtype.kind not in "fiub":
                raise FormError(f"array {name!r} has dtype {value.dtype}, of which there is no mean")
        if not isinstance(metrics.get(weight), int | float):
            raise FormError(f"the metrics have no number {weight!r}, by which the reply is weighed")
        return cls(
            array_key,
            tuple((name, value.shape, value.dtype.name) for name, value in arrays.items()),
            metric_key,
            tuple(
                (name, len(value) if isinstance(value, list) else None)
                for name, value in sorted(metrics.items())
                if name != weight
            ),
            weight,
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Form:
        """The inverse of `to_json`. Raises `FormError`."""
        try:
            told = json.loads(text)
            arrays = tuple(
                (str(name), tuple(int(n) for n in shape), np.dtype(dtype).name)
                for name, shape, dtype in told["arrays"]
            )
            metrics = tuple((str(name), None if size is None else int(size)) for name, size in told["metrics"])
            return cls(str(told["array_key"]), arrays, str(told["metric_key"]), metrics, str(told["weight"]))
        except (KeyError, TypeError, ValueError) as error:
            raise FormError("the text of a reply's form cannot be read") from error

    @property
    def lengths(self) -> dict[str, int]:
        """The groups of the sum: coordinates of each array that has any."""
        sizes = {name: math.prod(shape) for name, shape, _ in self.arrays}
        return {name: size for name, size in sizes.items() if size}

    @property
    def scalars(self) -> tuple[str, ...]:
        """The metrics of the sum, an element each."""
        return tuple(scalar for name, size in self.metrics for scalar in _scalars(name, size))

    @property
    def peaks(self) -> tuple[str, ...]:
        """The metrics of the sum that comes before the first: each group's largest coordinate, weighted."""
        return tuple(_PEAK + name for name in self.lengths)

    def update(self, arrays: Arrays, metrics: Metrics, base: Arrays) -> Update:
        """A reply of this form as a summand; `base` is what was broadcast. Raises `UpdateError`."""
        weight = on_grid(WEIGHT, metrics[self.weight])  # type: ignore[arg-type]
        sums: dict[str, float] = {}
        for name, size in self.metrics:
            found = metrics[name]
            values = found if isinstance(found, list) else [found]
            sums |= {key: weight * value for key, value in zip(_scalars(name, size), values, strict=True)}
        groups = {name: _difference(arrays[name], base.get(name)) for name in self.lengths}
        return Update(groups, weight, sums)

    def measured(self, update: Update) -> Update:
        """The summand of the first sum. Raises `UpdateError` for values that are not finite."""
        peaks = {}
        for name, vector in update.groups.items():
            peak = float(np.abs(vector).max())
            if not math.isfinite(peak):
                raise UpdateError(f"array {name!r} holds values that are not finite")
            peaks[_PEAK + name] = update.weight * peak
        return Update({}, update.weight, peaks)

    def bounds(self, measured: Update, count: int) -> dict[str, float]:
        """No coordinate (w/W)·x of a node's is larger, W being the mean weight, from the first sum over `count`."""
        mean = measured.weight / count
        return {name: measured.metrics[_PEAK + name] / mean for name in self.lengths}

    def reply(self, mean: Update, base: Arrays) -> tuple[dict[str, npt.NDArray[Any]], Metrics]:
        """Arrays and metrics of the one reply that stands for all: weighted means, and the sum of the weights.

        Dtypes are those of the arrays times a float, as in Flower's own mean.
        """
        arrays = {}
        for name, shape, dtype in self.arrays:
            value = np.zeros(shape) if name not in self.lengths else mean.groups[name].reshape(shape)
            start = _start(base.get(name), shape)
            if start is not None:
                value = value + start
            arrays[name] = np.asarray(value, dtype=(np.zeros((), dtype) * 1.0).dtype)
        weight = int(mean.weight) if mean.weight.is_integer() else mean.weight
        metrics: dict[str, Any] = {self.weight: weight}
        for name, size in self.metrics:
            values = [mean.metrics[key] / mean.weight for key in _scalars(name, size)]
            metrics[name] = values if size is not None else values[0]
        return arrays, metrics


def _scalars(name: str, size: int | None) -> tuple[str, ...]:
    if size is None:
        return (_METRIC + name,)
    return tuple(f"{_METRIC}{name}[{i}]" for i in range(size))


def _start(base: npt.NDArray[Any] | None, shape: tuple[int, ...]) -> npt.NDArray[np.float64] | None:
    return base.astype(np.float64) if base is not None and base.shape == shape else None


def _difference(value: npt.NDArray[Any], base: npt.NDArray[Any] | None) -> npt.NDArray[Any]:
    """Flat value − base (value itself where nothing of that shape was broadcast)."""
    start = _start(base, value.shape)
    moved = value.astype(np.float64) if start is None else value - start
    return moved.reshape(-1).astype(np.float32 if value.dtype in (np.float16, np.float32) else np.float64)


def parameters(n: int, dropout: float, corrupt: float) -> Parameters:
    """Neighbours, threshold and the rest for a cohort of `n`. Raises `NoProtection`."""
    return choose(n, dropout, corrupt)


def node_name(node_id: int) -> str:
    """What a node that nobody enrolled is called, by Flower's id."""
    return f"node-{node_id}"


def node_bytes(node_id: int) -> bytes:
    """Its id in a secure sum, 16 bytes."""
    return (node_id % 2**64).to_bytes(16)
