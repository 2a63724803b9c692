"""FedNP against brute force in NumPy, and the sums that the server and the nodes share."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from fedward_common.algorithms.base import Cohort
from fedward_common.algorithms.fednp import FedNP, FedNPOptions, cavity_of
from fedward_common.algorithms.registry import layout_of, parse_options
from fedward_common.errors import ConfigError, TaskError, UpdateError
from fedward_common.messages import Purpose, Reason, Request
from fedward_common.node import Participant
from fedward_common.update import Layout, Update
from fedward_common.work import Work
from fedward_server.paths import RunPaths
from fedward_server.simulation import Faults, simulate
from small_federation import Classes, Federation, Net, Quadratic, configure
from test_gaussian import logistic, paper
from torch import nn

LOCAL = {"lr": 0.1, "steps": 3, "batch_size": 4}
NODES = {f"n{i}": {"n": 6 + i, "seed": i, "test": 5} for i in range(5)}


def federation(task=None, local=LOCAL, nodes=NODES, **options):
    return Federation(configure({"name": "fednp", **options}, local), task or Classes(torch.float64), nodes)


def drift(fed):
    """Largest |server's sum − sum over all N of what nodes keep|, nodes that never took part counted as zero."""
    kept = [fed.kept(name).get("natural_k", np.zeros(20)) for name in fed.nodes]
    return float(np.abs(fed.state.vectors["natural"] - np.sum(kept, axis=0)).max())


def test_the_servers_sum_is_the_sum_of_what_nodes_keep_whatever_is_lost():
    fed = federation()
    chance = random.Random(5)
    losses = 0
    for _ in range(20):
        cohort = chance.sample(sorted(fed.nodes), 3)
        lost = {name for name in cohort if chance.random() < 0.3}
        losses += len(lost)
        fed.round(cohort, lost)
        assert drift(fed) < 1e-13
        if chance.random() < 0.3:  # a crash: what is on disk is all that is left
            name = chance.choice(cohort)
            fed.nodes[name] = Participant(fed.config, fed.stores[name], fed.runners[name].do)
    assert losses > 10
    linear, precision = np.split(fed.state.vectors["natural"], 2)
    assert (precision > 0).all() and np.abs(linear).max() > 1e-3
    # f is one number and the coordinates of z begin alike, so alike they stay.
    assert np.ptp(linear) < 1e-12 and np.ptp(precision) < 1e-12
    for name, node in fed.nodes.items():
        assert node.handle(Request(Purpose.FINISH, "run", included=fed.included.get(name))).failure is None
    assert drift(fed) < 1e-13


def test_a_lost_reply_leaves_head_and_natural_parameters_as_they_were():
    fed = federation()
    fed.round()
    before = {name: vector.copy() for name, vector in fed.kept("n0").items()}
    assert set(before) == {"head", "natural_k"}
    fed.round(lost={"n0"})
    fed.ask("n0")
    for name, vector in before.items():
        np.testing.assert_array_equal(fed.stores["n0"].committed()[1][name], vector)
        assert not np.array_equal(fed.stores["n0"].pending()[1][name], vector)


def test_a_node_that_lost_its_state_is_told_apart():
    fed = federation()
    fed.round()
    fed.stores["n0"].drop_pending()
    assert fed.ask("n0").failure.reason is Reason.STATE_DIVERGED


def test_the_sum_moves_by_the_sum_and_not_by_the_mean():
    fed = federation()
    replies = fed.round(["n0", "n3"])
    changes = sum(reply.vectors["delta_natural"] for reply in replies)
    np.testing.assert_allclose(fed.state.vectors["natural"], changes, rtol=1e-12)


def test_the_head_stays_and_twenty_numbers_travel():
    fed = federation()
    layout = fed.layout
    head = 6 * 10 + 10 + 10 * 10 + 10 + 10 * 18 + 18
    assert fed.algorithm.keeps(layout) == {"head": head, "natural_k": 20}
    assert fed.algorithm.sends(layout)["delta_natural"] == 20
    for _ in range(2):
        replies = fed.round()
        assert all(len(vector) != head for reply in replies for vector in reply.vectors.values())
    assert not np.array_equal(fed.kept("n0")["head"], fed.kept("n1")["head"])


