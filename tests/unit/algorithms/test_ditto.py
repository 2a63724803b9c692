"""Ditto: FedAvg beside personal models, each written again in plain numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fedward_common.messages import Purpose, Request
from fedward_common.task import Data
from fedward_common.update import Kind
from fedward_common.work import Work
from small_federation import Classes, Federation, Quadratic, configure
from torch.utils.data import TensorDataset

LOCAL = {"lr": 0.1, "steps": 5, "batch_size": 4}
CURVATURE = np.array([0.2, 0.4, 1.0])
OPTIMA = np.array([-1.6, 0.0, 1.6])
SITES = {f"n{i}": {"a": [a], "b": [b]} for i, (a, b) in enumerate(zip(CURVATURE, OPTIMA, strict=True))}
NODES = {f"n{i}": {"n": 7 + 2 * i, "seed": i, "test": 5} for i in range(3)}


def federation(options=None, task=None, nodes=SITES, **local):
    table = {"name": "ditto", **(options or {})}
    return Federation(configure(table, {**LOCAL, **local}), task or Quadratic([3.0]), nodes)


@pytest.mark.parametrize("lam", [0.0, 0.7])
def test_personal_models_follow_the_papers_algorithm(lam):
    """v_i ← v_i − η (a (v_i − b) + λ (v_i − w)), w as it was broadcast; lost replies and absent nodes leave v_i."""
    fed = federation({"lam": lam, "personal_steps": 4})
    w, v = 3.0, {}
    cohorts = [(["n0", "n1"], ()), (["n0", "n1", "n2"], ("n1",)), (["n0", "n1", "n2"], ()), (["n2"], ())]
    for cohort, lost in cohorts:
        ends = []
        for node in cohort:
            a, b = SITES[node]["a"][0], SITES[node]["b"][0]
            # It starts as the broadcast of the first round that counts.
            own = v.get(node, w)
            for _ in range(4):
                own -= 0.1 * (a * (own - b) + lam * (own - w))
            if node not in lost:
                v[node] = own
                ends.append(b + (1 - 0.1 * a) ** 5 * (w - b))
        fed.round(cohort, lost)
        w = np.mean(ends)
        np.testing.assert_allclose(fed.state.model, w, rtol=1e-12)
        for node, own in v.items():
            np.testing.assert_allclose(fed.kept(node)["v_i"], own, rtol=1e-12)


def test_they_end_at_the_minimum_of_the_proximal_problem():
    fed = federation({"lam": 0.5}, lr=0.5, steps=10)
    for _ in range(40):
        fed.round()
    r = (1 - 0.5 * CURVATURE) ** 10
    w = float(((1 - r) @ OPTIMA) / (1 - r).sum())
    np.testing.assert_allclose(fed.state.model, w, rtol=1e-12)
    best = (CURVATURE * OPTIMA + 0.5 * w) / (CURVATURE + 0.5)
    np.testing.assert_allclose([fed.kept(node)["v_i"][0] for node in SITES], best, rtol=1e-9)


def test_the_global_model_is_fedavgs_bit_for_bit():
    """With batch norm, a private head, momentum, weight decay, unequal nodes and lost replies; whatever λ."""
    task = Classes(kinds={"head.*": "private"})
    local = {"momentum": 0.9, "weight_decay": 0.01, "max_grad_norm": 1.0}
    plain = Federation(configure("fedavg", {**LOCAL, **local}), task, NODES)
    feds = [federation({"lam": lam, "personal_steps": 7}, task, NODES, **local) for lam in (0.0, 2.0)]
    for lost in ({"n0"}, (), {"n2"}, ()):
        replies = plain.round(lost=lost)
        for fed in feds:
            for one, two in zip(fed.round(lost=lost), replies, strict=True):
                assert {k: x.tobytes() for k, x in one.vectors.items()} == {
                    k: x.tobytes() for k, x in two.vectors.items()
                }
                assert (one.weight, one.metrics) == (two.weight, two.metrics)
                assert (one.info["steps"], one.info["complete"]) == (two.info["steps"], two.info["complete"])
            for name, vector in plain.state.vectors.items():
                assert fed.state.vectors[name].tobytes() == vector.tobytes()
    for fed in feds:
        for node in NODES:
            assert fed.kept(node)["private"].tobytes() == plain.kept(node)["private"].tobytes()
            assert not np.array_equal(fed.kept(node)["v_i_private"], fed.kept(node)["private"])


def test_a_personal_model_has_float_buffers_of_its_own():
    """With λ = 0 and as many steps it is what FedAvg would train on that node alone, buffers included."""
    task = Classes(torch.float64)
    mine = federation({"lam": 0.0}, task, {"n0": NODES["n0"], "n1": NODES["n1"]})
    mine.round()
    first = mine.kept("n0")
    assert not np.array_equal(first["v_i_statistic"], mine.state.vectors["statistic"])
    mine.round()
    # The same seeds, but w from elsewhere.
    other = federation({"lam": 0.0}, task, {"n0": NODES["n0"], "n2": NODES["n2"]})
    other.round()
    other.round()
    assert not np.array_equal(mine.state.model, other.state.model)
    for name, vector in mine.kept("n0").items():
        np.testing.assert_array_equal(vector, other.kept("n0")[name])
        assert not np.array_equal(vector, first[name])


def test_a_node_judges_v_i_and_leaves_it():
    class Tested(Quadratic):
        def data(self, config):
            test = TensorDataset(torch.ones(1, 1).double(), torch.zeros(1, 1).double())
            return Data(super().data(config).train, test)

    fed = federation({"lam": 0.3}, Tested([3.0]))
    fed.round()
    kept = {name: vector.copy() for name, vector in fed.kept("n0").items()}
    message = fed.algorithm.broadcast(fed.state)
    for _ in range(2):
        done = fed.runners["n0"].do(Work("evaluate", 2, message, fed.kept("n0")))
        assert done.metrics["loss"] == pytest.approx(0.5 * kept["v_i"][0] ** 2, rel=1e-12)
    np.testing.assert_array_equal(fed.kept("n0")["v_i"], kept["v_i"])
    # A node that never trained judges w.
    held_out = fed.runners["n0"].do(Work("evaluate", 2, message))
    assert held_out.metrics["loss"] == pytest.approx(0.5 * fed.state.model[0] ** 2, rel=1e-12)
    request = Request(Purpose.EVALUATE, "run", 1, vectors=message, included=fed.included["n0"])
    assert fed.nodes["n0"].handle(request).metrics["loss"] == done.metrics["loss"]


def test_v_i_is_judged_with_its_own_private_tensors():
    task = Classes(torch.float64, {"head.*": "private"})
    fed = federation({"lam": 0.0, "personal_steps": 40}, task, NODES)
    fed.round()
    kept, model = fed.kept("n0"), task.model()
    names = {"v_i": Kind.TRAINABLE, "v_i_statistic": Kind.STATISTIC, "v_i_private": Kind.PRIVATE}
    for name, kind in names.items():
        fed.layout.load(model, kept[name], kind)
    with torch.no_grad():
        loss = float(task.loss(model.eval(), task.data(NODES["n0"]).test.tensors))
    message = fed.algorithm.broadcast(fed.state)
    found = fed.runners["n0"].do(Work("evaluate", 2, message, kept)).metrics["loss"]
    assert found == pytest.approx(5 * loss, rel=1e-12)
    # And the next training of w has w's own.
    one = fed.runners["n0"].do(Work("train", 2, message, kept))
    two = federation({"lam": 0.0, "personal_steps": 40}, task, NODES).runners["n0"].do(Work("train", 2, message, kept))
    assert one.state["private"].tobytes() == two.state["private"].tobytes()


PRIVATE = {"clip": 1.0, "sampling_rate": 0.5, "noise_multiplier": 1.0, "delta": 1e-5}
TABLES = {"secure_sum": {"enabled": True}, "evaluation": {"every": 0}}


class Plain(Classes):
    """Without batch norm, which has no privacy by record."""

    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3)).to(self.dtype)


@pytest.fixture
def same_coins(monkeypatch):
    """Coins and noise that come out the same each time that a node's work begins."""
    from fedward_common.secagg import masks

    count = [0]

    def pseudo(size):
        count[0] += 1
        return count[0].to_bytes(size, "big")

    monkeypatch.setattr(masks.os, "urandom", pseudo)
    return lambda: count.__setitem__(0, 0)


