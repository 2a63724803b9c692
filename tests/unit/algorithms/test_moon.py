"""MOON against brute force in NumPy, and the traps of public implementations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fedward_common.errors import ConfigError, TaskError
from fedward_common.messages import Purpose, Request
from fedward_common.node import Participant
from fedward_common.update import Kind
from fedward_common.work import Work
from fedward_server.paths import RunPaths
from fedward_server.simulation import Faults, simulate
from small_federation import Classes, Federation, configure
from torch import nn

LOCAL = {"lr": 0.1, "steps": 3, "batch_size": 4}
NODES = {f"n{i}": {"n": 8 + i, "seed": i, "test": 5} for i in range(3)}


def federation(task=None, local=LOCAL, nodes=NODES, **options):
    return Federation(configure({"name": "moon", **options}, local), task or Classes(torch.float64), nodes)


class Smooth(Classes):
    """Two layers without batch norm, whose gradients finite differences find."""

    def model(self):
        return nn.Sequential(nn.Linear(4, 3, dtype=torch.float64), nn.Tanh(), nn.Linear(3, 3, dtype=torch.float64))

    def representation(self, model, batch):
        return model[:2](batch[0])


def objective(y, w, previous, x, labels, mu, tau):
    """f(y) + μ ℓ_con(y), from the paper's Eq. 3 and 4, on flat parameters."""

    def layers(flat):
        hidden = np.tanh(x @ flat[:12].reshape(3, 4).T + flat[12:15])
        return hidden, hidden @ flat[15:24].reshape(3, 3).T + flat[24:27]

    def cosine(a, b):
        return (a * b).sum(1) / np.sqrt((a * a).sum(1) * (b * b).sum(1))

    z, logits = layers(y)
    entropy = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(labels)), labels]
    to_global = np.exp(cosine(z, layers(w)[0]) / tau)
    to_previous = np.exp(cosine(z, layers(previous)[0]) / tau)
    return entropy.mean() - mu * np.log(to_global / (to_global + to_previous)).mean()


def slopes(function, at, step=1e-6):
    found = np.empty_like(at)
    for i in range(len(at)):
        move = np.zeros_like(at)
        move[i] = step
        found[i] = (function(at + move) - function(at - move)) / (2 * step)
    return found


