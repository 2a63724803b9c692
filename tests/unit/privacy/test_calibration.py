"""The least noise that keeps a target: against closed forms, dp-accounting, and its own neighbours."""

from __future__ import annotations

import math

import pytest
from fedward_common.privacy.accounting import spent
from fedward_common.privacy.calibration import CalibrationError, noise_multiplier
from fedward_common.privacy.events import EventError, Gaussian, SampledGaussian, Skellam

DELTA = 1e-5
RUNS = {
    "plain": (1.0, lambda z: [(Gaussian(z), 20)]),
    "two kinds": (3.0, lambda z: [(Gaussian(z), 20), (Gaussian(10 * z), 20)]),
    "integer": (8.0, lambda z: [(Skellam(100.0, 10_000.0, (100 * z) ** 2), 50)]),
    "weak": (1e5, lambda z: [(Gaussian(z), 1)]),
    "strong": (0.01, lambda z: [(Gaussian(z), 100)]),
    "nearly out of reach": (3.72, lambda z: [(Gaussian(z), 1), (Gaussian(2.0), 3)]),  # 3.7086 is spent anyway
    "sampled": (2.0, lambda z: [(SampledGaussian(0.01, z), 500)]),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_target_is_kept_and_hardly_less_noise_breaks_it(name):
    target, run = RUNS[name]
    z = noise_multiplier(target, DELTA, run)
    assert spent(run(z), DELTA).epsilon <= target
    assert spent(run(z * (1 - 1.1e-4)), DELTA).epsilon > target


@pytest.mark.parametrize("name", RUNS)
def test_few_questions_are_asked(name):
    """Each may cost an accountant the better part of a second; halving alone would ask 14 beside the bracket's."""
    target, run = RUNS[name]
    asked = []
    noise_multiplier(target, DELTA, lambda z: asked.append(z) or run(z))
    assert len(asked) <= 10 + abs(math.log2(asked[-1]))


@pytest.mark.parametrize(("target", "rounds"), [(0.5, 1), (1.0, 100), (8.0, 1000)])
def test_plain_noise_as_in_closed_form(target, rounds):
    import dp_accounting

    least = dp_accounting.get_sigma_gaussian(target, DELTA) * math.sqrt(rounds)
    z = noise_multiplier(target, DELTA, lambda z: [(Gaussian(z), rounds)])
    assert least * (1 - 1e-6) <= z <= least * 1.0001


def test_what_the_noise_cannot_change_is_named():
    with pytest.raises(CalibrationError, match="target_epsilon = 1: even with noise multiplier") as refused:
        noise_multiplier(1.0, DELTA, lambda z: [(Gaussian(z), 10), (Gaussian(1.0), 2), (Gaussian(50.0), 1)])
    assert "most of it (6.57" in str(refused.value)  # exact Gaussian of μ = √2, from dp-accounting
    assert "by Gaussian(noise_multiplier=1.0)" in str(refused.value)
    assert "Raise target_epsilon or delta" in str(refused.value)


def test_a_delta_that_cannot_pay_for_a_gap():
    with pytest.raises(CalibrationError, match="ε = inf"):
        noise_multiplier(1.0, DELTA, lambda z: [(Skellam(10.0, 100.0, (10 * z) ** 2, 1e-6), 10)])


def test_a_run_without_rounds_says_nothing_about_noise():
    with pytest.raises(CalibrationError, match="check that the run has rounds"):
        noise_multiplier(1.0, DELTA, lambda z: [(Gaussian(z), 0)])


@pytest.mark.parametrize("target", [0.0, -1.0, math.nan, math.inf])
def test_targets_that_are_none(target):
    with pytest.raises(CalibrationError, match=f"target_epsilon = {target}"):
        noise_multiplier(target, DELTA, RUNS["plain"][1])


def test_what_events_refuse_is_not_hidden():
    with pytest.raises(EventError, match="sampling_rate"):
        noise_multiplier(1.0, DELTA, lambda z: [(SampledGaussian(2.0, z), 10)])
