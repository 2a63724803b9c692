"""The bound for drawn cohorts: never below what a small mechanism really gives away, worked out outcome by outcome."""

from __future__ import annotations

import math
from itertools import combinations, product

import numpy as np
import pytest
from fedward_common.privacy import amplification
from fedward_common.privacy.accounting import divergences, spent
from fedward_common.privacy.amplification import Drawn, sampled, unseen
from fedward_common.privacy.events import (
    DiscreteGaussian,
    FixedSizeGaussian,
    Gaussian,
    Relation,
    SampledGaussian,
    Skellam,
)

DELTA = 1e-5
REACH = 60
OUTCOMES = np.arange(-REACH, REACH + 1)


def log_noise(variance: float) -> np.ndarray:
    """Discrete Gaussian: ln of its law at `OUTCOMES`."""
    logs = -(OUTCOMES**2) / (2 * variance)
    return logs - np.logaddexp.reduce(logs)


def of_sum(values: tuple[int, ...], size: int, variance: float) -> np.ndarray:
    """ln of the law of the noisy sum over a uniform draw of `size` of `values`."""
    noise = log_noise(variance)
    drawn = [np.roll(noise, sum(values[i] for i in chosen)) for chosen in combinations(range(len(values)), size)]
    return np.logaddexp.reduce(drawn, axis=0) - math.log(len(drawn))


def divergence(p: np.ndarray, q: np.ndarray, order: float) -> float:
    """Rényi's, on outcomes where rolling has not brought the other end in."""
    inner = slice(5, -5)
    return float(np.logaddexp.reduce(order * p[inner] + (1 - order) * q[inner])) / (order - 1)


@pytest.mark.parametrize("variance", [1.0, 4.0, 25.0])
@pytest.mark.parametrize(("population", "size"), [(2, 1), (4, 1), (4, 2), (6, 3), (6, 5), (8, 1)])
def test_never_below_what_a_small_mechanism_gives_away(variance: float, population: int, size: int) -> None:
    """Each unit holds −1, 0 or 1; one is replaced. All neighbours, for at most three kinds of the others."""
    orders = (2, 3, 4, 6, 10)
    replaced = {a: max(divergence(log_noise(variance), np.roll(log_noise(variance), d), a) for d in (-2, -1, 1, 2))
                for a in range(2, max(orders) + 1)}  # fmt: skip
    worst = dict.fromkeys(orders, 0.0)
    alike = {(other,) * (population - 1) for other in (-1, 0, 1)}
    for rest in alike | {tuple((-1) ** i for i in range(population - 1))}:
        for before, after in product((-1, 0, 1), repeat=2):
            p, q = (of_sum((one, *rest), size, variance) for one in (before, after))
            for order in orders:
                worst[order] = max(worst[order], divergence(p, q, order))
    for order in orders:
        bound = sampled(np.array([replaced[a] for a in range(2, order + 1)]), size / population)
        assert worst[order] <= bound * (1 + 1e-9)


def test_the_bound_is_worth_something() -> None:
    """One of eight drawn, noise of standard deviation 5: the bound is within a small factor of the truth, and far under
    what holds without the draw."""
    replaced = np.array([divergence(log_noise(25.0), np.roll(log_noise(25.0), 2), a) for a in (2, 3, 4)])
    real = divergence(of_sum((1,) + (-1,) * 7, 1, 25.0), of_sum((-1,) * 8, 1, 25.0), 4)
    bound = sampled(replaced, 1 / 8)
    assert real < bound < 10 * real and bound < replaced[-1] / 5


def test_by_hand() -> None:
    # α = 2, ε(2) = 0.1, γ = 0.1: ln(1 + 0.01·1·4(e^0.1 − 1)).
    assert sampled(np.array([0.1]), 0.1) == pytest.approx(math.log(1 + 0.04 * (math.exp(0.1) - 1)))
    # ε(2) = 3 is past ln 2, where 2e^ε is less; α = 3 adds γ³·1·2e^{2·ε(3)}.
    expected = math.log(1 + 0.01 * 3 * 2 * math.exp(3) + 0.001 * 2 * math.exp(2 * 4)) / 2
    assert sampled(np.array([3.0, 4.0]), 0.1) == pytest.approx(expected)
    assert sampled(np.array([0.0]), 0.5) == 0.0
    assert sampled(np.array([math.inf]), 0.5) == math.inf
    # No overflow where the divergence is large.
    assert math.isfinite(sampled(np.full(255, 500.0), 1e-3))


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5])
def test_not_under_the_bound_for_gaussian_noise_alone(rate: float) -> None:
    """The same paper's theorem 27 knows that noise is Gaussian; this knows nothing, so it cannot be less."""
    size = round(rate * 1000)
    whole = tuple(float(order) for order in range(2, 33))
    special = divergences(FixedSizeGaussian(1000, size, 4.0), Relation.REPLACE_ONE, whole)
    replaced = divergences(Gaussian(4.0), Relation.REPLACE_ONE, whole)
    general = np.minimum([sampled(replaced[: i + 1], rate) for i in range(len(whole))], replaced)
    assert (general >= special * (1 - 1e-9)).all()