def test_cavities_are_the_products_of_all_other_factors():
    """Algorithm 1, line 11, with p(z) = N(0, 1) among the factors, from means and variances."""
    generator = np.random.default_rng(2)
    m, s = generator.normal(size=(6, 10)), generator.uniform(0.5, 200, size=(6, 10))
    m[0], s[0] = 0, 1
    natural = np.concatenate([m / s, 1 / s], axis=1)
    for k in range(1, 6):
        rest = [j for j in range(6) if j != k]
        variance = 1 / sum(1 / s[j] for j in rest)
        mean = variance * sum(m[j] / s[j] for j in rest)
        found = cavity_of(natural[1:].sum(0) - natural[k], "cpu")
        np.testing.assert_allclose(found.mean, mean, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(found.variance, variance, rtol=1e-9)
    start = cavity_of(np.zeros(20), "cpu")
    assert not start.mean.any() and (start.variance == 1).all()


@pytest.mark.parametrize("precision", [-1.0, -3.0, math.nan])
def test_a_cavity_without_precision_is_refused(precision):
    others = np.concatenate([np.zeros(10), np.full(10, 0.2)])
    others[13] = precision
    with pytest.raises(UpdateError, match="not the sum of what the nodes keep"):
        cavity_of(others, "cpu")


@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_no_factor_has_a_negative_precision_and_none_is_large(scale):
    """|f| < 1 whatever the features are, and a cavity has the prior's precision at least."""

    class Scaled(Classes):
        def representation(self, model, batch):
            return scale * super().representation(model, batch)

    fed = federation(Scaled(torch.float64))
    for _ in range(5):
        for reply in fed.round():
            assert np.abs(reply.vectors["delta_natural"]).max() <= 1
        for name in fed.nodes:
            precision = fed.kept(name)["natural_k"][10:]
            assert (precision >= 0).all() and (precision < 0.25).all()
    assert np.isfinite(fed.state.model).all()


class Smooth(Classes):
    """Two layers without batch norm, whose gradients finite differences find."""

    def model(self):
        return nn.Sequential(nn.Linear(4, 3, dtype=torch.float64), nn.Tanh(), nn.Linear(3, 3, dtype=torch.float64))

    def representation(self, model, batch):
        return model[:2](batch[0])


D = 2
SHAPES = [(3, D), (D,), (D, D), (D,), (D, 9), (9,)]
SIZES = [math.prod(shape) for shape in SHAPES]


def parts(head):
    cuts = np.split(head, np.cumsum(SIZES)[:-1])
    return [cut.reshape(shape) for cut, shape in zip(cuts, SHAPES, strict=True)]


def estimate(y, head, cavity, x):
    """q(z): Theorem 1 with f(X) = tanh of the mean of the head's outputs."""
    hidden = np.tanh(x @ y[:12].reshape(3, 4).T + y[12:15])
    weight, bias = parts(head)[:2]
    return paper(*cavity, np.tanh((hidden @ weight + bias).mean()))


def objective(y, head, cavity, x, labels, weight, floor):
    hidden = np.tanh(x @ y[:12].reshape(3, 4).T + y[12:15])
    logits = hidden @ y[15:24].reshape(3, 3).T + y[24:27]
    entropy = (np.log(np.exp(logits).sum(1)) - logits[np.arange(len(labels)), labels]).mean()
    m, s = estimate(y, head, cavity, x)
    _, _, w1, b1, w2, b2 = parts(head)
    # Wang et al. 2016: a Gaussian through a linear layer and a sigmoid.
    om, os = m @ w1 + b1, s @ w1**2
    am = logistic(om / np.sqrt(1 + math.pi / 8 * os))
    a, b = 4 - 2 * math.sqrt(2), -math.log(math.sqrt(2) + 1)
    av = logistic(a * (om + b) / np.sqrt(1 + math.pi / 8 * a**2 * os)) - am**2
    mean, variance = am @ w2 + b2, av @ w2**2 + floor
    to_model = ((mean - y[15:24]) ** 2 / (2 * variance)).mean()
    to_prior = (-0.5 * (1 + np.log(s) - m**2 - s)).mean()
    return entropy + weight * (to_model + to_prior)


def slopes(function, at, step=1e-6):
    found = np.empty_like(at)
    for i in range(len(at)):
        move = np.zeros_like(at)
        move[i] = step
        found[i] = (function(at + move) - function(at - move)) / (2 * step)
    return found


@pytest.mark.parametrize("floor", [0.01, 5e-6])
def test_steps_follow_the_gradient_of_the_papers_objective(floor):
    task = Smooth(torch.float64)
    rate, weight, decay = 0.05, 0.02, 0.01
    local = {"lr": rate, "steps": 4, "batch_size": 8, "momentum": 0.5, "weight_decay": decay}
    fed = federation(task, local, {"n": {"n": 8, "seed": 1}}, kl_weight=weight, dimension=D, min_variance=floor)
    draw = np.random.default_rng(4)
    w, own = fed.state.model, np.array([0.2, -0.1, 0.05, 0.1])
    # Well away from zero, or the variances of p(θ|z) are near the floor and differences of it are all rounding.
    head = draw.normal(0, 0.6, sum(SIZES))
    others = np.array([0.4, -0.3, 0.5, 0.9])
    cavity = (others[:2] / (1 + others[2:]), 1 / (1 + others[2:]))
    message = {"model": w, "natural": others + own}
    done = fed.runners["n"].do(Work("train", 1, message, {"head": head, "natural_k": own}))
    x, labels = (tensor.numpy() for tensor in task.data({"n": 8, "seed": 1}).train.tensors)
    both, speed = np.concatenate([w, head]), np.zeros(w.size + head.size)
    for _ in range(4):
        gradient = slopes(lambda at: objective(at[:27], at[27:], cavity, x, labels, weight, floor), both)
        speed = 0.5 * speed + gradient + decay * both
        both = both - rate * speed
    np.testing.assert_allclose(done.vectors["delta"], both[:27] - w, rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(done.state["head"], both[27:], rtol=1e-6, atol=1e-9)
    # Algorithm 1, line 8, at the end of the round and over all local data.
    m, s = estimate(both[:27], both[27:], cavity, x)
    natural = np.concatenate([m / s - cavity[0] / cavity[1], 1 / s - 1 / cavity[1]])
    np.testing.assert_allclose(done.state["natural_k"], natural, rtol=1e-6)
    np.testing.assert_allclose(done.vectors["delta_natural"], natural - own, rtol=1e-6, atol=1e-9)


def test_the_last_pass_is_over_all_local_data_in_evaluation_mode():
    calls = []

    class Watched(Classes):
        def representation(self, model, batch):
            calls.append((model.training, len(batch[0])))
            return super().representation(model, batch)

    fed = federation(Watched(torch.float64), nodes={"n": {"n": 10, "seed": 1}})
    fed.round()
    assert [training for training, _ in calls] == [True] * 3 + [False] * 3
    assert [size for _, size in calls[3:]] == [4, 4, 2]


def test_the_head_follows_schedule_and_clipping():
    local = {"lr": 0.5, "steps": 3, "batch_size": 8, "max_grad_norm": 1e-3,
             "schedule": {"by": "step", "shape": "step", "every": 1, "ratio": 0.5}}  # fmt: skip
    fed = federation(Smooth(torch.float64), local, {"n": {"n": 8, "seed": 1}}, kl_weight=10.0)
    message = fed.algorithm.broadcast(fed.state)
    start = fed.algorithm.begin(fed.layout, message)["head"]
    moved = fed.runners["n"].do(Work("train", 1, message)).state["head"] - start
    # Gradients are far above the clip, and nearly parallel over three tiny steps.
    assert np.linalg.norm(moved) == pytest.approx(1e-3 * 0.5 * (1 + 0.5 + 0.25), rel=1e-2)


def test_without_weight_it_is_fedavg_with_equal_nodes_on_unequal_ones():
    nodes = {"a": {"n": 5, "seed": 0}, "b": {"n": 11, "seed": 1}}
    fed = federation(nodes=nodes, kl_weight=0.0)
    plain = Federation(configure("fedavg", LOCAL), Classes(torch.float64), nodes)
    for mine, theirs in zip(fed.round(), plain.round(), strict=True):
        np.testing.assert_array_equal(mine.vectors["delta"], theirs.vectors["delta"])
        assert not mine.vectors["delta_natural"].any()


def test_batch_norm_counts_a_batch_once():
    """After one step the buffers are what the batch made of them at w, whatever is added to the loss."""
    local = {**LOCAL, "steps": 1}
    fed, plain = federation(local=local), Federation(configure("fedavg", local), Classes(torch.float64), NODES)
    for mine, theirs in zip(fed.round(), plain.round(), strict=True):
        np.testing.assert_array_equal(mine.vectors["statistic"], theirs.vectors["statistic"])
        assert not np.array_equal(mine.vectors["delta"], theirs.vectors["delta"])


def test_the_classifier_is_named_or_the_last_matrix():
    fed = federation(Classes(torch.float64, {"head.*": "private"}))
    assert fed.algorithm.keeps(fed.layout)["head"] == 6 * 10 + 10 + 10 * 10 + 10 + 10 * 18 + 18
    body = FedNP(FedNPOptions(layer="body.weight"))
    assert body.keeps(Layout.of(Net()))["head"] == 4 * 10 + 10 + 10 * 10 + 10 + 10 * 24 + 24


def test_what_cannot_be_a_classifier_is_refused():
    with pytest.raises(TaskError, match=r"layer = 'norm.weight' is no .*name one of \['body.weight', 'head.weight'\]"):
        layout_of(parse_options({"name": "fednp", "layer": "norm.weight"}), Classes(), Net())

    class Vectors(Quadratic):
        def representation(self, model, batch):
            return batch[0]

    with pytest.raises(TaskError, match=r"needs a last layer.*the model has none"):
        layout_of(parse_options({"name": "fednp"}), Vectors(), Vectors().model())
    fed = federation(layer="body.weight")
    with pytest.raises(TaskError, match=r"returned 6 features a record, but the layer 'body.weight' takes 4"):
        fed.runners["n0"].do(Work("train", 1, fed.algorithm.broadcast(fed.state)))


def test_a_buffer_is_no_classifier():
    class Buffered(Classes):
        def model(self):
            model = super().model()
            model.register_buffer("codes", torch.zeros(3, 6, dtype=torch.float64))
            return model

    fed = federation(Buffered(torch.float64, {"codes": "private"}), layer="codes")
    with pytest.raises(TaskError, match=r"'codes' is no parameter.*algorithm\.layer"):
        fed.runners["n0"].do(Work("train", 1, fed.algorithm.broadcast(fed.state)))


@pytest.mark.parametrize("unit", ["record", "patient", "site"])
def test_privacy_is_refused_by_every_unit(unit):
    privacy = {"unit": unit, "clip": 1.0, "noise_multiplier": 1.0, "delta": 1e-5}
    privacy |= {"mechanism": "central"} if unit == "site" else {"sampling_rate": 0.1}
    with pytest.raises(ConfigError, match=f"'fednp' with privacy.unit = '{unit}': .*natural parameters.*or remove"):
        configure(
            "fednp", {"lr": 0.1, "steps": 2}, privacy=privacy, secure_sum={"enabled": True}, evaluation={"every": 0}
        )


def test_the_servers_half_reads_the_number_of_replies():
    fed = federation()
    groups = {name: np.zeros(fed.layout.extent(extent)[0]) for name, extent in fed.algorithm.sends(fed.layout).items()}
    groups["delta_natural"] += 0.1
    after = fed.algorithm.server(fed.state, Update(groups, 3.0), Cohort(1, 5, 4, 3))
    np.testing.assert_allclose(after.vectors["natural"], 0.3, rtol=1e-12)


class Named(Classes):
    metric_names = ("accuracy",)


class Lost(Faults):
    """n1's part of round 2 never arrives."""

    def __init__(self, purpose):
        self._purpose = purpose

    def answers(self, name, request, reply):
        return None if (name, request.round, request.purpose) == ("n1", 2, self._purpose) else reply


def test_a_secure_run_ends_where_a_plain_one_does_with_a_drop_out(tmp_path):
    secure_config = configure("fednp", LOCAL, secure_sum={"enabled": True}).model_copy(update={"rounds": 4})
    sum_options = secure_config.secure_sum.model_copy(update={"enabled": False})
    plain_config = secure_config.model_copy(update={"secure_sum": sum_options})
    plain = simulate(plain_config, Named(), NODES, RunPaths(tmp_path / "plain"), faults=Lost(Purpose.TRAIN))
    secure = simulate(secure_config, Named(), NODES, RunPaths(tmp_path / "secure"), faults=Lost(Purpose.MASK))
    assert plain.status == secure.status == "finished" and plain.state.round == secure.state.round == 4
    for name, vector in plain.state.vectors.items():
        np.testing.assert_allclose(secure.state.vectors[name], vector, atol=2e-3, err_msg=name)
    assert np.abs(plain.state.vectors["natural"]).max() > 0.01
