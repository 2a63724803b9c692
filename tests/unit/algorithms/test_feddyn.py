"""FedDyn: its rounds by hand, the optimum of quadratics, and what server and nodes must agree on."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from fedward_common.algorithms.base import Cohort
from fedward_common.messages import Purpose, Reason, Request
from fedward_common.node import Participant
from fedward_common.update import Kind, Update
from fedward_common.work import Work
from small_federation import Classes, Federation, Quadratic, configure

CURVATURE = np.array([0.2, 0.4, 1.0])
OPTIMA = np.array([-1.6, 0.0, 1.6])
BEST = float(CURVATURE @ OPTIMA / CURVATURE.sum())
NODES = {f"n{i}": {"a": [a], "b": [b]} for i, (a, b) in enumerate(zip(CURVATURE, OPTIMA, strict=True))}


def federation(alpha=0.3, **local):
    table = {"name": "feddyn", "alpha": alpha}
    return Federation(configure(table, {"lr": 0.1, "steps": 8, **local}), Quadratic([3.0]), NODES)


def test_reaches_the_optimum_of_quadratics_and_each_h_is_a_gradient():
    fed = federation(0.5, lr=0.5)
    for _ in range(30):
        fed.round()
    assert abs(fed.state.model[0] - BEST) < 1e-6
    np.testing.assert_allclose(fed.state.vectors["h"], 0, atol=1e-6)
    found = [fed.kept(name)["h_i"][0] for name in sorted(fed.nodes)]
    np.testing.assert_allclose(found, CURVATURE * (BEST - OPTIMA), atol=1e-6)


def test_reaches_it_with_two_of_three_nodes_a_round():
    fed, chance = federation(1.0, lr=0.5), random.Random(0)
    for _ in range(50):
        fed.round(chance.sample(sorted(fed.nodes), 2))
    assert abs(fed.state.model[0] - BEST) < 1e-6


def test_unequal_steps_end_there_too():
    """The optimum needs no equal K: a fixed point has Δ_i = 0 on every node, however many its steps."""
    quadratics = zip(CURVATURE, OPTIMA, (1, 3, 12), strict=True)
    nodes = {f"n{i}": {"a": [a] * n, "b": [b] * n} for i, (a, b, n) in enumerate(quadratics)}
    table = {"name": "feddyn", "alpha": 0.5}
    fed = Federation(configure(table, {"lr": 0.5, "epochs": 1, "batch_size": 1}), Quadratic([3.0]), nodes)
    for _ in range(70):
        fed.round()
    assert abs(fed.state.model[0] - BEST) < 1e-6


def test_reaches_the_decayed_optimum_with_momentum():
    fed = federation(0.5, momentum=0.5, weight_decay=0.1, lr=0.2)
    for _ in range(45):
        fed.round()
    assert abs(fed.state.model[0] - CURVATURE @ OPTIMA / (CURVATURE.sum() + 0.3)) < 1e-6


@pytest.mark.parametrize("cohort", [["n0"], ["n0", "n2"], ["n0", "n1", "n2"]])
def test_the_first_round_is_fedprox_and_a_share_of_its_step_again(cohort):
    """h_i = 0: y_i is FedProx's, in closed form; −h/α is |S|/N mean Δ."""
    alpha, w = 0.7, 3.0
    fed = federation(alpha, steps=7)
    target = (CURVATURE * OPTIMA + alpha * w) / (CURVATURE + alpha)
    y = target + (1 - 0.1 * (CURVATURE + alpha)) ** 7 * (w - target)
    delta = (y - w)[[int(name[1]) for name in cohort]].mean()
    fed.round(cohort)
    assert fed.state.model[0] == pytest.approx(w + (1 + len(cohort) / 3) * delta, rel=1e-13)
    assert fed.state.vectors["h"][0] == pytest.approx(-alpha * len(cohort) / 3 * delta, rel=1e-13)


