"""What a sequence of events spends: the tightest claim of those whose proofs cover all of its events.

- `exact Gaussian`, without amplification by sampling: Gaussian noise, however sampled;
- `PLD`, privacy loss distributions (dp-accounting): plain and Poisson-sampled Gaussian noise;
- `RDP`, Rényi divergences, which add up over any events (Mironov 2017). Integer noise has no other.

Neighbouring relations are never mixed: with one fixed-size event all are taken as replace-one. A replacement is a
removal and an addition, so it moves by at most 2Δ what each of these moves by Δ.

GDP's central limit theorem is an approximation that reports too little, and dp-accounting 0.6 takes the sensitivity of
a fixed-size sum as C where it is 2C: neither is used. It takes seconds to import, which only sampled events need.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from fedward_common.errors import FedwardError
from fedward_common.privacy.events import (
    DiscreteGaussian,
    Event,
    FixedSizeGaussian,
    Gaussian,
    Relation,
    SampledGaussian,
    Skellam,
)
from fedward_common.privacy.exact_gaussian import epsilon_of

Counts = tuple[tuple[Event, int], ...]
"""Different events in one order, each with how often."""
Curve = npt.NDArray[np.float64]
"""Rényi divergences (or their orders), one an order."""
Sampled = SampledGaussian | FixedSizeGaussian
Integer = Skellam | DiscreteGaussian

ORDERS = (
    *(1 + tenth / 10 for tenth in range(1, 100)),
    *(float(order) for order in range(11, 64)),
    *(float(round(64 * 2 ** (step / 8))) for step in range(41)),
)
"""Orders of Rényi divergence: dense enough to lose under 0.2 % of ε, from ε = 0.005 on (Gaussian noise, δ = 1e-5)."""
_WHOLE = *(float(order) for order in range(2, 64)), 128.0, 256.0, 512.0, 1024.0
"""For sampled releases: in between, their series does not converge for all of them, and each costs more the higher."""

_PLD_UP_TO = 100.0
"""ε from which on PLD's precision tells nobody anything, while its arrays grow with ε."""
_LOSSES = 1 << 14
"""Privacy losses that the distribution of one release is rounded to, at most."""
_FINEST = 1e-4
"""Least distance of such losses."""
_BLOCK = 1 << 16
"""Releases composed at once: dp-accounting takes a power with so many digits that more would take it hours."""
_ROUNDING, _ROUNDING_A_RELEASE = 1e-12, 1e-15
"""Probability that rounding in the FFT may lose. Without it PLD reports too little for δ ≤ 1e-10 (seen: 3e-14 lost in
10 000 releases)."""


class AccountingError(FedwardError):
    """What was asked of an accountant has no answer."""


@dataclass(frozen=True)
class Claim:
    """(ε, δ)-differential privacy, by which accountant, and what it rests on, in words. Raises `AccountingError` for an
    ε that nothing can spend."""

    epsilon: float
    delta: float
    accountant: str
    relation: Relation
    assumptions: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.epsilon >= 0:  # true for NaN
            raise AccountingError(
                f"epsilon = {self.epsilon}: an ε is a number from 0 on, so the accountant ({self.accountant}) is wrong "
                "and nothing may be claimed. Report the events, please."
            )


def spent(events: Sequence[tuple[Event, int]], delta: float, relation: Relation | None = None) -> Claim:
    """What `events` (each with how often) spend together at `delta`, within (0, 1). Raises `AccountingError`.

    relation: the neighbours that the claim is about; default those of the events. What holds for adding and removing
    a unit gives something for replacing one, not the other way round.
    Answers are kept by multiset of events, and so is what single events add: to know before each release whether it
    would be one too many, ask for the sum with it.
    """
    _check_delta(delta)
    counts = _counts(events)
    least = _relation(counts)
    if relation is Relation.ADD_OR_REMOVE_ONE and least is not relation:
        raise AccountingError(f"relation = {relation}: some events are about {least} and say nothing about it.")
    return _spent(counts, float(delta), relation or least)


def rdp(events: Sequence[tuple[Event, int]], delta: float, orders: Sequence[float] | None = None) -> Claim:
    """The claim by Rényi divergences alone, as Opacus makes it. orders: each over 1; those of `spent` if not given.
    Raises `AccountingError`."""
    _check_delta(delta)
    counts = _counts(events)
    chosen = tuple(map(float, _orders(counts) if orders is None else orders))
    if not chosen or not all(1 < order < math.inf for order in chosen):
        raise AccountingError(f"orders = {orders!r:.100}: one or more are needed, all finite and over 1.")
    return _rdp(counts, float(delta), _relation(counts), chosen)


