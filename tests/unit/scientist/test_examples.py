"""Every example is a bundle that nodes accept and a federation that learns."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fedward_common.bundle import Bundle, build_bundle
from fedward_common.config import RunConfig, load_config
from fedward_server.plan import open_task, refusals
from fedward_server.rehearsal import rehearse
from fedward_server.scenario import scenario

EXAMPLES = Path(__file__).parents[3] / "examples"
FASHION = Path("/usr/share/datasets/fashion-mnist")
WRITERS = Path(os.environ.get("FEDWARD_MNIST_WRITERS", EXAMPLES.parents[1] / "shared/data/mnist_writers.npz"))


def short(example: str, rounds: int, steps: int) -> RunConfig:
    config = load_config(EXAMPLES / example / "run.toml")
    return config.model_copy(update={"rounds": rounds, "local": config.local.model_copy(update={"steps": steps})})


def prepare_script(example: str) -> Any:
    """An example's prepare.py as a module."""
    spec = importlib.util.spec_from_file_location(f"{example}_prepare", EXAMPLES / example / "prepare.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("example", ["digits", "fashion_mnist", "mnist_writers"])
def test_bundles_hold_thin_tasks_and_nothing_else(example: str) -> None:
    project = EXAMPLES / example
    assert refusals(load_config(project / "run.toml"), project) == []
    files = Bundle.open(build_bundle(project)).files
    tasks = [name for name in files if name.endswith("/task.py")]
    assert len(tasks) == 1 and len(files[tasks[0]].decode().splitlines()) < 60
    package = tasks[0].partition("/")[0]
    assert set(files) == {
        "pyproject.toml", "README.md", f"{package}/__init__.py", f"{package}/task.py", ".info/CONTENT"
    }  # fmt: skip


def accuracies(run: Path) -> list[float]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    told = (event.get("round_before", event) for event in events if event["event"] in ("round", "evaluation"))
    return [one["evaluate"]["accuracy"] for one in told if one["evaluate"]]


def test_digits_learn(tmp_path: Path) -> None:
    prepare_script("digits").prepare(tmp_path / "data", seed=1)
    config = short("digits", 8, 40)
    nodes = scenario(config, None, tmp_path / "data/nodes.toml").nodes
    assert list(nodes) == [f"site-{number}" for number in range(1, 6)]
    ended = rehearse(config, EXAMPLES / "digits", nodes, tmp_path / "run")
    assert ended.status == "finished" and ended.model is not None
    assert accuracies(tmp_path / "run")[-1] > 0.9


def test_the_digits_are_shared_out_once_each(tmp_path: Path) -> None:
    prepare = prepare_script("digits").prepare
    prepare(tmp_path, seed=3)
    split = json.loads((tmp_path / "split.json").read_text())
    parts = [split["heldout"], *(site[part] for site in split["sites"].values() for part in ("train", "test"))]
    assert sorted(index for part in parts for index in part) == list(range(1797))
    again = tmp_path / "again"
    prepare(again, seed=3)
    assert (again / "split.json").read_text() == (tmp_path / "split.json").read_text()
    pooled = np.load(tmp_path / "pooled.npz")
    assert len(pooled["train_y"]) == sum(len(site["train"]) for site in split["sites"].values())


@pytest.mark.skipif(not FASHION.is_dir(), reason="apt-get install dataset-fashion-mnist")
@pytest.mark.slow
def test_fashion_mnist_learns(tmp_path: Path) -> None:
    config = short("fashion_mnist", 3, 30)
    ended = rehearse(config, EXAMPLES / "fashion_mnist", scenario(config, 10, None).nodes, tmp_path / "run")
    assert ended.status == "finished"
    assert accuracies(tmp_path / "run")[-1] > 0.45


@pytest.mark.skipif(not FASHION.is_dir(), reason="apt-get install dataset-fashion-mnist")
def test_fashion_mnist_is_shared_out_once_each() -> None:
    task = open_task(load_config(EXAMPLES / "fashion_mnist/run.toml"), EXAMPLES / "fashion_mnist")
    parts = [task.data({"partition": number, "partitions": 3}) for number in range(3)]
    assert sum(len(part.train) for part in parts) == 60_000  # type: ignore[arg-type]
    assert sum(len(part.test) for part in parts) == 10_000  # type: ignore[arg-type,misc]


@pytest.mark.slow
@pytest.mark.skipif(not WRITERS.is_file(), reason="no mnist_writers.npz; $FEDWARD_MNIST_WRITERS says where")
def test_writers_learn_and_strangers_are_held_out(tmp_path: Path) -> None:
    prepare_script("mnist_writers").prepare(WRITERS, 30, tmp_path / "nodes.toml")
    config = short("mnist_writers", 3, 20)
    found = scenario(config, None, tmp_path / "nodes.toml")
    assert len(found.trained) == 30 and "other-writers" not in found.trained
    ended = rehearse(config, EXAMPLES / "mnist_writers", found.nodes, tmp_path / "run")
    assert ended.status == "finished"
    rounds = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    last = next(event for event in reversed(rounds) if event["event"] == "round")
    assert "other-writers" not in last["cohort"]
    assert last["holdout"]["accuracy"] > 0.5


def test_the_demo_fails_when_the_federation_falls_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES / "digits"))
    compare = importlib.import_module("compare")

    def site(name: str, alone: float, federated: float, pooled: float) -> Any:
        scores = {"alone": alone, "federated": federated, "pooled": pooled}
        return compare.Scores(name, 100, scores, scores)

    assert compare.verdict([site("a", 60.0, 95.5, 97.0), site("b", 70.0, 95.5, 97.0)]) == []
    (behind,) = compare.verdict([site("a", 60.0, 95.4, 97.0)])
    assert "more than 1.5 points below" in behind
    (worse,) = compare.verdict([site("a", 60.0, 96.0, 97.0), site("b", 96.0, 96.0, 97.0)])
    assert worse.startswith("b is no better off")
