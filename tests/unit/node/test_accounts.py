"""A node's budget: across runs, servers and restarts, and whatever the server says."""

from __future__ import annotations

from pathlib import Path

import pytest
from fedward_client.accounts import NodeAccounts
from fedward_client.policy import Policy, check_run, default_policy_toml, parse_policy
from fedward_common.config import parse_config
from fedward_common.messages import Reason
from fedward_common.node import Refused
from fedward_common.privacy.anchor import default_place
from fedward_common.privacy.budget import Limits
from fedward_common.privacy.events import Gaussian, to_json
from fedward_common.privacy.ledger import LedgerError, Release, Unit, verify

Z4 = 0.92634
"""ε of one Gaussian release with z = 4 at δ = 1e-5 (Balle & Wang 2018)."""


def release(round_: int = 1, run: str = "run", attempt: int = 0) -> Release:
    return Release(run, round_, attempt, "train", "here", Unit.SITE, "here", to_json(Gaussian(4.0)))


def accounts(folder: Path, server: str = "https://one", **limits: float) -> NodeAccounts:
    ledger = folder / "ledger.jsonl"
    return NodeAccounts(ledger, "node", default_place(ledger), Limits(**limits), "data", server)


def refusal(act: object, one: Release) -> str:
    with pytest.raises(Refused) as caught:
        act(one)  # type: ignore[operator]
    assert caught.value.failure.reason is Reason.POLICY
    return caught.value.failure.rule


def test_a_data_sets_releases_count_across_runs_servers_and_restarts(tmp_path: Path) -> None:
    limit = {"max_epsilon_per_dataset": 1.4 * Z4}
    first = accounts(tmp_path, **limit)
    first.check(release())
    first.write(release())
    other = accounts(tmp_path, "https://two", **limit)
    rule = refusal(other.check, release(run="another"))
    assert "max_epsilon_per_dataset" in rule and "another" in rule and "left" in rule
    assert "max_epsilon_per_dataset" in refusal(other.write, release(run="another"))
    (written,) = verify(tmp_path / "ledger.jsonl").releases
    assert (written.server, written.dataset) == ("https://one", "data")


def test_a_limit_of_a_run_is_no_limit_of_others(tmp_path: Path) -> None:
    node = accounts(tmp_path, max_epsilon_per_run=1.1 * Z4)
    for run in ("a", "b", "c"):
        node.write(release(run=run))
        assert "max_epsilon_per_run" in refusal(node.write, release(2, run))


def test_nothing_is_answered_twice(tmp_path: Path) -> None:
    node = accounts(tmp_path)
    node.write(release())
    assert "answers once" in refusal(node.write, release())
    node.write(release(attempt=1))  # another attempt is another release, and counts
    assert len(verify(tmp_path / "ledger.jsonl").releases) == 2


@pytest.mark.parametrize("harm", ["delete", "cut", "edit", "swap"])
def test_a_ledger_that_is_not_as_it_was_stops_the_node(tmp_path: Path, harm: str) -> None:
    ledger = tmp_path / "ledger.jsonl"
    node = accounts(tmp_path)
    for round_ in (1, 2, 3):
        node.write(release(round_))
    lines = ledger.read_bytes().splitlines(keepends=True)
    if harm == "delete":
        ledger.unlink()
    elif harm == "cut":
        ledger.write_bytes(b"".join(lines[:-1]))
    elif harm == "edit":
        ledger.write_bytes(ledger.read_bytes().replace(b"4.0", b"9.0"))
    else:
        ledger.write_bytes(lines[1] + lines[0] + lines[2])
    with pytest.raises(LedgerError, match="ledger accept"):
        accounts(tmp_path)


def test_a_ledger_that_cannot_be_written_stops_the_release(tmp_path: Path) -> None:
    node = accounts(tmp_path)
    node.write(release())
    (tmp_path / "ledger.jsonl").unlink()
    (tmp_path / "ledger.jsonl").mkdir()
    assert "privacy ledger" in refusal(node.write, release(2))


def config(mechanism: str | None) -> object:
    tables = {"name": "r", "task": "t:T", "rounds": 1, "algorithm": {"name": "fedavg"}}
    tables["local"] = {"lr": 0.1, "steps": 1}
    if mechanism is not None:
        by_steps = {"unit": mechanism, "sampling_rate": 0.001}
        unit = by_steps if mechanism in ("record", "patient") else {"unit": "site", "mechanism": mechanism}
        tables["privacy"] = {"clip": 1.0, "noise_multiplier": 1.0, **unit}
        tables["local"] = {"lr": 0.1, "epochs": 2} if mechanism == "record" else tables["local"]
        tables["evaluation"] = {"every": 0}
    return parse_config(tables)


@pytest.mark.parametrize(
    ("rules", "mechanism", "rule"),
    [
        ({}, None, None),
        ({}, "distributed", None),
        ({}, "central", "trust_servers_noise = false"),
        ({"trust_servers_noise": True}, "central", None),
        ({"require_privacy": True}, None, "require_privacy = true"),
        ({"require_privacy": True}, "distributed", None),
        ({"require_privacy": True}, "patient", None),
        ({"privacy_units": ("patient", "site")}, "patient", None),
        ({"privacy_units": ("patient", "site")}, "record", 'privacy_units = ["patient", "site"], the run has'),
        ({"privacy_units": ("patient",)}, None, None),
        ({"max_steps": 1999}, "record", "max_steps = 1999, the run's passes over the data are 2000"),
        ({"max_epsilon_per_run": 3.0}, None, "max_epsilon_per_run = 3, the run has no [privacy]"),
        ({"max_epsilon_per_year": 3.0}, None, "max_epsilon_per_year = 3"),
    ],
)
def test_what_the_policy_says(rules: dict[str, object], mechanism: str | None, rule: str | None) -> None:
    found = [failure.rule for failure in check_run(Policy(**rules), config(mechanism))]  # type: ignore[arg-type]
    assert found == [] if rule is None else len(found) == 1 and rule in found[0]


def test_the_default_file_names_the_limits() -> None:
    text = default_policy_toml()
    assert "# max_epsilon_per_dataset = 16.0" in text
    changed = parse_policy(text.replace("# max_epsilon_per_dataset = 16.0", "max_epsilon_per_dataset = 4"))
    assert changed.epsilon_limits.max_epsilon_per_dataset == 4
    assert parse_policy(text).epsilon_limits == Limits()
