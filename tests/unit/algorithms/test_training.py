"""The local loop against torch's own optimiser and loader, and the corners of data and tasks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fedward_common import batches
from fedward_common.algorithms.local_options import LocalOptions
from fedward_common.algorithms.node_half import Hook, Local, gradients
from fedward_common.algorithms.training import gradient, train
from fedward_common.errors import TaskError
from fedward_common.task import Data
from fedward_common.update import Kind, Layout
from small_federation import Classes, Net, Quadratic
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset


def local(task, data, model=None, *, seed=3, seconds=None, **options):
    torch.manual_seed(0)
    model = task.model() if model is None else model
    table = {"lr": 0.1, "batch_size": 4, **options}
    if "epochs" not in table:
        table.setdefault("steps", 5)
    data = data if isinstance(data, Data) else Data(data)
    kinds = getattr(task, "tensor_kinds", {})
    return Local(task, model, data, Layout.of(model, kinds), LocalOptions(**table), 1, seed, seconds=seconds)


def start(local):
    state = local.model.state_dict()
    names = {"model": Kind.TRAINABLE, "statistic": Kind.STATISTIC}
    return {name: local.layout.pack(state, kind) for name, kind in names.items()}


def points(count, dtype=torch.float32):
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(
        torch.randn(count, 4, generator=generator, dtype=dtype), torch.randint(0, 3, (count,), generator=generator)
    )


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("clip", [None, 0.3])
def test_equals_torch_sgd_bit_for_bit(momentum, decay, clip):
    task, data = Classes(), points(10)
    own = local(task, data, steps=7, momentum=momentum, weight_decay=decay, max_grad_norm=clip)
    before = start(own)
    reference = Net()
    reference.load_state_dict(own.model.state_dict())
    trained = train(own, before)

    optimiser = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=momentum, weight_decay=decay)
    order = torch.Generator().manual_seed(own.seed)
    done, loss_sum, examples = 0, 0.0, 0
    while done < 7:
        permutation = torch.randperm(10, generator=order)
        for rows in DataLoader(Subset(data, permutation.tolist()), batch_size=4):
            if done == 7:
                break
            optimiser.zero_grad()
            loss = task.loss(reference, rows)
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(reference.parameters(), clip)
            optimiser.step()
            done, examples = done + 1, examples + len(rows[1])
            loss_sum += loss.item() * len(rows[1])
    layout = own.layout
    assert trained.vectors["model"].tobytes() == layout.pack(reference.state_dict(), Kind.TRAINABLE).tobytes()
    assert trained.vectors["statistic"].tobytes() == layout.pack(reference.state_dict(), Kind.STATISTIC).tobytes()
    assert trained.metrics == {"examples": examples, "loss": pytest.approx(loss_sum)}
    assert trained.steps == 7
    assert trained.complete


class Seen:
    """Records which rows each step saw; its loss has gradient 1 in every weight."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []

    def model(self) -> nn.Module:
        return nn.Linear(1, 1, bias=False).double()

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        self.rows.append(sorted(batch[0].flatten().int().tolist()))
        return model.weight.sum()

    def data(self, config: Any) -> Data:
        raise NotImplementedError

    def metrics(self, model: Any, batch: Any) -> dict[str, float]:
        return {}


def rows(count):
    return TensorDataset(torch.arange(float(count)).unsqueeze(1))


@pytest.mark.parametrize(("count", "size", "sizes"), [
    (10, 4, [4, 4, 2]),
    (9, 4, [4, 5]),
    (5, 4, [5]),
    (4, 4, [4]),
    (3, 4, [3]),
    (1, 4, [1]),
    (3, 1, [1, 1, 1]),
])  # fmt: skip
def test_an_epoch_drops_nothing_and_a_lonely_last_example_joins(count, size, sizes):
    task = Seen()
    own = local(task, rows(count), epochs=2, batch_size=size)
    trained = train(own, start(own))
    assert [len(batch) for batch in task.rows] == sizes * 2
    assert trained.steps == 2 * len(sizes) == 2 * batches.epoch_length(count, size)
    for epoch in (task.rows[: len(sizes)], task.rows[len(sizes) :]):
        assert sorted(row for batch in epoch for row in batch) == list(range(count))
    if count == 10:
        assert task.rows[:3] != task.rows[3:]


