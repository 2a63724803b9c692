"""Task code on the server: what it builds is used, what it must not see it does not see."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fedward_common.bundle import build_bundle
from fedward_common.config import RunConfig, parse_config
from fedward_common.errors import ConfigError
from fedward_common.messages import Reason
from fedward_common.worker import sandbox
from fedward_common.worker.parent import WorkerFailed
from fedward_server.paths import ServerPaths
from fedward_server.taskhost import TaskHost
from safetensors.numpy import save_file

needs_landlock = pytest.mark.skipif(not sandbox.available(), reason="the kernel has no Landlock")

PROJECT = """
[project]
name = "hosted"
version = "1.0.0"
description = "x"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedward"
fab-include = ["hosted/**/*.py"]

[tool.flwr.app.components]
serverapp = "fedward_server.app:app"
clientapp = "fedward_client.app:app"

[tool.flwr.app.config]
fedward-manifest = ""
fedward-epoch = 0
"""
TASK = """
from pathlib import Path
from torch import nn

class Task:
    def model(self):
        {first}
        return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    def data(self, config): raise NotImplementedError
    def loss(self, model, batch): raise NotImplementedError
    def metrics(self, model, batch): return {{}}
"""


def config() -> RunConfig:
    return parse_config(
        {
            "name": "hosted",
            "task": "hosted.task:Task",
            "rounds": 1,
            "algorithm": {"name": "fedavg"},
            "local": {"lr": 0.1, "steps": 1},
            "secure_sum": {"enabled": False},
        }
    )


def host(root: Path, first: str = "pass") -> TaskHost:
    project, paths = root / "hosted", ServerPaths(root / "state")
    (project / "hosted").mkdir(parents=True)
    (project / "pyproject.toml").write_text(PROJECT)
    (project / "hosted" / "__init__.py").write_text("")
    (project / "hosted" / "task.py").write_text(TASK.format(first=first))
    paths.authority.mkdir(parents=True)
    paths.ca_key.write_text("the key of the CA")
    paths.database.write_text("the store")
    run = paths.run("0" * 32)
    run.root.mkdir(parents=True)
    run.bundle.write_bytes(build_bundle(project))
    return TaskHost(config(), paths, run, {})


@needs_landlock
def test_the_model_is_built_in_a_worker(tmp_path: Path) -> None:
    hosted = host(tmp_path)
    try:
        layout, vectors, _ = hosted.initial(None)
        assert {name: len(vector) for name, vector in vectors.items()} == {"model": 12, "statistic": 4, "counter": 1}

        start = tmp_path / "start.safetensors"
        tensors = {
            spec.name: np.full(spec.shape, i, spec.dtype)
            for i, spec in enumerate(layout.tensors)
            if spec.dtype != "int64"
        }
        save_file(tensors, start)
        _, given, _ = hosted.initial(start)
        assert given["model"][:6].tolist() == [0.0] * 6 and given["model"][6:8].tolist() == [1.0] * 2

        save_file({**tensors, "0.bias": np.zeros(5, np.float32), "more": np.zeros(1, np.float32)}, start)
        with pytest.raises(ConfigError, match=r"0\.bias: shape \(5,\).*more: not a tensor"):
            hosted.initial(start)
    finally:
        hosted.close()


@needs_landlock
@pytest.mark.parametrize("secret", ["authority/ca.key", "fedward.db"])
def test_task_code_reads_neither_the_cas_key_nor_the_store(tmp_path: Path, secret: str) -> None:
    hosted = host(tmp_path, f"Path({str(tmp_path / 'state' / secret)!r}).read_text()")
    try:
        with pytest.raises(WorkerFailed) as failed:
            hosted.initial(None)
        assert failed.value.reason is Reason.TASK_ERROR
        assert "PermissionError" in failed.value.detail
    finally:
        hosted.close()
