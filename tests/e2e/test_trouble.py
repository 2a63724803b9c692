"""Nodes whose task breaks, in one run: each is named with its reason, stays enrolled, and says nothing private."""

from __future__ import annotations

import pytest
from federation import Federation, fedward, until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

RUN = """
name = "trouble"
task = "toy.task:Toy"
rounds = 2
{top}

[algorithm]
name = "fedavg"

[local]
lr = 0.1
steps = 5

[secure_sum]
enabled = false

[cohort]
quorum = 1
min_nodes = {min_nodes}
wait = 180
deadline = {deadline}
"""
STRICT = "require_secure_sum = false\napproved_bundles_only = true\nmin_cohort = 1\n"
OPEN = "approved_bundles_only = false\nrequire_secure_sum = false\n"
LIMITS = f"{OPEN}min_cohort = 1\nmax_memory_mb = 1200\nmax_seconds_per_round = 15\n"


def test_every_way_to_break_has_its_reason(federation: Federation) -> None:
    wanted = {
        "good": ("", None),
        "raises": ("raise", "task_error"),
        "crashes": ("segfault", "worker_crashed"),
        "hangs": ("hang", "time_limit"),
        "eats": ("memory", "out_of_memory"),
        "lies": ("nan", "bad_update"),
    }
    for i, (name, (trouble, _)) in enumerate(wanted.items()):
        federation.join(name, {"site": i, "trouble": trouble}, policy=LIMITS)
        federation.start_node(name)
    run = federation.submit(RUN.format(top="", min_nodes=6, deadline=60))
    assert federation.finished(run, 400)["status"] == "finished"
    for event in federation.events(run, "round"):
        assert event["replies"] == ["good"]
        for name, (_, reason) in wanted.items():
            if reason:
                assert event["failures"][name].startswith(reason), (name, event["failures"])
                assert "Jane Roe" not in event["failures"][name]
    # The traceback is in the node's own log, under the incident that both sides show.
    text = federation.events(run, "round")[0]["failures"]["raises"]
    incident = text.partition("incident ")[2].rstrip("]")
    own = "".join(p.read_text() for p in (federation.root / "raises" / "log").rglob(f"*{incident}*"))
    assert "Jane Roe" in own
    assert all(process.popen is not None and process.popen.poll() is None for process in federation.nodes.values())


@pytest.mark.parametrize("granted", [False, True], ids=["not named", "named in the data table"])
def test_a_task_cannot_read_the_nodes_keys(federation: Federation, granted: bool) -> None:
    folder = federation.join("victim", {})
    loot = f"{folder}/keys/identity.key" if granted else f"{folder}/keys/identity.key".lstrip("/")
    federation.join_data("victim", {"trouble": "steal", "loot": loot})
    federation.start_node("victim")
    run = federation.submit(RUN.format(top="", min_nodes=1, deadline=30).replace("wait = 180", "wait = 20"))
    end = federation.finished(run, 120)
    assert end["status"] == "failed"
    assert ("internal" if granted else "task_error") in end["reason"]
    logs = "".join(path.read_text(errors="replace") for path in (folder / "log").rglob("*") if path.is_file())
    assert ("is private to the node" if granted else "Permission") in logs
    assert "PRIVATE KEY" not in logs


def test_a_run_waits_for_the_bundles_approval(federation: Federation) -> None:
    folder = federation.join("careful", {"site": 0}, policy=STRICT)
    federation.start_node("careful")
    run = federation.submit(RUN.format(top="", min_nodes=1, deadline=60))
    waiting = until("the refusal", lambda: federation.events(run, "waiting"), 90)
    assert "bundle_not_approved" in waiting[-1]["missing"]["careful"]
    listed = fedward("node", "bundle", "list", "--dir", folder).stdout
    assert "pending" in listed
    digest = waiting[-1]["missing"]["careful"].split("approve ")[1].split(")")[0].strip()
    assert "task.py" in fedward("node", "bundle", "show", digest, "--dir", folder).stdout
    fedward("node", "bundle", "approve", digest, "--dir", folder)
    assert federation.finished(run, 120)["status"] == "finished"


def test_a_policys_refusal_reaches_the_data_scientist(federation: Federation) -> None:
    federation.join("strict", {"site": 0}, policy=f"{OPEN}max_steps = 2\n")
    federation.start_node("strict")
    run = federation.submit(RUN.format(top="", min_nodes=1, deadline=30).replace("wait = 180", "wait = 15"))
    end = federation.finished(run, 120)
    assert end["status"] == "failed"
    assert "max_steps" in end["reason"] and "5" in end["reason"]


def test_two_runs_share_the_nodes(federation: Federation) -> None:
    for i, name in enumerate(("a", "b")):
        federation.join(name, {"site": i, "seconds": 0.05})
        federation.start_node(name)
    config = RUN.format(top="", min_nodes=2, deadline=60).replace("rounds = 2", "rounds = 20")
    first, second = federation.submit(config), federation.submit(config.replace('"trouble"', '"second"'))
    assert federation.finished(first, 240)["status"] == "finished"
    assert federation.finished(second, 240)["status"] == "finished"
    # Neither waited for the other's end: their rounds interleave.
    one, two = ([e["time"] for e in federation.events(run, "round")] for run in (first, second))
    assert max(one[0], two[0]) < min(one[-1], two[-1])
