"""FedPer, FedRep and FedBN: what is shared, what stays, and which steps move what."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from fedward_common.algorithms.phases import Phases
from fedward_common.errors import ConfigError, TaskError
from fedward_common.local import LocalRunner
from fedward_common.node import Participant
from fedward_common.update import Kind
from fedward_common.work import Work
from small_federation import Classes, Federation, configure
from torch import nn
from torch.utils.data import TensorDataset

LOCAL = {"lr": 0.1, "steps": 3, "batch_size": 4, "momentum": 0.5}
NODES = {f"n{i}": {"n": 7 + 2 * i, "seed": i, "test": 5} for i in range(3)}
HEAD = {"head": ["head.*"]}


def federation(table, task=None, nodes=NODES, **local):
    return Federation(configure(table, {**LOCAL, **local}), task or Classes(torch.float64), nodes)


def private(fed):
    return {spec.name for spec in fed.layout.of_kind(Kind.PRIVATE)}


def test_fedper_is_fedavg_on_a_model_with_a_private_head():
    named = federation({"name": "fedper", **HEAD})
    declared = federation("fedper", Classes(torch.float64, {"head.*": "private"}))
    plain = federation("fedavg", Classes(torch.float64, {"head.*": "private"}))
    for _ in range(3):
        for fed in (named, declared, plain):
            fed.round(lost={"n1"})
    for fed in (named, declared):
        assert fed.layout == plain.layout
        assert fed.state.model.tobytes() == plain.state.model.tobytes()
        for node in NODES:
            assert {k: v.tobytes() for k, v in fed.kept(node).items()} == {
                k: v.tobytes() for k, v in plain.kept(node).items()
            }


@pytest.mark.parametrize("name", ["fedper", "fedrep"])
def test_a_head_must_be_named_and_be_there(name):
    with pytest.raises(TaskError, match=rf"'{name}': no tensor of the model is private.*algorithm.head.*'body.weight'"):
        federation(name)
    with pytest.raises(TaskError, match=r"algorithm.head .*\['fc.*'\].*'body.weight'"):
        federation({"name": name, "head": ["head.*", "fc.*"]})
    with pytest.raises(TaskError, match="no trainable tensor"):
        federation({"name": name, "head": ["*"]})


@pytest.mark.parametrize("table", [{"name": "fedper", **HEAD}, {"name": "fedrep", **HEAD}, {"name": "fedbn"}])
def test_what_is_private_never_leaves(table):
    """Updates are as long as the shared part, and do not follow from the head but by the body's steps."""
    fed = federation(table)
    shared = fed.layout.size(Kind.TRAINABLE)
    assert shared + fed.layout.size(Kind.STATISTIC) + fed.layout.size(Kind.PRIVATE) == sum(
        spec.size for spec in fed.layout.tensors if spec.kind is not Kind.COUNTER
    )
    heads = []
    for _ in range(2):
        for reply in fed.round():
            assert {name: len(vector) for name, vector in reply.vectors.items() if name != "statistic"} == {
                "delta": shared
            }
        heads.append([fed.kept(node)["private"] for node in NODES])
        assert set(fed.kept("n0")) == {"private"}
    assert not any(np.array_equal(one, two) for one, two in zip(*heads, strict=True))
    message = fed.algorithm.broadcast(fed.state)
    assert len(message["model"]) == shared


@pytest.mark.parametrize("table", [{"name": "fedper", **HEAD}, {"name": "fedrep", **HEAD}, {"name": "fedbn"}])
def test_a_lost_reply_leaves_the_old_private_tensors(table):
    fed = federation(table)
    fed.round()
    before = fed.kept("n0")["private"].copy()
    fed.round(lost={"n0"})
    np.testing.assert_array_equal(fed.kept("n0")["private"], before)
    fed.round(cohort=["n1"])
    np.testing.assert_array_equal(fed.kept("n0")["private"], before)


@pytest.mark.parametrize("table", [{"name": "fedper", **HEAD}, {"name": "fedrep", **HEAD}, {"name": "fedbn"}])
def test_a_node_whose_process_died_after_each_reply_goes_on_bit_for_bit(table):
    whole, broken = federation(table), federation(table)
    for _ in range(3):
        whole.round()
        broken.round()
        runner = LocalRunner(broken.config, Classes(torch.float64), "n0", NODES["n0"])
        broken.nodes["n0"] = Participant(broken.config, broken.stores["n0"], runner.do)
    assert broken.state.model.tobytes() == whole.state.model.tobytes()
    assert broken.kept("n0")["private"].tobytes() == whole.kept("n0")["private"].tobytes()