def test_steps_go_on_with_the_next_epoch():
    task = Seen()
    own = local(task, rows(6), steps=5, batch_size=3)
    train(own, start(own))
    assert len(task.rows) == 5
    for first in (0, 2):
        assert sorted(task.rows[first] + task.rows[first + 1]) == list(range(6))


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("steps", [1, 2, 13])
def test_mass_is_the_displacement_at_gradient_one(momentum, steps):
    own = local(Seen(), rows(6), steps=steps, momentum=momentum)
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimiser = torch.optim.SGD([weight], lr=0.1, momentum=momentum)
    for _ in range(steps):
        weight.grad = torch.ones(1, dtype=torch.float64)
        optimiser.step()
    before = start(own)
    trained = train(own, before)
    assert trained.mass == pytest.approx(-weight.item(), rel=1e-12)
    np.testing.assert_allclose(trained.vectors["model"] - before["model"], -trained.mass, rtol=1e-12)


def test_out_of_time_does_one_step_and_says_so():
    own = local(Seen(), rows(6), steps=50, seconds=0.0)
    trained = train(own, start(own))
    assert (trained.steps, trained.complete) == (1, False)
    assert trained.mass == pytest.approx(0.1)
    assert (own.progress.steps, own.progress.complete) == (1, False)


def test_max_seconds_ends_training_too():
    own = local(Seen(), rows(6), steps=10**9, max_seconds=0.05)
    trained = train(own, start(own))
    assert trained.steps >= 1
    assert not trained.complete


@pytest.mark.parametrize("options", [{"batch_size": 4}, {"batch_size": 1}])
def test_batch_norm_with_a_single_example(options):
    own = local(Classes(), points(1 if options["batch_size"] == 4 else 3), **options)
    before = start(own)
    trained = train(own, before)
    assert np.isfinite(trained.vectors["model"]).all()
    assert not np.array_equal(trained.vectors["model"], before["model"])
    # One example has no variance to learn from.
    np.testing.assert_array_equal(trained.vectors["statistic"], before["statistic"])
    gradient(own, before)


def test_batch_norm_with_a_lonely_last_example():
    own = local(Classes(), points(9), epochs=1)
    before = start(own)
    assert not np.array_equal(train(own, before).vectors["statistic"], before["statistic"])


class Dropout(Classes):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))


class Noisy(Dataset[Any]):
    """A map-style dataset with augmentation from three global generators."""

    def __init__(self, count: int) -> None:
        self.base = points(count)

    def __len__(self) -> int:
        return len(self.base)

    def __getitem__(self, index: int) -> dict[str, Any]:
        import random

        x, y = self.base[index]
        return {"x": x + torch.randn(4) + random.random() + float(np.random.rand()), "y": y, "name": "patient"}


class Named(Dropout):
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        assert batch["name"][0] == "patient"
        return F.cross_entropy(model(batch["x"]), batch["y"])


@pytest.mark.parametrize(("task", "data"), [(Dropout(), points(9)), (Named(), Noisy(9))])
def test_a_seed_decides_every_bit(task, data):
    own = local(task, data)
    before = start(own)
    one = train(own, before).vectors["model"]
    torch.rand(3)
    two = train(own, before).vectors["model"]
    assert one.tobytes() == two.tobytes()
    other = local(task, data, own.model, seed=4)
    assert train(other, before).vectors["model"].tobytes() != one.tobytes()


def test_datasets_of_any_shape_train_alike():
    """TensorDataset, Subset of it, plain dataset, own collate: the same examples, the same bits."""

    class Plain(Dataset[Any]):
        def __len__(self) -> int:
            return 9

        def __getitem__(self, index: int) -> Any:
            return points(9)[index]

    def collate(samples: list[Any]) -> Any:
        return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])

    wide = TensorDataset(*(torch.cat([t, t]) for t in points(9).tensors))
    nested = Subset(Subset(wide, list(range(2, 18))), list(range(7, 16)))
    assert type(batches.flattened(nested)) is TensorDataset
    assert batches.flattened(Subset(Plain(), [1])).__class__ is Subset
    results = set()
    for data in (
        Data(points(9)), Data(Plain()), Data(points(9), collate=collate), Data(nested),
        Data(batches.flattened(nested)),
    ):  # fmt: skip
        own = local(Classes(), data)
        results.add(train(own, start(own)).vectors["model"].tobytes())
    assert len(results) == 1


