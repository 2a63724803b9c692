"""What a run spends against those who see its models and do not know who took part in which round.

A round's cohort is `size` of `population` units, drawn uniformly without replacement, afresh for each round and in
secret. For any mechanism whose Rényi divergence between sums that differ in one place is at most ε(α), at integer α,
that of the mechanism over such a draw is at most

    1/(α − 1)·log(1 + γ²·C(α, 2)·min(4(e^ε(2) − 1), 2e^ε(2)) + Σ_{j=3}^{α} γ^j·C(α, j)·2e^{(j−1)·ε(j)}),

γ = size/population (Wang, Balle & Kasiviswanathan 2019, "Subsampled Rényi Differential Privacy and Analytical Moments
Accountant", theorem 9, with ε(∞) = ∞). In its proof a drawn unit stands in the place of another one, so ε(α) is for a
replacement: one unit moves the sum by up to 2Δ, though what is hidden is whether a unit's contribution is there or
zero. With γ near 1 that costs more than the draw gains; then the release counts as if everybody had been drawn, which
holds always (divergences are quasi-convex, and the cohort's draw is a mixture).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fedward_common.privacy.accounting import Claim, Curve, divergences, least_epsilon, spent
from fedward_common.privacy.events import DiscreteGaussian, Event, Gaussian, Relation, Skellam

_WHOLE = *(float(order) for order in range(2, 65)), 96.0, 128.0, 192.0, 256.0
"""Orders. Where ε is a number that means something, the best one is among the first."""
_UNSEEN = (
    "Amplified by sampling: each round's cohort was drawn uniformly from those who were available, by the server, with "
    "a secret of its own; who was available did not depend on earlier cohorts or on data. Nothing is claimed here "
    "against the server, against nodes, or against anybody else who knows who took part in a round."
)


@dataclass(frozen=True)
class Drawn:
    """A release over `size` units, drawn from `population`."""

    event: Event
    size: int
    population: int

    def __post_init__(self) -> None:
        if not 1 <= self.size <= self.population:
            raise ValueError(f"size = {self.size} of population = {self.population}: cannot be drawn")


def unseen(releases: Sequence[tuple[Drawn, int]], delta: float, relation: Relation | None = None) -> Claim:
    """What `releases` (each with how often) spend together at `delta` against those who do not know the draws: never
    more than what they spend against those who do. relation: as in `spent`. Raises `AccountingError`."""
    known = spent([(drawn.event, count) for drawn, count in releases], delta, relation)
    if not all(isinstance(drawn.event, Skellam | DiscreteGaussian | Gaussian) for drawn, _ in releases):
        return known  # these are sampled already
    total = np.zeros(len(_WHOLE))
    gap = 0.0
    for drawn, count in releases:
        total += count * _of_one(drawn, known.relation)
        gap += count * getattr(drawn.event, "gap", 0.0)
    epsilon = least_epsilon(total, np.array(_WHOLE), delta, gap)
    if not epsilon < known.epsilon:
        return known
    return Claim(epsilon, delta, "RDP", known.relation, (*known.assumptions, _UNSEEN))


def sampled(replaced: Curve, rate: float) -> float:
    """The theorem's bound at order α = len(replaced) + 1. replaced: ε(2), ε(3), … ε(α) of the mechanism itself
    for a replacement. rate: γ."""
    order = len(replaced) + 1
    j = np.arange(2, order + 1)
    logs = np.array([math.lgamma(order + 1) - math.lgamma(i + 1) - math.lgamma(order - i + 1) for i in j])
    logs += j * math.log(rate) + math.log(2) + (j - 1) * replaced
    first = float(replaced[0])
    # 4(e^ε − 1) instead of 2e^ε, if it is less.
    if first < math.log(2):
        logs[0] += math.log(2 * -math.expm1(-first)) if first > 0 else -math.inf
    return float(np.logaddexp(0.0, np.logaddexp.reduce(logs))) / (order - 1)


@lru_cache(maxsize=8192)
def _of_one(drawn: Drawn, relation: Relation) -> Curve:
    plain = divergences(drawn.event, relation, _WHOLE)
    if drawn.size == drawn.population:
        return plain
    every = tuple(float(order) for order in range(2, int(_WHOLE[-1]) + 1))
    replaced = divergences(drawn.event, Relation.REPLACE_ONE, every)
    rate = drawn.size / drawn.population
    return np.fmin(plain, [sampled(replaced[: int(order) - 1], rate) for order in _WHOLE])
