"""FedDC: its rounds by hand, the optimum of quadratics, and what server and nodes must agree on."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from fedward_common.algorithms.base import Cohort
from fedward_common.errors import ConfigError
from fedward_common.messages import Purpose, Reason, Request
from fedward_common.node import Participant
from fedward_common.update import Kind, Update
from fedward_common.work import Work
from small_federation import Classes, Federation, Quadratic, configure

CURVATURE = np.array([0.2, 0.4, 1.0])
OPTIMA = np.array([-1.6, 0.0, 1.6])
BEST = float(CURVATURE @ OPTIMA / CURVATURE.sum())
NODES = {f"n{i}": {"a": [a], "b": [b]} for i, (a, b) in enumerate(zip(CURVATURE, OPTIMA, strict=True))}


def federation(alpha=0.1, **local):
    table = {"name": "feddc", "alpha": alpha}
    return Federation(configure(table, {"lr": 0.1, "steps": 8, **local}), Quadratic([3.0]), NODES)


def sampled(fed, rounds, size, seed=0):
    chance = random.Random(seed)
    for _ in range(rounds):
        fed.round(chance.sample(sorted(fed.nodes), size))
    return fed


@pytest.mark.parametrize("alpha", [0.0, 0.01, 0.1, 1.0])
def test_reaches_the_optimum_of_quadratics(alpha):
    fed = federation(alpha, lr=0.5)
    for _ in range(35):
        fed.round()
    assert abs(fed.state.model[0] - BEST) < 1e-6
    # There no node drifts any more: c and h̄ are zero, and each h_i still holds its own drift.
    np.testing.assert_allclose([fed.state.vectors["c"][0], fed.state.vectors["h"][0]], 0, atol=1e-6)


@pytest.mark.parametrize("alpha", [0.1, 1.0])
def test_reaches_it_with_two_of_three_nodes_a_round(alpha):
    fed = sampled(federation(alpha, lr=0.5), 50, 2)
    assert abs(fed.state.model[0] - BEST) < 1e-6


def test_reaches_the_decayed_optimum_with_momentum():
    fed = federation(0.1, momentum=0.5, weight_decay=0.1, lr=0.2)
    for _ in range(45):
        fed.round()
    assert abs(fed.state.model[0] - CURVATURE @ OPTIMA / (CURVATURE.sum() + 0.3)) < 1e-6


@pytest.mark.parametrize("cohort", [["n0"], ["n0", "n2"], ["n0", "n1", "n2"]])
def test_the_first_round_without_a_penalty_is_fedavg_and_the_drift(cohort):
    """w₀ + (1 + |S|/N) mean Δ, Δ being FedAvg's: h_i, c_i and c are still zero."""
    fed = federation(0.0, steps=7)
    shrink = (1 - 0.1 * CURVATURE) ** 7
    delta = ((1 - shrink) * (OPTIMA - 3.0))[[int(name[1]) for name in cohort]]
    fed.round(cohort)
    assert fed.state.model[0] == pytest.approx(3.0 + (1 + len(cohort) / 3) * delta.mean(), rel=1e-13)