def test_a_subclass_with_augmentation_is_respected():
    class Zeros(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            x, y = super().__getitem__(index)
            return x * 0, y

    own = local(Classes(), Zeros(*points(9).tensors))
    plain = local(Classes(), points(9))
    assert train(own, start(own)).vectors["model"].tobytes() != train(plain, start(plain)).vectors["model"].tobytes()


def test_gradient_is_the_mean_over_all_data_and_leaves_the_model_alone():
    task = Quadratic([1.0, 2.0])
    a, b = torch.rand(7, 2, dtype=torch.float64), torch.rand(7, 2, dtype=torch.float64)
    own = local(task, TensorDataset(a, b), batch_size=3)
    w = torch.tensor([1.0, 2.0], dtype=torch.float64)
    expected = (a * (w - b)).mean(0).numpy()
    np.testing.assert_allclose(gradient(own, {"model": w.numpy()}), expected, rtol=1e-12)

    own = local(Classes(), points(9))
    before = {name: tensor.clone() for name, tensor in own.model.state_dict().items()}
    gradient(own, start(own))
    for name, tensor in own.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert all(parameter.grad is None for parameter in own.model.parameters())


def test_hooks_see_trainable_parameters_in_layout_order():
    calls = []

    class Spy(Hook):
        def before_step(self, model: nn.Module, parameters: Any) -> None:
            assert not torch.is_grad_enabled()
            calls.append(("before", [tuple(p.shape) for p in parameters]))
            for grad in gradients(parameters):
                grad.zero_()

        def after_step(self, model: nn.Module, parameters: Any) -> None:
            calls.append(("after", len(parameters)))

        def at_end(self, model: nn.Module, parameters: Any) -> None:
            calls.append(("end", len(parameters)))

    task = Classes(kinds={"head.*": "private"})
    own = local(task, points(8), steps=2)
    before = start(own)
    head = own.model.head.weight.detach().clone()
    trained = train(own, before, (Spy(),))
    shapes = [spec.shape for spec in own.layout.of_kind(Kind.TRAINABLE)]
    assert calls == [("before", shapes), ("after", 4)] * 2 + [("end", 4)]
    # The hook took the gradient of what is sent; the private head went on learning.
    np.testing.assert_array_equal(trained.vectors["model"], before["model"])
    assert not torch.equal(own.model.head.weight, head)


def test_unused_and_sparse_parameters_train():
    class Sparse(Classes):
        def model(self) -> nn.Module:
            model = nn.Module()
            model.table = nn.Embedding(5, 2, sparse=True)
            model.unused = nn.Linear(2, 2)
            return model

        def loss(self, model: Any, batch: Any) -> torch.Tensor:
            return model.table(batch[0]).pow(2).mean()

    own = local(Sparse(), TensorDataset(torch.tensor([0, 1, 1, 2])), momentum=0.5)
    before = start(own)
    change = train(own, before).vectors["model"] - before["model"]
    assert np.all(change[:6] != 0)
    assert np.all(change[6:] == 0)


@pytest.mark.parametrize(("loss", "message"), [
    (lambda model, batch: float(F.cross_entropy(model(batch[0]), batch[1])), "returned float"),
    (lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"), r"shape \(4,\).*mean"),
    (lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]).detach(), "without a gradient"),
])  # fmt: skip
def test_a_wrong_loss_is_explained(loss, message):
    task = Classes()
    task.loss = loss  # type: ignore[method-assign]
    own = local(task, points(8))
    with pytest.raises(TaskError, match=message):
        train(own, start(own))
    with pytest.raises(TaskError, match=message):
        gradient(own, start(own))


@pytest.mark.parametrize("table", [{}, {"steps": 1, "epochs": 1}])
def test_one_length_is_asked_for(table):
    with pytest.raises(ValueError, match="exactly one"):
        LocalOptions(lr=0.1, **table)


class Halved(Hook):
    def loss(self, model, batch, loss):
        return loss / 2


def test_a_hook_may_change_the_loss_but_not_what_is_told_of_it():
    task, data = Classes(), points(10)
    plain, halved = local(task, data, lr=0.05, steps=4), local(task, data, lr=0.1, steps=4)
    one, two = train(plain, start(plain)), train(halved, start(halved), (Halved(),))
    np.testing.assert_allclose(one.vectors["model"], two.vectors["model"], rtol=1e-5, atol=1e-7)
    assert one.metrics == pytest.approx(two.metrics, rel=1e-5)


@pytest.mark.parametrize("moved", [Kind.PRIVATE, Kind.TRAINABLE])
def test_only_the_kinds_that_are_to_move_do(moved):
    task, data = Classes(kinds={"head.*": "private"}), points(10)
    own = local(task, data, steps=9)
    kinds = (Kind.PRIVATE, Kind.TRAINABLE)
    before = {kind: own.layout.pack(own.model.state_dict(), kind) for kind in kinds}
    trained = train(own, start(own), moves=(moved,), steps=2)
    assert trained.steps == 2
    for kind in kinds:
        changed = not np.array_equal(own.layout.pack(own.model.state_dict(), kind), before[kind])
        assert changed == (kind is moved)


def test_a_source_of_gradients_takes_the_place_of_the_loss():
    own = local(Quadratic(), TensorDataset(torch.ones(1, 1).double(), torch.ones(1, 1).double()), steps=3)

    def threes(local, parameters, metrics):
        while True:
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, 3.0)
            yield

    trained = train(own, start(own), source=threes)
    np.testing.assert_allclose(trained.vectors["model"], -0.9)
