"""DP-SGD against gradients taken one by one with autograd, and against the law of its noise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from fedward_common.algorithms.local_options import LocalOptions
from fedward_common.algorithms.node_half import Local
from fedward_common.algorithms.training import train
from fedward_common.errors import ConfigError, TaskError, UpdateError
from fedward_common.privacy import dp_sgd
from fedward_common.privacy.sampled import SampledSteps
from fedward_common.task import Data
from fedward_common.update import Kind, Layout
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

torch.set_num_threads(1)

CLIP = 1.7


class Task:
    """Three classes of points in eight dimensions."""

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def losses(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def data(count: int = 30, groups: Any = None, scale: float = 1.0) -> Data:
    generator = torch.Generator().manual_seed(1)
    x = scale * torch.randn(count, 8, generator=generator)
    return Data(TensorDataset(x, torch.randint(0, 3, (count,), generator=generator)), groups=groups)


def asked(**changes: Any) -> SampledSteps:
    table = {
        "by_patient": False, "clip": CLIP, "sampling_rate": 1.0, "noise_multiplier": 1e-6, "steps": 1, "ghost": False,
    }  # fmt: skip
    return SampledSteps(**{**table, **changes})


def local(task: Any, data: Data, private: SampledSteps, model: nn.Module | None = None, batch_size: int = 7) -> Local:
    model = model or task.model()
    options = LocalOptions(lr=1.0, batch_size=batch_size, steps=private.steps)
    return Local(task, model, data, Layout.of(model), options, 1, 3, private=private)


def start(of: Local) -> dict[str, Any]:
    return {"model": of.layout.pack(of.model.state_dict(), Kind.TRAINABLE)}


def moved(of: Local) -> np.ndarray:
    """The step that training made, with lr = 1: minus the gradient."""
    before = start(of)
    return before["model"] - train(of, before).vectors["model"]


def alone(task: Any, model: nn.Module, data: Data, records: list[int]) -> torch.Tensor:
    """The summed gradient of the records, each on a model of its own, flat."""
    parameters = list(model.parameters())
    total = torch.zeros(sum(p.numel() for p in parameters))
    for record in records:
        batch = [tensor[[record]] for tensor in data.train.tensors]  # type: ignore[attr-defined]
        grads = torch.autograd.grad(task.loss(model, batch), parameters)
        total += torch.cat([grad.reshape(-1) for grad in grads])
    return total


def clipped_mean(
    task: Any, data: Data, units: list[list[int]], clip: float = CLIP
) -> tuple[np.ndarray, list[float]]:
    """Σ clip(g_u) / U by brute force, and the norms."""
    model = task.model()
    grads = [alone(task, model, data, records) for records in units]
    norms = [float(grad.norm()) for grad in grads]
    clipped = [grad * min(1.0, clip / norm) for grad, norm in zip(grads, norms, strict=True)]
    return (sum(clipped) / len(units)).numpy(), norms  # type: ignore[union-attr]


@pytest.mark.parametrize("ghost", [False, True])
def test_a_step_is_the_mean_of_clipped_gradients_by_record(ghost: bool) -> None:
    given = data()
    expected, norms = clipped_mean(Task(), given, [[i] for i in range(30)])
    assert min(norms) < CLIP < max(norms)  # both cases are there
    found = moved(local(Task(), given, asked(ghost=ghost)))
    assert np.abs(found - expected).max() < 2e-4 * np.abs(expected).max()


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_a_patient_s_records_count_as_one(batch_size: int) -> None:
    """One has a single record, one has more than fit a pass, their records stand mixed, ids are text."""
    groups = ["a", "b", "c", "b", "b"] * 5 + ["d", "b", "b", "b", "b"]
    given = data(groups=groups)
    units = [[i for i, group in enumerate(groups) if group == name] for name in "abcd"]
    expected, norms = clipped_mean(Task(), given, units, clip=2.5)
    assert len(units[3]) == 1 and len(units[1]) == 19 and min(norms) < 2.5 < max(norms)
    found = moved(local(Task(), given, asked(by_patient=True, clip=2.5), batch_size=batch_size))
    assert np.abs(found - expected).max() < 2e-4 * np.abs(expected).max()


@pytest.mark.parametrize(("by_patient", "ghost"), [(False, False), (True, False), (False, True)])
def test_one_unit_moves_the_sum_by_at_most_the_clipping_norm(by_patient: bool, ghost: bool) -> None:
    """With huge inputs in one unit: what is behind the claim of every accountant."""
    groups = [i // 5 for i in range(30)] if by_patient else None
    small, large = data(groups=groups), data(groups=groups)
    large.train.tensors[0][:5] *= 1e4  # type: ignore[attr-defined]
    moves = [moved(local(Task(), given, asked(by_patient=by_patient, ghost=ghost))) for given in (small, large)]
    units = 6 if by_patient else 30
    changed = 1 if by_patient else 5
    # Replacing is at most 2C a unit.
    assert np.linalg.norm(moves[0] - moves[1]) * units <= 2 * CLIP * changed * (1 + 1e-6)


def test_the_noise_has_the_standard_deviation_that_is_accounted_for() -> None:
    steps = 300
    quiet = data(scale=0.0)
    private = asked(noise_multiplier=3.0, steps=steps, sampling_rate=0.5)
    task = Still()
    moves = local(task, quiet, private)
    before = start(moves)
    walked = (before["model"] - train(moves, before).vectors["model"]) / np.sqrt(steps)
    # Zero gradients: each coordinate is a sum of `steps` draws of σ = z·C/(q·n).
    sigma = 3.0 * CLIP / (0.5 * 30)
    assert abs(walked.std() / sigma - 1) < 5 / np.sqrt(2 * walked.size)
    assert abs(walked.mean()) < 5 * sigma / np.sqrt(walked.size)


class Still(Task):
    """A loss with a gradient of zero, and 4000 parameters."""

    def model(self) -> nn.Module:
        return nn.Linear(8, 500, bias=False)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return (model(batch[0]) * 0).sum(1).mean()


def test_units_take_part_by_their_own_coins() -> None:
    """The number is binomial, the draws differ from step to step, and a seed repeats nothing."""
    units = dp_sgd._Units(np.arange(2000), np.arange(2001))
    draws = [units.drawn(0.1) for _ in range(200)]
    sizes = np.array([len(draw) for draw in draws])
    assert abs(sizes.mean() - 200) < 5 * np.sqrt(180 / 200)
    assert 0.7 < sizes.var() / 180 < 1.4  # χ² with 199 degrees: 5 standard deviations are 0.5
    chosen = np.bincount(np.concatenate(draws), minlength=2000)
    assert abs(chosen.var() / 18 - 1) < 0.25
    assert len(units.drawn(1.0)) == 2000


def test_two_trainings_with_one_seed_draw_other_records_and_other_noise() -> None:
    private = asked(sampling_rate=0.5, steps=2)
    assert not np.array_equal(*(moved(local(Task(), data(), private)) for _ in range(2)))


def test_a_step_in_which_nobody_takes_part_is_noise() -> None:
    found = moved(local(Task(), data(), asked(sampling_rate=1e-9, noise_multiplier=1.0)))
    assert np.isfinite(found).all() and np.count_nonzero(found) > 60


def test_the_model_is_left_as_it_was() -> None:
    given = local(Task(), data(), asked(steps=3))
    train(given, start(given))
    for parameter in given.model.parameters():
        assert parameter.grad is None and not hasattr(parameter, "grad_sample")
    plain = Local(Task(), given.model, data(), given.layout, LocalOptions(lr=0.1, steps=2), 1, 3)
    fresh = Local(Task(), Task().model(), data(), given.layout, LocalOptions(lr=0.1, steps=2), 1, 3)
    before = start(fresh)
    assert np.array_equal(train(plain, before).vectors["model"], train(fresh, before).vectors["model"])


def test_nothing_else_is_told() -> None:
    given = local(Task(), data(), asked(steps=3))
    trained = train(given, start(given))
    assert trained.metrics == {} and trained.steps == 3 and trained.complete


class Weighted(Task):
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], weight=torch.tensor([1.0, 5.0, 25.0]))


class Contrastive(Task):
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        out = model(batch[0])
        return ((out - out.mean(0)) ** 2).mean()


class Tied(nn.Module):
    """Uses a layer's weight past the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.layer(x) @ self.layer.weight)


