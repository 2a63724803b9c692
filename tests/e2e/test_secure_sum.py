"""A secure run over real processes and TLS gRPC: one node is killed in the middle of a round."""

from __future__ import annotations

import json

import pytest
from federation import Federation, fedward, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

RUN = """
name = "secure"
task = "toy.task:Toy"
rounds = 4

[algorithm]
name = "scaffold"

[local]
lr = 0.2
steps = 10

[cohort]
min_nodes = 5
nodes = ["a", "b", "c", "d", "e"]
quorum = 4
wait = 120
"""
STRICT = "approved_bundles_only = false\nmin_cohort = 4\n"


def test_a_node_killed_in_a_round_costs_the_sum_nothing(federation: Federation) -> None:
    names = ["a", "b", "c", "d", "e"]
    for i, name in enumerate(names):
        # The last one takes long enough to be killed while it trains.
        federation.join(name, {"site": i, **({"seconds": 0.3} if name == "e" else {})}, policy=STRICT)
        federation.start_node(name)
    run = federation.submit(RUN)
    until("round 1", lambda: federation.events(run, "round"), 120)
    until("e trains again", lambda: federation.nodes["e"].text().count("train") >= 2, 60)
    federation.nodes["e"].kill()
    rounds = until("all rounds", lambda: _all(federation, run), 180)

    assert rounds[0]["secure_sum"]["survivors"] == 5
    assert rounds[0]["secure_sum"]["exchanges"] == 4
    assert [event["secure_sum"]["survivors"] for event in rounds[1:]] == [4, 4, 4]
    for event in rounds:
        assert event["evaluate"] is None and event["secure_sum"]["clipped"]["delta"] <= 3
    assert [event["round_before"]["round"] for event in rounds[1:]] == [1, 2, 3]
    [last] = until("the last model's figures", lambda: federation.events(run, "evaluation"), 60)
    assert last["round"] == 4 and last["evaluate"]["accuracy"] > 0.8

    until("the run is over", lambda: federation.events(run, "run_finished"), 60)
    folder = federation.root / "a"
    federation.nodes["a"].stop()
    text = fedward("node", "journal", "verify", "--dir", folder).stdout
    assert "intact" in text
    entries = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    masked = [entry for entry in entries if entry.get("purpose") == "mask"]
    assert len(masked) == 5  # four rounds, and the last model's figures
    assert all("secure-sum" in entry["protections"] for entry in masked)
    # Nothing else that left had tensors of the model or metrics in it.
    sent = {name for entry in entries for name in entry.get("tensors", ())}
    assert sent == {"advertisement", "dealt", "masked", "signatures", "revealed"}
    assert not any(entry.get("metrics") for entry in entries)


def _all(federation: Federation, run: str) -> list[dict[str, object]]:
    found = federation.events(run, "round")
    return found if len(found) == 4 else []