@lru_cache(maxsize=4096)
def _spent(counts: Counts, delta: float, relation: Relation) -> Claim:
    if any(isinstance(event, Integer) for event, _ in counts):
        return _rdp(counts, delta, relation, _orders(counts))
    claims = [_exact(counts, delta, relation)]
    if any(isinstance(event, Sampled) for event, _ in counts):
        claims.append(_rdp(counts, delta, relation, _orders(counts)))
        rough = min(claim.epsilon for claim in claims)
        if relation is Relation.ADD_OR_REMOVE_ONE and rough <= _PLD_UP_TO:
            claims.append(_pld(counts, delta))
    return min(claims, key=lambda claim: claim.epsilon)


def _exact(counts: Counts, delta: float, relation: Relation) -> Claim:
    """Sampling is a mixture over who takes part, and neighbours are as near in each case as with everybody, or nearer:
    hockey-stick divergences are jointly convex."""
    epsilon = epsilon_of(delta, _moves(relation) * math.sqrt(_precision(counts)))
    return _claim(epsilon, delta, "exact Gaussian", relation, counts, _NOT_AMPLIFIED)


def _pld(counts: Counts, delta: float) -> Claim:
    """Koskela, Jälkö & Honkela 2020, "Computing Tight Differential Privacy Guarantees Using FFT"; Doroshenko et al.
    2022, "Connect the Dots", for the rounding of losses, which only ever makes them larger."""
    parts = [
        (event.sampling_rate, event.noise_multiplier, count)
        for event, count in counts
        if isinstance(event, SampledGaussian)
    ]
    precision = _precision(tuple((event, count) for event, count in counts if isinstance(event, Gaussian)))
    if precision:
        parts.append((1.0, 1 / math.sqrt(precision), 1))
    interval = max(_interval(rate, noise) for rate, noise, _ in parts)
    total = reduce(lambda one, other: one.compose(other), (_composed(*part, interval) for part in parts))
    left = delta - _ROUNDING - _ROUNDING_A_RELEASE * sum(count for _, count in counts)
    epsilon = float(total.get_epsilon_for_delta(left)) if left > 0 else math.inf
    further = (*_amplified(counts), _FIXED_BEFOREHAND)
    return _claim(epsilon, delta, "PLD", Relation.ADD_OR_REMOVE_ONE, counts, *further)


@lru_cache(maxsize=16)
def _composed(rate: float, noise: float, count: int, interval: float) -> Any:
    if count <= _BLOCK:
        return _single(rate, noise, interval).self_compose(count)
    blocks, rest = divmod(count, _BLOCK)
    total = _composed(rate, noise, _BLOCK, interval).self_compose(blocks)
    return total.compose(_composed(rate, noise, rest, interval)) if rest else total


@lru_cache(maxsize=64)
def _single(rate: float, noise: float, interval: float) -> Any:
    from dp_accounting.pld import privacy_loss_distribution as pld  # type: ignore[import-untyped]

    return pld.from_gaussian_mechanism(noise, sampling_prob=rate, value_discretization_interval=interval)


def _interval(rate: float, noise: float) -> float:
    """The distance of losses, a power of two times the finest, at which the largest that matters is one of the first
    `_LOSSES`: log(1 − q + q·e^t) with t = 10/z + 1/2z², that of noise of ten standard deviations."""
    t = 10 / noise + 0.5 * _square(1 / noise)
    largest = float(np.logaddexp(math.log1p(-rate), math.log(rate) + t)) if rate < 1 else t
    return _FINEST * 2.0 ** max(0, math.ceil(math.log2(max(largest, _FINEST) / _LOSSES / _FINEST)))


def _rdp(counts: Counts, delta: float, relation: Relation, orders: tuple[float, ...]) -> Claim:
    curve = sum((count * divergences(event, relation, orders) for event, count in counts), np.zeros(len(orders)))
    gap = sum(count * event.gap for event, count in counts if isinstance(event, Integer))
    epsilon = least_epsilon(curve, np.array(orders), delta, gap)
    return _claim(epsilon, delta, "RDP", relation, counts, *_amplified(counts))


def _orders(counts: Counts) -> tuple[float, ...]:
    return _WHOLE if any(isinstance(event, Sampled) for event, _ in counts) else ORDERS


