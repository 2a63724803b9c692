"""Per-FedAvg's step against dense Hessians, finite differences and closed forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fedward_common.algorithms.perfedavg import hessian_product, twice_differentiable
from fedward_common.errors import ConfigError, TaskError
from fedward_common.task import Data
from fedward_common.work import Work
from small_federation import Classes, Federation, Quadratic, configure
from torch import nn
from torch.func import functional_call
from torch.utils.data import TensorDataset

ALPHA, BETA = 0.3, 0.2


class Recorded(Classes):
    """Two smooth layers in float64; remembers the batches that the loss was asked for."""

    def __init__(self) -> None:
        super().__init__(torch.float64)
        self.batches = []

    def model(self):
        return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()

    def loss(self, model, batch):
        self.batches.append((batch[0].clone(), batch[1].clone()))
        return super().loss(model, batch)


def by_hand(w, batch):
    """The same loss from the flat vector, without the model."""
    a, c, b, d = w[:12].reshape(3, 4), w[12:15], w[15:24].reshape(3, 3), w[24:27]
    z = torch.tanh(batch[0] @ a.T + c) @ b.T + d
    return (torch.logsumexp(z, 1) - z[torch.arange(len(z)), batch[1]]).mean()


def gradient(w, batch):
    w = w.clone().requires_grad_()
    return torch.autograd.grad(by_hand(w, batch), w)[0]


def federation(task, options, data, **local):
    table = {"name": "perfedavg", "alpha": ALPHA, **options}
    nodes = data if all(isinstance(value, dict) for value in data.values()) else {"n": data}
    return Federation(configure(table, {"lr": BETA, "steps": 3, "batch_size": 4, **local}), task, nodes)


@pytest.mark.parametrize("hessian", [True, False])
def test_steps_are_the_papers_with_a_dense_hessian(hessian):
    task = Recorded()
    fed = federation(task, {"hessian": hessian}, {"n": 12, "seed": 1})
    w = torch.from_numpy(fed.state.model.copy())
    [reply] = fed.round()
    used = iter(task.batches)
    for _ in range(3):
        d, d1 = next(used), next(used)
        outer = gradient(w - ALPHA * gradient(w, d), d1)
        if hessian:
            d2 = next(used)
            dense = torch.autograd.functional.hessian(lambda at, batch=d2: by_hand(at, batch), w)
            outer = outer - ALPHA * dense @ outer
            assert not any(torch.equal(one[0], two[0]) for one, two in ((d, d1), (d, d2), (d1, d2)))
        w = w - BETA * outer
    assert not list(used)
    np.testing.assert_allclose(fed.state.model, w.numpy(), rtol=1e-12, atol=1e-14)
    assert reply.metrics["examples"] == 12


def test_the_outer_batches_are_fedavgs():
    mine, plain = Recorded(), Recorded()
    federation(mine, {"hessian": False}, {"n": 12, "seed": 1}).round()
    averaging = configure("fedavg", {"lr": BETA, "steps": 3, "batch_size": 4})
    Federation(averaging, plain, {"n": {"n": 12, "seed": 1}}).round()
    for one, two in zip(mine.batches[1::2], plain.batches, strict=True):
        assert torch.equal(one[0], two[0])


def test_the_meta_gradient_is_that_of_the_adapted_loss():
    """On full batches one step goes along −∇ f(w − α ∇f(w)), by central differences."""
    task = Recorded()
    fed = federation(task, {}, {"n": 10, "seed": 2}, steps=1, batch_size=10)
    w = torch.from_numpy(fed.state.model.copy())
    fed.round()
    everything = task.batches[0]
    h = 1e-5
    slopes = []
    for i in range(len(w)):
        up, down = w.clone(), w.clone()
        up[i] += h
        down[i] -= h
        ends = [by_hand(at - ALPHA * gradient(at, everything), everything) for at in (up, down)]
        slopes.append(float(ends[0] - ends[1]) / (2 * h))
    np.testing.assert_allclose((w.numpy() - fed.state.model) / BETA, slopes, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("hessian", [True, False])
def test_quadratics_have_a_closed_form(hessian):
    """F_i has curvature a (1 − αa)², the first-order step one of a (1 − αa); the optimum b stays."""
    a, b = np.array([0.4, 1.5]), np.array([-1.0, 2.0])
    nodes = {f"n{i}": {"a": [a[i]], "b": [b[i]]} for i in range(2)}
    fed = federation(Quadratic([3.0]), {"hessian": hessian}, nodes, steps=7)
    w = 3.0
    for _ in range(4):
        bent = a * (1 - ALPHA * a) ** (2 if hessian else 1)
        w = np.mean(b + (1 - BETA * bent) ** 7 * (w - b))
        fed.round()
        np.testing.assert_allclose(fed.state.model, w, rtol=1e-12)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "weight_decay": 0.01, "max_grad_norm": 0.5}])
@pytest.mark.parametrize("hessian", [True, False])
def test_without_adaptation_it_is_fedavg_bit_for_bit(hessian, options):
    nodes = {f"n{i}": {"n": 5 + 3 * i, "seed": i} for i in range(3)}
    mine = federation(Classes(), {"alpha": 0.0, "hessian": hessian}, nodes, **options)
    plain = Federation(configure("fedavg", {"lr": BETA, "steps": 3, "batch_size": 4, **options}), Classes(), nodes)
    for _ in range(3):
        mine.round()
        plain.round()
        for name, vector in plain.state.vectors.items():
            assert mine.state.vectors[name].tobytes() == vector.tobytes()


class NormFirst(Recorded):
    """Its running statistics depend on the data alone."""

    def model(self):
        return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)).double()


def test_batch_norm_moves_with_the_outer_batches_only():
    task = NormFirst()
    fed = federation(task, {}, {"n": 12, "seed": 1})
    fed.round()
    mean, variance = np.zeros(4), np.ones(4)
    for x, _ in task.batches[1::3]:
        mean = 0.9 * mean + 0.1 * x.numpy().mean(0)
        variance = 0.9 * variance + 0.1 * x.numpy().var(0, ddof=1)
    np.testing.assert_allclose(fed.state.vectors["statistic"], np.concatenate([mean, variance]), rtol=1e-12)
    assert int(fed.runners["n"]._built.model[0].num_batches_tracked) == 3


def test_hessian_products_equal_the_dense_hessian():
    """Of a model with batch norm and attention; also for parameters that the loss does not see."""
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.out = nn.BatchNorm1d(4), nn.Linear(4, 2)
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
            self.unseen = nn.Parameter(torch.ones(2))

        def forward(self, x):
            y = self.norm(x)[None]
            return self.out(self.attention(y, y, y, need_weights=False)[0][0])

    model = Model().double()
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.randint(0, 2, (5,))
    parameters = dict(model.named_parameters())
    sizes = [p.numel() for p in parameters.values()]
    vector = [torch.randn_like(p) for p in parameters.values()]

    def flat(w):
        parts = [part.reshape(p.shape) for part, p in zip(w.split(sizes), parameters.values(), strict=True)]
        return F.cross_entropy(functional_call(model, dict(zip(parameters, parts, strict=True)), (x,)), y)

    with twice_differentiable():
        w = torch.cat([p.detach().reshape(-1) for p in parameters.values()])
        dense = torch.autograd.functional.hessian(flat, w) @ torch.cat([v.reshape(-1) for v in vector])
        found = hessian_product(F.cross_entropy(model(x), y), list(parameters.values()), vector)
    np.testing.assert_allclose(torch.cat([h.reshape(-1) for h in found]), dense, rtol=1e-9, atol=1e-12)
    assert not found[list(parameters).index("unseen")].any()


def test_a_loss_without_curvature_has_no_hessian_term():
    class Linear(Quadratic):
        def loss(self, model, batch):
            return (model.w * batch[0]).sum()

    fed = federation(Linear([3.0]), {}, {"a": [2.0], "b": [0.0]}, steps=1)
    fed.round()
    np.testing.assert_allclose(fed.state.model, 3.0 - BETA * 2.0)


def test_attention_trains_with_hessians():
    class Attending(Classes):
        def model(self):
            return nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)

        def loss(self, model, batch):
            return F.cross_entropy(model(batch[0][:, None])[:, 0, :3], batch[1])

    fed = federation(Attending(), {}, {"n": 8, "seed": 1})
    fed.round()
    assert np.isfinite(fed.state.model).all()


class Once(torch.autograd.Function):
    """A square."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


