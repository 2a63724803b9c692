"""Real vectors to whole numbers: clipping that counts, rounding at random."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fedward_common.errors import UpdateError
from fedward_common.update import Vector

_CHUNK = 1 << 16
_ONE = 2.0**32


class Stream(Protocol):
    """A keystream: uniform words that nobody without its key can tell from random ones."""

    def words(self, count: int) -> npt.NDArray[np.uint32]:
        """The next `count` words; they may be overwritten by the next call."""


def clip(what: str, vector: Vector, bound: float) -> tuple[Vector, int]:
    """`vector` with each element moved into ±bound (to the nearest value of its dtype), and how many had to be moved.

    The vector itself if none was, else a copy. Raises `UpdateError` unless it is a float vector of finite values.
    """
    if vector.dtype not in (np.float32, np.float64):
        raise UpdateError(f"{what} has dtype {vector.dtype}: only float32 and float64 can be quantised")
    low, high = vector.min(), vector.max()
    if not (np.isfinite(low) and np.isfinite(high)):  # the extremes of a vector with a NaN are NaN
        raise UpdateError(f"{what} holds values that are not finite")
    limit = _nearest_below(bound, vector.dtype)
    if -limit <= low and high <= limit:
        return vector, 0
    moved = sum(
        int(np.count_nonzero(np.abs(vector[start : start + _CHUNK]) > limit))
        for start in range(0, vector.size, _CHUNK)
    )
    return np.clip(vector, -limit, limit), moved


def _nearest_below(bound: float, dtype: np.dtype[Any]) -> Any:
    """The largest value of `dtype` that is not over `bound`: for values of that dtype, x > bound iff x is over it."""
    limit = dtype.type(min(bound, float(np.finfo(dtype).max)))
    return limit if float(limit) <= bound else np.nextafter(limit, dtype.type(0))


def quantize(vector: Vector, scale: float, levels: int, stream: Stream, out: npt.NDArray[np.uint32]) -> None:
    """out ← ⌊scale·x + levels/2 + u⌋ with u uniform in [0, 1): within [0, levels], and scale·x + levels/2 in the mean.

    levels: even, under 2^31. u has the 32 bits of a word of `stream`; fixed point with 32 bits behind the point makes
    the largest value levels + (1 − 2^−32), in int64, and its floor `levels`: a word cannot become larger whatever x is.
    Unbiased for |scale·x| ≤ levels/2 to within 2^−21 of a level, the resolution of float64 at 2^31 levels.
    (Gupta et al. 2015, "Deep Learning with Limited Numerical Precision", eq. 1, for the rounding.)
    """
    size = min(_CHUNK, vector.size)
    reals = np.empty(size, dtype=np.float64)
    fixed = np.empty(size, dtype=np.int64)
    top = levels * _ONE
    for start in range(0, vector.size, _CHUNK):
        part = vector[start : start + _CHUNK]
        real, whole = reals[: part.size], fixed[: part.size]
        np.multiply(part, scale * _ONE, out=real, dtype=np.float64)
        real += top / 2
        np.clip(real, 0.0, top, out=real)  # for the last bit of the product, and for noise added after clipping
        np.copyto(whole, real, casting="unsafe")
        whole += stream.words(part.size)
        whole >>= 32
        out[start : start + _CHUNK] = whole
