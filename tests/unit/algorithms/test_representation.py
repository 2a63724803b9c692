"""The pass for a task's representation leaves no trace, and a task without one is refused early."""

from __future__ import annotations

import pytest
import torch
from fedward_common.algorithms.node_half import Local
from fedward_common.algorithms.registry import layout_of, parse_options
from fedward_common.algorithms.representation import represent
from fedward_common.errors import TaskError
from fedward_common.local import LocalRunner
from fedward_common.update import Layout
from fedward_common.work import Work
from small_federation import Classes, Net, configure
from torch import nn

LOCAL = {"lr": 0.1, "steps": 3, "batch_size": 4}
BATCH = (torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(5, dtype=torch.int64))


class Plain(Classes):
    representation = None


def local_of(task, model):
    config = configure("fedavg", LOCAL)
    return Local(task, model, task.data({"n": 5, "seed": 1}), Layout.of(model), config.local, 1, 7)


def test_batch_norm_and_random_streams_see_nothing_of_it():
    class Dropping(Classes):
        def representation(self, model, batch):
            return nn.functional.dropout(model.features(batch[0]), 0.5)

    model, task = Net().train(), Dropping()
    local = local_of(task, model)
    before = {name: (id(buffer), buffer.clone()) for name, buffer in model.named_buffers()}
    state = torch.get_rng_state()
    first, second = represent(local, model, BATCH), represent(local, model, BATCH)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, second) and (first == 0).any()
    for name, buffer in model.named_buffers():
        assert id(buffer) == before[name][0] and torch.equal(buffer, before[name][1])
    # The batch's own statistics are used all the same, and the gradient is that of an ordinary pass.
    torch.set_rng_state(state)
    first.square().sum().backward()
    found = model.body.weight.grad.clone()
    model.zero_grad()
    task.representation(model, BATCH).square().sum().backward()
    torch.testing.assert_close(found, model.body.weight.grad, rtol=0, atol=0)


def test_buffers_come_back_when_the_task_fails():
    class Failing(Classes):
        def representation(self, model, batch):
            model.features(batch[0])
            raise RuntimeError("no")

    model = Net().train()
    buffer = model.norm.running_mean
    with pytest.raises(RuntimeError, match="no"):
        represent(local_of(Failing(), model), model, BATCH)
    assert model.norm.running_mean is buffer and not buffer.any()


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda model, x: None, "returned NoneType: return a tensor"),
        (lambda model, x: model.features(x).sum(1), r"shape \(5,\).*one row for each record"),
        (lambda model, x: model(x).argmax(1, keepdim=True), "dtype torch.int64: return floats"),
    ],
)
def test_anything_else_than_rows_of_floats_is_refused(result, message):
    class Odd(Classes):
        def representation(self, model, batch):
            return result(model, batch[0])

    model = Net()
    with pytest.raises(TaskError, match=message):
        represent(local_of(Odd(), model), model, BATCH)


@pytest.mark.parametrize("name", ["moon", "fednp"])
def test_a_task_without_it_is_refused_when_a_node_prepares(name):
    with pytest.raises(TaskError, match=rf"lacks representation, which algorithm.name = '{name}'.* add: def repr"):
        LocalRunner(configure(name, LOCAL), Plain(), "a", {"n": 4, "seed": 1}).do(Work("prepare"))
    assert layout_of(parse_options({"name": "fedavg"}), Plain(), Net()) == Layout.of(Net())
