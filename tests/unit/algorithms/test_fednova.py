"""FedNova: the accumulation in closed form and by brute force, its weights, and where it ends with unequal steps."""

from __future__ import annotations

import random

import numpy as np
import pytest
from fedward_common.algorithms.base import Cohort
from fedward_common.algorithms.fednova import accumulation
from fedward_common.algorithms.local_options import LocalOptions
from fedward_common.errors import ConfigError
from fedward_common.messages import Purpose, Request
from fedward_common.update import Update
from fedward_common.work import Work
from small_federation import Classes, Federation, Quadratic, configure

SCHEDULES = [
    None,
    {"shape": "cyclical", "by": "step", "half_cycle": 3},
    {"shape": "cosine", "by": "step", "period": 9},
    {"shape": "step", "by": "round", "every": 2, "ratio": 0.5},
]


def options(lr=0.1, momentum=0.0, schedule=None):
    return LocalOptions.model_validate({"lr": lr, "momentum": momentum, "steps": 1, "schedule": schedule})


def coefficients(local, mu, round_, steps):
    """a_j, each from a run of the recursion in which the loss's gradient is 1 in step j and 0 in all others."""
    found = []
    for pulse in range(steps):
        y, velocity = 0.0, 0.0
        for step in range(steps):
            velocity = local.momentum * velocity + float(step == pulse) + mu * y
            y -= local.rate(round_, step) * velocity
        found.append(-y / local.lr)
    return np.array(found)


@pytest.mark.parametrize("tau", [1, 2, 7, 100])
def test_accumulation_of_plain_steps_is_their_number(tau):
    assert accumulation(options(), 0.0, 1, tau) == pytest.approx(tau, rel=1e-15)


@pytest.mark.parametrize("tau", [1, 2, 7, 100])
@pytest.mark.parametrize("rho", [0.3, 0.9])
def test_accumulation_with_momentum_is_the_papers(rho, tau):
    closed = (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)
    assert accumulation(options(momentum=rho), 0.0, 1, tau) == pytest.approx(closed, rel=1e-12)


@pytest.mark.parametrize("tau", [1, 2, 7, 100])
@pytest.mark.parametrize("mu", [0.01, 1.0, 9.9])
def test_accumulation_with_a_proximal_term_is_the_papers(mu, tau):
    closed = (1 - (1 - 0.1 * mu) ** tau) / (0.1 * mu)
    assert accumulation(options(), mu, 1, tau) == pytest.approx(closed, rel=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("rho", "share"), [(0.0, 0.5), (0.5, 1.0), (0.9, 0.3), (0.9, 1.0)])
def test_accumulation_is_the_l1_norm_of_all_weights_together(rho, share, schedule):
    """share: of the largest μ that is not refused."""
    local = options(momentum=rho, schedule=schedule)
    mu = share * (1 - rho**0.5) ** 2 / local.lr
    for round_ in (1, 4):
        weights = coefficients(local, mu, round_, 40)
        assert weights.min() > -1e-12
        assert accumulation(local, mu, round_, 40) == pytest.approx(np.abs(weights).sum(), rel=1e-10)


def test_a_pull_that_swings_is_refused_since_weights_then_cancel():
    limit = (1 - 0.9**0.5) ** 2 / 0.1
    assert coefficients(options(momentum=0.9), 1.5 * limit, 1, 200).min() < 0
    with pytest.raises(ConfigError, match=r"algorithm\.mu = 0\.04 .*momentum = 0\.9.*lower mu to 0\.026"):
        configure({"name": "fednova", "mu": 0.04}, {"lr": 0.1, "steps": 2, "momentum": 0.9})
    configure({"name": "fednova", "mu": 0.026}, {"lr": 0.1, "steps": 2, "momentum": 0.9})
    with pytest.raises(ConfigError, match=r"lower mu to 10,"):
        configure({"name": "fednova", "mu": 10.1}, {"lr": 0.1, "steps": 2})


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_without_a_pull_accumulation_is_the_mass_of_training(schedule):
    from fedward_common.algorithms.training import train

    local = {"lr": 0.1, "steps": 11, "momentum": 0.7, "schedule": schedule}
    fed = Federation(configure("fednova", local), Quadratic([1.0]), {"n": {"a": [1.0], "b": [0.0]}})
    runner = fed.runners["n"]
    trained = train(runner._local(Work("train", 3), 3), fed.algorithm.broadcast(fed.state))
    assert accumulation(fed.config.local, 0.0, 3, 11) == pytest.approx(trained.mass / 0.1, rel=1e-12)