@pytest.mark.parametrize(
    ("operation", "text"),
    [
        # PyTorch itself would take their second derivative for 0, and say nothing.
        (Once.apply, "Once is marked with @once_differentiable"),
        (lambda x: Once.apply(x).square(), "Once is marked with @once_differentiable"),
        (lambda x: torch.cdist(x, x.detach() + 1, p=1.5), "_cdist_backward"),
    ],
)
def test_operations_without_second_derivatives_are_named_and_the_first_order_variant_works(operation, text):
    class Rough(Quadratic):
        def loss(self, model, batch):
            return 0.5 * (batch[0] * operation(model.w - batch[1])).sum(1).mean()

    data = {"a": [1.0], "b": [0.0]}
    fed = federation(Rough([3.0]), {}, data)
    with pytest.raises(TaskError, match=rf"algorithm.hessian = true .*{text}.*algorithm.hessian = false"):
        fed.ask("n")
    federation(Rough([3.0]), {"hessian": False}, data).round()


def test_a_node_judges_the_adapted_model_and_nothing_is_left_of_it():
    class Tested(Quadratic):
        def data(self, config):
            train = super().data(config).train
            return Data(train, TensorDataset(torch.ones(1, 1).double(), torch.zeros(1, 1).double()))

    for steps in (0, 1, 3):
        data = {"a": [0.5], "b": [-1.0]}
        fed = federation(Tested([3.0]), {"adapt_steps": steps}, data, momentum=0.9, weight_decay=0.1)
        work = Work("evaluate", 1, fed.algorithm.broadcast(fed.state), seconds=0.0)
        adapted = -1.0 + (1 - ALPHA * 0.5) ** steps * 4.0
        for _ in range(2):
            assert fed.runners["n"].do(work).metrics["loss"] == pytest.approx(0.5 * adapted**2, rel=1e-12)
        np.testing.assert_array_equal(work.vectors["model"], [3.0])


