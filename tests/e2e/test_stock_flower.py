"""The same ClientApp without our guard: under stock `flower-supernode`, and in Flower's simulation runtime."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from federation import BIN, ENVIRONMENT, TOY, Federation, Process, free_ports, until
from fedward_client.enrol import Enrolled
from fedward_client.paths import NodePaths
from fedward_common.config import parse_config
from fedward_common.task import load_task
from fedward_server.checkpoint import Checkpoints, read_checkpoint
from fedward_server.paths import RunPaths
from fedward_server.simulation import simulate
from safetensors.numpy import load

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

RUN = """
name = "stock"
task = "toy.task:Toy"
rounds = 3
seed = 3

[algorithm]
name = "scaffold"

[local]
lr = 0.2
steps = 10

[secure_sum]
enabled = false

[cohort]
min_nodes = 2
nodes = ["a", "b"]
quorum = 2
wait = 300
deadline = 300
"""


def listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def supernode(federation: Federation, name: str, site: int) -> Iterator[Process]:
    """Flower's own node program with the key that `fedward node join` made and registered."""
    paths = NodePaths(federation.join(name, {"site": site}))
    (port,) = free_ports(1)
    command = [
        # A home of its own: SuperNodes keep unpacked bundles there.
        "env", f"FLWR_HOME={federation.root / f'{name}-flower'}",
        str(BIN / "flower-supernode"),
        "--superlink", Enrolled.load(paths).fleet_address,
        "--root-certificates", str(paths.ca),
        "--auth-supernode-private-key", str(paths.flower_key),
        "--port", str(port),
        "--node-config", f'site={site} fedward-name="{name}"',
    ]  # fmt: skip
    process = Process(command, federation.root / f"{name}.log")
    process.start()
    try:
        until(f"{name} is up", lambda: listens(port), 120)
        yield process
    finally:
        process.stop()


def test_stock_supernodes_give_the_very_same_model(federation: Federation, tmp_path: Path) -> None:
    with supernode(federation, "a", 0) as a, supernode(federation, "b", 1) as b:
        run = federation.submit(RUN)
        end = federation.finished(run, 700)
        assert end["status"] == "finished", (end, a.text()[-3000:], b.text()[-3000:])
        rounds = federation.events(run, "round")
        assert all(event["replies"] == ["a", "b"] and not event["failures"] for event in rounds)
        real = {name: tensor.tobytes() for name, tensor in load(federation.model(run)).items()}

    config = parse_config(tomllib.loads(RUN))
    paths = RunPaths(tmp_path / "simulated")
    outcome = simulate(config, load_task(config.task, TOY), {"a": {"site": 0}, "b": {"site": 1}}, paths)
    assert outcome.status == "finished"
    checkpoint = read_checkpoint(Checkpoints(paths).model_file("last"))
    assert real == {name: tensor.tobytes() for name, tensor in load(checkpoint.model_bytes()).items()}


TASK = '''
from toy.task import Toy


class Partitioned(Toy):
    """Flower's runtime tells a node its partition, not its site."""

    def data(self, config):
        assert config["partitions"] == 4
        return super().data({"site": config["partition"]})
'''
# The batch is a site's whole data: Flower draws its nodes' ids, on which the order in a batch hangs, by chance.
RAY_RUN = """
name = "ray"
task = "partitioned:Partitioned"
rounds = 9

[algorithm]
name = "scaffold"

[local]
lr = 0.2
batch_size = 90
steps = 5

[secure_sum]
enabled = false

[cohort]
min_nodes = 4
quorum = 4
deadline = 200
"""
SCRIPT = '''
import json, sys, tomllib
from pathlib import Path

import torch
from fedward_client.app import app as client
from fedward_common.config import load_config
from fedward_common.task import load_task
from fedward_server.strategy import Fedward
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation

folder = Path(sys.argv[1])
server = ServerApp()


@server.main()
def main(grid, context):
    config = load_config(folder / "run.toml")
    task = load_task(config.task)
    torch.manual_seed(config.seed)
    arrays = ArrayRecord(task.model().state_dict())
    result = Fedward(config, task, work_dir=folder / "work").start(grid=grid, initial_arrays=arrays, num_rounds=2)
    told = {
        "arrays": {name: array.numpy().tolist() for name, array in result.arrays.items()},
        "train": {number: dict(record) for number, record in result.train_metrics_clientapp.items()},
        "evaluate": {number: dict(record) for number, record in result.evaluate_metrics_clientapp.items()},
    }
    (folder / "result.json").write_text(json.dumps(told))


resources = {"num_cpus": 1, "num_gpus": 0.0}
run_simulation(
    server, client, num_supernodes=4,
    backend_config={"client_resources": resources, "init_args": {"num_cpus": 2, "log_to_driver": False}},
)
'''


def test_flowers_simulation_runtime(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    (tmp_path / "partitioned.py").write_text(TASK)
    (tmp_path / "run.toml").write_text(RAY_RUN)
    (tmp_path / "script.py").write_text(SCRIPT)
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    found = os.pathsep.join([str(tmp_path), str(TOY)])
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), str(tmp_path)],
        env={**ENVIRONMENT, **quiet, "PYTHONPATH": found, "FLWR_HOME": str(tmp_path / "flower")},
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert sorted(result["train"]) == sorted(result["evaluate"]) == ["1", "2"]
    assert result["evaluate"]["2"]["accuracy"] > 0.6

    # Each virtual node had its own partition: the model is that of our own simulation over those four.
    sys.path.insert(0, str(tmp_path))
    try:
        config = parse_config({**tomllib.loads(RAY_RUN), "rounds": 2})
        outcome = simulate(config, load_task(config.task, TOY), 4, RunPaths(tmp_path / "simulated"))
    finally:
        sys.path.remove(str(tmp_path))
    expected = outcome.state.vectors["model"]
    arrived = np.concatenate([np.ravel(result["arrays"][name]) for name in ("weight", "bias")])
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(arrived, expected, atol=1e-5)