def test_by_record_the_update_is_the_same_with_and_without_personal_steps(same_coins):
    task = Plain(kinds={"2.*": "private"})
    private = {"privacy": {**PRIVATE, "unit": "record"}, **TABLES}
    few, many = {"lam": 1.0, "personal_steps": 1}, {"lam": 0.0, "personal_steps": 30}
    done = []
    for table in ({"name": "fedavg"}, {"name": "ditto", **few}, {"name": "ditto", **many}):
        fed = Federation(configure(table, LOCAL, **private), task, {"n": {"n": 12, "seed": 1}})
        message, state = fed.algorithm.broadcast(fed.state), {}
        rounds = []
        for round_ in (1, 2):
            same_coins()
            one = fed.runners["n"].do(Work("train", round_, message, state))
            state = one.state
            rounds.append((one.vectors["delta"].tobytes(), one.state["private"].tobytes(), one.info, one.metrics))
        done.append(rounds)
        assert (len(state) > 1) == (table["name"] == "ditto")
    assert done[0] == done[1] == done[2]
    assert done[0][0] != done[0][1]


def test_by_record_the_personal_steps_have_no_noise():
    """With a noise that drowns everything, v_i is what it is without [privacy]."""
    drowned = {**PRIVATE, "unit": "record", "noise_multiplier": 30.0}
    nodes = {"n": {"n": 12, "seed": 1}}
    private = Federation(configure({"name": "ditto", "lam": 0.0}, LOCAL, privacy=drowned, **TABLES), Plain(), nodes)
    plain = Federation(configure({"name": "ditto", "lam": 0.0}, LOCAL), Plain(), nodes)
    one, two = (
        fed.runners["n"].do(Work("train", 1, fed.algorithm.broadcast(fed.state))) for fed in (private, plain)
    )
    assert one.state["v_i"].tobytes() == two.state["v_i"].tobytes()
    assert np.abs(one.vectors["delta"]).max() > 10 * np.abs(two.vectors["delta"]).max()
    assert not one.metrics


def test_by_record_a_personal_model_that_runs_away_does_not_hold_the_update_back():
    private = {"privacy": {**PRIVATE, "unit": "record"}, **TABLES}
    wild = {"name": "ditto", "lam": 1e6, "personal_steps": 60}
    nodes = {"n": {"n": 12, "seed": 1}}
    fed = Federation(configure(wild, LOCAL, **private), Plain(), nodes)
    done = fed.runners["n"].do(Work("train", 1, fed.algorithm.broadcast(fed.state)))
    np.testing.assert_array_equal(done.state["v_i"], fed.state.model)
    assert np.isfinite(done.vectors["delta"]).all()
    # Without [privacy] the node says so.
    reply = Federation(configure(wild, LOCAL), Plain(), nodes).ask("n")
    assert reply.failure is not None and "kept vector 'v_i'" in str(reply.failure)


def test_without_time_each_training_does_one_step():
    fed = federation({"lam": 0.5})
    done = fed.runners["n0"].do(Work("train", 1, fed.algorithm.broadcast(fed.state), seconds=0.0))
    assert done.info == {"steps": 1, "complete": False}
    np.testing.assert_allclose(done.state["v_i"], 3.0 - 0.1 * 0.2 * 4.6, rtol=1e-12)
