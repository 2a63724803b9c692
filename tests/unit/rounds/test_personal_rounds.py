"""Personal algorithms through the round engine: the same plain and under secure aggregation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fedward_common.config import RunConfig
from fedward_common.messages import Purpose
from fedward_common.node import MemoryStore
from fedward_common.update import Kind, Layout
from fedward_server.events import read_events
from fedward_server.paths import RunPaths
from fedward_server.simulation import Faults, simulate
from torch import nn

from .test_simulation import Task

ALGORITHMS = [
    {"name": "perfedavg", "alpha": 0.1},
    {"name": "perfedavg", "alpha": 0.1, "hessian": False},
    {"name": "fedper", "head": ["2.*"]},
    {"name": "fedrep", "head": ["2.*"]},
    {"name": "fedphp", "participations": 2},
    {"name": "fedphp", "participations": 2, "transfer": "mmd"},
    {"name": "ditto"},
    {"name": "fedbn"},
]


class Layers(Task):
    metric_names = ("accuracy",)

    def model(self):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    def logits(self, model, batch):
        return model(batch[0])

    def representation(self, model, batch):
        return model[:2](batch[0])


def config(algorithm, secure, **tables):
    base = {"name": "test", "task": "t:Task", "rounds": 4, "algorithm": algorithm, "secure_sum": {"enabled": secure}}
    return RunConfig.model_validate({**base, "local": {"lr": 0.1, "steps": 4, "batch_size": 5}, **tables})


class Lost(Faults):
    """node-3's second training is lost: in a secure sum it drops out before its masked vector is in."""

    def answers(self, name, request, reply):
        lost = request.purpose is Purpose.TRAIN and request.round == 2 and name == "node-3"
        return None if lost else reply


def told(paths, kind):
    return [event for event, _ in read_events(paths.events) if event["event"] == kind]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: "-".join(map(str, a.values())))
def test_a_secure_run_ends_where_a_plain_one_does(algorithm, tmp_path):
    ends, kept, figures = [], [], []
    for secure in (False, True):
        stores = {f"node-{i}": MemoryStore() for i in range(5)}
        paths = RunPaths(tmp_path / str(secure))
        run = config(algorithm, secure)
        outcome = simulate(run, Layers(), 5, paths, faults=Lost(), store=stores.__getitem__)
        assert outcome.status == "finished", outcome.reason
        ends.append(outcome.state.vectors)
        kept.append({name: store.committed()[1] for name, store in stores.items()})
        rounds = told(paths, "round")
        assert [len(event["replies"]) for event in rounds] == [5, 4, 5, 5]
        if secure:
            [last] = told(paths, "evaluation")
            figures.append([event["round_before"]["evaluate"] for event in rounds[1:]] + [last["evaluate"]])
        else:
            figures.append([event["evaluate"] for event in rounds])
    for name, vector in ends[0].items():
        # 20 bits for five nodes: a step of 2R/2^17 a round.
        np.testing.assert_allclose(vector, ends[1][name], atol=2e-3, err_msg=name)
    for node, vectors in kept[0].items():
        for name, vector in vectors.items():
            np.testing.assert_allclose(vector, kept[1][node][name], atol=5e-3, err_msg=f"{node} {name}")
    for plain, secure in zip(*figures, strict=True):
        # Round 2 loses a node in one of the two ways: those that are left judge the model in both.
        if plain["examples"] == secure["examples"]:
            assert plain["loss"] == pytest.approx(secure["loss"], abs=5e-3)


@pytest.mark.parametrize("secure", [False, True])
def test_a_round_is_judged_with_the_heads_that_it_trained(secure, tmp_path):
    """Not with those of the round before: the nodes are told what of their work was in the sum."""
    stores = {f"node-{i}": MemoryStore() for i in range(5)}
    run = config({"name": "fedper", "head": ["2.*"]}, secure, rounds=1)
    outcome = simulate(run, Layers(), 5, RunPaths(tmp_path / "run"), store=stores.__getitem__)
    [judged] = told(RunPaths(tmp_path / "run"), "evaluation" if secure else "round")
    losses, stale = np.zeros(5), np.zeros(5)
    for i in range(5):
        model = Layers().model().eval()
        layout = Layout.of(model, {"2.*": "private"})
        test = Layers().data({"partition": i}).test.tensors
        layout.load(model, outcome.state.vectors["model"], Kind.TRAINABLE)
        layout.load(model, outcome.state.vectors["statistic"], Kind.STATISTIC)
        with torch.no_grad():
            stale[i] = Layers().loss(model, test)
            layout.load(model, stores[f"node-{i}"].committed()[1]["private"], Kind.PRIVATE)
            losses[i] = Layers().loss(model, test)
    assert stale.mean() - losses.mean() > 0.02
    assert judged["evaluate"]["loss"] == pytest.approx(losses.mean(), abs=5e-3 if secure else 1e-6)