def rows(a, b, n):
    return {"a": [a] * n, "b": [b] * n}


SPREAD = {"one": rows(0.5, -1.0, 1), "few": rows(1.0, 0.5, 5), "many": rows(0.3, 2.0, 50)}
"""One pass in batches of one: 1, 5 and 50 steps."""


def ends(algorithm, rounds=6):
    fed = Federation(configure(algorithm, {"lr": 1e-4, "epochs": 1, "batch_size": 1}), Quadratic([0.0]), SPREAD)
    for _ in range(rounds):
        fed.round()
    return fed.state.model[0]


def test_steps_from_1_to_50_end_at_the_optimum_where_fedavg_is_biased():
    n, a, b = np.array([1, 5, 50]), np.array([0.5, 1.0, 0.3]), np.array([-1.0, 0.5, 2.0])
    best = (n * a) @ b / (n * a).sum()
    # The server's rate moves no fixed point; it makes up for the small η. FedAvg weighs node i by n_i K_i, K_i = n_i.
    biased = (n * n * a) @ b / (n * n * a).sum()
    assert abs(ends({"name": "fednova", "server_lr": 600.0}) - best) < 1e-3
    assert ends({"name": "fedavg", "server_lr": 600.0}) == pytest.approx(biased, abs=1e-3)
    assert abs(biased - best) > 0.2


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("mu", [0.0, 0.02])
def test_the_optimum_does_not_hang_on_momentum_or_pull(momentum, mu):
    local = {"lr": 1e-4, "epochs": 1, "batch_size": 1, "momentum": momentum}
    table = {"name": "fednova", "server_lr": 70.0 if momentum else 600.0, "mu": mu}
    fed = Federation(configure(table, local), Quadratic([0.0]), SPREAD)
    for _ in range(6):
        fed.round()
    n, a, b = np.array([1, 5, 50]), np.array([0.5, 1.0, 0.3]), np.array([-1.0, 0.5, 2.0])
    assert fed.state.model[0] == pytest.approx((n * a) @ b / (n * a).sum(), abs=4e-3 if momentum else 1e-3)


