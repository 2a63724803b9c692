"""ε and δ of Gaussian noise against published values, arithmetic of 60 digits, integration and dp-accounting."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
from fedward_common.privacy.exact_gaussian import delta_of, epsilon_of

MUS, EPSILONS = (1e-6, 1e-3, 0.1, 1.0, 3.0, 50.0), (0.0, 1e-7, 0.01, 0.5, 3.0, 20.0, 1400.0)


def by_60_digits(epsilon, mu):
    with mpmath.workdps(60):
        epsilon, mu = mpmath.mpf(epsilon), mpmath.mpf(mu)
        return mpmath.ncdf(mu / 2 - epsilon / mu) - mpmath.exp(epsilon) * mpmath.ncdf(-mu / 2 - epsilon / mu)


@pytest.mark.parametrize(("sigma", "rounds", "epsilon"), [(1.0, 1, 4.37718), (4.0, 1, 0.92634), (5.0, 100, 9.99726)])
def test_published_values(sigma, rounds, epsilon):
    assert epsilon_of(1e-5, math.sqrt(rounds) / sigma) == pytest.approx(epsilon, rel=1e-5)


@pytest.mark.parametrize("mu", MUS)
@pytest.mark.parametrize("epsilon", EPSILONS)
def test_delta_has_nine_digits_far_out_in_the_tail(epsilon, mu):
    truth = float(by_60_digits(epsilon, mu))
    assert delta_of(epsilon, mu) == pytest.approx(truth, rel=1e-9 if truth > 1e-290 else 1e-3, abs=1e-300)


def test_the_ends_of_the_two_ways_to_compute_mills_ratio_meet():
    for mu in (0.5, 5.0):
        for a in (24.9, 25.0, 25.1):
            epsilon = (a + mu / 2) * mu
            assert delta_of(epsilon, mu) == pytest.approx(float(by_60_digits(epsilon, mu)), rel=1e-10)


@pytest.mark.parametrize(("epsilon", "mu"), [(0.0, 0.3), (1.0, 0.5), (2.0, 1.0), (4.0, 2.0)])
def test_delta_is_the_integral_that_defines_it(epsilon, mu):
    """∫ max(0, p(x) − e^ε·q(x)) dx for N(μ, 1) and N(0, 1)."""
    x, step = np.linspace(-12, 12 + mu, 2_000_001, retstep=True)
    p, q = (np.exp(-((x - mean) ** 2) / 2) / math.sqrt(2 * math.pi) for mean in (mu, 0.0))
    integral = float(np.maximum(0, p - math.exp(epsilon) * q).sum() * step)
    assert delta_of(epsilon, mu) == pytest.approx(integral, rel=1e-6)


@pytest.mark.parametrize("mu", [1e-3, 0.1, 1.0, 7.0, 100.0, 1e6])
@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.1])
def test_epsilon_is_the_least_that_keeps_delta(delta, mu):
    epsilon = epsilon_of(delta, mu)
    if epsilon:
        assert delta_of(epsilon, mu) <= delta
        assert delta_of(epsilon * (1 - 1e-9), mu) > delta
        assert float(by_60_digits(epsilon, mu)) == pytest.approx(delta, rel=1e-4)
    else:
        assert float(by_60_digits(0, mu)) <= delta


@pytest.mark.parametrize(("sigma", "delta"), [(0.3, 1e-5), (1.0, 1e-8), (10.0, 1e-5), (30.0, 1e-3)])
def test_as_dp_accounting(sigma, delta):
    import dp_accounting

    assert epsilon_of(delta, 1 / sigma) == pytest.approx(dp_accounting.get_epsilon_gaussian(sigma, delta), rel=1e-6)


def test_no_data_and_no_noise():
    assert delta_of(0.0, 0.0) == delta_of(1.0, 0.0) == epsilon_of(1e-5, 0.0) == 0.0
    assert delta_of(1.0, math.inf) == 1.0
    assert epsilon_of(1e-5, math.inf) == math.inf
    assert epsilon_of(1e-5, 1e200) == math.inf
    assert delta_of(math.inf, 1.0) == 0.0


def test_a_delta_that_needs_no_epsilon():
    assert epsilon_of(0.4, 1.0) == 0.0
    assert epsilon_of(0.38, 1.0) > 0.0
    assert delta_of(0.0, 1.0) == pytest.approx(math.erf(1 / math.sqrt(8)))  # the total variation distance


@pytest.mark.parametrize(("epsilon", "mu"), [(-1.0, 1.0), (math.nan, 1.0), (1.0, -1.0), (1.0, math.nan)])
def test_epsilon_and_mu_outside_their_range(epsilon, mu):
    with pytest.raises(ValueError, match="neither is negative"):
        delta_of(epsilon, mu)


@pytest.mark.parametrize(("delta", "mu"), [(0.0, 1.0), (1.0, 1.0), (math.nan, 1.0), (1e-5, -1.0), (1e-5, math.nan)])
def test_delta_outside_its_range(delta, mu):
    with pytest.raises(ValueError, match="within"):
        epsilon_of(delta, mu)