class TiedTask(Task):
    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return Tied()


class ContrastiveLosses(Task):
    def losses(self, model: nn.Module, batch: Any) -> torch.Tensor:
        out = model(batch[0])
        return ((out - out.mean(0)) ** 2).mean(1)


@pytest.mark.parametrize(
    ("task", "ghost"),
    [(Weighted(), False), (Contrastive(), False), (TiedTask(), False), (TiedTask(), True), (ContrastiveLosses(), True)],
)
def test_losses_that_are_no_mean_over_records_are_refused(task: Task, ghost: bool) -> None:
    given = local(task, data(), asked(ghost=ghost))
    with pytest.raises(TaskError, match="mean over a batch"):
        train(given, start(given))


def test_dropout_is_no_reason_to_refuse() -> None:
    class Dropping(Task):
        def model(self) -> nn.Module:
            return nn.Sequential(nn.Linear(8, 6), nn.Dropout(0.5), nn.Linear(6, 3))

    assert np.isfinite(moved(local(Dropping(), data(), asked()))).all()


def test_what_a_task_lacks_is_said() -> None:
    for given, words in (
        (local(Task(), data(), asked(by_patient=True)), "Data.train|groups"),
        (local(Task(), data(groups=[1, 2]), asked(by_patient=True)), "2 entries for 30"),
    ):
        with pytest.raises(TaskError, match=words):
            train(given, start(given))

    class NoLosses(Task):
        losses = None  # type: ignore[assignment]

    given = local(NoLosses(), data(), asked(ghost=True))
    with pytest.raises(TaskError, match="losses"):
        train(given, start(given))


