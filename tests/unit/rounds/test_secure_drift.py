"""FedNova, FedDC and FedDyn under secure aggregation: the plain result, where steps differ and nodes drop out too."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fedward_common.config import RunConfig
from fedward_common.messages import Purpose
from fedward_common.node import MemoryStore
from fedward_common.task import Data
from fedward_server.events import read_events
from fedward_server.paths import RunPaths
from fedward_server.simulation import Faults, simulate
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

SAME = {"lr": 0.1, "steps": 5, "batch_size": 5}
SPREAD = {"lr": 0.02, "epochs": 1, "batch_size": 1}
"""K_i = n_i: from 4 to 60 steps."""
SIZES = (4, 60, 9, 25, 14)


class Task:
    metric_names = ()

    def model(self):
        return nn.Linear(2, 2)

    def data(self, config):
        i = config["partition"]
        rng = np.random.default_rng(i)
        y = (rng.random(SIZES[i]) < (0.2 if i % 2 else 0.8)).astype(np.int64)
        x = rng.normal(size=(SIZES[i], 2)) + 2 * np.stack([y, -y], 1)
        both = TensorDataset(torch.tensor(x, dtype=torch.float32), torch.tensor(y))
        return Data(train=both, test=both)

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model, batch):
        return {}


class Lost(Faults):
    """Replies of one node never arrive: at the training, whose trace must vanish, and at the masks."""

    def answers(self, name, request, reply):
        lost = {(Purpose.TRAIN, 2, "node-3"), (Purpose.MASK, 3, "node-1")}
        return None if (request.purpose, request.round, name) in lost else reply


class Absent(Faults):
    """The same without secure aggregation: what came too late for the sum was no reply."""

    def answers(self, name, request, reply):
        lost = {(2, "node-3"), (3, "node-1")}
        return None if request.purpose is Purpose.TRAIN and (request.round, name) in lost else reply


def run(paths, algorithm, local, secure, faults=None, rounds=4):
    algorithm = algorithm if isinstance(algorithm, dict) else {"name": algorithm}
    base = {"name": "test", "task": "t:Task", "rounds": rounds, "algorithm": algorithm, "evaluation": {"every": 0}}
    config = RunConfig.model_validate({**base, "local": local, "secure_sum": {"enabled": secure}})
    stores = {}

    def store(name):
        return stores.setdefault(name, MemoryStore())

    outcome = simulate(config, Task(), 5, paths, faults=faults, store=store)
    assert outcome.status == "finished"
    kept = {name: found.committed()[1] for name, found in stores.items()}
    return outcome.state, kept, [event for event, _ in read_events(paths.events) if event["event"] == "round"]


CASES = [
    ("fednova", SAME),
    ("fednova", SPREAD),
    ({"name": "fednova", "mu": 0.5}, {**SPREAD, "momentum": 0.5}),
    ({"name": "fednova", "mu": 0.5}, {**SAME, "momentum": 0.5, "schedule": {"shape": "step", "every": 2}}),
    ("feddc", SAME),
    ({"name": "feddc", "max_corrected_norm": 2.0}, SPREAD),
    ("feddyn", SAME),
    ("feddyn", SPREAD),
]


@pytest.mark.parametrize(("algorithm", "local"), CASES, ids=str)
def test_a_secure_run_with_drop_outs_ends_where_a_plain_one_does(algorithm, local, tmp_path):
    plain, of_plain, _ = run(RunPaths(tmp_path / "plain"), algorithm, local, False, Absent())
    secure, of_secure, rounds = run(RunPaths(tmp_path / "secure"), algorithm, local, True, Lost())
    assert [len(event["replies"]) for event in rounds] == [5, 4, 4, 5]
    assert all(set(event["secure_sum"]["clipped"].values()) == {0} for event in rounds)
    for name, vector in plain.vectors.items():
        # 20 bits for five nodes: a step of 2R/2^17 a round.
        np.testing.assert_allclose(secure.vectors[name], vector, atol=2e-3, err_msg=name)
    for node, vectors in of_plain.items():
        for name, vector in vectors.items():
            np.testing.assert_allclose(of_secure[node][name], vector, atol=4e-3, err_msg=f"{node} {name}")
    # What the server holds is still the mean of what nodes keep, but for the rounding of sums.
    for server, node in {"c": "c_i", "h": "h_i"}.items():
        if server in secure.vectors:
            mean = np.mean([vectors[node] for vectors in of_secure.values()], axis=0)
            np.testing.assert_allclose(secure.vectors[server], mean, atol=1e-3)


def test_only_what_does_not_follow_travels(tmp_path):
    found = {}
    for name, algorithm, local in (
        ("nova", {"name": "fednova"}, SAME),
        ("nova spread", {"name": "fednova"}, SPREAD),
        ("dc", {"name": "feddc"}, SAME),
        ("dc spread", {"name": "feddc", "max_corrected_norm": 2.0}, SPREAD),
        ("dyn", {"name": "feddyn"}, SPREAD),
    ):
        _, _, rounds = run(RunPaths(tmp_path / name), algorithm, local, True, rounds=1)
        found[name] = set(rounds[0]["secure_sum"]["ranges"])
    # The accumulation of steps that differ is a scalar beside these, so it has no range.
    assert found.pop("dc spread") == {"delta", "delta_c"}
    assert set.union(*found.values()) == {"delta"}


def test_the_accumulation_is_not_clipped_in_the_first_round(tmp_path):
    """‖a‖ of 60 steps with momentum is 500; the first range of coordinates is 1."""
    local = {**SPREAD, "lr": 5e-3, "momentum": 0.9}
    plain, _, _ = run(RunPaths(tmp_path / "plain"), "fednova", local, False, rounds=1)
    secure, _, [first] = run(RunPaths(tmp_path / "secure"), "fednova", local, True, rounds=1)
    assert first["secure_sum"]["ranges"] == {"delta": 1.0}
    start, _, _ = run(RunPaths(tmp_path / "start"), "fednova", {**local, "lr": 1e-12}, False, rounds=1)
    moved = plain.model - start.model
    assert np.abs(moved).max() > 0.1
    np.testing.assert_allclose(secure.model - start.model, moved, atol=0.02 * np.abs(moved).max())
