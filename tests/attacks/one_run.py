"""A lower bound on ε from one release that holds many canaries.

Each of m canaries, units of the kind that the release hides, is put in if its own fair coin says so. The attacker sees
the release, gives each canary a score, and guesses of some that they are in, of others that they are not. If the
release is (ε, δ)-differentially private, the number of right guesses is nearly bounded by that of as many coins which
fall right with probability e^ε/(1 + e^ε). (Steinke, Nasr, Jagielski 2023, "Privacy Auditing with One (1) Training Run",
corollary 5.4; the code of their appendix D gives the published values in the tests.)

The bound is far below ε, most of all where the noise is Gaussian: it finds mechanisms that are broken, not those that
are a little off.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
from scipy import special

_FEWEST = 16
"""Guesses below which nothing can be shown."""


def epsilon_lower_bound(scores: Any, included: Any, delta: float, confidence: float = 0.95) -> float:
    """ε of the release is at least this with the `confidence` given; 0 if nothing can be said.

    scores: (m,), higher where the attacker holds a canary for one that is in; included: (m,), whether it is, by coins
    that are fair and independent. As many guesses are made as serve best: of all canaries, half of them, a quarter, and
    so on, the surest first; each of these numbers is tried at its part of 1 − confidence.
    """
    scores, included = np.asarray(scores, float), np.asarray(included, bool)
    if scores.ndim != 1 or scores.shape != included.shape:
        raise ValueError(f"scores of shape {scores.shape} for canaries of shape {included.shape}")
    if not np.isfinite(scores).all():
        raise ValueError("a score is not finite")
    order = np.argsort(scores, kind="stable")
    m = scores.size
    sides = [k for k in (m // 2 >> step for step in range(m.bit_length())) if 2 * k >= _FEWEST] or [m // 2]
    level = 1 - (1 - confidence) / len(sides)
    bounds = []
    for k in sides:
        right = np.count_nonzero(included[order[m - k :]]) + np.count_nonzero(~included[order[:k]])
        bounds.append(lower_bound(m, 2 * k, int(right), delta, level))
    return max(bounds)


@lru_cache(maxsize=1024)
def lower_bound(canaries: int, guesses: int, right: int, delta: float, confidence: float = 0.95) -> float:
    """The largest ε, to 2^-20, that so many right guesses refute: their `p_value` is below 1 − confidence."""

    def refuted(epsilon: float) -> bool:
        return p_value(canaries, guesses, right, epsilon, delta) < 1 - confidence

    low, high = 0.0, 1.0
    while refuted(high):
        low, high = high, 2 * high
    while high - low > 2.0**-20:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """A bound on the probability of `right` or more right ones among `guesses`, if the release is (ε, δ)-DP.

    With W ~ Binomial(guesses, e^ε/(1 + e^ε)): P(W ≥ right) + 2·canaries·δ·max_i P(right > W ≥ right − i)/i.
    """
    if not 0 <= right <= guesses <= canaries:
        raise ValueError(f"{right} right of {guesses} guesses about {canaries} canaries")
    chance = 1 / (1 + math.exp(-epsilon))
    # scipy.stats has the same and takes a hundred times as long.
    w = np.arange(right)[::-1]
    ways = special.gammaln(guesses + 1) - special.gammaln(w + 1) - special.gammaln(guesses - w + 1)
    law = np.exp(ways + special.xlogy(w, chance) + special.xlogy(guesses - w, 1 - chance))
    nearly = np.cumsum(law) / np.arange(1, right + 1)
    at_least = float(special.bdtrc(right - 1, guesses, chance)) if right else 1.0
    return float(min(1.0, at_least + 2 * canaries * delta * nearly.max(initial=0.0)))