@pytest.mark.parametrize("table", [{"name": "fedper", **HEAD}, {"name": "fedrep", **HEAD}, {"name": "fedbn"}])
def test_a_node_judges_its_own_head_and_another_one_a_fresh_one(table):
    fed = federation(table)
    fed.round()
    message = fed.algorithm.broadcast(fed.state)
    runner = fed.runners["n0"]
    own, fresh = (
        runner.do(Work("evaluate", 2, message, state)).metrics["loss"] for state in (fed.kept("n0"), {})
    )
    model, layout = Classes(torch.float64).model(), fed.layout
    for vectors in (message, fed.kept("n0")):
        for name, kind in (("model", Kind.TRAINABLE), ("statistic", Kind.STATISTIC), ("private", Kind.PRIVATE)):
            if name in vectors and layout.size(kind):
                layout.load(model, vectors[name], kind)
    rows = Classes(torch.float64).data(NODES["n0"]).test.tensors
    with torch.no_grad():
        assert own == pytest.approx(5 * float(Classes().loss(model.eval(), rows)), rel=1e-12)
    assert own != fresh


class Product(Classes):
    """f(b, h) = mean ½ (b h x − y)²: one number of body, one of head. config: x, y."""

    def __init__(self) -> None:
        super().__init__(torch.float64)
        self.seen = []

    def model(self):
        model = nn.Module()
        model.body = nn.Parameter(torch.tensor([1.5], dtype=torch.float64))
        model.head = nn.Parameter(torch.tensor([0.5], dtype=torch.float64))
        return model

    def data(self, config):
        from fedward_common.task import Data

        return Data(TensorDataset(*(torch.tensor(config[key], dtype=torch.float64) for key in "xy")))

    def loss(self, model, batch):
        self.seen.append((batch[0].tolist(), model.body.item(), model.head.item()))
        return (0.5 * (model.body * model.head * batch[0] - batch[1]) ** 2).mean()

    def metrics(self, model, batch):
        return {}


def test_fedrep_is_the_papers_algorithm():
    """Written without this code: head steps with the body frozen, then body steps with the head frozen."""
    data = {"one": {"x": [1.0, 2.0], "y": [0.3, -1.0]}, "two": {"x": [0.5, 1.0, -1.0], "y": [1.0, 2.0, 0.1]}}
    lr, head_steps, steps = 0.1, 4, 3
    table = {"name": "fedrep", "head": ["head"], "head_steps": head_steps, "server_lr": 0.7}
    task = Product()
    fed = federation(table, task, data, lr=lr, steps=steps, batch_size=8, momentum=0.0)
    body, heads = 1.5, {"one": 0.5, "two": 0.5}
    for round_ in range(3):
        lost = {"two"} if round_ == 1 else set()
        moved, weights = [], []
        for node, rows in data.items():
            x, y = np.array(rows["x"]), np.array(rows["y"])
            h, b = heads[node], body
            for _ in range(head_steps):
                h -= lr * np.mean((b * h * x - y) * b * x)
            for _ in range(steps):
                b -= lr * np.mean((b * h * x - y) * h * x)
            if node not in lost:
                heads[node] = h
                moved.append(b - body)
                weights.append(len(x))
        body += 0.7 * np.average(moved, weights=weights)
        task.seen.clear()
        fed.round(lost=lost)
        np.testing.assert_allclose(fed.state.model, body, rtol=1e-12)
        for node, head in heads.items():
            np.testing.assert_allclose(fed.kept(node)["private"], head, rtol=1e-12)
    bodies, found = ([row[i] for row in task.seen[: head_steps + steps]] for i in (1, 2))
    assert len(set(bodies[: head_steps + 1])) == 1 and len(set(found[head_steps:])) == 1
    assert len(set(found[: head_steps + 1])) == head_steps + 1 and len(set(bodies[head_steps:])) == steps


def test_fedreps_two_trainings_draw_different_batches_and_the_same_again():
    rows = {"x": [float(i) for i in range(8)], "y": [1.0] * 8}
    table = {"name": "fedrep", "head": ["head"], "head_steps": 4}
    orders = []
    for _ in range(2):
        task = Product()
        federation(table, task, {"n": rows}, batch_size=2, steps=4).round()
        orders.append([row[0] for row in task.seen])
    assert orders[0] == orders[1]
    assert orders[0][:4] != orders[0][4:]
    for half in (orders[0][:4], orders[0][4:]):
        assert sorted(x for batch in half for x in batch) == rows["x"]


def test_the_statistics_that_fedrep_sends_come_from_the_bodys_steps():
    class Task(Classes):
        batches: list = []  # noqa: RUF012

        def model(self):
            return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 3)).double()

        def loss(self, model, batch):
            self.batches.append(batch[0].numpy().copy())
            return super().loss(model, batch)

    task = Task(torch.float64)
    fed = federation({"name": "fedrep", "head": ["2.*"], "head_steps": 5}, task, {"n": NODES["n0"]})
    [reply] = fed.round()
    mean, variance = np.zeros(4), np.ones(4)
    for x in task.batches[5:]:
        mean = 0.9 * mean + 0.1 * x.mean(0)
        variance = 0.9 * variance + 0.1 * x.var(0, ddof=1)
    assert len(task.batches) == 5 + 3
    np.testing.assert_allclose(fed.state.vectors["statistic"], np.concatenate([mean, variance]), rtol=1e-12)
    # Counted as the body's steps are.
    assert int(fed.runners["n"]._built.model[0].num_batches_tracked) == 3
    assert reply.metrics["examples"] == 4 + 3 + 4


