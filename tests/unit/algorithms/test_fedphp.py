"""FedPHP: the inherited model's momentum and what is learnt from it, in plain numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fedward_common.algorithms.fedphp import distillation, mmd
from fedward_common.errors import ConfigError, TaskError
from fedward_common.task import Data
from fedward_common.work import Work
from small_federation import Classes, Federation, Quadratic, configure
from torch import nn
from torch.utils.data import TensorDataset

LOCAL = {"lr": 0.1, "steps": 3, "batch_size": 4}
SITES = {"n0": {"a": [0.4], "b": [-1.0]}, "n1": {"a": [1.5], "b": [2.0]}}
NODES = {f"n{i}": {"n": 7 + 2 * i, "seed": i, "test": 5} for i in range(3)}


def federation(options, task, nodes=NODES, **local):
    return Federation(configure({"name": "fedphp", **options}, {**LOCAL, **local}), task, nodes)


def test_momentum_grows_with_a_nodes_rounds_in_the_sum():
    """p ← μ_t p + (1 − μ_t) y, μ_t = μ min(t/T, 1); t counts what was in a sum, not what was trained."""
    fed = federation({"lam": 0.0, "mu": 0.8, "participations": 3}, Quadratic([3.0]), SITES)
    w, inherited, count = 3.0, {}, {"n0": 0, "n1": 0}
    cohorts = [("n0", "n1"), ("n1",), ("n0", "n1"), ("n0", "n1"), ("n1",), ("n0", "n1"), ("n0", "n1")]
    for round_, cohort in enumerate(cohorts):
        lost = {"n1"} if round_ == 2 else set()
        ends = []
        for node in cohort:
            a, b = SITES[node]["a"][0], SITES[node]["b"][0]
            y = b + (1 - 0.1 * a) ** 3 * (w - b)
            if node in lost:
                continue
            ends.append(y)
            mu = 0.8 * min(count[node] / 3, 1)
            inherited[node] = mu * inherited.get(node, w) + (1 - mu) * y
            count[node] += 1
        fed.round(cohort, lost)
        w = np.mean(ends)
        np.testing.assert_allclose(fed.state.model, w, rtol=1e-12)
        for node, p in inherited.items():
            np.testing.assert_allclose(fed.kept(node)["hpm"], p, rtol=1e-12)
            np.testing.assert_array_equal(fed.kept(node)["participations"], [count[node]])
    assert count == {"n0": 5, "n1": 6}


def test_without_transfer_the_global_model_is_fedavgs_bit_for_bit():
    task = Classes(kinds={"head.*": "private"})
    mine, plain = federation({"lam": 0.0}, task), Federation(configure("fedavg", LOCAL), task, NODES)
    for _ in range(3):
        mine.round()
        plain.round()
        for name, vector in plain.state.vectors.items():
            assert mine.state.vectors[name].tobytes() == vector.tobytes()


def softmax(z):
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


class Linear(Classes):
    """Softmax regression: gradients are known in closed form."""

    def __init__(self) -> None:
        super().__init__(torch.float64)

    def model(self):
        return nn.Linear(4, 3, bias=False).double()


def test_distillation_steps_have_a_closed_form():
    """Two rounds of one step on all data: ∇ = (1 − λ) (p − y)ᵀx/n + λ (p − softmax(z_hpm/τ))ᵀx/n."""
    lam, tau = 0.3, 4.0
    node = {"n": 9, "seed": 1}
    fed = federation({"lam": lam, "participations": 1}, Linear(), {"n": node}, steps=2, batch_size=9)
    x, labels = (tensor.numpy() for tensor in Linear().data(node).train.tensors)
    y = np.eye(3)[labels]
    w = fed.state.model.reshape(3, 4).copy()
    hpm = w.copy()
    for round_ in range(3):
        guide = softmax(x @ hpm.T / tau)
        own = w.copy()
        for _ in range(2):
            p = softmax(x @ own.T)
            own -= 0.1 * ((1 - lam) * (p - y) + lam * (p - guide)).T @ x / 9
        mu = 0.9 * min(round_, 1)
        hpm, w = mu * hpm + (1 - mu) * own, own
        fed.round()
        np.testing.assert_allclose(fed.state.model.reshape(3, 4), w, rtol=1e-11)
        np.testing.assert_allclose(fed.kept("n")["hpm"].reshape(3, 4), hpm, rtol=1e-11)


def test_distances_equal_brute_force():
    rng = np.random.default_rng(0)
    own, theirs = rng.normal(size=(5, 3)), rng.normal(size=(5, 3)) + 0.5
    one, two = torch.tensor(own), torch.tensor(theirs)
    expected = -np.mean([p @ np.log(q) for p, q in zip(softmax(theirs / 2.5), softmax(own), strict=True)])
    assert float(distillation(one, two, 2.5)) == pytest.approx(expected, rel=1e-12)

    points = [*own, *theirs]
    pairs = [((a - b) ** 2).sum() for i, a in enumerate(points) for j, b in enumerate(points) if i != j]
    s = np.mean(pairs)

    def kernel(a, b):
        return sum(np.exp(-((a - b) ** 2).sum() / (2.0**k * s)) for k in (-2, -1, 0, 1, 2))

    within = sum(np.mean([kernel(a, b) for a in side for b in side]) for side in (own, theirs))
    across = np.mean([kernel(a, b) for a in own for b in theirs])
    assert float(mmd(one, two)) == pytest.approx(within - 2 * across, rel=1e-6)
    assert float(mmd(one, one)) == pytest.approx(0, abs=1e-12)


def test_mmd_has_the_gradient_of_its_value_with_the_scale_held():
    rng = np.random.default_rng(1)
    own, theirs = torch.tensor(rng.normal(size=(4, 2))), torch.tensor(rng.normal(size=(4, 2)))
    with torch.no_grad():
        both = torch.cat([own, theirs])
        scale = float(torch.cdist(both, both).square().sum() / (8 * 7) + 1e-8)

    def value(x):
        square = ((torch.cat([x, theirs])[:, None] - torch.cat([x, theirs])[None]) ** 2).sum(2)
        k = sum(torch.exp(-square / (scale * 2.0**i)) for i in range(-2, 3))
        return (k[:4, :4] + k[4:, 4:] - 2 * k[:4, 4:]).mean()

    x = own.clone().requires_grad_()
    found = torch.autograd.grad(mmd(x, theirs), x)[0]
    h = 1e-6
    for i, j in np.ndindex(4, 2):
        step = torch.zeros_like(own)
        step[i, j] = h
        slope = float(value(own + step) - value(own - step)) / (2 * h)
        assert float(found[i, j]) == pytest.approx(slope, abs=1e-7)


def test_mmd_of_equal_points_is_zero_with_a_gradient_of_zero():
    x = torch.ones(1, 3, requires_grad=True)
    value = mmd(x, torch.ones(1, 3))
    value.backward()
    assert float(value) == 0 and not x.grad.any()


class Watched(Classes):
    """Batch norm first, so that running statistics depend on the data alone; remembers how logits were asked for."""

    def __init__(self, **more) -> None:
        super().__init__(torch.float64, **more)
        self.modes = []

    def model(self):
        return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)).double()

    def logits(self, model, batch):
        self.modes.append((model.training, torch.is_grad_enabled()))
        return model(batch[0])

    def representation(self, model, batch):
        return model[0](batch[0])


@pytest.mark.parametrize("transfer", ["kd", "mmd"])
def test_the_second_look_moves_no_float_buffer(transfer):
    task = Watched()
    mine = federation({"lam": 0.5, "transfer": transfer}, task)
    plain = Federation(configure("fedavg", LOCAL), Watched(), NODES)
    mine.round()
    plain.round()
    np.testing.assert_array_equal(mine.state.vectors["statistic"], plain.state.vectors["statistic"])
    assert int(mine.runners["n0"]._built.model[0].num_batches_tracked) == 3
    assert not np.array_equal(mine.state.model, plain.state.model)
    if transfer == "kd":
        # The inherited model predicts as in evaluation; the other one as it trains.
        assert task.modes == [(False, False), (True, True)] * 9


def test_the_inherited_model_has_buffers_and_private_tensors_of_its_own():
    task = Classes(torch.float64, {"head.*": "private"})
    fed = federation({"lam": 0.2, "participations": 1, "mu": 0.5}, task, {"n": NODES["n0"]})
    fed.round()
    first, end = fed.kept("n"), fed.state.vectors
    # t = 0: the trained model itself.
    np.testing.assert_allclose(first["hpm"], end["model"], rtol=1e-14)
    np.testing.assert_allclose(first["hpm_statistic"], end["statistic"], rtol=1e-14)
    np.testing.assert_array_equal(first["hpm_private"], first["private"])
    fed.round()
    second = fed.kept("n")
    for name, new in (("hpm_statistic", fed.state.vectors["statistic"]), ("hpm_private", second["private"])):
        np.testing.assert_allclose(second[name], 0.5 * first[name] + 0.5 * new, rtol=1e-12)


def test_a_node_judges_its_inherited_model_and_leaves_it():
    class Tested(Quadratic):
        def data(self, config):
            test = TensorDataset(torch.ones(1, 1).double(), torch.zeros(1, 1).double())
            return Data(super().data(config).train, test)

    fed = federation({"lam": 0.0, "participations": 2}, Tested([3.0]), SITES)
    for _ in range(3):
        fed.round()
    kept = {name: vector.copy() for name, vector in fed.kept("n0").items()}
    message = fed.algorithm.broadcast(fed.state)
    for _ in range(2):
        done = fed.runners["n0"].do(Work("evaluate", 4, message, fed.kept("n0")))
        assert done.metrics["loss"] == pytest.approx(0.5 * kept["hpm"][0] ** 2, rel=1e-12)
    for name, vector in fed.kept("n0").items():
        np.testing.assert_array_equal(vector, kept[name])
    held_out = fed.runners["n0"].do(Work("evaluate", 4, message)).metrics["loss"]
    assert held_out == pytest.approx(0.5 * fed.state.model[0] ** 2, rel=1e-12)


def test_a_task_without_logits_or_features_is_refused_before_the_run():
    for transfer, method in (("kd", "logits"), ("mmd", "representation")):
        with pytest.raises(TaskError, match=rf"Quadratic lacks {method}, which algorithm.name = 'fedphp' asks"):
            federation({"transfer": transfer}, Quadratic(), SITES)
    federation({"transfer": "mmd"}, Watched())


def test_logits_and_features_of_a_wrong_form_are_named():
    class Odd(Watched):
        given = None

        def logits(self, model, batch):
            return self.given(model(batch[0]))

        representation = logits

    for transfer, given, text in (
        ("kd", lambda z: z.argmax(1), r"logits\(\) returned a tensor of shape \(4,\) and dtype torch.int64"),
        ("kd", lambda z: None, r"logits\(\) returned NoneType"),
        ("mmd", lambda z: z[:, :, None], r"representation\(\) returned a tensor of shape \(4, 3, 1\).*flatten"),
    ):
        task = Odd()
        task.given = given
        with pytest.raises(TaskError, match=text):
            federation({"transfer": transfer}, task, {"n": {"n": 8, "seed": 1}}).ask("n")


def test_privacy_by_record_is_refused_while_there_is_transfer():
    tables = {"secure_sum": {"enabled": True}, "evaluation": {"every": 0}}
    private = {"clip": 1.0, "sampling_rate": 0.1, "noise_multiplier": 1.0, "delta": 1e-5, "unit": "record"}
    with pytest.raises(ConfigError, match=r"'fedphp' with privacy.unit = 'record': its transfer"):
        configure("fedphp", LOCAL, privacy=private, **tables)
    configure({"name": "fedphp", "lam": 0.0}, LOCAL, privacy=private, **tables)
