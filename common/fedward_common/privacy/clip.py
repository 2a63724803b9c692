"""L2 clipping: what bounds the part of one site in a sum."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from fedward_common.errors import ConfigError, UpdateError
from fedward_common.update import Vector, Vectors

SMALLEST_CLIP, LARGEST_CLIP = 2.0**-64, 2.0**64

_PART = 1 << 12
"""Elements squared and summed at a time: in any order, the sum of so many squares is within 2^-41 of the exact one."""
_SLACK = 2.0**-38


def check_clip(bound: object) -> None:
    """Raise `ConfigError` unless `bound` is a number from 2^-64 to 2^64."""
    if type(bound) not in (int, float) or not SMALLEST_CLIP <= bound <= LARGEST_CLIP:  # type: ignore[operator]
        raise ConfigError(
            f"clip = {bound!r}: a bound of the L2 norm is a number from 2^-64 to 2^64. The median norm of the updates "
            "of a run without clipping is a good first choice."
        )


def clip(groups: Vectors, bound: float) -> tuple[dict[str, Vector], bool]:
    """`groups` times the one factor that brings the norm over all of them down to `bound`, and whether that was needed.

    groups: float32 or float64, of any shapes; the vectors themselves where they need not change. The norm of what is
    given back, as it stands in its dtypes, is at most `bound`: the factor makes up for the rounding to come, by 2^-22
    where it is to float32 and by 2^-37 where it is to float64 only. A norm within 2^-38 of the bound is taken for one
    over it, for sums of squares are not known more exactly. Raises `UpdateError` for other dtypes and values that are
    not finite, `ConfigError` as `check_clip`. (Abadi et al. 2016, algorithm 1, line 8.)
    """
    check_clip(bound)
    exponent = max([0, *(_exponent(f"group {name!r}", vector) for name, vector in groups.items())])
    # All is computed of x/2^e, which is exact: no square overflows. What is lost below 2^-537 is nothing to the bound.
    sums = [float(part @ part) for vector in groups.values() for part in _parts(vector, 2.0**-exponent)]
    root = math.sqrt(math.fsum(sums))
    if root <= math.ldexp(bound, -exponent) * (1 - _SLACK):
        return dict(groups), False
    rounding = max(float(np.finfo(vector.dtype).eps) for vector in groups.values())
    factor = bound / root * (1 - 2 * (rounding + _SLACK))
    return {name: _times(vector, 2.0**-exponent, factor) for name, vector in groups.items()}, True


def _exponent(what: str, vector: Vector) -> int:
    """The least e with |x| < 2^e for all x of `vector`."""
    if vector.dtype not in (np.float32, np.float64):
        raise UpdateError(f"{what} has dtype {vector.dtype}: only float32 and float64 can be clipped")
    if not vector.size:
        return 0
    low, high = float(vector.min()), float(vector.max())
    if not (math.isfinite(low) and math.isfinite(high)):  # the extremes of a vector with a NaN are NaN
        raise UpdateError(f"{what} holds values that are not finite")
    return math.frexp(max(-low, high))[1]


def _parts(vector: Vector, power: float) -> Iterator[npt.NDArray[np.float64]]:
    """`vector`·`power` in float64, flat and in parts, each in the buffer of the one before."""
    flat = vector.reshape(-1)
    buffer = np.empty(min(_PART, flat.size))
    for start in range(0, flat.size, _PART):
        part = flat[start : start + _PART]
        yield np.multiply(part, power, out=buffer[: part.size], dtype=np.float64)


def _times(vector: Vector, power: float, factor: float) -> Vector:
    """`vector`·`power`·`factor`, in its shape and dtype."""
    out = np.empty(vector.size, vector.dtype)
    at = 0
    for part in _parts(vector, power):
        np.multiply(part, factor, out=out[at : at + part.size], casting="same_kind")
        at += part.size
    return out.reshape(vector.shape)
