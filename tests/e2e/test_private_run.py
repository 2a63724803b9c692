"""A run that hides each site: noise before the masks, ledgers on both sides, a node's own limit, the run's budget."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from federation import Federation, fedward
from fedward_common.privacy.anchor import default_place, write_anchor
from fedward_common.privacy.ledger import verify
from fedward_server.paths import ServerPaths

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]

RUN = """
name = "{name}"
task = "toy.task:Toy"
rounds = 9

[algorithm]
name = "fedavg"

[local]
lr = 0.2
steps = 3

[cohort]
min_nodes = 5
wait = {wait}

[evaluation]
every = 0

[privacy]
unit = "site"
mechanism = "distributed"
clip = 1.0
noise_multiplier = 4.0
max_epsilon = 2.6
"""
POLICY = "approved_bundles_only = false\n"


def test_budgets_hold_on_both_sides(federation: Federation, tmp_path: Path) -> None:
    names = ("a", "b", "c", "d", "e")
    for i, name in enumerate(names):
        federation.join(name, {"site": i}, POLICY + ("max_epsilon_per_run = 1.6\n" if name == "e" else ""))
        federation.start_node(name)
    run = federation.submit(RUN.format(name="private", wait=180))
    end = federation.finished(run)
    assert end["status"] == "budget_spent" and "max_epsilon_per_run = 2.6" in end["reason"], end
    rounds = federation.events(run, "round")
    spent = [event["privacy"]["epsilon"] for event in rounds]
    assert spent == sorted(spent) and 2.2 < spent[-1] <= 2.6
    # The strict node's limit is for two rounds; the others go on without it.
    answered = [sum(name in event["replies"] for event in rounds) for name in names]
    assert answered == [len(rounds)] * 4 + [2] and len(rounds) > 3
    refusals = [event["failures"].get("e", "") for event in rounds[2:]]
    assert all("policy" in text and "max_epsilon_per_run = 1.6" in text for text in refusals)

    # Ledgers say the same as rounds, on the server and on every node.
    assert len(verify(ServerPaths(federation.state).run(run).ledger).releases) == len(rounds)
    for name, count in zip(names, answered, strict=True):
        shown = fedward("node", "ledger", "show", "--json", "--dir", tmp_path / name).stdout
        row = json.loads(shown)
        assert (row["unit"], row["releases"]) == ("site", count)
        assert row["epsilon"] == pytest.approx(spent[count - 1])
        assert "intact" in fedward("node", "ledger", "verify", "--dir", tmp_path / name).stdout
    entries = fedward("node", "journal", "show", "--json", "--run", run, "--dir", tmp_path / "a").stdout.splitlines()
    masked = [json.loads(line) for line in entries if "secure-sum" in json.loads(line)["protections"]]
    assert len(masked) == len(rounds)
    assert all({"clip-norm", "skellam-noise"} <= set(entry["protections"]) for entry in masked)

    # A ledger that was cut off: its node answers nothing more, and says what to do.
    assert federation.nodes["a"].stop() == 0
    ledger = tmp_path / "a" / "ledger.jsonl"
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:-1]))
    assert fedward("node", "ledger", "verify", "--dir", tmp_path / "a", check=False).returncode == 1
    federation.start_node("a")
    # One that was rolled back as a whole: its own anchor fits, what the server remembers does not.
    assert federation.nodes["b"].stop() == 0
    ledger = tmp_path / "b" / "ledger.jsonl"
    whole = verify(ledger).last
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:-1]))
    back = verify(ledger).last
    assert whole is not None and back is not None
    write_anchor(default_place(ledger), back.head)
    assert "intact" in fedward("node", "ledger", "verify", "--dir", tmp_path / "b").stdout
    federation.start_node("b")
    again = federation.submit(RUN.format(name="again", wait=20))
    waiting = federation.finished(again)
    assert waiting["status"] == "failed" and "privacy ledger" in waiting["reason"], waiting
    assert "fedward node ledger accept" in federation.nodes["a"].text()
    assert f"b: policy (this node's privacy ledger does not hold line {whole.number}" in waiting["reason"], waiting
    (mismatch,) = federation.events(again, "ledger_mismatch")
    assert (mismatch["node"], mismatch["expected"], mismatch["told"]) == ("b", str(whole.head), str(back.head))
    assert "the privacy ledger of b is at" in federation.server.text()
    assert str(whole.head) in fedward("node", "ledger", "verify", "--dir", tmp_path / "b", check=False).stdout


BY_PATIENT = """
name = "by-patient"
task = "toy.task:Toy"
rounds = 3

[algorithm]
name = "scaffold"

[local]
lr = 0.5
steps = 5

[cohort]
min_nodes = 3
wait = 120

[evaluation]
every = 0

[privacy]
unit = "patient"
clip = 2.0
sampling_rate = 0.2
noise_multiplier = 2.0
"""


def test_patients_are_hidden_in_sandboxed_workers(federation: Federation, tmp_path: Path) -> None:
    """Opacus and the noise run where task code does; the guard accounts. A node that asks for sites refuses."""
    for i, name in enumerate(("a", "b", "c")):
        federation.join(name, {"site": i}, POLICY + 'privacy_units = ["patient"]\n')
        federation.start_node(name)
    federation.join("d", {"site": 3}, POLICY + 'privacy_units = ["site"]\n')
    federation.start_node("d")
    run = federation.submit(BY_PATIENT)
    end = federation.finished(run)
    assert end["status"] == "finished", end
    rounds = federation.events(run, "round")
    spent = [event["privacy"]["epsilon"] for event in rounds]
    assert spent == sorted(spent) and len(spent) == 3
    assert {tuple(event["replies"]) for event in rounds} == {("a", "b", "c")}
    waited = federation.events(run, "waiting")
    assert any("privacy_units" in text for event in waited for text in event["missing"].values())
    row = json.loads(fedward("node", "ledger", "show", "--json", "--dir", tmp_path / "a").stdout)
    assert (row["unit"], row["releases"]) == ("patient", 3)
    assert row["epsilon"] == pytest.approx(spent[-1])
    entries = fedward("node", "journal", "show", "--json", "--run", run, "--dir", tmp_path / "a").stdout.splitlines()
    masked = [json.loads(line) for line in entries if "secure-sum" in json.loads(line)["protections"]]
    assert len(masked) == 3 and all("dp-sgd-by-patient" in entry["protections"] for entry in masked)
