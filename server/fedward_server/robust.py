"""Rules that take up with liars: pure functions of n flat vectors, one a node, in the order of the nodes' names.

All work on updates, never on models: a distance between models drowns in what they have in common. Distances come from
differences in float64; ‖x‖² + ‖y‖² − 2xy would cancel. Ties go to the name that comes first. Memory beside the vectors:
the result and a few MB, whatever n and d are. Time: n²d for the Krum family, n log n · d for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from fedward_common.update import Vector

Real = npt.NDArray[np.float64]
Vectors = Sequence[Vector]

_CELLS = 1 << 19
"""Elements of all vectors together that are float64 at a time."""


def mean(vectors: Vectors) -> Real:
    """Each coordinate's mean."""
    return _by_coordinate(vectors, lambda block: block.mean(axis=0))


def median(vectors: Vectors) -> Real:
    """Each coordinate's median; of an even number the mean of the two in the middle (Yin et al. 2018, option I)."""
    n = len(vectors)
    return _by_coordinate(vectors, lambda block: np.sort(block, axis=0)[(n - 1) // 2 : n // 2 + 1].mean(axis=0))


def trimmed_mean(vectors: Vectors, trim: int) -> Real:
    """Each coordinate's mean without its `trim` largest and smallest values (Yin et al. 2018, option II)."""
    n = len(vectors)
    if not 1 <= 2 * trim < n:
        raise ValueError(f"trim = {trim}: of {n} values at least one goes at each end, and one stays")
    return _by_coordinate(vectors, lambda block: np.sort(block, axis=0)[trim : n - trim].mean(axis=0))


def squared_distances(vectors: Vectors) -> Real:
    """‖v_i − v_j‖² as an [n, n] matrix; inf where it is beyond float64."""
    n = len(vectors)
    apart = np.zeros((n, n))
    with np.errstate(over="ignore"):
        for _, block in _blocks(vectors):
            for i in range(n - 1):
                difference = block[i + 1 :] - block[i]
                apart[i, i + 1 :] += np.square(difference, out=difference).sum(axis=1)
    return apart + apart.T


def krum_scores(apart: Real, byzantine: int) -> Real:
    """The sum of each one's n − f − 2 smallest squared distances to others; of one at least (Blanchard et al. 2017)."""
    others = apart.copy()
    np.fill_diagonal(others, np.inf)
    others.sort(axis=1)
    with np.errstate(over="ignore"):
        scores: Real = others[:, : max(1, len(apart) - byzantine - 2)].sum(axis=1)
    return scores


def krum(vectors: Vectors, byzantine: int, keep: int = 1) -> list[int]:
    """The indices, in order, of the `keep` vectors with the smallest scores: Krum's choice, Multi-Krum's if several."""
    scores = krum_scores(squared_distances(vectors), byzantine)
    return sorted(np.argsort(scores, kind="stable")[:keep].tolist())


def bulyan(vectors: Vectors, byzantine: int) -> tuple[list[int], Real]:
    """The indices of the θ = n − 2f vectors that Krum chooses one after another, each from those that are left; and for
    each coordinate the mean of their θ − 2f values nearest to the median (El Mhamdi et al. 2018)."""
    theta = len(vectors) - 2 * byzantine
    if theta - 2 * byzantine < 1:
        raise ValueError(f"byzantine = {byzantine}: nothing is left of {len(vectors)} vectors")
    apart, left = squared_distances(vectors), list(range(len(vectors)))
    chosen: list[int] = []
    while len(chosen) < theta:
        best = int(np.argmin(krum_scores(apart[np.ix_(left, left)], byzantine)))
        chosen.append(left.pop(best))
    chosen.sort()

    def nearest(block: Real) -> Real:
        from_median = np.abs(block - np.median(block, axis=0))
        order = np.argsort(from_median, axis=0, kind="stable")[: theta - 2 * byzantine]
        return np.asarray(np.take_along_axis(block, order, axis=0).mean(axis=0))

    return chosen, _by_coordinate([vectors[i] for i in chosen], nearest)


@dataclass(frozen=True)
class Centre:
    """A geometric median. shares: how much of each vector is in it; they sum to 1."""

    vector: Real
    shares: Real
    iterations: int
    converged: bool


def geometric_median(vectors: Vectors, iterations: int, tolerance: float, smoothing: float) -> Centre:
    """argmin_z Σ ‖v_i − z‖ by Weiszfeld's steps z ← Σ β_i v_i / Σ β_i, β_i = 1 / max(ν, ‖v_i − z‖) (Pillutla et al.
    2022, algorithm 2, with equal weights), from the median of each coordinate, which few liars cannot move far.

    With s the median distance of the vectors from there: ν = smoothing · s, and the search ends when z moves by no more
    than tolerance · s; so vectors at any scale have their result at that scale. The paper starts from the mean and
    takes a few steps, each of which costs it a round; here a step costs one look at the vectors.
    """
    n = len(vectors)
    z = median(vectors)
    with np.errstate(over="ignore"):
        apart = np.sqrt(sum(np.square(block - z[part]).sum(axis=1) for part, block in _blocks(vectors)))
        scale = float(np.median(apart))
        if scale == 0:  # more than half are the same: no other point is as near to all
            here = apart == 0
            return Centre(z, here / here.sum(), 0, True)
        shares, done, converged = np.full(n, 1 / n), 0, False
        while done < iterations and not converged:
            shares = 1 / np.maximum(smoothing * scale, apart)
            shares /= shares.sum()
            moved, squares = 0.0, np.zeros(n)
            for part, block in _blocks(vectors):
                new = np.einsum("i,ij->j", shares, block)  # not BLAS: its sums depend on its threads
                moved += float(np.square(new - z[part]).sum())
                squares += np.square(block - new).sum(axis=1)
                z[part] = new
            apart, done = np.sqrt(squares), done + 1
            converged = moved**0.5 <= tolerance * scale
    return Centre(z, shares, done, converged)


def _by_coordinate(vectors: Vectors, rule: Callable[[Real], Real]) -> Real:
    out = np.empty(len(vectors[0]))
    for part, block in _blocks(vectors):
        out[part] = rule(block)
    return out


def _blocks(vectors: Vectors) -> Iterator[tuple[slice, Real]]:
    """The vectors as rows, some columns at a time, in float64."""
    width = max(1, _CELLS // len(vectors))
    for start in range(0, len(vectors[0]), width):
        part = slice(start, start + width)
        yield part, np.array([vector[part] for vector in vectors], dtype=np.float64)
