"""A federation in one process, with the real local training and algorithms."""

import numpy as np
import pytest
import torch
from fedward_common.config import RunConfig
from fedward_common.errors import ConfigError, TaskError
from fedward_common.messages import Purpose
from fedward_common.node import MemoryStore
from fedward_common.task import Data
from fedward_server.events import read_events
from fedward_server.paths import RunPaths
from fedward_server.simulation import Faults, node_data, simulate
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

torch.set_num_threads(1)


class Task:
    """Two classes around two points; each partition sees mostly one of them."""

    def __init__(self):
        self.loaded = []

    def model(self):
        return nn.Linear(2, 2)

    def data(self, config):
        self.loaded.append(config["partition"])
        rng = np.random.default_rng(config["partition"])
        y = (rng.random(20) < (0.2 if config["partition"] % 2 else 0.8)).astype(np.int64)
        x = rng.normal(size=(20, 2)) + 2 * np.stack([y, -y], 1)
        both = TensorDataset(torch.tensor(x, dtype=torch.float32), torch.tensor(y))
        return Data(train=both, test=both)

    def central_data(self, config):
        return self.data({"partition": 99})

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model, batch):
        return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).float().mean()}


def config(algorithm="scaffold", **tables):
    base = {"name": "test", "task": "t:Task", "rounds": 4, "algorithm": {"name": algorithm}}
    base |= {"secure_sum": {"enabled": False}}
    return RunConfig.model_validate({**base, "local": {"lr": 0.1, "steps": 5, "batch_size": 5}, **tables})


@pytest.fixture
def paths(tmp_path):
    return lambda name="run": RunPaths(tmp_path / name)


def bits(outcome):
    return {name: vector.tobytes() for name, vector in outcome.state.vectors.items()}


def test_it_learns_and_tells(paths):
    run = paths()
    outcome = simulate(config(rounds=10, evaluation={"central": True}), Task(), 6, run)
    rounds = [event for event, _ in read_events(run.events) if event["event"] == "round"]
    assert outcome.status == "finished" and len(rounds) == 10
    assert rounds[-1]["evaluate"]["accuracy"] > 0.8 and rounds[-1]["central"]["examples"] == 20
    assert rounds[-1]["evaluate"]["loss"] < rounds[0]["evaluate"]["loss"]


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold"])
def test_few_runners_in_memory_give_the_same_model(paths, algorithm):
    whole = simulate(config(algorithm), Task(), 5, paths("a"))
    assert bits(whole) == bits(simulate(config(algorithm), Task(), 5, paths("b"), keep=1))


def test_a_thousand_nodes_load_only_what_is_drawn(paths):
    task = Task()
    few = config(rounds=2, cohort={"size": 10}, evaluation={"every": 0})
    assert simulate(few, task, 1000, paths()).status == "finished"
    assert len(task.loaded) <= 20


class Killed(BaseException):
    pass


class KilledIn(Faults):
    def __init__(self, round_):
        self.round = round_

    def answers(self, name, request, reply):
        if request.purpose is Purpose.TRAIN and request.round == self.round and name == "node-2":
            raise Killed
        return reply


def test_killed_and_resumed_is_bit_identical_and_control_variates_agree(paths):
    whole = simulate(config(), Task(), 4, paths("whole"))
    stores = {}

    def store(name):
        return stores.setdefault(name, MemoryStore())

    with pytest.raises(Killed):
        simulate(config(), Task(), 4, paths("killed"), store=store, faults=KilledIn(3))
    again = simulate(config(), Task(), 4, paths("killed"), store=store)
    assert again.status == "finished" and bits(again) == bits(whole)
    kept = np.mean([store.committed()[1]["c_i"] for store in stores.values()], axis=0)
    np.testing.assert_allclose(again.state.vectors["c"], kept, atol=1e-6)
    assert np.abs(kept).max() > 1e-3


def test_task_code_that_raises_is_a_failing_node(paths, caplog):
    class Broken(Task):
        def data(self, config):
            if config["partition"] == 1:
                raise RuntimeError("patient 17 has no age")
            return super().data(config)

    run = paths()
    assert simulate(config(rounds=1), Broken(), 3, run).status == "finished"
    (event,) = [event for event, _ in read_events(run.events) if event["event"] == "round"]
    assert event["failures"] == {"node-1": "worker_crashed (see the log)"}
    assert "patient 17" in caplog.text and "patient" not in run.events.read_text()


def test_a_starting_model_is_used(paths):
    start = {"model": np.full(6, 7.0, np.float32)}
    outcome = simulate(config("fedavg", rounds=1), Task(), 3, paths(), initial=start)
    assert np.abs(outcome.state.model - 7).max() < 1


def test_central_evaluation_without_data_is_refused(paths):
    class Without(Task):
        central_data = None

    try:
        outcome = simulate(config(evaluation={"central": True}), Without(), 2, paths())
    except TaskError as error:
        pytest.fail(f"raised instead of ending the run: {error}")
    assert outcome.status == "failed" and "central_data(config)" in outcome.reason


def test_names_and_partitions():
    named = config(cohort={"nodes": ["clinic-a", "clinic-b"]}, evaluation={"holdout": ["clinic-c"]})
    assert node_data(named, 3, {"root": "x"}) == {
        "clinic-a": {"root": "x", "partition": 0, "partitions": 3},
        "clinic-b": {"root": "x", "partition": 1, "partitions": 3},
        "clinic-c": {"root": "x", "partition": 2, "partitions": 3},
    }
    assert list(node_data(config(), 11, {}))[::10] == ["node-00", "node-10"]
    with pytest.raises(ConfigError, match="the run names 3"):
        node_data(named, 2, {})
    assert node_data(config(), {"a": {"x": 1}}, {"x": 0, "y": 2}) == {"a": {"x": 1, "y": 2}}