@pytest.mark.parametrize(("mu", "tau"), [(1.0, 0.5), (5.0, 0.2)])
def test_steps_follow_the_gradient_of_the_papers_loss(mu, tau):
    task = Smooth(torch.float64)
    fed = federation(task, {"lr": 0.3, "steps": 4, "batch_size": 8}, {"n": {"n": 8, "seed": 1}}, mu=mu, temperature=tau)
    w = fed.state.model
    previous = w + np.random.default_rng(3).normal(0, 0.5, w.size)
    done = fed.runners["n"].do(Work("train", 1, {"model": w}, {"previous": previous}))
    x, labels = (tensor.numpy() for tensor in task.data({"n": 8, "seed": 1}).train.tensors)
    y = w.copy()
    for _ in range(4):
        y -= 0.3 * slopes(lambda at: objective(at, w, previous, x, labels, mu, tau), y)
    np.testing.assert_allclose(done.vectors["delta"], y - w, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(done.state["previous"], y, rtol=1e-6, atol=1e-9)
    # The metric is the task's loss alone.
    first = objective(w, w, w, x, labels, 0.0, tau)
    single = configure({"name": "moon", "mu": mu}, {"lr": 0.3, "steps": 1, "batch_size": 8})
    [reply] = Federation(single, task, {"n": {"n": 8, "seed": 1}}).round()
    assert reply.metrics["loss"] / 8 == pytest.approx(first, rel=1e-12)


class Dropping(Classes):
    def loss(self, model, batch):
        return F.cross_entropy(F.dropout(model(batch[0]), 0.3), batch[1])


def test_a_first_training_is_fedavg_bit_for_bit():
    """z_prev = z_glob: the term is constant. Nor do its passes touch batch norm or dropout."""
    task = Dropping(torch.float64)
    mine, plain = federation(task, mu=3.0), Federation(configure("fedavg", LOCAL), task, NODES)
    for ours, theirs in zip(mine.round(), plain.round(), strict=True):
        for group, vector in ours.vectors.items():
            np.testing.assert_array_equal(vector, theirs.vectors[group])
    ours, theirs = mine.round()[0], plain.round()[0]
    assert np.abs(ours.vectors["delta"] - theirs.vectors["delta"]).max() > 1e-4


class Watched(Classes):
    """Notes which model was asked for a representation, in which mode and with which tensors."""

    def __init__(self, **kinds):
        super().__init__(torch.float64, kinds)
        self.calls = []

    def representation(self, model, batch):
        tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        self.calls.append((model.training, tensors))
        return super().representation(model, batch)


def test_frozen_models_are_in_evaluation_mode_with_buffers_of_their_own():
    task = Watched()
    fed = federation(task)
    fed.round()
    before, kept = fed.algorithm.broadcast(fed.state), fed.kept("n0")
    task.calls.clear()
    fed.ask("n0")
    assert [training for training, _ in task.calls] == [True, False, False] * 3
    for _, tensors in task.calls[1::3]:
        for name, kind in (("model", Kind.TRAINABLE), ("statistic", Kind.STATISTIC)):
            np.testing.assert_array_equal(fed.layout.pack(tensors, kind), before[name])
    for _, tensors in task.calls[2::3]:
        for name, kind in (("previous", Kind.TRAINABLE), ("previous_statistic", Kind.STATISTIC)):
            np.testing.assert_array_equal(fed.layout.pack(tensors, kind), kept[name])
    assert not np.array_equal(before["statistic"], kept["previous_statistic"])
    # A batch is counted once, by the pass of the task's loss: in the third step two have been.
    counts = [int(tensors["norm.num_batches_tracked"]) for _, tensors in task.calls[::3]]
    assert counts == [1, 2, 3]


def test_private_tensors_of_the_frozen_models_are_the_previous_models():
    task = Watched(**{"body.*": "private"})
    fed = federation(task)
    fed.round()
    private = fed.kept("n0")["private"].copy()
    task.calls.clear()
    fed.ask("n0")
    for _, tensors in task.calls[1::3] + task.calls[2::3]:
        np.testing.assert_array_equal(fed.layout.pack(tensors, Kind.PRIVATE), private)
    assert not np.array_equal(fed.layout.pack(task.calls[-3][1], Kind.PRIVATE), private)


def test_the_previous_model_is_the_nodes_own_and_evaluation_leaves_it():
    fed, quiet = federation(), federation()
    for each in (fed, quiet):
        start = each.state.model
        for name, reply in zip(each.nodes, each.round(), strict=True):
            np.testing.assert_allclose(each.kept(name)["previous"], start + reply.vectors["delta"], rtol=1e-12)
            assert np.abs(each.kept(name)["previous"] - each.state.model).max() > 1e-3
    kept = {name: {k: v.copy() for k, v in fed.kept(name).items()} for name in fed.nodes}
    for split in ("test", "train"):
        for name, node in fed.nodes.items():
            request = Request(
                Purpose.EVALUATE, "run", 2, 0, fed.algorithm.broadcast(fed.state), fed.included[name],
                settings={"split": split},
            )  # fmt: skip
            assert node.handle(request).metrics["examples"] > 0
    for name in fed.nodes:
        for key, vector in fed.kept(name).items():
            np.testing.assert_array_equal(vector, kept[name][key])
    for one, other in zip(fed.round(), quiet.round(), strict=True):
        np.testing.assert_array_equal(one.vectors["delta"], other.vectors["delta"])


def test_a_lost_reply_and_a_crash_leave_the_previous_model_as_it_was():
    fed = federation()
    fed.round()
    before = fed.kept("n0")["previous"].copy()
    fed.round(lost={"n0"})
    np.testing.assert_array_equal(fed.kept("n0")["previous"], before)
    fed.nodes["n0"] = Participant(fed.config, fed.stores["n0"], fed.runners["n0"].do)
    seen = []
    work = fed.runners["n0"].do
    fed.nodes["n0"]._execute = lambda item: (seen.append(item), work(item))[1]
    fed.ask("n0")
    [trained] = [item for item in seen if item.op == "train"]
    np.testing.assert_array_equal(trained.state["previous"], before)


def test_a_node_that_lost_its_state_begins_anew():
    fed = federation()
    fed.round()
    fed.stores["n0"].drop_pending()
    reply = fed.ask("n0")
    assert reply.failure is None
    done = fed.runners["n0"].do(Work("train", 2, fed.algorithm.broadcast(fed.state)))
    np.testing.assert_array_equal(reply.vectors["delta"], done.vectors["delta"])


def test_a_small_temperature_does_not_overflow():
    fed = federation(temperature=1e-4)
    for _ in range(2):
        assert all(np.isfinite(reply.vectors["delta"]).all() for reply in fed.round())
    assert np.isfinite(fed.state.model).all()


def test_a_representation_without_gradient_is_refused():
    class Detached(Classes):
        def representation(self, model, batch):
            return super().representation(model, batch).detach()

    fed = federation(Detached(torch.float64))
    with pytest.raises(TaskError, match=r"without a gradient.*no \.detach"):
        fed.runners["n0"].do(Work("train", 1, fed.algorithm.broadcast(fed.state)))


@pytest.mark.parametrize("unit", ["record", "patient"])
def test_privacy_of_single_records_is_refused(unit):
    privacy = {"unit": unit, "clip": 1.0, "noise_multiplier": 1.0, "delta": 1e-5, "sampling_rate": 0.1}
    more = {"secure_sum": {"enabled": True}, "evaluation": {"every": 0}}
    with pytest.raises(ConfigError, match=f"'moon' with privacy.unit = '{unit}'.*contrastive loss.*'site'"):
        configure("moon", {"lr": 0.1, "steps": 2}, privacy=privacy, **more)
    del privacy["sampling_rate"]
    configure("moon", {"lr": 0.1, "steps": 2}, privacy={**privacy, "unit": "site", "mechanism": "central"}, **more)


class Named(Classes):
    metric_names = ("accuracy",)


class Lost(Faults):
    """n1's part of round 2 never arrives."""

    def __init__(self, purpose):
        self._purpose = purpose

    def answers(self, name, request, reply):
        return None if (name, request.round, request.purpose) == ("n1", 2, self._purpose) else reply


def test_a_secure_run_ends_where_a_plain_one_does_with_a_drop_out(tmp_path):
    nodes = {f"n{i}": {"n": 8 + i, "seed": i, "test": 5} for i in range(5)}
    config = configure("moon", LOCAL, secure_sum={"enabled": True}).model_copy(update={"rounds": 4})
    plain_config = config.model_copy(update={"secure_sum": replace_enabled(config.secure_sum)})
    plain = simulate(plain_config, Named(), nodes, RunPaths(tmp_path / "plain"), faults=Lost(Purpose.TRAIN))
    secure = simulate(config, Named(), nodes, RunPaths(tmp_path / "secure"), faults=Lost(Purpose.MASK))
    assert plain.status == secure.status == "finished" and plain.state.round == secure.state.round == 4
    for name, vector in plain.state.vectors.items():
        np.testing.assert_allclose(secure.state.vectors[name], vector, atol=2e-3, err_msg=name)


def replace_enabled(options):
    return options.model_copy(update={"enabled": False})
