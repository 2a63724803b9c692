"""What may never happen: more rounds, less noise or more sampling, and a smaller ε."""

from __future__ import annotations

import math

import pytest
from fedward_common.privacy.accounting import rdp, spent
from fedward_common.privacy.events import (
    DiscreteGaussian,
    FixedSizeGaussian,
    Gaussian,
    SampledGaussian,
    Skellam,
    from_json,
    to_json,
)
from fedward_common.privacy.exact_gaussian import delta_of, epsilon_of
from hypothesis import given, settings
from hypothesis import strategies as st

SLACK = 1 + 1e-9
noises = st.floats(0.3, 200.0)
rates = st.floats(1e-4, 0.999)
rounds = st.integers(1, 2000)
deltas = st.sampled_from([1e-9, 1e-7, 1e-5, 1e-3])
gaussians = st.builds(Gaussian, noises)
sampled = st.builds(SampledGaussian, rates, noises)
fixed = st.builds(lambda size, noise: FixedSizeGaussian(100, size, noise), st.integers(1, 100), noises)
skellams = st.builds(
    lambda l2, flat, z, gap: Skellam(l2, l2 * flat, (l2 * z) ** 2, gap),
    st.floats(1.0, 1e6), st.floats(1.0, 1e3), noises, st.sampled_from([0.0, 1e-15, 1e-9]),
)  # fmt: skip
discrete = st.builds(
    DiscreteGaussian, st.floats(1.0, 1e3), st.floats(0.5, 1e3), st.integers(1, 50), st.integers(1, 1 << 20)
)
cheap = gaussians | skellams | discrete
lists = st.lists(st.tuples(cheap, rounds), max_size=4)


@given(cheap | sampled | fixed)
@settings(max_examples=200, deadline=None)
def test_an_event_comes_back_from_its_text(event):
    assert from_json(to_json(event)) == event


@given(lists, cheap, deltas)
@settings(max_examples=60, deadline=None)
def test_one_more_release_costs(events, event, delta):
    before, after = spent(events, delta), spent([*events, (event, 1)], delta)
    assert 0 <= before.epsilon <= after.epsilon * SLACK


@given(lists, deltas, deltas)
@settings(max_examples=60, deadline=None)
def test_a_larger_delta_needs_no_more(events, one, other):
    low, high = sorted((one, other))
    assert spent(events, high).epsilon <= spent(events, low).epsilon * SLACK


@given(noises, st.floats(1.0, 3.0), rounds, deltas)
@settings(max_examples=100, deadline=None)
def test_more_noise_costs_less(z, factor, count, delta):
    def claims(z):
        yield spent([(Gaussian(z), count)], delta)
        yield rdp([(Gaussian(z), count)], delta)
        yield spent([(Skellam(100.0, 10_000.0, (100 * z) ** 2), count)], delta)
        yield spent([(DiscreteGaussian(100.0, 10 * z, 100, 1000), count)], delta)

    for more, less in zip(claims(z * factor), claims(z), strict=True):
        assert more.epsilon <= less.epsilon * SLACK


def check_a_poisson_sample(rate, noise, count, what, factor):
    """PLD: its losses lie on a grid, so only what differs by more than that is sure to be told apart."""
    more = {
        "rounds": (rate, noise, math.ceil(count * factor)),
        "noise": (rate, noise / factor, count),
        "rate": (min(1.0, rate * factor), noise, count),
    }[what]
    one, other = (spent([(SampledGaussian(q, z), n)], 1e-5) for q, z, n in ((rate, noise, count), more))
    assert 0 <= one.epsilon <= other.epsilon * (1 + 1e-6) + 1e-6
    assert other.epsilon <= epsilon_of(1e-5, math.sqrt(more[2]) / more[1]) * SLACK  # no worse than without sampling


poisson = given(rates, noises, rounds, st.sampled_from(["rounds", "noise", "rate"]), st.floats(1.05, 2.0))


@pytest.mark.slow
@poisson
@settings(max_examples=4, deadline=None)
def test_a_poisson_sample(rate, noise, count, what, factor):
    check_a_poisson_sample(rate, noise, count, what, factor)


@pytest.mark.slow
@poisson
@settings(max_examples=100, deadline=None)
def test_many_poisson_samples(rate, noise, count, what, factor):
    check_a_poisson_sample(rate, noise, count, what, factor)


@pytest.mark.slow
@given(st.integers(1, 50), noises, rounds, st.sampled_from(["rounds", "noise", "size"]), st.floats(1.05, 2.0))
@settings(max_examples=60, deadline=None)
def test_a_sample_of_fixed_size(size, noise, count, what, factor):
    more = {
        "rounds": (size, noise, math.ceil(count * factor)),
        "noise": (size, noise / factor, count),
        "size": (math.ceil(size * factor), noise, count),
    }[what]
    one, other = (spent([(FixedSizeGaussian(100, m, z), n)], 1e-5) for m, z, n in ((size, noise, count), more))
    assert 0 <= one.epsilon <= other.epsilon * SLACK


@given(st.floats(0.0, 50.0), st.floats(0.0, 50.0), st.floats(1e-6, 50.0), st.floats(1e-6, 50.0))
@settings(max_examples=200, deadline=None)
def test_delta_of_gaussian_noise_falls_with_epsilon_and_grows_with_mu(one, other, mu, nu):
    (less, more), (weak, strong) = sorted((one, other)), sorted((mu, nu))
    assert 0 <= delta_of(more, weak) <= delta_of(less, weak) * SLACK <= 1 * SLACK
    assert delta_of(less, weak) <= delta_of(less, strong) * SLACK
