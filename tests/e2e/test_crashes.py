"""kill -9 of anything at any moment loses at most the round in flight."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from federation import Federation, until
from safetensors.numpy import load

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

RUN = """
name = "crashes"
task = "toy.task:Toy"
rounds = {rounds}
seed = 5

[algorithm]
name = "scaffold"

[local]
lr = 0.1
steps = 5

[secure_sum]
enabled = false

[cohort]
nodes = ["a", "b", "c"]
min_nodes = 3
quorum = {quorum}
wait = 180
deadline = 60
"""


def kill_all(federation: Federation) -> None:
    """kill -9 of the whole server: supervisor, service, SuperLink, SuperExec, ServerApp."""
    assert federation.server.popen is not None
    root = psutil.Process(federation.server.popen.pid)
    doomed = [root, *root.children(recursive=True)]
    for process in doomed:
        try:
            os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    psutil.wait_procs(doomed, timeout=10)
    federation.server.popen.wait()


def trained(federation: Federation, rounds: int, quorum: int = 3, seconds: float = 0.0) -> str:
    for i, name in enumerate(("a", "b", "c")):
        federation.join(name, {"site": i, "seconds": seconds})
        federation.start_node(name)
    return federation.submit(RUN.format(rounds=rounds, quorum=quorum))


def at_round(federation: Federation, run: str, number: int) -> None:
    until(f"round {number}", lambda: len(federation.events(run, "round")) >= number, 240)


def test_a_killed_server_resumes_and_the_model_is_the_uninterrupted_one(tmp_path: Path) -> None:
    models = []
    for kind in ("whole", "killed"):
        (tmp_path / kind).mkdir()
        federation = Federation(tmp_path / kind)
        try:
            federation.up()
            run = trained(federation, rounds=6, seconds=0.05)
            if kind == "killed":
                at_round(federation, run, 2)
                time.sleep(0.3)  # into the third round
                kill_all(federation)
                federation.up()
            end = federation.finished(run, 300)
            assert end["status"] == "finished", end
            starts = federation.events(run, "run_started")
            if kind == "killed":
                assert len(starts) >= 2 and starts[-1]["resumed_from"] >= 2
            assert [event["round"] for event in federation.events(run, "round")] == [1, 2, 3, 4, 5, 6]
            models.append({name: t.tobytes() for name, t in load(federation.model(run)).items()})
        finally:
            federation.close()
    assert models[0] == models[1]


def test_a_killed_guard_is_back_within_seconds_and_control_variates_still_agree(federation: Federation) -> None:
    run = trained(federation, rounds=8, quorum=2, seconds=0.05)
    at_round(federation, run, 2)
    federation.nodes["b"].kill()
    killed = time.monotonic()
    federation.start_node("b")
    assert time.monotonic() - killed < 60  # an upper bound for a loaded machine; the link itself needs one call
    end = federation.finished(run, 300)
    assert end["status"] == "finished", end
    rounds = federation.events(run, "round")
    assert "b" in rounds[-1]["replies"]

    # SCAFFOLD's invariant over what server and nodes have on disk: c is the mean of all c_i.
    from fedward_client.state import FileStore
    from fedward_server.checkpoint import Checkpoints, read_checkpoint
    from fedward_server.paths import ServerPaths

    checkpoint = read_checkpoint(Checkpoints(ServerPaths(federation.state).run(run)).model_file("last"))
    kept = [FileStore(federation.root / name / "runs" / run / "state").committed()[1]["c_i"] for name in "abc"]
    mean = np.mean(np.stack(kept).astype(np.float64), axis=0)
    assert np.abs(mean).max() > 1e-4
    assert np.abs(mean - checkpoint.state.vectors["c"]).max() < 1e-6


def test_a_node_that_is_killed_for_good_costs_only_its_reply(federation: Federation) -> None:
    run = trained(federation, rounds=5, quorum=2, seconds=0.05)
    at_round(federation, run, 1)
    federation.nodes["c"].kill()
    end = federation.finished(run, 400)
    assert end["status"] == "finished", end
    last = federation.events(run, "round")[-1]
    assert last["replies"] == ["a", "b"]
    assert json.dumps(last["failures"]).count("c") >= 1
