"""The weighted mean of a cohort's updates, folded in one by one, the same to the last bit in any order.

Floating-point addition depends on its order; integer addition does not. Each w_i·x_i is rounded once to a multiple
of a fixed step (the lsb) and added to an int64 accumulator, so a round's result depends on who took part only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from fedward_common.errors import UpdateError
from fedward_common.update import Update, Vector

LSB = 2.0**-36
"""Default step of the accumulator: 1.5e-11; sums of w·x up to 1.3e8 fit."""

_CHUNK = 1 << 16
_LARGEST = 2**63 - 1
_LARGEST_METRIC = 1e200  # far from where a sum of floats would overflow


class MetricSums:
    """Sums of metrics over nodes, exactly rounded (`math.fsum`), hence the same in any order."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    @staticmethod
    def check(metrics: Mapping[str, float]) -> None:
        """Raise `UpdateError` for a value that is not finite or too large to be summed."""
        for name, value in metrics.items():
            if not abs(value) <= _LARGEST_METRIC:  # false for NaN too
                raise UpdateError(f"metric {name!r} is not a finite number of sensible size")

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add one node's metrics. Raises `UpdateError`; then nothing was added."""
        self.check(metrics)
        for name, value in metrics.items():
            self._values.setdefault(name, []).append(float(value))

    def total(self) -> dict[str, float]:
        """The sums, by name in alphabetical order."""
        return {name: math.fsum(self._values[name]) for name in sorted(self._values)}


def averages(sums: Mapping[str, float]) -> dict[str, float] | None:
    """Means per example from sums over examples; "examples" stays a sum. None if there was no example."""
    examples = sums.get("examples", 0.0)
    if examples <= 0:
        return None
    return {name: value if name == "examples" else value / examples for name, value in sums.items()}


class StreamingSum:
    """Σ w_i·x_i and Σ w_i over at most `capacity` updates; memory is one int64 vector a group.

    lengths: elements of each group. lsb: a power of two. No accumulator can overflow: an update is refused if
    its largest |w·x| is over 1/capacity of the int64 range. (A share of its own for each update, not what the others
    have left over: else the order of arrival would decide who is refused.)
    """

    def __init__(self, lengths: Mapping[str, int], capacity: int, lsb: float = LSB) -> None:
        if capacity < 1:
            raise ValueError(f"capacity = {capacity}: a sum takes at least one update")
        if math.frexp(lsb)[0] != 0.5:
            raise ValueError(f"lsb = {lsb}: must be a positive power of two, so that scaling by it is exact")
        self._lsb = lsb
        self._capacity = capacity
        self._sums: dict[str, npt.NDArray[np.int64]] = {
            group: np.zeros(length, dtype=np.int64) for group, length in lengths.items()
        }
        self._bounds = dict.fromkeys(lengths, 0)
        self._weights: list[float] = []
        self._metrics = MetricSums()

    @property
    def count(self) -> int:
        """Updates in the sum."""
        return len(self._weights)

    def add(self, update: Update) -> None:
        """Fold one update in. Raises `UpdateError` naming the group that could overflow; then nothing was added."""
        if self.count >= self._capacity:
            raise ValueError(f"the sum holds {self.count} updates already, all that it was made for")
        if set(update.groups) != set(self._sums):
            raise UpdateError(f"update has groups {sorted(update.groups)}, the sum has {sorted(self._sums)}")
        scale = update.weight / self._lsb
        bounds = {group: self._bound(group, vector, scale) for group, vector in update.groups.items()}
        self._metrics.add(update.metrics)
        for group, vector in update.groups.items():
            self._bounds[group] += bounds[group]
            assert self._bounds[group] <= _LARGEST
            _fold(self._sums[group], vector, scale)
        self._weights.append(update.weight)

    def mean(self) -> Update:
        """The weighted means Σ w_i·x_i / Σ w_i (float64), with Σ w_i and the metric sums.

        Reuses the accumulators' memory: the sum is empty of groups afterwards. Raises `UpdateError` when the
        weights sum to zero (no update at all).
        """
        weight = math.fsum(self._weights)
        if weight <= 0:
            raise UpdateError(f"the weights of {self.count} updates sum to {weight}: there is no mean")
        groups = {group: _divide(self._sums[group], self._lsb, weight) for group in list(self._sums)}
        self._sums = {}
        return Update(groups, weight, self._metrics.total())

    def _bound(self, group: str, vector: Vector, scale: float) -> int:
        """The largest |rounded w·x| of `vector`. Rounding is monotone, so no element exceeds it."""
        if vector.shape != self._sums[group].shape:
            raise UpdateError(f"group {group!r} has shape {vector.shape}, the sum {self._sums[group].shape}")
        if vector.size == 0:
            return 0
        largest = max(-float(vector.min()), float(vector.max())) * scale
        if not math.isfinite(largest) or round(largest) > _LARGEST // self._capacity:
            limit = _LARGEST * self._lsb / self._capacity
            raise UpdateError(
                f"group {group!r}: weight × largest value = {largest * self._lsb:.3g} is over {limit:.3g}, "
                f"what a sum of {self._capacity} can hold. Scale the model's inputs, or lower the learning rate."
            )
        return round(largest)


def _fold(total: npt.NDArray[np.int64], vector: Vector, scale: float) -> None:
    """total += rint(vector · scale), a chunk at a time."""
    size = min(_CHUNK, vector.size)
    scaled = np.empty(size, dtype=np.float64)
    rounded = np.empty(size, dtype=np.int64)
    for start in range(0, vector.size, _CHUNK):
        part = vector[start : start + _CHUNK]
        reals, integers = scaled[: part.size], rounded[: part.size]
        np.multiply(part, scale, out=reals, dtype=np.float64)
        np.rint(reals, out=reals)
        np.copyto(integers, reals, casting="unsafe")  # exact: whole numbers within ± 2^63
        total[start : start + _CHUNK] += integers


def _divide(total: npt.NDArray[np.int64], lsb: float, weight: float) -> npt.NDArray[Any]:
    """total · lsb / weight as float64, written over `total`'s own memory."""
    out = total.view(np.float64)
    for start in range(0, total.size, _CHUNK):
        part = total[start : start + _CHUNK].astype(np.float64)
        part *= lsb
        part /= weight
        out[start : start + _CHUNK] = part
    return out