def test_exact_local_minima_make_h_the_local_gradient():
    """First-order condition of the local objective: ∇f_i(y_i) = h_i − α(y_i − w), which is the new h_i."""
    fed = federation(0.4, lr=0.5, steps=80)
    for _ in range(3):
        w = fed.state.model[0]
        for name, reply in zip(sorted(fed.nodes), fed.round(), strict=True):
            i = int(name[1])
            y = w + reply.vectors["delta"][0]
            assert fed.kept(name)["h_i"][0] == pytest.approx(CURVATURE[i] * (y - OPTIMA[i]), abs=1e-8)


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.6, 0.2)])
def test_rounds_by_hand(momentum, decay):
    """Some rounds of changing cohorts, written without this code, with h summed as Algorithm 1 has it."""
    alpha, eta, steps = 0.7, 0.05, 6
    fed = federation(alpha, lr=eta, steps=steps, momentum=momentum, weight_decay=decay)
    w, h, h_i = 3.0, 0.0, np.zeros(3)
    for cohort in ([0, 1, 2], [1], [0, 2], [0, 1, 2], [2], [0, 1]):
        y = {}
        for i in cohort:
            x, v = w, 0.0
            for _ in range(steps):
                v = momentum * v + CURVATURE[i] * (x - OPTIMA[i]) + decay * x - h_i[i] + alpha * (x - w)
                x -= eta * v
            y[i] = x
        for i in cohort:
            h_i[i] -= alpha * (y[i] - w)
        h -= alpha / 3 * sum(y[i] - w for i in cohort)
        w = np.mean(list(y.values())) - h / alpha
        fed.round([f"n{i}" for i in cohort])
        np.testing.assert_allclose(fed.state.model[0], w, rtol=1e-12)
        np.testing.assert_allclose(fed.state.vectors["h"][0], h, rtol=0, atol=1e-12)
    np.testing.assert_allclose([fed.kept(name)["h_i"][0] for name in sorted(fed.nodes)], h_i, rtol=0, atol=1e-12)


def test_the_local_objective_by_autograd():
    fed = federation(0.3, steps=2)
    w, h_i = (torch.tensor([v], dtype=torch.float64) for v in (3.0, -0.8))
    y = w.clone()
    for _ in range(2):
        y.requires_grad_()
        whole = 0.5 * CURVATURE[1] * (y - OPTIMA[1]) ** 2 - h_i * y + 0.3 / 2 * (y - w) ** 2
        y = (y - 0.1 * torch.autograd.grad(whole.sum(), y)[0]).detach()
    done = fed.runners["n1"].do(Work("train", 1, fed.algorithm.broadcast(fed.state), {"h_i": h_i.numpy()}))
    np.testing.assert_allclose(done.vectors["delta"], (y - w).numpy(), rtol=1e-12)


LOCAL = {"lr": 0.05, "epochs": 2, "batch_size": 3, "momentum": 0.3}


def classes(dtype=torch.float64):
    nodes = {f"n{i}": {"n": 6 + i, "seed": i} for i in range(5)}
    return Federation(configure({"name": "feddyn", "alpha": 0.2}, LOCAL), Classes(dtype), nodes)


def apart(fed):
    """Largest |h − mean over all N of h_i|."""
    zero = np.zeros(fed.layout.size(Kind.TRAINABLE))
    kept = [fed.kept(name).get("h_i", zero).astype(np.float64) for name in fed.nodes]
    return float(np.abs(fed.state.vectors["h"] - np.mean(kept, axis=0)).max())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_server_and_nodes_agree_whatever_is_lost(dtype, tolerance):
    fed = classes(dtype)
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
    assert np.abs(fed.state.vectors["h"]).max() > 1e-3
    for name, node in fed.nodes.items():
        assert node.handle(Request(Purpose.FINISH, "run", included=fed.included.get(name))).failure is None
    assert apart(fed) < tolerance


def test_a_lost_reply_keeps_the_old_h():
    fed = classes()
    fed.round()
    fed.round()
    before = fed.kept("n0")["h_i"].copy()
    fed.round(lost={"n0"})
    fed.ask("n0")
    np.testing.assert_array_equal(fed.stores["n0"].committed()[1]["h_i"], before)


def test_h_moves_by_replied_over_enrolled():
    fed = classes()
    groups = {"delta": np.full(fed.layout.size(Kind.TRAINABLE), 2.0)}
    groups["statistic"] = np.zeros(fed.layout.size(Kind.STATISTIC))
    after = fed.algorithm.server(fed.state, Update(groups, 2.0), Cohort(1, 5, 4, 2))
    np.testing.assert_allclose(after.vectors["h"], -0.2 * 0.8)
    np.testing.assert_allclose(after.model, fed.state.model + 2.8)


def test_clipping_is_of_the_whole_corrected_gradient():
    table = {"name": "feddyn", "max_corrected_norm": 0.5}
    fed = Federation(configure(table, {"lr": 0.1, "steps": 1}), Quadratic([3.0]), NODES)
    done = fed.runners["n1"].do(Work("train", 1, fed.algorithm.broadcast(fed.state), {"h_i": np.array([90.0])}))
    np.testing.assert_allclose(done.vectors["delta"], 0.05, rtol=1e-5)


def test_privacy_by_site_is_refused_with_the_reason():
    options = configure("feddyn", {"lr": 0.1, "steps": 2}).algorithm
    assert "means would part" in options.check_privacy("site")
    assert options.check_privacy("record") is options.check_privacy("patient") is None


def test_a_node_that_lost_its_state_is_told_apart():
    fed = classes()
    fed.round()
    fed.stores["n0"].drop_pending()
    reply = fed.ask("n0")
    assert reply.failure is not None and reply.failure.reason is Reason.STATE_DIVERGED
