"""How the server chooses the next round's ranges and weight scale from the sum that it has just seen.

It knows means only, while a range has to hold each node's own coordinates: those are larger where data differ from
node to node, without bound where they cancel. So R = headroom·max|mean|, and the counts of clipped coordinates, which
come with the sum, correct the headroom: the sum is all that the choice needs.

Why a wide headroom: what is clipped are the largest coordinates, and always towards zero, while a range that is too
wide only adds rounding noise without bias. FedAvg on digits, an MLP, labels by Dirichlet(0.1), 20 bits (`bench/road.py`
measures it again): largest |(w/W)x| ÷ max|mean|, and by headroom the L2 error of a round's mean relative to it, each in
the median and in the worst round after the first:

    nodes   ratio      16               32               64
    10      12, 18     4e-4, 7e-4       9e-4, 1e-3       2e-3, 3e-3
    30      27, 48     1e-3, 0.16       2e-3, 0.03       3e-3, 4e-3
    100     57, 98     5e-3, 0.04       4e-3, 0.03       5e-3, 0.02

A worst error over 1 % is a round in which some were clipped: a share of 4e-4 made 0.16, 2e-5 made 0.03. The rounding
noise is 16 times as large at 16 bits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from fedward_common.summand import CLIPPED, LARGEST_SCALAR, SMALLEST_SCALAR, Group
from fedward_common.update import Update

HEADROOM = 32.0
SHARE = 1e-5
"""Share of a group's coordinates, over all nodes, that may be clipped before its range is widened."""


@dataclass(frozen=True)
class Scale:
    """range: R, a power of two, of (w/W)·x. headroom: by how much R is to exceed the mean's largest coordinate."""

    range: float
    headroom: float = HEADROOM


@dataclass(frozen=True)
class Scales:
    """All that the negotiation remembers; a checkpoint holds it as JSON. weight: W, a power of two."""

    groups: Mapping[str, Scale]
    weight: float

    def shape_groups(self, lengths: Mapping[str, int]) -> tuple[Group, ...]:
        """The groups of the next round's shape, in the order of `lengths`."""
        return tuple(Group(name, length, self.groups[name].range) for name, length in lengths.items())

    def to_json(self) -> str:
        groups = {name: [scale.range, scale.headroom] for name, scale in self.groups.items()}
        return json.dumps([groups, self.weight])

    @classmethod
    def from_json(cls, text: str) -> Scales:
        """The inverse of `to_json`."""
        groups, weight = json.loads(text)
        return cls({name: Scale(*numbers) for name, numbers in groups.items()}, weight)


def first(initial: Mapping[str, float], weight: float = 1.0) -> Scales:
    """Before any sum: `initial` gives each group's range, `weight` a guess at a node's weight.

    Guess high: ten times too wide is more rounding noise in one round, while too narrow clips the largest coordinates
    and needs a few rounds to grow.
    """
    return Scales({name: Scale(_range(value)) for name, value in initial.items()}, _weight(weight))


def fixed(exact: Mapping[str, float]) -> Scales:
    """Scales with exactly these ranges, chosen by something else than this module."""
    return Scales({name: Scale(value) for name, value in exact.items()}, 1.0)


def following(scales: Scales, mean: Update, count: int) -> Scales:
    """The scales for the next round from those of the last and the sum of its `count` summands (as `decode` gives it).

    W' is the mean weight. R' = headroom·max|mean| on the scale of W', at least R/4; where more than `SHARE` was
    clipped, at least 2R, and the headroom is doubled unless R had fallen behind it. Each is rounded up to a power of
    two: it then changes seldom and tells little. Headroom that was not needed for a while shrinks back (a half in 16
    rounds). A group whose mean is zero says nothing about its range and keeps it.
    """
    weight = _weight(mean.weight / count)
    ratio = mean.weight / count / weight
    groups = {}
    for name, scale in scales.groups.items():
        vector = mean.groups[name]
        peak = max(float(vector.max()), -float(vector.min())) * ratio
        held = scale.range * (scales.weight / weight)
        clipped = mean.metrics[CLIPPED + name]
        groups[name] = _next(scale.headroom, held, peak, clipped, count * vector.size)
    return Scales(groups, weight)


def _next(headroom: float, held: float, peak: float, clipped: float, coordinates: int) -> Scale:
    if clipped > SHARE * coordinates:
        if headroom * peak <= held:
            headroom *= 2
        return Scale(_range(max(2 * held, headroom * peak)), headroom)
    if clipped <= 0:
        headroom = max(HEADROOM, headroom * 2 ** (-1 / 16))
    return Scale(_range(max(held / 4, headroom * peak) if peak else held), headroom)


def _range(value: float) -> float:
    return min(max(_power(value), 2.0**-40), 2.0**40)


def _weight(value: float) -> float:
    return min(max(_power(value), SMALLEST_SCALAR), LARGEST_SCALAR)


def _power(value: float) -> float:
    """The power of two at or next above a positive `value`."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent)
