"""Limits on ε: what counts, in which unit, and where exactly they end."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

import pytest
from fedward_common.errors import ConfigError
from fedward_common.privacy.budget import Limits, accounted, composed, would_exceed
from fedward_common.privacy.events import Gaussian, to_json
from fedward_common.privacy.ledger import Ledger, Release, ReleaseRefused, Unit
from fedward_common.signing import canonical
from scipy.optimize import brentq
from scipy.stats import norm

WHEN = datetime(2026, 3, 1, tzinfo=UTC)
RECORD, PATIENT, SITE = Unit


def pure(epsilon: float) -> str:
    return json.dumps({"e": epsilon, "kind": "pure"}, separators=(",", ":"))


def summed(events: Sequence[tuple[str, int]], delta: float) -> float:
    """Pure ε adds up."""
    return math.fsum(json.loads(event)["e"] * count for event, count in events)


def gaussian_delta(epsilon: float, mu: float) -> float:
    """Balle & Wang 2018, theorem 8."""
    return float(norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu))


@lru_cache(maxsize=4096)
def gaussian_epsilon(mu: float, delta: float) -> float:
    return float(brentq(lambda epsilon: gaussian_delta(epsilon, mu) - delta, 0.0, 100.0, xtol=1e-12))


def gaussian(events: Sequence[tuple[str, int]], delta: float) -> float:
    """Noise multipliers z of releases compose to μ² = Σ 1/z²."""
    precision = sum(count / json.loads(event)["noise_multiplier"] ** 2 for event, count in events)
    return gaussian_epsilon(math.sqrt(precision), delta)


def release(round_: int = 1, event: str = pure(1.0), **more) -> Release:
    fields = {
        "run": "r1", "attempt": 0, "purpose": "train", "dataset": "xray", "unit": RECORD, "server": "s", "time": WHEN
    }  # fmt: skip
    return Release(round=round_, event=event, **{**fields, **more})


def test_every_release_of_a_data_set_counts() -> None:
    before = [
        release(1), release(2, run="r2", server="another"), release(3, run="r3", purpose="evaluate"),
        release(4, time=WHEN - timedelta(days=4000)), release(5, event=pure(0.25), count=2),
    ]  # fmt: skip
    limits = Limits(max_epsilon_per_dataset=5.5)
    assert would_exceed(before, release(6), limits, summed) is None
    assert would_exceed(before, release(6, event=pure(1.001)), limits, summed)
    assert would_exceed(before, release(6, event=pure(0.4), count=3), limits, summed)
    assert would_exceed(before, release(6, event=pure(5.5), dataset="ct"), limits, summed) is None


def test_the_rule_in_words() -> None:
    before = [release(1, event=pure(3.0)), release(1, run="r2", event=pure(4.0))]
    text = would_exceed(before, release(9, run="r3", event=pure(1.5)), Limits(None, 8, None, 1e-6), summed)
    assert text == (
        "max_epsilon_per_dataset = 8: round 9 of run r3 would bring data set 'xray' to ε = 8.5 by record at δ = 1e-06 "
        "in all runs; 7 is spent, 1 left"
    )


def test_a_run_has_its_own_limit() -> None:
    before = [release(1), release(2), release(1, run="r2")]
    assert would_exceed(before, release(3), Limits(max_epsilon_per_run=3), summed) is None
    text = would_exceed(before, release(3), Limits(max_epsilon_per_run=2.5), summed)
    assert text is not None and text.startswith("max_epsilon_per_run = 2.5: ") and "in run r1; 2 is spent" in text
    assert would_exceed(before, release(2, run="r2"), Limits(max_epsilon_per_run=2.5), summed) is None


def test_the_first_limit_that_breaks_is_named() -> None:
    before = [release(1), release(2), release(1, run="r2")]
    limits = Limits(3, 3, 3)
    text = would_exceed(before, release(3), limits, summed)
    assert text is not None and text.startswith("max_epsilon_per_dataset = 3: ")


def test_a_year_is_the_last_365_days() -> None:
    limits = Limits(max_epsilon_per_year=2)
    day = timedelta(days=1)
    for age, broken in ((0 * day, True), (364 * day, True), (365 * day, True), (365 * day + timedelta(0, 1), False)):
        before = [release(1, time=WHEN - age), release(2, time=WHEN - 400 * day), release(3, time=WHEN - 3 * day)]
        assert (would_exceed(before, release(4), limits, summed) is not None) is broken
    # The clock was set back since: nothing is forgotten.
    ahead = [release(1, time=WHEN + 500 * day), release(2, time=WHEN + day)]
    text = would_exceed(ahead, release(3), limits, summed)
    assert text is not None and "in 365 days; 2 is spent, 0 left" in text


@pytest.mark.parametrize("step", [0.1, 0.3, 0.7, 1e-3, 1 / 3, 2.2])
@pytest.mark.parametrize("count", [1, 3, 10, 77])
def test_exactly_at_the_limit_is_allowed_and_nothing_past_it(step: float, count: int) -> None:
    """The sum is made one by one, so that its last digits are those of floats."""

    def one_by_one(events: Sequence[tuple[str, int]], delta: float) -> float:
        total = 0.0
        for event, times in events:
            for _ in range(times):
                total += json.loads(event)["e"]
        return total

    limit = float(Fraction(str(step)) * count) if step != 1 / 3 else count / 3
    limits = Limits(max_epsilon_per_dataset=limit)
    before = [release(number, event=pure(step)) for number in range(count - 1)]
    assert would_exceed(before, release(count, event=pure(step)), limits, one_by_one) is None
    before.append(release(count, event=pure(step)))
    assert would_exceed(before, release(count + 1, event=pure(limit * 1e-6)), limits, one_by_one)


def test_published_values_of_gaussians() -> None:
    """σ = 1: ε = 4.37718; σ = 5, a hundred times: ε = 9.99726 (δ = 1e-5)."""
    one, five = to_json(Gaussian(1.0)), to_json(Gaussian(5.0))
    assert would_exceed([], release(1, event=one), Limits(4.3772), gaussian) is None
    assert would_exceed([], release(1, event=one), Limits(4.3771), gaussian)
    hundred = [release(number, event=five) for number in range(99)]
    assert would_exceed(hundred, release(100, event=five), Limits(9.9973), gaussian) is None
    assert would_exceed(hundred, release(100, event=five), Limits(9.9972), gaussian)
    hundred.append(release(100, event=five))
    assert would_exceed(hundred, release(101, event=five), Limits(9.9973), gaussian)


def test_the_accountants_as_the_rule() -> None:
    assert accounted([(to_json(Gaussian(5.0)), 100)], 1e-5) == pytest.approx(9.99726, abs=1e-5)
    assert accounted([(to_json(Gaussian(5.0)), 60), (to_json(Gaussian(4.0)), 1)], 1e-5) == pytest.approx(
        gaussian_epsilon(math.sqrt(60 / 25 + 1 / 16), 1e-5), abs=1e-6
    )


def test_units_never_mix() -> None:
    limits = Limits(max_epsilon_per_dataset=3)
    by_record = [release(number) for number in range(3)]
    assert would_exceed(by_record, release(9), limits, summed)
    by_site = [release(number, unit=SITE) for number in range(3)]
    text = would_exceed(by_site, release(9, unit=SITE), limits, summed)
    assert text is not None and "ε = 4 by site" in text
    assert would_exceed(by_site[:2], release(9, unit=SITE), limits, summed) is None
    # A record was promised 3, which is spent: what is released of the whole site now would tell more of it.
    text = would_exceed(by_record, release(9, unit=SITE), limits, summed)
    assert text is not None and "ε = 5 by record" in text and "3 is spent, 0 left" in text


def test_coarser_units_count_twice_for_finer_ones() -> None:
    limits = Limits(max_epsilon_per_dataset=7)
    by_site, by_patient = release(1, unit=SITE), release(2, unit=PATIENT)
    assert would_exceed([by_site, by_patient], release(3, event=pure(3.0)), limits, summed) is None
    text = would_exceed([by_site, by_patient], release(3, event=pure(3.1)), limits, summed)
    assert text is not None and "ε = 7.1 by record" in text
    assert would_exceed([by_site], release(2, unit=PATIENT, event=pure(5.0)), limits, summed) is None
    assert would_exceed([by_site], release(2, unit=PATIENT, event=pure(5.1)), limits, summed)


NOISE = [0.7, 1.0, 2.0, 5.0, 30.0]


@pytest.mark.parametrize("limit", [0.5, 2.0, 4.0, 8.0, 12.0])
@pytest.mark.parametrize("coarse", [PATIENT, SITE])
def test_a_record_has_its_epsilon_whatever_was_released_of_its_site(limit: float, coarse: Unit) -> None:
    """Exchanging a site's data moves its update by twice the clip, a record more or less moves a gradient by once: of
    Gaussians the ε of both together is known exactly."""
    allowed = 0
    for z_coarse, z_record in itertools.product(NOISE, NOISE):
        before = [release(1, unit=coarse, event=to_json(Gaussian(z_coarse)))]
        candidate = release(2, event=to_json(Gaussian(z_record)))
        for releases, last in ((before, candidate), ([candidate], before[0])):
            if would_exceed(releases, last, Limits(limit), gaussian) is None:
                allowed += 1
                assert gaussian_epsilon(math.sqrt((2 / z_coarse) ** 2 + z_record**-2), 1e-5) <= limit
    assert allowed


def alarm(events: Sequence[tuple[str, int]], delta: float) -> float:
    """A bell that rings with probability 0, d, or (1 + e^x)·d, at most one step apart between neighbours: (x, d), and
    as bad as any such mechanism two steps apart. The least ε at `delta`, from the two pairs of neighbours by hand."""
    ((event, count),) = events
    x, d = json.loads(event)["x"], json.loads(event)["d"]
    assert count == 1
    return math.inf if delta < d else math.log(max(1.0, 1 + math.exp(x) - delta / d))


@pytest.mark.parametrize("x", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("limit", [4.0, 6.0])
def test_delta_is_kept_two_steps_away_and_shared(x: float, limit: float) -> None:
    """Between data sets two steps apart the site's bell rings with probability 0 or (1 + e^x)·d, the record's with 0 or
    d': whoever hears one of them knows, so that no ε helps and both together must be at most δ."""
    delta, allowed = 1e-5, 0
    for power, other in itertools.product(range(0, 16), repeat=2):
        d_site, d_record = delta * 2.0 ** (-power / 2), delta * 2.0 ** (-other / 2)
        site = release(1, unit=SITE, event=canonical({"kind": "alarm", "x": x, "d": d_site}))
        record = release(2, event=canonical({"kind": "alarm", "x": 0.0, "d": d_record}))
        for before, last in ((site, record), (record, site)):
            if would_exceed([before], last, Limits(limit, delta=delta), alarm) is None:
                allowed += 1
                assert 1 - (1 - d_record) * (1 - (1 + math.exp(x)) * d_site) <= delta
    assert allowed