def test_without_penalty_and_control_variates_it_is_fedavg_and_the_drift_for_good():
    """α = 0 and c = c_i = 0 on every node: the local steps are FedAvg's bit for bit, from any h_i."""
    fed = federation(0.0, steps=7, momentum=0.4)
    plain = Federation(configure("fedavg", {"lr": 0.1, "steps": 7, "momentum": 0.4}), Quadratic([3.0]), NODES)
    message = {**fed.algorithm.broadcast(fed.state), "c": np.zeros(1)}
    mine = fed.runners["n2"].do(Work("train", 1, message, {"h_i": np.array([5.0]), "c_i": np.zeros(1)}))
    theirs = plain.runners["n2"].do(Work("train", 1, plain.algorithm.broadcast(plain.state)))
    np.testing.assert_array_equal(mine.vectors["delta"], theirs.vectors["delta"])
    np.testing.assert_array_equal(mine.state["h_i"], 5.0 + mine.vectors["delta"])


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.6, 0.2)])
def test_rounds_by_hand(momentum, decay):
    """Some rounds of changing cohorts, written without this code, from the objective's gradient."""
    alpha, eta, steps = 0.7, 0.05, 6
    fed = federation(alpha, lr=eta, steps=steps, momentum=momentum, weight_decay=decay)
    w, c, h, c_i = 3.0, 0.0, np.zeros(3), np.zeros(3)
    for cohort in ([0, 1, 2], [1], [0, 2], [0, 1, 2], [2], [0, 1]):
        delta, new = {}, c_i.copy()
        for i in cohort:
            y, v, weight, mass = w, 0.0, 0.0, 0.0
            for _ in range(steps):
                loss = CURVATURE[i] * (y - OPTIMA[i]) + decay * y
                v = momentum * v + loss + alpha * (y - (w - h[i])) + (c - c_i[i])
                y -= eta * v
                weight = momentum * weight + 1
                mass += eta * weight
            delta[i] = y - w
            new[i] = c_i[i] - c - delta[i] / mass
        for i in cohort:
            h[i] += delta[i]
        c += (new - c_i).sum() / 3
        c_i = new
        w = np.mean([w + delta[i] for i in cohort]) + h.mean()
        fed.round([f"n{i}" for i in cohort])
        np.testing.assert_allclose(fed.state.model[0], w, rtol=1e-12)
        np.testing.assert_allclose(fed.state.vectors["c"][0], c, rtol=0, atol=1e-12)
        np.testing.assert_allclose(fed.state.vectors["h"][0], h.mean(), rtol=0, atol=1e-12)
    kept = [[fed.kept(name)[key][0] for name in sorted(fed.nodes)] for key in ("h_i", "c_i")]
    np.testing.assert_allclose(kept, [h, c_i], rtol=0, atol=1e-12)


def test_the_local_objective_by_autograd():
    """One plain step goes down the gradient of the whole local objective at any state."""
    fed = federation(0.3, steps=1)
    w, h_i, c_i, c = (torch.tensor([v], dtype=torch.float64) for v in (3.0, -0.8, 0.4, 1.1))
    y = w.clone().requires_grad_()
    whole = 0.5 * CURVATURE[1] * (y - OPTIMA[1]) ** 2 + 0.3 / 2 * (y - (w - h_i)) ** 2 + y * (c - c_i)
    [expected] = torch.autograd.grad(whole.sum(), y)
    message = {**fed.algorithm.broadcast(fed.state), "c": c.numpy()}
    done = fed.runners["n1"].do(Work("train", 1, message, {"h_i": h_i.numpy(), "c_i": c_i.numpy()}))
    np.testing.assert_allclose(done.vectors["delta"], -0.1 * expected.numpy(), rtol=1e-12)


LOCAL = {"lr": 0.05, "steps": 3, "batch_size": 4, "momentum": 0.3}


def classes(dtype=torch.float64, local=LOCAL, **options):
    nodes = {f"n{i}": {"n": 6 + i, "seed": i} for i in range(5)}
    return Federation(configure({"name": "feddc", **options}, local), Classes(dtype), nodes)


def apart(fed):
    """Largest distance of c and h̄ from the means of c_i and h_i over all N nodes."""
    zero = np.zeros(fed.layout.size(Kind.TRAINABLE))
    found = []
    for server, node in (("c", "c_i"), ("h", "h_i")):
        kept = [fed.kept(name).get(node, zero).astype(np.float64) for name in fed.nodes]
        found.append(np.abs(fed.state.vectors[server] - np.mean(kept, axis=0)).max())
    return max(found)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
