"""The site's rules: what a run or a request may not ask for, and how a broken policy file is told."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from fedward_client.policy import Policy, check_request, check_run, default_policy_toml, load_policy, parse_policy
from fedward_common.config import RunConfig, parse_config
from fedward_common.errors import ConfigError
from fedward_common.messages import Purpose, Reason, Request


def config(
    algorithm: str = "fedavg", tags: tuple[str, ...] = (), secure: bool = True, **local: Any
) -> RunConfig:
    local = local or {"steps": 1}
    return parse_config(
        {
            "name": "r", "task": "a:B", "rounds": 1, "algorithm": {"name": algorithm},
            "local": {"lr": 0.1, **local}, "tags": list(tags),
            "secure_sum": {"enabled": secure},
        }
    )  # fmt: skip


def rules(policy: str, run: RunConfig) -> list[str]:
    found = check_run(parse_policy(policy), run)
    assert all(failure.reason is Reason.POLICY for failure in found)
    return [failure.rule for failure in found]


@pytest.mark.parametrize(
    ("policy", "refused", "rule", "allowed"),
    [
        ("max_epochs = 5", config(epochs=10), "max_epochs = 5, the run asks for 10", config(epochs=5)),
        ("max_steps = 5", config(steps=6), "max_steps = 5, the run asks for 6", config(steps=5)),
        ('algorithms = ["scaffold"]', config("fedavg"), 'algorithms = ["scaffold"], the run uses fedavg',
         config("scaffold")),
        ('run_tags = ["cancer", "test"]', config(tags=("marketing",)),
         'run_tags = ["cancer", "test"], the run has ["marketing"]', config(tags=("test", "more"))),
        ('run_tags = ["cancer"]', config(), 'run_tags = ["cancer"], the run has []', config(tags=("cancer",))),
        ("max_seconds_per_round = 60", config(steps=1, max_seconds=90),
         "max_seconds_per_round = 60, the run asks for 90", config(steps=1, max_seconds=60)),
        ("", config(secure=False), "require_secure_sum = true, the run has secure_sum.enabled = false", config()),
    ],
)  # fmt: skip
def test_a_run_that_breaks_a_rule_hears_it(policy, refused, rule, allowed) -> None:
    assert rules(policy, refused) == [rule]
    assert rules(policy, allowed) == []


@pytest.mark.parametrize("aggregation", [{"rule": "median"}, {"rule": "krum", "byzantine": 1}], ids=str)
def test_a_rule_that_needs_single_updates_runs_where_they_are_allowed(aggregation) -> None:
    tables = config(secure=False).model_dump(mode="json") | {"aggregation": aggregation}
    run = parse_config(tables)
    assert rules("", run) == ["require_secure_sum = true, the run has secure_sum.enabled = false"]
    assert rules("require_secure_sum = false", run) == []


def test_every_broken_rule_is_named() -> None:
    assert len(rules('max_epochs = 1\nalgorithms = ["fedprox"]\nrun_tags = ["x"]', config(epochs=2))) == 3


@pytest.mark.parametrize("text", ["", 'algorithms = "any"', "algorithms = []"])
def test_any_algorithm(text) -> None:
    assert rules(text, config("scaffold")) == []


@pytest.mark.parametrize("purpose", [Purpose.TRAIN, Purpose.EVALUATE])
@pytest.mark.parametrize(
    ("cohort", "part"),
    [
        (None, "does not say"), (True, "does not say"), ("9", "does not say"), (9.0, "does not say"),
        (2, "for 2"), (0, "for 0"), (-5, "for -5"),
    ],
)  # fmt: skip
def test_min_cohort(purpose, cohort, part) -> None:
    policy = parse_policy("min_cohort = 3")
    settings = {} if cohort is None else {"cohort": cohort}
    failure = check_request(policy, Request(purpose, "r", settings=settings))
    assert failure is not None and failure.reason is Reason.POLICY
    assert failure.rule.startswith("min_cohort = 3") and part in failure.rule
    assert check_request(policy, Request(purpose, "r", settings={"cohort": 3})) is None


@pytest.mark.parametrize("purpose", [Purpose.PREPARE, Purpose.COLLECT, Purpose.FINISH])
def test_other_requests_name_no_cohort(purpose) -> None:
    assert check_request(parse_policy("min_cohort = 3"), Request(purpose, "r")) is None


def test_a_site_that_takes_part_alone() -> None:
    assert check_request(parse_policy("min_cohort = 1"), Request(Purpose.TRAIN, "r")) is None


def test_the_strict_defaults() -> None:
    policy = parse_policy("")
    assert policy.approved_bundles_only and not policy.allow_unsandboxed_worker
    assert policy.min_cohort == 2
    assert policy.max_memory_bytes > 0


def test_the_default_file_says_the_defaults_and_names_every_key() -> None:
    text = default_policy_toml()
    assert parse_policy(text) == Policy()
    optional = {name for name, field in Policy.model_fields.items() if field.examples}
    assert optional == {"max_memory_mb", "pinned_roster", *Policy().epsilon_limits.by_rule()}
    assert set(tomllib.loads(text)) == set(Policy.model_fields) - optional
    assert all(name in text for name in Policy.model_fields)
    # With the comment sign taken off, the optional keys are valid too.
    assert parse_policy(text.replace("# max_memory_mb", "max_memory_mb")).max_memory_bytes == 8192 << 20
    assert parse_policy(text.replace("# pinned_roster", "pinned_roster")).pinned_roster == "0" * 64


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("max_epoch = 3", ["max_epoch = 3", "unknown key", "max_epochs"]),
        ('min_cohort = "3"', ["min_cohort", "whole number"]),
        ("min_cohort = 0", ["min_cohort = 0", "at least 1"]),
        ("min_cohort = true", ["min_cohort"]),
        ('approved_bundles_only = "no"', ["approved_bundles_only", "true or false"]),
        ("max_seconds_per_round = nan", ["max_seconds_per_round"]),
        ("algorithms = 3", ["algorithms = 3", "list"]),
        ('pinned_roster = "abc"', ["pinned_roster", "64 digits"]),
        ("approve_roster_changes = 1", ["approve_roster_changes = 1", "true or false"]),
        ('run_tags = ["Upper Case"]', ["run_tags[0]", "lower-case"]),
        ("max_epochs 3", ["policy.toml", "not valid TOML"]),
    ],
)
def test_a_broken_policy_is_explained(text, parts) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_policy(text)
    for part in parts:
        assert part in str(refused.value)


def test_a_policy_that_got_lost_is_not_replaced_in_silence(tmp_path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_policy(tmp_path / "policy.toml")
    (tmp_path / "policy.toml").write_text("max_epochs = 7\n")
    assert load_policy(tmp_path / "policy.toml").max_epochs == 7


def test_work_is_ended_shortly_after_it_should_have_ended_itself() -> None:
    policy = parse_policy("max_seconds_per_round = 100")
    assert policy.seconds_for(None) == 100
    assert policy.seconds_for(1000) == 100
    assert 10 < policy.seconds_for(10) < 30