@pytest.mark.parametrize("wrong", [math.nan, -0.3, math.inf])
def test_an_accountant_that_reports_no_epsilon_breaks_every_limit(wrong: float) -> None:
    assert would_exceed([], release(), Limits(max_epsilon_per_run=1e9), lambda events, delta: wrong)


def test_without_limits_nobody_asks() -> None:
    def never(events: Sequence[tuple[str, int]], delta: float) -> float:
        raise AssertionError

    assert would_exceed([release(1)], release(2), Limits(), never) is None


def test_a_limit_of_zero_allows_what_costs_nothing() -> None:
    assert would_exceed([], release(event=pure(0.0)), Limits(0), summed) is None
    assert would_exceed([], release(event=pure(1e-12)), Limits(0), summed)


def test_delta_and_equal_events_together() -> None:
    asked = []

    def rule(events: Sequence[tuple[str, int]], delta: float) -> float:
        asked.append((list(events), delta))
        return 0.0

    before = [release(1, count=4), release(2, event=pure(2.0)), release(3, count=2)]
    would_exceed(before, release(4), Limits(max_epsilon_per_dataset=1, delta=1e-7), rule)
    assert asked == [([(pure(1.0), 7), (pure(2.0), 1)], 1e-7)]
    assert composed(before) == [(pure(1.0), 6), (pure(2.0), 1)] and composed([]) == []


def test_what_a_ledger_holds_counts_after_a_restart(tmp_path: Path) -> None:
    limits = Limits(max_epsilon_per_dataset=2)

    def ask(number: int) -> None:
        one = release(number, run=f"r{number}")
        ledger = Ledger(tmp_path / "ledger.jsonl", "node")
        ledger.append(one, lambda releases: would_exceed(releases, one, limits, summed))

    ask(1)
    ask(2)
    for number in (3, 4):
        with pytest.raises(ReleaseRefused, match="max_epsilon_per_dataset = 2"):
            ask(number)
    assert len((tmp_path / "ledger.jsonl").read_bytes().splitlines()) == 2


@pytest.mark.parametrize(
    ("limits", "field"),
    [
        ({"max_epsilon_per_run": -1}, "max_epsilon_per_run"),
        ({"max_epsilon_per_dataset": math.nan}, "max_epsilon_per_dataset"),
        ({"max_epsilon_per_year": math.inf}, "max_epsilon_per_year"),
        ({"delta": 0.0}, "delta"), ({"delta": 1.0}, "delta"), ({"delta": math.nan}, "delta"),
    ],
)  # fmt: skip
def test_limits_that_are_none(limits: dict[str, float], field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field} = "):
        Limits(**limits)