@pytest.mark.parametrize("local", [LOCAL, {"lr": 0.05, "epochs": 2, "batch_size": 3}])
def test_server_and_nodes_agree_whatever_is_lost(local, dtype, tolerance):
    fed = classes(dtype, local, max_corrected_norm=5.0 if "epochs" in local else None)
    chance = random.Random(7)
    losses = 0
    for _ in range(40):
        cohort = chance.sample(sorted(fed.nodes), 3)
        lost = {name for name in cohort if chance.random() < 0.3}
        restarted = chance.choice(cohort)
        fed.nodes[restarted] = Participant(fed.config, fed.stores[restarted], fed.runners[restarted].do)
        losses += len(lost)
        fed.round(cohort, lost)
        assert apart(fed) < tolerance
    assert losses > 20
    assert min(np.abs(fed.state.vectors[name]).max() for name in ("c", "h")) > 1e-3
    for name, node in fed.nodes.items():
        reply = node.handle(Request(Purpose.FINISH, "run", included=fed.included.get(name)))
        assert reply.failure is None
    assert apart(fed) < tolerance


def test_a_lost_reply_keeps_the_old_state_and_mutates_nothing():
    fed = classes()
    fed.round()
    fed.round()
    before = {key: vector.copy() for key, vector in fed.kept("n0").items()}
    fed.round(lost={"n0"})
    fed.ask("n0")
    for key, vector in before.items():
        np.testing.assert_array_equal(fed.stores["n0"].committed()[1][key], vector)


def test_c_and_drift_move_by_replied_over_enrolled():
    fed = classes()
    size = fed.layout.size(Kind.TRAINABLE)
    groups = {"delta": np.full(size, 2.0), "delta_c": np.full(size, 3.0)}
    groups["statistic"] = np.zeros(fed.layout.size(Kind.STATISTIC))
    after = fed.algorithm.server(fed.state, Update(groups, 2.0), Cohort(1, 5, 4, 2))
    np.testing.assert_allclose(after.vectors["h"], 0.8)
    np.testing.assert_allclose(after.vectors["c"], 1.2)
    np.testing.assert_allclose(after.model, fed.state.model + 2.8)


def test_control_variates_follow_from_the_mean_change_with_equal_steps():
    fed = classes()
    assert set(fed.algorithm.summed(fed.layout, fed.config.local)) == {"delta", "statistic"}
    for _ in range(3):
        before = fed.state
        replies = fed.round()
        groups = {
            name: np.mean([reply.vectors[name] for reply in replies], axis=0) for name in ("delta", "delta_c")
        }
        completed = fed.algorithm.completed(before, Update({"delta": groups["delta"]}, 5.0), fed.config.local)
        np.testing.assert_allclose(completed.groups["delta_c"], groups["delta_c"], rtol=0, atol=1e-13)


def test_clipping_is_of_the_whole_corrected_gradient():
    table = {"name": "feddc", "max_corrected_norm": 0.5}
    fed = Federation(configure(table, {"lr": 0.1, "steps": 1}), Quadratic([3.0]), NODES)
    message = {**fed.algorithm.broadcast(fed.state), "c": np.array([40.0])}
    done = fed.runners["n1"].do(Work("train", 1, message, {"h_i": np.array([90.0]), "c_i": np.zeros(1)}))
    np.testing.assert_allclose(np.abs(done.vectors["delta"]), 0.05, rtol=1e-5)


def test_refusals():
    with pytest.raises(ConfigError, match=r"local\.epochs = 2 .*FedDC.*local\.steps.*max_corrected_norm"):
        configure("feddc", {"lr": 0.1, "epochs": 2})
    options = configure("feddc", {"lr": 0.1, "steps": 2}).algorithm
    assert "means would part" in options.check_privacy("site")
    assert options.check_privacy("record") is options.check_privacy("patient") is None


def test_a_node_that_lost_its_state_is_told_apart():
    fed = classes()
    fed.round()
    fed.stores["n0"].drop_pending()
    reply = fed.ask("n0")
    assert reply.failure is not None and reply.failure.reason is Reason.STATE_DIVERGED
