"""The Krum family once more, from the papers, in plain Python loops and floats: no array is in it."""

from __future__ import annotations

import statistics


def squared(a, b):
    return sum((float(x) - float(y)) ** 2 for x, y in zip(a, b, strict=True))


def scores(vectors, f):
    """Σ of the n − f − 2 smallest squared distances to the other vectors (one at least)."""
    found = []
    for i, v in enumerate(vectors):
        others = sorted(squared(v, u) for j, u in enumerate(vectors) if j != i)
        found.append(sum(others[: max(1, len(vectors) - f - 2)]))
    return found


def krum(vectors, f):
    found = scores(vectors, f)
    return found.index(min(found))


def multi_krum(vectors, f, m):
    found = scores(vectors, f)
    return sorted(sorted(range(len(vectors)), key=lambda i: found[i])[:m])


def bulyan(vectors, f):
    """(the θ chosen, the vector)."""
    theta = len(vectors) - 2 * f
    left, chosen = list(range(len(vectors))), []
    for _ in range(theta):
        best = left[krum([vectors[i] for i in left], f)] if len(left) > 1 else left[0]
        chosen.append(best)
        left.remove(best)
    out = []
    for coordinate in zip(*(vectors[i] for i in sorted(chosen)), strict=True):
        values = [float(x) for x in coordinate]
        middle = statistics.median(values)
        nearest = sorted(values, key=lambda x: abs(x - middle))[: theta - 2 * f]
        out.append(sum(nearest) / len(nearest))
    return sorted(chosen), out
