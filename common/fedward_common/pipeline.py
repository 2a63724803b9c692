"""The one road of an update from a node into a sum, as typed steps: Flat → Bounded → Quantized → Masked.

Each step takes what the one before it gives, and only `Masked` may be sent: a wrong order, or a step left out, is an
error to the type checker.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Generic, NewType, Protocol, TypeVar

from fedward_common.errors import UpdateError
from fedward_common.quantize import Stream, clip, quantize
from fedward_common.summand import CLIPPED, WEIGHT, Shape, Words, on_grid
from fedward_common.update import Update

Flat = NewType("Flat", Update)
"""An update as the algorithm made it, past the gate (`check_update`)."""
Bounded = NewType("Bounded", Update)
"""Every coordinate (w/W)·x is within its group's range; the metrics count those that had to be moved there."""
Quantized = NewType("Quantized", Words)
"""A summand."""
Masked = NewType("Masked", bytes)
"""A summand under its masks, as it goes over the wire."""

I = TypeVar("I", contravariant=True)  # noqa: E741
O = TypeVar("O", covariant=True)  # noqa: E741
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")


class Step(Protocol[I, O]):
    """One stretch of the road."""

    @property
    def name(self) -> str:
        """What the node's journal calls it."""

    def __call__(self, value: I, /) -> O: ...


@dataclass(frozen=True)
class Road(Generic[A, B]):
    """Steps in a row. names: theirs, in order, for the journal: read from what runs, not from a configuration."""

    run: Callable[[A], B]
    names: tuple[str, ...]

    @classmethod
    def of(cls, step: Step[A, B]) -> Road[A, B]:
        """The road of one step."""
        return cls(step, (step.name,))

    def then(self, step: Step[B, C]) -> Road[A, C]:
        """This road with one more step at its end."""
        return Road(lambda value: step(self.run(value)), (*self.names, step.name))

    def __call__(self, value: A) -> B:
        return self.run(value)


@dataclass(frozen=True)
class Clip:
    """Moves each coordinate that is out of its group's range to the range's end, and counts it.

    The range is for (w/W)·x, so x is held within ±R·W/w, in its own dtype. w is rounded to what the sum of weights
    will hold of it (2^-20), for both sums of a weighted mean have to see the same w.
    """

    shape: Shape
    name: ClassVar[str] = "clip"

    def __call__(self, value: Flat, /) -> Bounded:
        """Raises `UpdateError` for an update with other groups, lengths or metrics than the shape's."""
        _check_fits(self.shape, value)
        weight = on_grid(WEIGHT, value.weight)
        if weight <= 0:
            raise UpdateError("the weight is not positive: under 2^-20 it has no part in the sum")
        groups = {}
        metrics = dict(value.metrics)
        for group in self.shape.groups:
            bound = group.range * self.shape.weight_scale / weight
            groups[group.name], moved = clip(f"group {group.name!r}", value.groups[group.name], bound)
            metrics[CLIPPED + group.name] = float(moved)
        return Bounded(Update(groups, weight, metrics))


@dataclass(frozen=True)
class Quantize:
    """Lays the update out as words of the shape, coordinates rounded at random with `stream`."""

    shape: Shape
    stream: Stream
    name: ClassVar[str] = "quantise"

    def __call__(self, value: Bounded, /) -> Quantized:
        """Raises `UpdateError` for a scalar beyond ±2^42."""
        words = self.shape.blank({WEIGHT: value.weight, **value.metrics})
        for group, part in self.shape.parts(words):
            levels = self.shape.levels
            scale = levels / (2 * group.range) * (value.weight / self.shape.weight_scale)
            quantize(value.groups[group.name], scale, levels, self.stream, part)
        return Quantized(words)


@dataclass(frozen=True)
class Mask:
    """Adds the round's masks modulo 2^b and packs: `seal`, given by secure aggregation, may write over its words."""

    seal: Callable[[Words], bytes]
    name: ClassVar[str] = "mask"

    def __call__(self, value: Quantized, /) -> Masked:
        return Masked(self.seal(value))


def build(shape: Shape, stream: Stream, seal: Callable[[Words], bytes]) -> Road[Flat, Masked]:
    """The road of a secure round."""
    return Road.of(Clip(shape)).then(Quantize(shape, stream)).then(Mask(seal))


def _check_fits(shape: Shape, update: Update) -> None:
    lengths = {group.name: group.length for group in shape.groups}
    if set(update.groups) != set(lengths):
        raise UpdateError(f"update has groups {sorted(update.groups)}, the sum has {sorted(lengths)}")
    for name, length in lengths.items():
        if update.groups[name].shape != (length,):
            raise UpdateError(f"group {name!r} has shape {update.groups[name].shape}, the sum ({length},)")
    missing = sorted(set(shape.metrics) - set(update.metrics))
    unknown = sorted(set(update.metrics) - set(shape.metrics))
    if missing or unknown:
        raise UpdateError(
            f"metrics that the run declared and are missing: {missing}; that it did not declare: {unknown}. All nodes "
            "of a secure sum send the same: the task's metrics() must return, everywhere, those in its metric_names."
        )