def test_gradients_that_are_not_finite_stop_the_training() -> None:
    broken = data()
    broken.train.tensors[0][17] = float("nan")  # type: ignore[attr-defined]
    given = local(Task(), broken, asked())
    with pytest.raises(UpdateError, match="not finite"):
        train(given, start(given))


@pytest.mark.parametrize("module", [nn.BatchNorm1d(6), nn.LSTM(6, 6), nn.MultiheadAttention(6, 2)])
def test_models_without_gradients_by_record_are_refused_by_name(module: nn.Module) -> None:
    with pytest.raises(TaskError, match=rf"model: 1 is {type(module).__name__}"):
        dp_sgd.check_model(nn.Sequential(nn.Linear(8, 6), module))


def test_models_with_group_norm_are_fine() -> None:
    dp_sgd.check_model(nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.LayerNorm(4)))


def test_noise_too_large_for_its_grid_is_refused() -> None:
    with pytest.raises(ConfigError, match="noise_multiplier"):
        dp_sgd._GridNoise.of(asked(noise_multiplier=1000.0), 1_000_000)


class Scaled(nn.Module):
    """A parameter of no dimension, and a buffer of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class OddTask(Task):
    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 6), Counting(), Scaled(), nn.Linear(6, 3))


@pytest.mark.parametrize("ghost", [False, True])
def test_parameters_without_dimensions_and_integer_buffers(ghost: bool) -> None:
    given = data()
    expected, _ = clipped_mean(OddTask(), given, [[i] for i in range(30)])
    found = moved(local(OddTask(), given, asked(ghost=ghost)))
    assert np.abs(found - expected).max() < 2e-4 * np.abs(expected).max()


def test_a_patient_with_thousands_of_records_and_one_with_a_single_one() -> None:
    groups = np.r_[np.zeros(3000, int), 1]
    given = data(3001, groups=groups)
    found = moved(local(Task(), given, asked(by_patient=True), batch_size=256))
    # Two units of at most C each, in a mean over two.
    assert 0 < np.linalg.norm(found) <= CLIP


def test_a_site_with_fewer_records_than_a_batch() -> None:
    expected, _ = clipped_mean(Task(), data(2), [[0], [1]])
    found = moved(local(Task(), data(2), asked(), batch_size=64))
    assert np.abs(found - expected).max() < 2e-4 * np.abs(expected).max()
    alone = moved(local(Task(), data(1), asked(sampling_rate=0.5, noise_multiplier=1.0, steps=3)))
    assert np.isfinite(alone).all()