def test_fedrep_refuses_a_head_that_does_not_learn():
    fed = federation("fedrep", Classes(torch.float64, {"norm.running_*": "private"}))
    with pytest.raises(TaskError, match="no private parameter"):
        fed.ask("n0")


def test_phases_share_the_rounds_time(monkeypatch):
    from test_training import local, points

    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    task = Classes()
    cases = ((10.0, None, 6.0), (10.0, 5.0, 1.0), (None, 5.0, 1.0), (3.0, None, 0.0), (None, None, None))
    for given, most, left in cases:
        now[0] = 100.0
        phases = Phases(local(task, points(8), seconds=given, max_seconds=most))
        first = phases.next()
        now[0] = 104.0
        second = phases.next("other")
        assert second.seconds == left
        assert first.seed != second.seed and first.progress is second.progress


def test_privacy_by_record_refuses_what_has_steps_without_noise():
    private_ = {"clip": 1.0, "sampling_rate": 0.1, "noise_multiplier": 1.0, "delta": 1e-5, "unit": "record"}
    site = {"unit": "site", "mechanism": "distributed", "clip": 1.0, "noise_multiplier": 1.0, "delta": 1e-5}
    tables = {"secure_sum": {"enabled": True}, "evaluation": {"every": 0}}
    local = {"lr": 0.1, "steps": 3}
    with pytest.raises(ConfigError, match=r"'fedrep' with privacy.unit = 'record': the body's steps"):
        configure({"name": "fedrep", **HEAD}, local, privacy=private_, **tables)
    with pytest.raises(ConfigError, match=r"'fedbn' with privacy.unit = 'record': batch norm mixes"):
        configure("fedbn", local, privacy=private_, **tables)
    configure({"name": "fedper", **HEAD}, local, privacy=private_, **tables)
    for name in ("fedper", "fedrep", "fedbn"):
        configure(name, local, privacy=site, **tables)


def test_fedbn_keeps_all_of_batch_norm_and_averages_the_rest():
    fed = federation("fedbn")
    norm = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    assert private(fed) == {f"norm.{name}" for name in norm}
    start, replies = fed.state.model, fed.round()
    weights = np.array([NODES[node]["n"] for node in NODES])
    deltas = np.stack([reply.vectors["delta"] for reply in replies])
    np.testing.assert_allclose(fed.state.model, start + weights @ deltas / weights.sum(), rtol=1e-12)
    running = [fed.layout.unpack(fed.kept(node)["private"], Kind.PRIVATE) for node in NODES]
    assert not torch.equal(running[0]["norm.running_mean"], running[1]["norm.running_mean"])
    assert not torch.equal(running[0]["norm.weight"], running[1]["norm.weight"])


def test_fedbn_counts_batches_over_rounds():
    """A cumulative mean (momentum=None) needs its counter: after two rounds it is that of all batches."""

    class Cumulative(Classes):
        batches: list = []  # noqa: RUF012

        def model(self):
            return nn.Sequential(nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 3)).double()

        def loss(self, model, batch):
            self.batches.append(batch[0].numpy().copy())
            return super().loss(model, batch)

    task = Cumulative(torch.float64)
    fed = federation("fedbn", task, {"n": NODES["n0"]})
    for _ in range(2):
        fed.round()
    kept = fed.layout.unpack(fed.kept("n")["private"], Kind.PRIVATE)
    assert int(kept["0.num_batches_tracked"]) == len(task.batches) == 6
    np.testing.assert_allclose(kept["0.running_mean"], np.mean([x.mean(0) for x in task.batches], axis=0), rtol=1e-12)


def test_fedbn_goes_with_what_the_task_declares_and_refuses_models_without_batch_norm():
    fed = federation("fedbn", Classes(torch.float64, {"norm.*": "private", "head.*": "private"}))
    assert {"head.weight", "norm.weight"} < private(fed)

    class Odd(nn.Module):
        """Its layer's name reads as a shell pattern."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleDict({"[x]": nn.BatchNorm1d(4), "x": nn.Linear(4, 3)})

        def forward(self, x):
            return self.layers["x"](self.layers["[x]"](x))

    class Task(Classes):
        made = Odd

        def model(self):
            return self.made()

    assert {name.rpartition(".")[0] for name in private(federation("fedbn", Task()))} == {"layers.[x]"}
    Task.made = lambda self: nn.Linear(4, 3)
    with pytest.raises(TaskError, match=r"'fedbn': the model has no batch-norm layer.*fedper.*fedavg"):
        federation("fedbn", Task())
