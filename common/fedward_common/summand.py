"""What one node adds to a secure sum, word by word, and how the sum is read.

A summand is a vector of words in Z_2^b:

    [participant count: 1] [zero words: ⌈80/b⌉] [scalars, each cut into limbs] [coordinates of group 1] [group 2] …
    [noised numbers]

The count is 1 and the zero words are 0 at every node, so that a sum over other contexts than the server thinks is
recognised. With n the largest number of summands, every word that a node sends is at most

    L = the largest even number ≤ (2^b − 1)/n,

hence **no word of the sum can overflow**: n words of at most L sum to at most nL ≤ 2^b − 1. What is read modulo 2^b is
the sum itself, whatever the values and whoever dropped out; and several words may be masked as one number, since none
carries into the next (`secagg.cells`). L is even so that 0 lies on a level and a coordinate that did not move stays
exactly where it is. Noised numbers, which have no largest one, are another matter: `privacy.distributed`.

Coordinates: y = (w/W)·x in [−R, R] becomes q in {0 … L}, q − L/2 being y in steps of 2R/L, rounded at random
(`quantize`). Over m nodes Σy = (Σq − mL/2)·2R/L. A weighted mean is two sums, Σ(w/W)x and Σw; equal weights are
W = w = 1.

Scalars (the weight, metric sums, counts of clipped coordinates) are summed exactly: v = round(x·2^20) + 2^62, within
[0, 2^63] for |x| ≤ 2^42, is cut into limbs of ℓ = ⌊log2(L + 1)⌋ bits. A limb is at most 2^ℓ − 1 ≤ L, so the same proof
holds, and Σv is put together from the sums of limbs in Python's integers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedward_common.errors import FedwardError, UpdateError
from fedward_common.update import Update

Words = npt.NDArray[np.uint32]
"""Words of b ≤ 32 bits, one an element."""

WEIGHT = "weight"
CLIPPED = "clipped."
"""What a group's name follows in the name of the count of its clipped coordinates."""

_FRACTION = 20
"""Bits behind the point of a scalar."""
SMALLEST_SCALAR, LARGEST_SCALAR = 2.0**-_FRACTION, 2.0**42
_OFFSET = 1 << 62
_SCALAR_BITS = 64
_CHECK_BITS = 80
_LEAST_LEVELS = 256
_WIDTHS = range(12, 33, 4)
_CHUNK = 1 << 16


class ShapeError(FedwardError):
    """Words of that shape cannot hold what is asked of them, or a shape's text is not in its one valid form."""


class WrongSum(FedwardError):
    """The check words of a sum are wrong: it is no sum of summands of one round."""


@dataclass(frozen=True)
class Group:
    """A flat vector of `length` coordinates, each (w/W)·x within ±`range`."""

    name: str
    length: int
    range: float


