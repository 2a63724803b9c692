"""A bundle with a task, and the setup of a worker for it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fedward_common.config import parse_config
from fedward_common.work import Work
from fedward_common.worker.parent import Worker, Workers
from fedward_common.worker.setup import Setup

from .tasks import TASK

CONFIG = parse_config(
    {
        "name": "toy", "task": "toy_task:Toy", "rounds": 3,
        "algorithm": {"name": "fedavg"}, "local": {"lr": 0.1, "steps": 2, "batch_size": 4},
        "secure_sum": {"enabled": False},
    }
)  # fmt: skip
MODEL = {"model": np.zeros(10, np.float32)}
TRAIN = Work("train", 1, MODEL)
EVALUATE = Work("evaluate", 1, MODEL)
PREPARE = Work("prepare")


def make_setup(root: Path) -> Setup:
    """A worker's setup with a bundle; `data/act` holds what the task is to do (nothing at first)."""
    bundle = root / "state" / "bundles" / "abc" / "tree"
    bundle.mkdir(parents=True)
    (bundle / "toy_task.py").write_text(TASK)
    data = root / "data"
    data.mkdir()
    (data / "act").write_text("")
    return Setup(
        CONFIG.model_dump_json(), bundle, "site-a",
        scratch=root / "state" / "runs" / "r" / "scratch", log=root / "state" / "log" / "worker.log",
        data={"act": str(data / "act")}, read=(data,), private=(root / "state" / "keys",),
    )  # fmt: skip


def tell(setup: Setup, what: str) -> None:
    """Choose what the task does from now on."""
    Path(setup.data["act"]).write_text(what)


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return make_setup(tmp_path)


@pytest.fixture
def worker(setup: Setup) -> Iterator[Worker]:
    with Worker(setup) as found:
        yield found


@pytest.fixture
def workers() -> Iterator[Workers]:
    found = Workers()
    yield found
    found.close()


def with_data(setup: Setup, **changes: Any) -> Setup:
    return replace(setup, data={**setup.data, **changes})


def layout_size(text: str) -> int:
    return sum(int(np.prod(shape)) for _, shape, _, _ in json.loads(text))


def running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, **more}
