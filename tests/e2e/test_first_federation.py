"""The first federation: three enrolled nodes, TLS and node authentication, gRPC, SCAFFOLD."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import numpy as np
import pytest
from federation import TOY, Federation, fedward, until
from safetensors.numpy import load

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

RUN = """
name = "first"
task = "toy.task:Toy"
rounds = 4
seed = 3

[algorithm]
name = "scaffold"

[local]
lr = 0.2
steps = 10

[secure_sum]
enabled = false

[cohort]
min_nodes = 3
nodes = ["a", "b", "c"]
wait = 120
"""


def simulated(tmp_path: Path, sites: dict[str, dict[str, int]]) -> dict[str, bytes]:
    """The same run in one process; the model's tensors as bytes."""
    sys.path.insert(0, str(TOY))
    from fedward_common.config import parse_config
    from fedward_common.task import load_task
    from fedward_server.checkpoint import Checkpoints, read_checkpoint
    from fedward_server.paths import RunPaths
    from fedward_server.simulation import simulate

    tables = __import__("tomllib").loads(RUN)
    config = parse_config(tables)
    paths = RunPaths(tmp_path / "simulated")
    outcome = simulate(config, load_task(config.task), sites, paths)
    assert outcome.status == "finished"
    checkpoint = read_checkpoint(Checkpoints(paths).model_file("last"))
    return {name: tensor.tobytes() for name, tensor in load(checkpoint.model_bytes()).items()}


def test_a_federation_trains_and_its_model_is_the_simulated_one(federation: Federation, tmp_path: Path) -> None:
    sites = {name: {"site": i} for i, name in enumerate(("a", "b", "c"))}
    for name, data in sites.items():
        federation.join(name, data)
        federation.start_node(name)
    run = federation.submit(RUN)
    end = federation.finished(run)
    assert end["status"] == "finished", end
    rounds = federation.events(run, "round")
    assert [event["round"] for event in rounds] == [1, 2, 3, 4]
    assert all(event["replies"] == ["a", "b", "c"] and not event["failures"] for event in rounds)
    assert rounds[-1]["evaluate"]["accuracy"] > 0.8
    assert all(event["bytes_up"] > 0 and event["bytes_down"] > 0 for event in rounds)

    # The very same code runs in one process: the real run's model is bit for bit the simulated one.
    real = {name: tensor.tobytes() for name, tensor in load(federation.model(run)).items()}
    assert real == simulated(tmp_path, sites)

    # The model of any round can be had, and another run starts from it: without learning it stays what it is.
    best = max(rounds, key=lambda event: event["evaluate"]["accuracy"])["round"]
    assert federation.model(run, "best") == federation.model(run, str(best))
    second = load(federation.model(run, "2"))
    assert {name: tensor.tobytes() for name, tensor in second.items()} != real
    still = RUN.replace("rounds = 4", 'rounds = 1\ninitial_model = "2.safetensors"').replace("lr = 0.2", "lr = 1e-12")
    next_run = federation.submit(still)
    assert federation.finished(next_run)["status"] == "finished"
    for name, tensor in load(federation.model(next_run)).items():
        np.testing.assert_allclose(tensor, second[name], rtol=0, atol=1e-6)

    # Each node has written down what left it, before it left.
    for name in sites:
        left = fedward("node", "journal", "show", "--json", "--run", run, "--dir", tmp_path / name).stdout
        entries = [json.loads(line) for line in left.splitlines()]
        asked = [entry["purpose"] for entry in entries]
        assert asked[0] == "prepare" and asked[-1] == "finish"
        assert asked.count("train") == 4 and asked.count("evaluate") == 4
        assert all(entry["bundle"] and entry["config"] and entry["verdict"] == "allowed" for entry in entries)

    # The journal is sound and accounts for all that the link sent: while the guard runs, and to the last byte when
    # it has stopped.
    assert "intact" in fedward("node", "journal", "verify", "--dir", tmp_path / "a").stdout
    assert federation.nodes["a"].stop() == 0
    checked = fedward("node", "journal", "verify", "--dir", tmp_path / "a").stdout
    assert "intact" in checked and run in checked
    total = sum(int(event["bytes_up"]) for event in rounds) // len(sites)
    sent = json.loads((tmp_path / "a" / "sent.json").read_text())
    assert sent["total"] > total and sent["unsent"] == 0
    journal = tmp_path / "a" / "journal.jsonl"
    journal.write_bytes(journal.read_bytes().replace(b'"answered"', b'"innocent"', 1))
    wrong = fedward("node", "journal", "verify", "--dir", tmp_path / "a", check=False)
    assert wrong.returncode == 1 and "wrong: line" in wrong.stdout

    # Keys are for their owner only, on both sides.
    secret = [tmp_path / "a" / "keys" / "identity.key", federation.state / "authority" / "ca.key"]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in [*secret, federation.credential])

    # A revoked node is cut off at once and says why.
    fedward("server", "node", "revoke", "c", "--dir", federation.state)
    cut = federation.nodes["c"].popen
    assert cut is not None
    until("c ended", lambda: cut.poll() is not None, 30)
    assert cut.returncode == 3
    assert "revoked" in federation.nodes["c"].text()
