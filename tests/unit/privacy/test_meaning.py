"""What (ε, δ) means: against the mechanism that is exactly (ε, δ)-private and no more, and against Gaussian noise."""

from __future__ import annotations

import math
from itertools import product
from statistics import NormalDist

import pytest
from fedward_common.privacy.exact_gaussian import epsilon_of
from fedward_common.privacy.meaning import Meaning, accuracy, true_positives

CASES = [(0.0, 0.0), (0.0, 0.3), (0.1, 1e-5), (1.0, 1e-5), (1.0, 0.2), (3.0, 1e-3), (8.0, 1e-5), (2.5, 0.0)]


def tightest(epsilon: float, delta: float) -> tuple[list[float], list[float]]:
    """The laws, without and with, of the mechanism that every (ε, δ)-private one is a copy of (Kairouz, Oh & Viswanath
    2015): it tells which with probability δ, else it flips a coin of odds e^ε."""
    heads = (1 - delta) * math.exp(epsilon) / (1 + math.exp(epsilon))
    tails = (1 - delta) / (1 + math.exp(epsilon))
    return [delta, heads, tails, 0.0], [0.0, tails, heads, delta]


def _dot(rule: tuple[int, ...], law: list[float]) -> float:
    return sum(says * p for says, p in zip(rule, law, strict=True))


def points(epsilon: float, delta: float) -> list[tuple[float, float]]:
    """(FPR, TPR) of every rule that says "with" for some of its four outcomes."""
    without, with_ = tightest(epsilon, delta)
    rules = product((0, 1), repeat=4)
    return [(min(1.0, _dot(rule, without)), _dot(rule, with_)) for rule in rules]


@pytest.mark.parametrize(("epsilon", "delta"), CASES)
def test_no_test_is_better_and_the_best_are_as_good(epsilon: float, delta: float) -> None:
    found = points(epsilon, delta)
    assert all(right <= true_positives(epsilon, delta, wrong) + 1e-12 for wrong, right in found)
    # Neyman & Pearson: the best rules say "with" for the outcomes that speak most for it.
    without, with_ = tightest(epsilon, delta)
    for first in range(4):
        wrong, right = sum(without[first:]), sum(with_[first:])
        assert true_positives(epsilon, delta, wrong) == pytest.approx(right, abs=1e-12)
    best = max((1 + right - wrong) / 2 for wrong, right in found)
    assert accuracy(epsilon, delta) == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize(("epsilon", "delta"), CASES)
def test_accuracy_is_that_of_the_best_point_of_the_trade_off(epsilon: float, delta: float) -> None:
    grid = [i / 20000 for i in range(20001)]
    best = max((1 + true_positives(epsilon, delta, wrong) - wrong) / 2 for wrong in grid)
    assert best <= accuracy(epsilon, delta) + 1e-12
    assert best == pytest.approx(accuracy(epsilon, delta), abs=1e-4)


def test_by_hand() -> None:
    # ε = ln 3: factor 3; of a fair coin's 50 % become 75 %; one false alarm in 100 goes with 3 in 100 found.
    meaning = Meaning.of(math.log(3), 0.0)
    assert (meaning.factor, meaning.right, meaning.found) == pytest.approx((3.0, 0.75, 0.03))
    assert Meaning.of(math.log(3), 0.01).found == pytest.approx(0.04)
    # With ε = ln 1000 the other bound is the smaller one: 1 − 0.99/1000.
    assert Meaning.of(math.log(1000), 0.0).found == pytest.approx(1 - 0.00099)


def test_the_ends() -> None:
    assert Meaning.of(0.0, 0.0) == Meaning(0.0, 0.0, 1.0, 0.5, 0.01)
    assert Meaning.of(math.inf, 1e-5) == Meaning(math.inf, 1e-5, math.inf, 1.0, 1.0)
    assert Meaning.of(1000.0, 1e-5).right == 1.0
    assert true_positives(800.0, 0.0, 0.0) == 0.0
    assert (true_positives(0.0, 1.0, 0.0), accuracy(0.0, 1.0)) == (1.0, 1.0)
    for wrong in ((-0.1, 0.0), (math.nan, 0.0), (1.0, 2.0)):
        with pytest.raises(ValueError, match="epsilon"):
            accuracy(*wrong)
    with pytest.raises(ValueError, match="false_positives"):
        true_positives(1.0, 0.0, 1.1)


@pytest.mark.parametrize("mu", [0.2, 1.0, 3.0])
def test_the_best_test_against_gaussian_noise_stays_under_it(mu: float) -> None:
    """Neyman & Pearson: TPR = Φ(Φ⁻¹(FPR) + μ)."""
    normal = NormalDist()
    for delta in (1e-6, 1e-3, 0.05):
        epsilon = epsilon_of(delta, mu)
        gaps = []
        for wrong in (1e-4, 0.01, 0.1, 0.4, 0.9):
            right = normal.cdf(normal.inv_cdf(wrong) + mu)
            gaps.append(true_positives(epsilon, delta, wrong) - right)
        assert min(gaps) >= -1e-12