def test_evaluations_are_the_same_whenever_they_come_and_leave_private_tensors():
    task = Classes(torch.float64, {"head.*": "private"})
    fed = federation(task, {"adapt_steps": 2}, {"n": 20, "seed": 1, "test": 5})
    fed.round()
    runner, kept = fed.runners["n"], dict(fed.kept("n"))
    before = kept["private"].copy()
    first, again = (
        runner.do(Work("evaluate", round_, fed.algorithm.broadcast(fed.state), kept)).metrics for round_ in (1, 2)
    )
    assert first == again
    np.testing.assert_array_equal(kept["private"], before)
    plain = Federation(configure("fedavg", {"lr": BETA, "steps": 3}), task, {"n": {"n": 20, "seed": 1, "test": 5}})
    unadapted = plain.runners["n"].do(Work("evaluate", 1, fed.algorithm.broadcast(fed.state), kept)).metrics
    assert unadapted["loss"] != first["loss"]
    # Training after an evaluation is what it was without one.
    ask = Work("train", 2, fed.algorithm.broadcast(fed.state), kept)
    fresh = federation(task, {"adapt_steps": 2}, {"n": 20, "seed": 1, "test": 5}).runners["n"]
    one, two = runner.do(ask), fresh.do(ask)
    assert one.vectors["delta"].tobytes() == two.vectors["delta"].tobytes()
    assert one.state["private"].tobytes() == two.state["private"].tobytes()


def test_privacy_by_record_is_refused_and_by_site_is_not():
    private = {"clip": 1.0, "sampling_rate": 0.1, "noise_multiplier": 1.0, "delta": 1e-5}
    tables = {"secure_sum": {"enabled": True}, "evaluation": {"every": 0}}
    for unit in ("record", "patient"):
        with pytest.raises(ConfigError, match=f"'perfedavg' with privacy.unit = '{unit}': .*batches"):
            configure("perfedavg", {"lr": 0.1, "steps": 3}, privacy={**private, "unit": unit}, **tables)
    site = {"unit": "site", "mechanism": "distributed", "clip": 1.0, "noise_multiplier": 1.0, "delta": 1e-5}
    configure("perfedavg", {"lr": 0.1, "steps": 3}, privacy=site, **tables)


def test_buffers_are_spared_even_if_a_graph_needs_them():
    """In evaluation mode batch norm's backward pass reads the running statistics."""
    from fedward_common.algorithms.training import spared

    model = nn.BatchNorm1d(2).double()
    buffers = list(model.buffers())
    x = torch.randn(3, 2, dtype=torch.float64)
    model.eval()
    first = model(x).square().sum()
    model.train()
    with spared(model):
        model(x + 5)
        assert model.running_mean.abs().max() > 0.1
    assert all(one is two for one, two in zip(model.buffers(), buffers, strict=True))
    assert not model.running_mean.any() and int(model.num_batches_tracked) == 0
    first.backward()