def least_epsilon(curve: Curve, alpha: Curve, delta: float, gap: float) -> float:
    """The least ε of a curve at orders alpha, for noise within `gap` of its law in total variation, which adds
    (1 + e^ε)·gap to δ: approached from below until it pays for itself; infinite where δ cannot pay."""
    if gap == 0:
        return _convert(curve, alpha, delta)
    epsilon = 0.0
    for _ in range(100):
        left = delta - (1 + math.exp(min(epsilon, 700.0))) * gap
        needed = _convert(curve, alpha, left) if left > 0 else math.inf
        if needed <= epsilon:
            return epsilon
        epsilon = needed * (1 + 1e-9)
    return math.inf


def _convert(curve: Curve, alpha: Curve, delta: float) -> float:
    """Canonne, Kamath & Steinke 2020, "The Discrete Gaussian for Differential Privacy", proposition 12. No order counts
    where rounding made the divergence negative or no number."""
    bounds = curve + np.log1p(-1 / alpha) - (math.log(delta) + np.log(alpha)) / (alpha - 1)
    return max(0.0, float(np.min(np.where(curve >= 0, bounds, math.inf))))


@lru_cache(maxsize=256)
def divergences(event: Event, relation: Relation, orders: tuple[float, ...]) -> Curve:
    """The Rényi divergence of one release at each order α > 1."""
    alpha, moves = np.array(orders), _moves(relation)
    if isinstance(event, Skellam):
        return _skellam(moves * event.l2, moves * event.l1, event.variance, alpha)
    if isinstance(event, DiscreteGaussian):
        return _discrete_gaussian(moves * event.l2, event, alpha)
    curve = alpha / 2 * _square(moves / event.noise_multiplier)
    if isinstance(event, FixedSizeGaussian):
        curve = np.fmin(curve, _sampled(event, alpha))
    elif isinstance(event, SampledGaussian) and relation is event.relation:
        curve = _sampled(event, alpha)
    elif isinstance(event, SampledGaussian):
        # Mironov 2017, "Rényi Differential Privacy", proposition 11 with p = 2: from one unit to none to the other.
        pair = (alpha - 0.5) / (alpha - 1) * _sampled(event, 2 * alpha) + _sampled(event, 2 * alpha - 1)
        curve = np.fmin(curve, pair)
    return curve


def _sampled(event: Sampled, alpha: Curve) -> Curve:
    """Under the event's own relation: Mironov, Talwar & Zhang 2019, "Rényi Differential Privacy of the Sampled Gaussian
    Mechanism"; Wang, Balle & Kasiviswanathan 2019, "Subsampled Rényi Differential Privacy", theorem 27. Infinite where
    rounding made it negative or no number, so that no sum hides that."""
    import dp_accounting as library  # type: ignore[import-untyped]

    release = library.GaussianDpEvent(event.noise_multiplier / _moves(event.relation))
    if isinstance(event, SampledGaussian):
        release = library.PoissonSampledDpEvent(event.sampling_rate, release)
    else:
        release = library.SampledWithoutReplacementDpEvent(event.population, event.size, release)
    accountant = library.rdp.RdpAccountant(alpha, library.NeighboringRelation[event.relation.name])
    accountant.compose(release)
    curve = np.asarray(accountant.rdp, np.float64)
    return np.where(curve >= 0, curve, math.inf)


def _skellam(l2: float, l1: float, variance: float, alpha: Curve) -> Curve:
    """Agarwal, Kairouz & Liu 2021, "The Skellam Mechanism for Differentially Private Federated Learning", corollary
    3.6: at integer α > 1, with μ the variance (the law is e^{−μ}·I_k(μ)),

        D_α ≤ α·Δ₂²/2μ + min(((2α − 1)·Δ₂² + 6Δ₁)/4μ², 3Δ₁/2μ).

    In between, (α − 1)·D_α is convex in α and 0 at 1, so it lies under its chords.
    """

    def cumulant(order: Curve) -> Curve:
        square = _square(l2)
        excess = np.fmin(((2 * order - 1) * square + 6 * l1) / (4 * _square(variance)), 1.5 * l1 / variance)
        return (order - 1) * (order * square / (2 * variance) + excess)

    below, share = np.floor(alpha), alpha % 1
    return ((1 - share) * cumulant(below) + share * cumulant(below + 1)) / (alpha - 1)