def test_one_round_by_hand():
    """Unequal n_i and K_i, momentum, pull and decay, in plain floats."""
    eta, rho, mu, decay, start = 0.05, 0.3, 0.9, 0.1, 3.0
    local = {"lr": eta, "momentum": rho, "weight_decay": decay, "epochs": 2, "batch_size": 2}
    nodes = {"x": (0.4, -1.0, 3), "y": (1.0, 2.0, 9)}
    table = {"name": "fednova", "mu": mu, "server_lr": 0.7}
    fed = Federation(configure(table, local), Quadratic([start]), {k: rows(*v) for k, v in nodes.items()})
    normalised, norms, total = 0.0, 0.0, 3 + 9
    for a, b, n in nodes.values():
        # A lonely last example joins the batch before it.
        steps = 2 * (n // 2)
        y, v, probe, pv = start, 0.0, 0.0, 0.0
        for _ in range(steps):
            v = rho * v + a * (y - b) + decay * y + mu * (y - start)
            y -= eta * v
            pv = rho * pv + 1 + mu * probe
            probe -= eta * pv
        norm = -probe / eta
        normalised += n / total * (y - start) / norm
        norms += n / total * norm
    fed.round()
    assert fed.state.model[0] == pytest.approx(start + 0.7 * norms * normalised, rel=1e-13)


def test_equal_steps_are_fedavg_whatever_the_sizes():
    nodes = {f"n{i}": {"n": 5 + 7 * i, "seed": i} for i in range(3)}
    local = {"lr": 0.1, "steps": 4, "batch_size": 3, "momentum": 0.9}
    nova, plain = (Federation(configure(name, local), Classes(), nodes) for name in ("fednova", "fedavg"))
    for _ in range(3):
        nova.round()
        plain.round()
        np.testing.assert_allclose(nova.state.model, plain.state.model, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(nova.state.vectors["statistic"], plain.state.vectors["statistic"], rtol=1e-4)


def test_with_equal_steps_the_pull_is_fedproxs():
    nodes = {f"n{i}": rows(1.0 + i, float(i), 2 + i) for i in range(3)}
    local = {"lr": 0.05, "steps": 6, "batch_size": 4}
    nova, prox = (
        Federation(configure({"name": name, "mu": 0.7}, local), Quadratic([3.0]), nodes)
        for name in ("fednova", "fedprox")
    )
    for _ in range(5):
        nova.round()
        prox.round()
        np.testing.assert_allclose(nova.state.model, prox.state.model, rtol=1e-12)


def test_weights_are_of_the_cohort_not_of_all_nodes():
    """A common implementation weighs by 1/m and multiplies by N/m: right on average over cohorts of equal nodes only,
    and twice the step or none in a given round."""
    fed = Federation(configure("fednova", {"lr": 0.1, "epochs": 1, "batch_size": 1}), Quadratic([0.0]), SPREAD)
    replies = fed.round(["one", "few"])
    sums = [(r.weight, r.vectors["delta"][0], r.vectors["accumulation"][0]) for r in replies]
    assert [(w, k) for w, _, k in sums] == [(1, 1), (5, 5)]
    total = sum(w for w, _, _ in sums)
    expected = sum(w * k for w, _, k in sums) / total * sum(w * d for w, d, _ in sums) / total
    np.testing.assert_allclose(fed.state.model, expected, rtol=1e-12)
    # Replied, enrolled and selected are of no account to the mean.
    mean = Update({"delta": np.array([2.0]), "accumulation": np.array([3.0])}, 6.0)
    moved = [fed.algorithm.server(fed.state, mean, Cohort(2, n, 2, 1)).model[0] for n in (2, 100)]
    assert moved == [fed.state.model[0] + 6.0] * 2


def test_partial_work_counts_by_what_was_done():
    fed = Federation(configure("fednova", {"lr": 0.1, "steps": 9}), Quadratic([3.0]), {"n": rows(1.0, 0.0, 1)})
    done = fed.runners["n"].do(Work("train", 1, fed.algorithm.broadcast(fed.state), seconds=0.0))
    assert done.info == {"steps": 1, "complete": False}
    assert done.vectors["accumulation"] == [1.0]
    np.testing.assert_allclose(done.vectors["delta"], [-0.1 * 3.0], rtol=1e-12)


def test_a_lost_reply_leaves_nothing_behind():
    nodes = {f"n{i}": {"n": 6 + i, "seed": i} for i in range(3)}
    lossy, clean = (
        Federation(configure("fednova", {"lr": 0.1, "epochs": 2, "batch_size": 4}), Classes(), nodes) for _ in range(2)
    )
    chance = random.Random(3)
    for _ in range(8):
        lost = {name for name in nodes if chance.random() < 0.4}
        lossy.round(lost=lost)
        arrived = [name for name in nodes if name not in lost]
        if arrived:
            clean.round(arrived)
    assert lossy.state.round == clean.state.round > 4
    assert lossy.state.model.tobytes() == clean.state.model.tobytes()
    assert lossy.nodes["n0"].handle(Request(Purpose.FINISH, "run", included=lossy.included["n0"])).failure is None


def test_the_accumulation_follows_where_all_do_the_same_steps():
    local = {"lr": 0.1, "momentum": 0.5, "schedule": {"shape": "cosine", "by": "step", "period": 6}}
    table = {"name": "fednova", "mu": 0.4}
    same = Federation(configure(table, {**local, "steps": 5}), Quadratic([3.0]), SPREAD)
    assert set(same.algorithm.summed(same.layout, same.config.local)) == {"delta"}
    for more in ({"steps": 5, "max_seconds": 9.0}, {"epochs": 1}):
        fed = Federation(configure(table, {**local, **more}), Quadratic([3.0]), SPREAD)
        assert fed.algorithm.summed(fed.layout, fed.config.local)["accumulation"] == 1
    for _ in range(3):
        [reply, *_] = same.round()
        before = same.algorithm.completed(
            type(same.state)(same.state.vectors, same.state.round - 1),
            Update({"delta": np.zeros(1)}, 1.0),
            same.config.local,
        )
        np.testing.assert_array_equal(before.groups["accumulation"], reply.vectors["accumulation"])


def test_privacy_by_site_is_refused_with_the_reason():
    options = configure("fednova", {"lr": 0.1, "steps": 2}).algorithm
    assert "choose fedavg or fedprox" in options.check_privacy("site")
    assert options.check_privacy("record") is options.check_privacy("patient") is None
