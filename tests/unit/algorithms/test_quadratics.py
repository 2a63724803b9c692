"""Three quadratics with different optima: what FedAvg, FedProx and SCAFFOLD do is known in closed form."""

from __future__ import annotations

import numpy as np
import pytest
from fedward_common.work import Work
from small_federation import Federation, Quadratic, configure

CURVATURE = np.array([0.2, 0.4, 1.0])
OPTIMA = np.array([-1.6, 0.0, 1.6])
LR, STEPS, ROUNDS = 0.1, 50, 200
BEST = float(CURVATURE @ OPTIMA / CURVATURE.sum())


def federation(algorithm, **local):
    nodes = {f"n{i}": {"a": [a], "b": [b]} for i, (a, b) in enumerate(zip(CURVATURE, OPTIMA, strict=True))}
    return Federation(configure(algorithm, {"lr": LR, "steps": STEPS, **local}), Quadratic([3.0]), nodes)


def run(algorithm, rounds=ROUNDS, **local):
    fed = federation(algorithm, **local)
    for _ in range(rounds):
        fed.round()
    return fed


@pytest.mark.slow
def test_fedavg_stalls_where_theory_says():
    # After K steps node i is at b_i + r_i (w − b_i) with r_i = (1 − η a_i)^K; the mean of that fixes w.
    r = (1 - LR * CURVATURE) ** STEPS
    stall = float(((1 - r) @ OPTIMA) / (1 - r).sum())
    w = run("fedavg").state.model[0]
    assert w == pytest.approx(stall, abs=1e-12)
    assert abs(w - BEST) == pytest.approx(0.57, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffold_reaches_the_optimum(option):
    w = run({"name": "scaffold", "option": option}).state.model[0]
    assert abs(w - BEST) < 1e-9


@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffold_follows_the_papers_algorithm(option):
    """Algorithm 1 in plain floats, every node in every round, written without this code."""
    w, c, c_i = 3.0, 0.0, [0.0, 0.0, 0.0]
    fed = federation({"name": "scaffold", "option": option, "server_lr": 0.8}, steps=7)
    for _ in range(20):
        y, new = [], []
        for a, b, own in zip(CURVATURE, OPTIMA, c_i, strict=True):
            local = w
            for _ in range(7):
                local -= LR * (a * (local - b) - own + c)
            y.append(local)
            new.append(a * (w - b) if option == "I" else own - c + (w - local) / (7 * LR))
        w += 0.8 * (sum(y) / 3 - w)
        c += sum(n - o for n, o in zip(new, c_i, strict=True)) / 3
        c_i = new
        fed.round()
        np.testing.assert_allclose(fed.state.model[0], w, rtol=1e-11)
        np.testing.assert_allclose(fed.state.vectors["c"][0], c, rtol=0, atol=1e-11)
        np.testing.assert_allclose([fed.kept(name)["c_i"][0] for name in fed.nodes], c_i, rtol=0, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffold_with_momentum_and_decay_reaches_the_decayed_optimum(option):
    decay = 0.1
    local = {"momentum": 0.5, "weight_decay": decay, "lr": 0.02, "steps": 10}
    w = run({"name": "scaffold", "option": option}, 150, **local).state.model[0]
    best = float(CURVATURE @ OPTIMA / (CURVATURE.sum() + 3 * decay))
    assert abs(w - best) < 1e-9


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_options_agree_at_one_full_batch_step(decay):
    first, second = (
        federation({"name": "scaffold", "option": option}, steps=1, weight_decay=decay) for option in ("I", "II")
    )
    for _ in range(30):
        first.round()
        second.round()
        np.testing.assert_allclose(first.state.model, second.state.model, rtol=0, atol=1e-12)
        np.testing.assert_allclose(first.state.vectors["c"], second.state.vectors["c"], rtol=0, atol=1e-12)


def test_options_differ_at_more_steps():
    first, second = (run({"name": "scaffold", "option": option}, 2) for option in ("I", "II"))
    assert abs(first.state.vectors["c"] - second.state.vectors["c"])[0] > 1e-3


def test_option_two_follows_the_learning_rate():
    """With another η the control variate of one step is still the gradient at w."""
    for lr in (0.1, 0.01):
        fed = run({"name": "scaffold", "option": "II"}, 1, lr=lr, steps=1)
        for i, name in enumerate(fed.nodes):
            np.testing.assert_allclose(fed.kept(name)["c_i"], CURVATURE[i] * (3.0 - OPTIMA[i]), rtol=1e-9)


def test_option_two_counts_steps_not_epochs():
    """Two epochs of three batches are six steps: c_i is the average of the six gradients."""
    rows = {"a": [2.0] * 6, "b": [0.5] * 6}
    table = {"name": "scaffold", "option": "II", "max_corrected_norm": 1e6}
    fed = Federation(configure(table, {"lr": 0.1, "epochs": 2, "batch_size": 2}), Quadratic([3.0]), {"n": rows})
    fed.round()
    gradients = [2.0 * 2.5 * 0.8**k for k in range(6)]
    np.testing.assert_allclose(fed.kept("n")["c_i"], np.mean(gradients), rtol=1e-12)


def test_clipping_bounds_the_corrected_step():
    fed = run({"name": "scaffold", "max_corrected_norm": 0.5}, 1, steps=1)
    assert abs(fed.state.model[0] - 3.0) == pytest.approx(LR * 0.5, rel=1e-5)


def test_warm_start_is_fedavg_then_control_variates_move():
    warm = federation({"name": "scaffold", "warm_start_rounds": 3})
    plain = federation("fedavg")
    for _ in range(3):
        warm.round()
        plain.round()
        assert warm.state.model[0] == plain.state.model[0]
        assert warm.state.vectors["c"][0] == 0
        assert all(warm.kept(name)["c_i"][0] == 0 for name in warm.nodes)
    warm.round()
    assert warm.state.vectors["c"][0] != 0
    for _ in range(30):
        warm.round()
    assert abs(warm.state.model[0] - BEST) < 1e-3


def test_server_learning_rate_scales_the_mean_change():
    for name in ("fedavg", "fedprox", "scaffold"):
        full, half = run(name, 1), run({"name": name, "server_lr": 0.5}, 1)
        np.testing.assert_allclose(half.state.model - 3.0, (full.state.model - 3.0) / 2, rtol=1e-12)


def test_fedprox_closed_form():
    # Node i contracts towards (a_i b_i + μ w)/(a_i + μ) by 1 − η(a_i + μ) a step.
    mu, w = 0.7, 3.0
    target = (CURVATURE * OPTIMA + mu * w) / (CURVATURE + mu)
    y = target + (1 - LR * (CURVATURE + mu)) ** 7 * (w - target)
    fed = run({"name": "fedprox", "mu": mu}, 1, steps=7)
    assert fed.state.model[0] == pytest.approx(y.mean(), abs=1e-12)


def test_fedprox_with_no_pull_is_fedavg_bit_for_bit():
    prox, plain = run({"name": "fedprox", "mu": 0.0}, 5), run("fedavg", 5)
    assert prox.state.model.tobytes() == plain.state.model.tobytes()


def test_fedavg_weights_by_examples():
    nodes = {"small": {"a": [1.0], "b": [0.0]}, "large": {"a": [1.0] * 3, "b": [4.0] * 3}}
    fed = Federation(configure("fedavg", {"lr": 1.0, "steps": 1}), Quadratic([0.0]), nodes)
    fed.round()
    assert fed.state.model[0] == pytest.approx(3.0)


def test_scaffold_weighs_model_and_control_uniformly():
    nodes = {"small": {"a": [1.0], "b": [0.0]}, "large": {"a": [1.0] * 3, "b": [4.0] * 3}}
    fed = Federation(configure("scaffold", {"lr": 1.0, "steps": 1}), Quadratic([0.0]), nodes)
    fed.round()
    assert fed.state.model[0] == pytest.approx(2.0)
    assert fed.state.vectors["c"][0] == pytest.approx(-2.0)


def test_partial_work_counts():
    """A node out of time contributes the one step it did, at its full weight, and its mass says so."""
    fed = federation({"name": "fedprox", "mu": 0.5})
    runner = fed.runners["n0"]
    done = runner.do(Work("train", 1, fed.algorithm.broadcast(fed.state), seconds=0.0))
    assert done.info == {"steps": 1, "complete": False}
    assert done.weight == 1
    np.testing.assert_allclose(done.vectors["delta"], -LR * CURVATURE[0] * (3.0 - OPTIMA[0]), rtol=1e-12)
