"""Properties of batches, flat vectors and local steps over many inputs."""

from __future__ import annotations

import numpy as np
import torch
from fedward_common import batches
from fedward_common.algorithms.base import moved_statistic
from fedward_common.algorithms.local_options import LocalOptions
from fedward_common.algorithms.node_half import Local
from fedward_common.algorithms.training import train
from fedward_common.task import Data
from fedward_common.update import Kind, Layout
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

torch.set_num_threads(1)
counts = st.integers(1, 40)


@given(counts, st.integers(1, 45))
def test_batches_cover_everything_once(count, size):
    parts = batches.split(torch.arange(count), size)
    assert torch.equal(torch.cat(parts), torch.arange(count))
    assert len(parts) == batches.epoch_length(count, size)
    assert all(len(part) <= size + 1 for part in parts)
    assert size == 1 or len(parts) == 1 or all(len(part) > 1 for part in parts)


class Slope:
    """Loss with gradient 1 everywhere."""

    def model(self):
        return nn.Linear(1, 1, bias=False).double()

    def data(self, config):
        raise NotImplementedError

    def loss(self, model, batch):
        return model.weight.sum()

    def metrics(self, model, batch):
        return {}


@settings(max_examples=40, deadline=None)
@given(st.floats(1e-4, 1.0), st.floats(0, 0.99), st.integers(1, 30), counts)
def test_mass_is_the_displacement_at_gradient_one(lr, momentum, steps, count):
    task = Slope()
    model = task.model()
    options = LocalOptions(lr=lr, momentum=momentum, steps=steps, batch_size=3)
    local = Local(task, model, Data(TensorDataset(torch.zeros(count, 1))), Layout.of(model), options, 1, 0)
    trained = train(local, {"model": np.zeros(1)})
    np.testing.assert_allclose(trained.vectors["model"], -trained.mass, rtol=1e-9)
    assert trained.steps == steps


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(0, 2**31))
def test_vectors_and_tensors_are_inverse(shape, seed):
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(shape))
    model.b = nn.Parameter(torch.zeros(3))
    layout = Layout.of(model)
    vector = np.random.default_rng(seed).normal(size=layout.size(Kind.TRAINABLE)).astype(np.float32)
    layout.load(model, vector, Kind.TRAINABLE)
    np.testing.assert_array_equal(layout.pack(model.state_dict(), Kind.TRAINABLE), vector)
    assert Layout.from_json(layout.to_json()) == layout


weights = st.lists(st.floats(0.1, 1000), min_size=1, max_size=20)


positive = st.floats(2.0**-100, 2.0**100, width=32)
ends = st.lists(st.just(0.0) | positive, min_size=20, max_size=20)


@given(weights, positive, ends)
def test_a_mean_of_variances_is_never_negative(weights, variance, ends):
    """Whatever non-negative values the nodes end with, all zero among them."""
    start = np.array([variance, variance], np.float32)
    total = np.zeros(2)
    for weight, end in zip(weights, ends, strict=False):
        total += weight * (np.array([end, 0.0], np.float32) - start).astype(np.float64)
    new = moved_statistic(start, total / sum(weights))
    assert (new >= 0).all()
    assert new[1] == 0