def _discrete_gaussian(l2: float, event: DiscreteGaussian, alpha: Curve) -> Curve:
    """Kairouz, Liu & Steinke 2021, "The Distributed Discrete Gaussian Mechanism for Federated Learning with Secure
    Aggregation": on each coordinate the law of the sum of n is within a factor e^{±τ/2} of the discrete Gaussian of
    variance nσ², τ = 10·Σ_{k=1}^{n−1} e^{−2π²σ²k/(k+1)}.

    So with s = Δ₂/(√n·σ) two bounds hold: D_α ≤ αs²/2 + τd·(α − ½)/(α − 1), the factors taken out of the sum that
    defines D_α; and, by concentrated DP's triangle inequality on each coordinate (as in theorem 1),
    D_α ≤ (α/2)(s² + 2τ·Δ₁/(√n·σ) + τ²d), where Δ₁ ≤ min(√d·Δ₂, Δ₂²) for whole numbers.
    """
    k = np.arange(1, event.nodes)
    tau = 10 * float(np.sum(np.exp(-2 * _square(math.pi * event.sigma) * k / (k + 1))))
    deviation = math.sqrt(event.nodes) * event.sigma
    scaled, l1 = _square(l2 / deviation), min(math.sqrt(event.dimension), l2) * l2 / deviation
    ratio = alpha / 2 * scaled + tau * event.dimension * (alpha - 0.5) / (alpha - 1)
    triangle = alpha / 2 * (scaled + 2 * tau * l1 + _square(tau) * event.dimension)
    return np.fmin(ratio, triangle)


def _counts(events: Sequence[tuple[Event, int]]) -> Counts:
    """The multiset of the events that release something. Raises `AccountingError`."""
    counts: Counter[Event] = Counter()
    for event, count in events:
        if not isinstance(event, Event):
            raise AccountingError(f"{event!r:.100}: no accountant knows this event, so nothing may be claimed.")
        if type(count) is not int or count < 0:
            raise AccountingError(f"{event}: count = {count!r:.100} is not a whole number from 0 on.")
        if isinstance(event, SampledGaussian) and event.sampling_rate == 1:
            event = Gaussian(event.noise_multiplier)
        if count and not (isinstance(event, SampledGaussian) and event.sampling_rate == 0):
            counts[event] += count
    return tuple(sorted(counts.items(), key=repr))


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise AccountingError(
            f"delta = {delta!r}: δ is within (0, 1); take less than 1 / number of units, such as 1e-5. With δ = 0 no "
            "amount of Gaussian noise is enough."
        )


def _relation(counts: Counts) -> Relation:
    replace = any(event.relation is Relation.REPLACE_ONE for event, _ in counts)
    return Relation.REPLACE_ONE if replace else Relation.ADD_OR_REMOVE_ONE


def _moves(relation: Relation) -> float:
    """How far neighbours move what one unit moves by 1."""
    return 2.0 if relation is Relation.REPLACE_ONE else 1.0


def _precision(counts: Counts) -> float:
    """Σ1/z²: Gaussian noise with multipliers z_i is together that of one with 1/√Σ1/z_i²."""
    return sum(count * _square(1 / event.noise_multiplier) for event, count in counts if not isinstance(event, Integer))


def _square(value: float) -> float:
    return value * value  # infinite where ** would raise


def _amplified(counts: Counts) -> tuple[str, ...]:
    return tuple(dict.fromkeys(event.amplified for event, _ in counts if isinstance(event, Sampled)))


def _claim(
    epsilon: float, delta: float, accountant: str, relation: Relation, counts: Counts, *further: str
) -> Claim:
    """The claim with what all claims about `counts` rest on, and what this accountant's does."""
    converted = [_CONVERTED] if any(event.relation is not relation for event, _ in counts) else []
    rests_on = dict.fromkeys(event.rests_on for event, _ in counts)
    return Claim(epsilon, delta, accountant, relation, (_HIDDEN[relation], *rests_on, *converted, *further))


_HIDDEN = {
    Relation.ADD_OR_REMOVE_ONE: "Hidden is whether any one unit is among the data.",
    Relation.REPLACE_ONE: "Hidden is which unit stands in any one place; how many there are is public.",
}
_CONVERTED = (
    "Events about adding or removing a unit were converted to replacing one, which is a removal and an addition: "
    "sensitivities count double, and Poisson-sampled releases by the triangle inequality of Rényi divergences."
)
_NOT_AMPLIFIED = "No sampling is counted: the claim holds against those, too, who know who took part."
_FIXED_BEFOREHAND = (
    "How many releases there are, with which noise and sampling, did not depend on what was released before; what they "
    "were about may."
)
