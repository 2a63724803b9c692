"""ε of each mechanism, bounded from below in one release (`one_run`): never over what is claimed, unless noise is
missing."""

from __future__ import annotations

import pytest
from fedward_common.privacy.accounting import spent

from .one_run import epsilon_lower_bound
from .releases import MECHANISMS, sampled_canaries

pytestmark = pytest.mark.slow

DELTA = 1e-5


def bound_and_claim(name: str) -> tuple[float, float]:
    found = MECHANISMS[name].canaries()
    return epsilon_lower_bound(found.scores, found.included, DELTA), spent(found.events, DELTA).epsilon


@pytest.mark.parametrize("name", MECHANISMS)
def test_no_more_is_found_than_is_claimed(name: str) -> None:
    bound, claim = bound_and_claim(name)
    assert bound < claim


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_tenth_of_the_noise_breaks_the_claim(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    MECHANISMS[name].weaken(monkeypatch, 0.1)
    bound, claim = bound_and_claim(name)
    assert bound > claim


def test_patients_in_a_run_by_record_break_its_claim() -> None:
    """Thirty scans of each person: hidden is a scan, and what is claimed of it does not hold for the person."""
    found = sampled_canaries("record", scans=30)
    claim = spent(found.events, DELTA).epsilon
    assert epsilon_lower_bound(found.scores, found.included, DELTA) > claim