EVENTS = [Skellam(100.0, 1000.0, 1.6e5), DiscreteGaussian(100.0, 400.0, 1, 1000), Gaussian(4.0)]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.kind)
@pytest.mark.parametrize("relation", list(Relation))
def test_never_more_than_against_those_who_know(event: object, relation: Relation) -> None:
    known = spent([(event, 100)], DELTA, relation)
    found = [unseen([(Drawn(event, size, 100), 100)], DELTA, relation).epsilon for size in (1, 5, 10, 20, 50, 99, 100)]
    assert found == sorted(found) and found[-1] == known.epsilon
    assert found[0] < known.epsilon / 10
    few = unseen([(Drawn(event, 5, 100), 100)], DELTA, relation)
    assert set(known.assumptions) < set(few.assumptions) and "secret" in few.assumptions[-1]
    assert unseen([(Drawn(event, 100, 100), 100)], DELTA, relation) == known


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.kind)
def test_a_drawn_unit_stands_in_anothers_place(event: object) -> None:
    """Hidden may be less, but what the theorem counts is a replacement: 2Δ, by hand at each order."""
    found = [unseen([(Drawn(event, 2, 100), 100)], DELTA, relation).epsilon for relation in Relation]
    assert found[0] == found[1]
    orders = np.arange(2.0, 65.0)
    replaced = divergences(event, Relation.REPLACE_ONE, tuple(orders))
    total = 100 * np.array([sampled(replaced[: i + 1], 0.02) for i in range(len(orders))])
    bounds = total + np.log1p(-1 / orders) - (math.log(DELTA) + np.log(orders)) / (orders - 1)
    assert found[0] == pytest.approx(bounds.min(), rel=1e-9)


def test_gaussian_noise_with_the_relation_of_a_fixed_size() -> None:
    """Compared at replace-one with what is known for Gaussian noise: at least that."""
    special = spent([(FixedSizeGaussian(1000, 20, 4.0), 200)], DELTA)
    general = unseen([(Drawn(Gaussian(4.0), 20, 1000), 200)], DELTA, Relation.REPLACE_ONE)
    assert special.relation is general.relation is Relation.REPLACE_ONE
    assert special.epsilon <= general.epsilon < 1.5 * special.epsilon


def test_rounds_without_a_draw_count_whole() -> None:
    event = EVENTS[0]
    few = [(Drawn(event, 5, 100), 90)]
    mixed = unseen([*few, (Drawn(event, 1, 1), 10)], DELTA).epsilon
    assert unseen(few, DELTA).epsilon < mixed < spent([(event, 100)], DELTA).epsilon
    assert mixed > spent([(event, 10)], DELTA).epsilon


def test_the_gap_of_a_table_is_paid() -> None:
    exact, tabled = Skellam(100.0, 1000.0, 1.6e5), Skellam(100.0, 1000.0, 1.6e5, 1e-9)
    paid = [unseen([(Drawn(event, 5, 100), 100)], DELTA).epsilon for event in (exact, tabled)]
    assert paid[0] < paid[1] < 1.1 * paid[0]
    # More than δ can pay: nothing can be claimed by this way or the other.
    assert unseen([(Drawn(Skellam(100.0, 1000.0, 1.6e5, 1e-6), 5, 100), 100)], DELTA).epsilon == math.inf


def test_what_is_sampled_already_is_not_amplified_again() -> None:
    event = SampledGaussian(0.01, 1.0)
    assert unseen([(Drawn(event, 1, 100), 10)], DELTA) == spent([(event, 10)], DELTA)


def test_what_cannot_be_drawn() -> None:
    with pytest.raises(ValueError, match="population"):
        Drawn(EVENTS[0], 3, 2)
    assert amplification.Drawn(EVENTS[0], 2, 2).size == 2
