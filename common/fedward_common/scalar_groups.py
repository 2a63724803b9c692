"""Groups of single numbers in a secure sum: among its scalars, which are summed exactly, not among its coordinates.

Coordinates are held to a range that the server guesses before the first sum and follows from then on (`ranges`). For
the many coordinates of a model that costs little; one number that is 500 would be clipped to 1 for rounds. A scalar w·x
has no range up to 2^42 and a grid of 2^-20, for about five words more.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedward_common.summand import WEIGHT, on_grid
from fedward_common.update import Extent, Layout, Update, Vector, Vectors

NUMBER = "number."
"""What stands before a group's name and a place in it."""

Groups = Mapping[str, Extent]


def lengths(layout: Layout, summed: Groups) -> dict[str, int]:
    """The groups of `summed` that are coordinates."""
    return {name: layout.size(extent) for name, extent in summed.items() if not isinstance(extent, int)}


def names(summed: Groups) -> tuple[str, ...]:
    """The scalars that the other groups become."""
    return tuple(name for group, length in _numbers(summed) for name in _scalars(group, length))


def weighted(summed: Groups, groups: Vectors, weight: float) -> dict[str, float]:
    """w·x of these scalars. Raises `UpdateError` for a weight beyond ±2^42."""
    held = on_grid(WEIGHT, weight)  # as the sum of weights will see it
    return {
        scalar: held * float(value)
        for group, length in _numbers(summed)
        for scalar, value in zip(_scalars(group, length), groups[group], strict=True)
    }


def means(summed: Groups, mean: Update) -> dict[str, Vector]:
    """The groups of numbers from the sum's scalars, float64: Σw·x/Σw."""
    return {
        group: np.array([mean.metrics[scalar] for scalar in _scalars(group, length)]) / mean.weight
        for group, length in _numbers(summed)
    }


def _numbers(summed: Groups) -> list[tuple[str, int]]:
    return [(name, extent) for name, extent in summed.items() if isinstance(extent, int)]


def _scalars(group: str, length: int) -> list[str]:
    return [f"{NUMBER}{group}.{place}" for place in range(length)]
