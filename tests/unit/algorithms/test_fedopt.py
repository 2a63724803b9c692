"""Server optimisers against Flower's own, on random updates."""

from __future__ import annotations

import numpy as np
import pytest
from fedward_common.algorithms.base import Cohort, ServerState
from fedward_common.algorithms.registry import ALGORITHMS
from fedward_common.update import Update
from flwr.common import Array, ArrayRecord
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedYogi

ROUNDS, LENGTH = 6, 7
COHORT = Cohort(1, 3, 3, 3)


def ours(options, state, deltas):
    """The models after each of `deltas`."""
    kind = ALGORITHMS[options["name"]]
    algorithm = kind(kind.Options.model_validate(options))
    state = algorithm.initial(None, state)
    models = []
    for delta in deltas:
        state = algorithm.server(state, Update({"delta": delta}, 3.0), COHORT)
        models.append(state.model)
    assert state.round == len(deltas)
    return models


def flowers(strategy, monkeypatch, start, deltas, correction=lambda round_: 1.0):
    """The models of a Flower strategy that is fed the same mean updates, its own bias correction divided out."""
    w, models = start, []
    for round_, delta in enumerate(deltas, 1):
        mean = ArrayRecord({"w": Array(w + delta)})
        monkeypatch.setattr(FedAvg, "aggregate_train", lambda *_, mean=mean: (mean, None))
        strategy.current_arrays = (
            ArrayRecord({"w": Array(w)}) if isinstance(strategy, FedAvgM) else {"w": w.copy()}
        )
        arrays, _ = strategy.aggregate_train(round_, [])
        w = w + (arrays["w"].numpy() - w) / correction(round_)
        models.append(w)
    return models


@pytest.fixture
def start():
    return np.random.default_rng(1).normal(size=LENGTH)


@pytest.fixture
def deltas():
    # Scales from far below to far above τ, so that v's sign in Yogi goes both ways.
    generator = np.random.default_rng(2)
    return [generator.normal(size=LENGTH) * 10.0 ** generator.integers(-5, 1) for _ in range(ROUNDS)]


def agree(mine, theirs):
    # Theirs forms Δ as (w + Δ) − w, which costs a few bits.
    for a, b in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)


def test_fedavgm(start, deltas, monkeypatch):
    theirs = flowers(FedAvgM(server_learning_rate=0.7, server_momentum=0.9), monkeypatch, start, deltas)
    mine = ours({"name": "fedavgm", "server_lr": 0.7, "server_momentum": 0.9}, {"model": start}, deltas)
    agree(mine, theirs)


BETA1, BETA2, TAU, ETA = 0.8, 0.95, 1e-3, 0.05
SECOND = {"fedadam": FedAdam, "fedyogi": FedYogi}


@pytest.mark.parametrize("name", sorted(SECOND))
def test_adam_and_yogi(name, start, deltas, monkeypatch):
    strategy = SECOND[name](eta=ETA, beta_1=BETA1, beta_2=BETA2, tau=TAU)
    strategy.v_t = {"w": np.full(LENGTH, TAU**2)}  # the paper's v₀; Flower starts at 0

    def bias(round_):
        return np.sqrt(1 - BETA2 ** (round_ + 1.0)) / (1 - BETA1 ** (round_ + 1.0))

    theirs = flowers(strategy, monkeypatch, start, deltas, bias if name == "fedadam" else lambda _: 1.0)
    options = {"name": name, "server_lr": ETA, "beta1": BETA1, "beta2": BETA2, "tau": TAU}
    agree(ours(options, {"model": start}, deltas), theirs)


def test_adagrad(start, deltas, monkeypatch):
    strategy = FedAdagrad(eta=ETA, tau=TAU)
    strategy.v_t = {"w": np.full(LENGTH, TAU**2)}
    theirs = flowers(strategy, monkeypatch, start, deltas)
    agree(ours({"name": "fedadagrad", "server_lr": ETA, "tau": TAU}, {"model": start}, deltas), theirs)


def test_no_bias_correction_in_the_first_round():
    """After one update: m = (1 − β₁) Δ, not Δ."""
    [w] = ours(
        {"name": "fedadam", "server_lr": 1.0, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3},
        {"model": np.zeros(1)},
        [np.ones(1)],
    )
    assert w[0] == pytest.approx(0.1 / (np.sqrt(0.99e-6 + 0.01) + 1e-3))


@pytest.mark.parametrize("name", ["fedavgm", "fedadam", "fedyogi", "fedadagrad"])
def test_float_buffers_are_averaged_and_never_optimised(name):
    kind = ALGORITHMS[name]
    algorithm = kind(kind.Options(name=name))
    vectors = {"model": np.ones(3, np.float32), "statistic": np.array([1.0, 2.0], np.float32)}
    state = algorithm.initial(None, vectors)
    mean = Update({"delta": np.full(3, 0.3), "statistic": np.array([0.5, -1.0])}, 1.0)
    for _ in range(3):
        state = algorithm.server(ServerState({**state.vectors, "statistic": vectors["statistic"]}), mean, COHORT)
        np.testing.assert_array_equal(state.vectors["statistic"], np.array([1.5, 1.0], np.float32))


def test_moments_are_computed_in_float64():
    """Δ² = 1e-50 underflows in float32, and the step would be Δ/τ; the stored vectors keep the model's dtype."""
    kind = ALGORITHMS["fedadam"]
    algorithm = kind(kind.Options(name="fedadam", beta1=0.0, beta2=0.0, server_lr=1.0, tau=1e-26))
    state = algorithm.initial(None, {"model": np.zeros(1, np.float32)})
    state = algorithm.server(state, Update({"delta": np.array([1e-25])}, 1.0), COHORT)
    assert state.model[0] == pytest.approx(1e-25 / (1e-25 + 1e-26))
    assert {vector.dtype for vector in state.vectors.values()} == {np.dtype(np.float32)}