@dataclass(frozen=True)
class Shape:
    """The form of a round's summands, the same for all nodes of the cohort: they bind their keys to `to_json()`.

    groups, metrics: in the order of their words. bits: b, a multiple of 4 from 12 to 32. capacity: n, the largest
    number of summands (the cohort). weight_scale: W. noised: numbers that a mechanism of differential privacy makes
    and reads. Raises `ShapeError`.
    """

    groups: tuple[Group, ...]
    metrics: tuple[str, ...]
    bits: int
    capacity: int
    weight_scale: float = 1.0
    noised: int = 0

    def __post_init__(self) -> None:
        if type(self.bits) is not int or self.bits not in _WIDTHS:
            raise ShapeError(f"bits = {self.bits!r}: words have {', '.join(map(str, _WIDTHS))} bits.")
        if type(self.capacity) is not int or self.capacity < 2:
            raise ShapeError(
                f"capacity = {self.capacity!r}: a sum of fewer than two hides nothing. Enlarge the cohort."
            )
        if self.levels < _LEAST_LEVELS:
            raise ShapeError(
                f"bits = {self.bits}: a cohort of {self.capacity} leaves each coordinate {self.levels} levels, fewer "
                f"than the {_LEAST_LEVELS} that rounding needs. {_way_out(self.bits, self.capacity)}"
            )
        _check_names("group", [group.name for group in self.groups])
        _check_names("scalar", self.scalars)
        for group in self.groups:
            if type(group.length) is not int or group.length < 1:
                raise ShapeError(f"group {group.name!r}: length = {group.length!r} is not a whole number from 1 on.")
            _check_size(f"group {group.name!r}: range", group.range, 2.0**-100, 2.0**100)
        _check_size("weight_scale", self.weight_scale, SMALLEST_SCALAR, LARGEST_SCALAR)
        if type(self.noised) is not int or self.noised < 0:
            raise ShapeError(f"noised = {self.noised!r} is not a whole number from 0 on.")

    @property
    def levels(self) -> int:
        """L, the largest word that a node sends."""
        return ((1 << self.bits) - 1) // self.capacity & ~1

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of the scalars in the order of their words: the weight, the metrics, each group's clip count."""
        return (WEIGHT, *self.metrics, *(CLIPPED + group.name for group in self.groups))

    @property
    def length(self) -> int:
        """Words in all."""
        return self.noised_at + self.noised

    @property
    def noised_at(self) -> int:
        """Where the noised numbers begin; they are the last words."""
        return self._coordinates_at + sum(group.length for group in self.groups)

    @property
    def _scalars_at(self) -> int:
        return 1 + -(-_CHECK_BITS // self.bits)

    @property
    def _limb_bits(self) -> int:
        return (self.levels + 1).bit_length() - 1

    @property
    def _limbs(self) -> int:
        return -(-_SCALAR_BITS // self._limb_bits)

    @property
    def _coordinates_at(self) -> int:
        return self._scalars_at + self._limbs * len(self.scalars)

    def parts(self, words: Words) -> Iterator[tuple[Group, Words]]:
        """Each group with the view of its words."""
        at = self._coordinates_at
        for group in self.groups:
            yield group, words[at : at + group.length]
            at += group.length

    def blank(self, scalars: Mapping[str, float]) -> Words:
        """A summand with its check words and `scalars`, coordinates still 0. Raises `UpdateError` for a scalar beyond
        ±2^42; its value is not in the text, which may leave the node."""
        words = np.zeros(self.length, dtype=np.uint32)
        words[0] = 1
        at = self._scalars_at
        for name in self.scalars:
            value = _fixed(name, scalars[name]) + _OFFSET
            for _ in range(self._limbs):
                words[at] = value & ((1 << self._limb_bits) - 1)
                value >>= self._limb_bits
                at += 1
        return words

    def to_json(self) -> str:
        """Canonical JSON: equal shapes give equal text."""
        groups = [[group.name, group.length, float(group.range)] for group in self.groups]
        row = [groups, list(self.metrics), self.bits, self.capacity, float(self.weight_scale), self.noised]
        return json.dumps(row, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Shape:
        """The inverse of `to_json`; refuses every other spelling. Raises `ShapeError`."""
        try:
            groups, metrics, bits, capacity, weight_scale, noised = json.loads(text)
            shape = cls(tuple(Group(*group) for group in groups), tuple(metrics), bits, capacity, weight_scale, noised)
            same = shape.to_json() == text
        except (ValueError, TypeError, RecursionError) as error:
            raise ShapeError("the text of a shape is not a JSON list of its groups, metrics and numbers.") from error
        if not same:
            raise ShapeError("the text of a shape is not in its one valid form.")
        return shape


def on_grid(name: str, value: float) -> float:
    """The multiple of 2^-20 nearest to a scalar: what the sum holds of it. Raises `UpdateError` beyond ±2^42."""
    return _fixed(name, value) / (1 << _FRACTION)


def _fixed(name: str, value: float) -> int:
    if not abs(value) <= LARGEST_SCALAR:  # the comparison is false for NaN
        raise UpdateError(f"{name!r} is not a number within ±2^42, which is what the sum can hold.")
    return round(float(value) * 2.0**_FRACTION)  # a power of two: the product is exact


def decode(shape: Shape, words: Words, count: int) -> Update:
    """The weighted means Σw·x/Σw (float64), Σw, and the sums of the other scalars, from the sum of `count` summands.

    words: (length,), each the sum modulo 2^b. Raises `WrongSum` for wrong check words, `UpdateError` if the weights
    do not sum to something positive. Memory: the result and a few chunks.
    """
    if words.shape != (shape.length,) or words.dtype != np.uint32:
        raise ValueError(f"words have shape {words.shape} and dtype {words.dtype}, not ({shape.length},) uint32")
    if not 1 <= count <= shape.capacity:
        raise ValueError(f"count = {count}: the shape is for 1 to {shape.capacity} summands")
    _check_sum(words[: shape._scalars_at], count)
    sums = _scalars(shape, words, count)
    weight = sums.pop(WEIGHT)
    if weight <= 0:
        raise UpdateError(f"the weights of {count} updates sum to {weight}: there is no mean")
    groups = {}
    for group, part in shape.parts(words):
        step = 2 * group.range / shape.levels * (shape.weight_scale / weight)
        groups[group.name] = _means(part, count * (shape.levels // 2), step)
    return Update(groups, weight, sums)


def _check_sum(check: Words, count: int) -> None:
    wrong = int(np.count_nonzero(check[1:]))
    if int(check[0]) != count or wrong:
        raise WrongSum(
            f"the sum counts {int(check[0])} participants where {count} were expected, and {wrong} of its "
            f"{check.size - 1} zero words are not zero: nodes were told different things about this round (cohort, "
            "model, configuration), or one of them sent a vector of its own making. Nothing was decoded; run the "
            "round again, with another cohort if it happens twice."
        )


def _scalars(shape: Shape, words: Words, count: int) -> dict[str, float]:
    sums = {}
    at = shape._scalars_at
    for name in shape.scalars:
        limbs = words[at : at + shape._limbs].tolist()
        total = sum(limb << (shape._limb_bits * place) for place, limb in enumerate(limbs)) - count * _OFFSET
        sums[name] = total / (1 << _FRACTION)
        at += shape._limbs
    return sums


def _means(words: Words, middle: int, step: float) -> npt.NDArray[Any]:
    """(words − middle)·step as float64; the difference is exact."""
    out = np.empty(words.size, dtype=np.float64)
    for start in range(0, words.size, _CHUNK):
        part = out[start : start + _CHUNK]
        np.subtract(words[start : start + _CHUNK], float(middle), out=part, dtype=np.float64)
        part *= step
    return out


def _way_out(bits: int, capacity: int) -> str:
    fits = [width for width in _WIDTHS if ((1 << width) - 1) // capacity >= _LEAST_LEVELS]
    smaller = f"a cohort of at most {((1 << bits) - 1) // _LEAST_LEVELS}"
    return f"Use {fits[0]} bits, or {smaller}." if fits else f"Use {smaller}."


def _check_size(what: str, value: object, least: float, largest: float) -> None:
    if type(value) not in (int, float) or not least <= value <= largest:  # type: ignore[operator]
        exponents = f"2^{math.log2(least):.0f} to 2^{math.log2(largest):.0f}"
        raise ShapeError(f"{what} = {value!r} is not a number from {exponents}.")


def _check_names(what: str, names: Sequence[str]) -> None:
    if not all(type(name) is str and name for name in names):
        raise ShapeError(f"the {what}s {list(names)!r}: names are text that is not empty.")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ShapeError(f"the {what} names {twice} stand twice: every {what} needs a name of its own.")
