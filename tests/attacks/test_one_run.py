"""The audit itself: its numbers against published ones and by brute force, its bound against mechanisms of known ε."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from .one_run import epsilon_lower_bound, lower_bound, p_value


@pytest.mark.parametrize(
    ("canaries", "guesses", "right", "delta", "published"),
    [(1000, 100, 75, 1e-4, 0.673), (100_000, 1510, 1439, 1e-5, 2.675)],
)
def test_published_bounds(canaries: int, guesses: int, right: int, delta: float, published: float) -> None:
    """Appendix D and section 7 of the paper, at 95 %; three digits are printed, one of them cut off."""
    assert lower_bound(canaries, guesses, right, delta) == pytest.approx(published, abs=1e-3)


@pytest.mark.parametrize("guesses", [1, 5, 10])
@pytest.mark.parametrize("odds", [Fraction(1), Fraction(2), Fraction(9, 2)])
def test_the_p_value_by_going_through_all_outcomes(guesses: int, odds: Fraction) -> None:
    """e^ε = odds; all 2^r ways in which guesses fall right or wrong, in exact arithmetic."""
    canaries, delta = 12, Fraction(1, 1000)
    chance = odds / (1 + odds)
    law = [Fraction(0)] * (guesses + 1)
    for outcome in itertools.product((0, 1), repeat=guesses):
        law[sum(outcome)] += chance ** sum(outcome) * (1 - chance) ** (guesses - sum(outcome))
    for right in range(guesses + 1):
        near = [sum(law[right - i : right], Fraction(0)) / i for i in range(1, right + 1)]
        exact = sum(law[right:], Fraction(0)) + 2 * canaries * delta * max(near, default=Fraction(0))
        found = p_value(canaries, guesses, right, math.log(odds), float(delta))
        assert found == pytest.approx(min(1.0, float(exact)), rel=1e-10)


def randomised_response(rng: np.random.Generator, runs: int, m: int, epsilon: float, delta: float) -> tuple[Any, Any]:
    """Of each canary a bit that is true with probability e^ε/(1 + e^ε), but with probability δ all are true: that is
    (ε, δ)-DP. Shapes (runs, m): scores, included."""
    included = rng.random((runs, m)) < 0.5
    true = rng.random((runs, m)) < 1 / (1 + math.exp(-epsilon))
    true |= rng.random((runs, 1)) < delta
    return np.where(true == included, 1.0, -1.0), included


@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 0.0), (2.0, 0.0), (1.0, 0.02)])
def test_the_p_value_by_simulation(epsilon: float, delta: float) -> None:
    """Right guesses about 40 canaries in 20 000 runs. Without δ they are those coins exactly; with it, never more
    than is said, and more than δ = 0 says."""
    m, runs = 40, 20_000
    scores, included = randomised_response(np.random.default_rng(1), runs, m, epsilon, delta)
    right = np.count_nonzero((scores > 0) == included, axis=1)
    for v in range(m + 1):
        seen, error = np.mean(right >= v), 4 / math.sqrt(4 * runs)
        bound = p_value(m, m, v, epsilon, delta)
        assert seen <= bound + error
        assert delta or bound <= seen + error
    if delta:
        assert np.mean(right == m) > 2 * p_value(m, m, m, epsilon, 0.0)


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_the_bound_is_too_high_as_seldom_as_it_says(epsilon: float) -> None:
    """For one number of guesses it is over ε in 5 % of the runs at most, and not in far fewer; for the best of several
    numbers it is so, too."""
    m, runs = 400, 1000
    scores, included = randomised_response(np.random.default_rng(2), runs, m, epsilon, 0.0)
    right = np.count_nonzero((scores > 0) == included, axis=1)
    over = np.mean([lower_bound(m, m, int(v), 0.0) > epsilon for v in right])
    assert 0.01 < over < 0.065
    best = [epsilon_lower_bound(s, i, 0.0) > epsilon for s, i in zip(scores[:300], included[:300], strict=True)]
    assert np.mean(best) < 0.09


def test_more_is_found_where_there_is_less_noise() -> None:
    rng = np.random.default_rng(3)
    included = rng.random(1000) < 0.5
    noise = rng.normal(size=1000)
    bounds = [epsilon_lower_bound(included + z * noise, included, 1e-5) for z in (4.0, 1.0, 0.5, 0.2)]
    assert bounds == sorted(bounds) and bounds[0] < 0.3 and bounds[-1] > 4
    assert epsilon_lower_bound(noise, included, 1e-5) < 0.3
    assert epsilon_lower_bound(np.zeros(1000), included, 1e-5) < 0.3


@pytest.mark.parametrize("m", [1, 2, 10, 33])
def test_few_canaries_show_little(m: int) -> None:
    included = np.arange(m) % 2 == 0
    assert epsilon_lower_bound(included, included, 0.0) <= max(0.0, math.log(m / -math.log(0.95)))


def test_scores_that_are_none() -> None:
    with pytest.raises(ValueError, match="shape"):
        epsilon_lower_bound([1.0, 2.0], [True], 0.0)
    with pytest.raises(ValueError, match="finite"):
        epsilon_lower_bound([1.0, math.nan], [True, False], 0.0)
    with pytest.raises(ValueError, match="5 right of 4"):
        p_value(10, 4, 5, 1.0, 0.0)
