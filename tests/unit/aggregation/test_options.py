"""What `[aggregation]` refuses at submission, and where each refusal says the way out."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fedward_common.aggregation_options import RULES, MultiKrum, TrimmedMean
from fedward_common.config import RunConfig, parse_config
from fedward_common.errors import ConfigError
from fedward_common.privacy.options import PrivacyOptions

COMPLETE: dict[str, dict[str, Any]] = {
    "mean": {},
    "krum": {"byzantine": 1},
    "multi_krum": {"byzantine": 1},
    "bulyan": {"byzantine": 1},
    "median": {},
    "trimmed_mean": {"trim": 1},
    "geometric_median": {},
    "norm_bound": {"bound": 1.0},
}


def tables(rule: str | None = None, secure: bool = False, **more: Any) -> dict[str, Any]:
    base = {
        "name": "r", "task": "a:B", "rounds": 1, "algorithm": {"name": "fedavg"}, "local": {"lr": 0.1, "steps": 1},
        "secure_sum": {"enabled": secure}, **more,
    }  # fmt: skip
    return base if rule is None else {**base, "aggregation": {"rule": rule, **COMPLETE[rule]}}


def refusal(given: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(given)
    return str(caught.value)


@pytest.mark.parametrize("rule", sorted(RULES))
def test_every_rule_survives_the_way_through_json(rule: str) -> None:
    config = parse_config(tables(rule))
    assert type(config.aggregation) is RULES[rule]
    assert parse_config(json.loads(config.model_dump_json())) == config
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config
    assert config.uniform == (rule != "mean")


def test_without_the_table_it_is_the_mean() -> None:
    assert parse_config(tables()) == parse_config(tables("mean"))


@pytest.mark.parametrize(
    ("table", "parts"),
    [
        ({"byzantine": 1}, ["aggregation.rule", "give"]),
        (3, ["aggregation", "give aggregation.rule"]),
        ({"rule": "kurm"}, ["aggregation.rule = 'kurm'", "use one of", "krum"]),
        ({"rule": "krum"}, ["aggregation.byzantine: missing"]),
        ({"rule": "krum", "byzantine": 0}, ["aggregation.byzantine = 0", "at least 1"]),
        ({"rule": "krum", "byzantine": 1.0}, ["aggregation.byzantine = 1.0", "whole number"]),
        ({"rule": "krum", "byzantin": 1, "byzantine": 1}, ["aggregation.byzantin = 1", "'byzantine'"]),
        ({"rule": "multi_krum", "byzantine": 1, "keep": 0}, ["aggregation.keep = 0", "at least 1"]),
        ({"rule": "median", "byzantine": 1}, ["aggregation.byzantine = 1", "unknown key"]),
        ({"rule": "trimmed_mean"}, ["aggregation.trim", "aggregation.share", "exactly one"]),
        ({"rule": "trimmed_mean", "trim": 1, "share": 0.1}, ["aggregation.trim", "exactly one"]),
        ({"rule": "trimmed_mean", "share": 0.5}, ["aggregation.share = 0.5", "less than 0.5"]),
        ({"rule": "trimmed_mean", "trim": 0}, ["aggregation.trim = 0", "at least 1"]),
        ({"rule": "norm_bound", "bound": 0}, ["aggregation.bound = 0", "more than 0"]),
        ({"rule": "norm_bound", "bound": float("inf")}, ["aggregation.bound = Infinity", "finite"]),
        ({"rule": "geometric_median", "iterations": 0}, ["aggregation.iterations = 0", "at least 1"]),
    ],
)
def test_refusals_of_single_keys(table: Any, parts: list[str]) -> None:
    text = refusal({**tables(), "aggregation": table})
    for part in parts:
        assert part in text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize("rule", sorted(set(RULES) - {"mean", "norm_bound"}))
def test_single_updates_and_a_secure_sum_exclude_each_other(rule: str) -> None:
    text = refusal(tables(rule, secure=True))
    for part in (f'aggregation.rule = "{rule}"', "single updates", '"norm_bound"', "secure_sum.enabled = false"):
        assert part in text


def test_a_norm_bound_needs_none() -> None:
    assert parse_config(tables("norm_bound", secure=True)).uniform


def test_control_variates_need_exact_means() -> None:
    assert "the two would part" in refusal(tables("norm_bound", algorithm={"name": "scaffold"}))
    assert "the two would part" in refusal(tables("median", algorithm={"name": "scaffold"}))


def test_what_stands_beside_a_models_change_needs_the_mean_too() -> None:
    text = refusal(tables("median", algorithm={"name": "fednova"}))
    assert '["accumulation"] beside' in text and "sends changes of the model alone" in text


@pytest.mark.parametrize(
    ("unit", "more", "why"),
    [
        ("site", {"mechanism": "distributed"}, "privacy.clip bounds each node's update already"),
        ("record", {"sampling_rate": 0.1}, "mostly the noise"),
    ],
)
def test_a_bound_and_privacy_exclude_each_other(unit: str, more: dict[str, Any], why: str) -> None:
    privacy = {"unit": unit, "clip": 1.0, "noise_multiplier": 1.0, **more}
    assert PrivacyOptions.model_validate(privacy)
    given = {"privacy": privacy, "evaluation": {"every": 0}}
    assert why in refusal(tables("norm_bound", secure=True, **given))
    assert "single updates" in refusal(tables("median", secure=True, **given))
    assert "with [privacy]" in refusal(tables("median", secure=False, **given))


@pytest.mark.parametrize(
    ("rule", "options", "least"),
    [
        ("krum", {"byzantine": 3}, 9),
        ("multi_krum", {"byzantine": 3}, 9),
        ("multi_krum", {"byzantine": 3, "keep": 7}, 10),
        ("bulyan", {"byzantine": 3}, 15),
        ("median", {}, 3),
        ("geometric_median", {}, 3),
        ("trimmed_mean", {"trim": 3}, 7),
        ("trimmed_mean", {"share": 0.1}, 10),
        ("trimmed_mean", {"share": 0.15}, 7),
        ("norm_bound", {"bound": 1.0}, 1),
    ],
)
def test_cohorts_that_are_too_small(rule: str, options: dict[str, Any], least: int) -> None:
    given = {**tables(), "aggregation": {"rule": rule, **options}}
    names = [f"n{i}" for i in range(least)]
    for cohort in ({"size": least}, {"quorum": least}, {"nodes": names}):
        assert parse_config({**given, "cohort": cohort}).aggregation.least == least
    if least == 1:
        return
    for cohort, what in (
        ({"size": least - 1}, f"cohort.size is {least - 1}"),
        ({"quorum": least - 1}, f"cohort.quorum is {least - 1}"),
        ({"nodes": names[1:]}, f"names in cohort.nodes is {least - 1}"),
    ):
        text = refusal({**given, "cohort": cohort})
        assert what in text and f"at least {least} nodes" in text and "a rule that needs fewer" in text


def test_the_quorum_is_at_least_what_the_rule_needs() -> None:
    config = parse_config(tables("krum"))
    assert [config.quorum_of(n) for n in (5, 9, 10, 20)] == [5, 5, 5, 10]
    assert parse_config(tables("mean")).quorum_of(9) == 5


def test_a_share_is_read_as_it_was_written() -> None:
    """int(0.29 · 100) is 28 in floats."""
    assert TrimmedMean(share=0.29).cut(100) == 29
    for share in (0.1, 0.15, 0.29, 1 / 3, 0.49):
        rule = TrimmedMean(share=share)
        for n in range(rule.least, 200):
            assert 1 <= rule.cut(n) <= share * n + 1e-9 and 2 * rule.cut(n) < n
        assert rule.cut(rule.least - 1) == 0


def test_multi_krum_keeps_all_but_the_liars_by_default() -> None:
    assert MultiKrum(byzantine=2).kept(10) == 8 and MultiKrum(byzantine=2, keep=3).kept(10) == 3
