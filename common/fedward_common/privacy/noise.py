"""Integer noise from a cryptographic keystream: exact laws, drawn through a table of their distribution function.

A draw takes a word of 64 bits: one bit is the sign, the other 63 are the top of a uniform number U in [0, 2^127), and
|X| is the number of entries C_k = ⌊2^127·P(|X| ≤ k)⌋ of the table that are ≤ U. Where these 63 bits are those of an
entry, which happens once in 2^40 draws or less, 64 more bits decide. A table of 64 bits alone would be too coarse: a
law of 10^5 values, drawn by 100 nodes in 10^6 coordinates over 100 rounds, would be off by 10^-5 and more in total
variation, as much as δ may be.

A guide finds the entry: U's top bits give a cell, the cell its first entry, and the cells, of the width of the likely
values, hold at most one more; a binary search does the unlikely ones (Devroye 1986, chapter III.2.4, with Chen and
Asau 1974). The table is computed in integers of 300 and more bits, so that its own errors are far below 2^-100.

Drawing looks values up at places that depend on the noise: it does not hide them from code on the same processor that
can watch its cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import lru_cache
from itertools import accumulate
from typing import Protocol

import numpy as np
import numpy.typing as npt

from fedward_common.errors import ConfigError
from fedward_common.quantize import Stream
from fedward_common.secagg.masks import Keystream

Whole = npt.NDArray[np.int32]

SMALLEST_VARIANCE, LARGEST_VARIANCE = 2.0**-20, 1e10
"""The largest table then has 1.2 million entries in 28 MB."""

_TAIL_BITS = 100
"""The table ends where less than 2^-100 is left."""
_DISTANCE = 2.0**-98
_PART = 1 << 16
_ONE_BIT = np.uint64(1)


class Law(Protocol):
    """A distribution on the whole numbers, symmetric about 0 and falling away from it."""

    def __hash__(self) -> int: ...

    @property
    def variance(self) -> float: ...

    def log_tail(self, k: int) -> float:
        """A bound on ln P(|X| ≥ k), falling in k ≥ 1."""

    def weights(self, last: int) -> list[int]:
        """Numbers in the ratio of P(X = 0), … P(X = last), each within 2^-102 of it, or of 2^-228·P(X = 0)."""


@dataclass(frozen=True)
class Skellam:
    """The difference of two Poisson variables of mean variance/2: P(k) = e^−v I_k(v), with v the variance.

    The sum of independent ones is Skellam, with the sum of the variances. (Agarwal, Kairouz, Liu 2021, "The Skellam
    Mechanism for Differentially Private Federated Learning".) Raises `ConfigError` for a variance that a table cannot
    hold.
    """

    variance: float

    def __post_init__(self) -> None:
        _check_variance(self.variance)

    def log_tail(self, k: int) -> float:
        """Chernoff's bound: E e^tX = e^(v(cosh t − 1)), at its best t = asinh(k/v)."""
        ratio = k / self.variance
        # √(1 + r²) − 1, without the difference of near numbers.
        excess = ratio * ratio / (math.sqrt(1 + ratio * ratio) + 1)
        return math.log(2) + self.variance * excess - k * math.asinh(ratio)

    def weights(self, last: int) -> list[int]:
        """I_{k−1}(v) = I_{k+1}(v) + (2k/v)·I_k(v), downwards from where I is next to nothing (Miller's algorithm).

        All terms are positive: relative errors add up and do not grow. They are 2^-127 a step from where it starts, at
        P(|X| ≥ k) < 2^-170, and what a wrong start adds to `last` is (2^-170/2^-100)².
        """
        numerator, denominator = float(self.variance).as_integer_ratio()
        slope = (denominator << 257) // numerator  # 2/v, 256 bits behind the point
        above, here = 0, 1 << 128
        weights = []
        for k in range(max(last + 1, _reach(self, 170)), 0, -1):
            above, here = here, above + (k * slope * here >> 256)
            if k <= last + 1:
                weights.append(here)
        return weights[::-1]


@dataclass(frozen=True)
class DiscreteGaussian:
    """P(k) ∝ e^(−k²/2v). The true variance is below v, by less than one in 10^6 from v = 1 on; accountants take v.

    The sum of several is close to such a law and not quite one: Kairouz, Liu, Steinke 2021, theorem 1, bounds the
    difference by 10·Σ e^(−2π²v·k/(k+1)), which is next to nothing from v = 10 on. (Canonne, Kamath, Steinke 2020, "The
    Discrete Gaussian for Differential Privacy".) Raises `ConfigError` for a v that a table cannot hold.
    """

    variance: float

    def __post_init__(self) -> None:
        _check_variance(self.variance)

    def log_tail(self, k: int) -> float:
        """E e^tX ≤ e^(vt²/2), as for the normal law (Canonne, Kamath, Steinke 2020), at its best t = k/v."""
        return math.log(2) - k * k / (2 * self.variance)

    def weights(self, last: int) -> list[int]:
        """w_{k+1} = w_k·r_k with r_{k+1} = r_k·e^(−1/v), 320 bits behind the point: at `last`, where w > 2^-102, the
        roundings of k² products are below 2^-170."""
        with localcontext() as context:
            context.prec = 120
            root = (-1 / (2 * Decimal(self.variance))).exp()
            ratio, step = (int(power * 2**320) for power in (root, root * root))
        weights = [1 << 320]
        for _ in range(last):
            weights.append(weights[-1] * ratio >> 320)
            ratio = ratio * step >> 320
        return weights


class Noise:
    """Draws of one law, through its table: 20 to 24 bytes a value; made in 0.3 s for a variance of 10^8, in 3 s for the
    largest."""

    def __init__(self, law: Law) -> None:
        self.law = law
        weights = law.weights(_reach(law, _TAIL_BITS))
        self._high, self._low = _table([weights[0], *(2 * weight for weight in weights[1:])])
        bits = len(weights).bit_length()
        self._shift = np.uint64(63 - bits)
        starts = np.arange(1 << bits, dtype=np.uint64) << self._shift
        self._guide = np.searchsorted(self._high, starts).astype(np.int32)
        crowded = np.flatnonzero(np.diff(self._guide, append=np.int32(len(weights))) > 1)
        self._unlikely = starts[crowded[0]] if crowded.size else np.uint64(1 << 63)
        """From here on U's cells may hold more than one entry."""

    @classmethod
    @lru_cache(maxsize=2)
    def of(cls, law: Law) -> Noise:
        """As `Noise(law)`; the last two are kept."""
        return cls(law)

    def draw(self, count: int, stream: Stream | None = None) -> Whole:
        """`count` independent values, int32 of shape (count,). Without a `stream`: from a fresh keystream, as it must
        be for every draw that is to be independent of all others. With one: from its next words, the same again from
        another stream of the same key."""
        stream = Keystream() if stream is None else stream
        out = np.empty(count, np.int32)
        for start in range(0, count, _PART):
            self._fill(out[start : start + _PART], stream)
        return out

    @staticmethod
    def truncation(count: int) -> float:
        """A bound on the total variation between `count` draws and as many of the law itself: count·2^-98.

        2^-100 is the tail that is cut off, 2^-106 the rounding of 2^21 entries to 2^-127, and 2^-100 leaves room for
        the weights' errors. (The keystream is taken for random words.) A mechanism that is (ε, δ) with the law itself
        is (ε, δ + (1 + e^ε)·t) with draws within t: charge that. The same for every law, so that nobody needs a table
        to account for it.
        """
        return count * _DISTANCE

    def _fill(self, out: Whole, stream: Stream) -> None:
        words = stream.words(2 * out.size)
        uniform = words.view("<u8") >> _ONE_BIT
        minus = -(words.view(np.int32)[::2] & np.int32(1))
        # The guide's places are below its length; "clip" only spares the check.
        value = self._guide.take((uniform >> self._shift).view(np.int64), mode="clip")
        entry = self._high.take(value, mode="clip")
        value += entry <= uniform
        unlikely = np.flatnonzero(uniform >= self._unlikely)
        if unlikely.size:
            found = np.searchsorted(self._high, uniform[unlikely])
            value[unlikely], entry[unlikely] = found, self._high[found]
        for place in np.flatnonzero(entry == uniform):
            value[place] = self._decided(uniform[place], stream)
        value ^= minus
        np.subtract(value, minus, out=out)

    def _decided(self, uniform: np.uint64, stream: Stream) -> int:
        """|X| where the top of U is that of an entry, by the next 64 bits."""
        rest = stream.words(2).view("<u8")[0]
        value = int(np.searchsorted(self._high, uniform))
        while self._high[value] == uniform and self._low[value] <= rest:
            value += 1
        return value


def _table(folded: Iterable[int]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """The entries C_k for weights of |X| = k, as their upper and lower 64 bits. The last is 2^127."""
    sums = list(accumulate(folded))
    entries = b"".join(((partial << 127) // sums[-1]).to_bytes(16, "little") for partial in sums)
    pairs = np.frombuffer(entries, "<u8").reshape(-1, 2)
    return pairs[:, 1].astype(np.uint64), pairs[:, 0].astype(np.uint64)


def _reach(law: Law, bits: int) -> int:
    """The least k ≥ 1 at which the bound on P(|X| ≥ k) is below 2^-bits."""
    limit = -bits * math.log(2)
    above = 1
    while law.log_tail(above) > limit:
        above *= 2
    below = above // 2
    while above - below > 1:
        middle = (above + below) // 2
        below, above = (middle, above) if law.log_tail(middle) > limit else (below, middle)
    return above


def _check_variance(variance: object) -> None:
    fits = type(variance) in (int, float) and SMALLEST_VARIANCE <= variance <= LARGEST_VARIANCE  # type: ignore[operator]
    if not fits:
        raise ConfigError(
            f"variance = {variance!r}: the noise of one node in one coordinate has a variance from 2^-20 to "
            f"{LARGEST_VARIANCE:g}, for which a table is made. Use fewer bits for a smaller one (rounding to whole "
            "numbers is then still next to nothing), more bits for a larger one."
        )
