"""The one place where a run's model is built: for nodes, server, plans, and whoever loads what a run has trained."""

from __future__ import annotations

from torch import nn

from fedward_common.algorithms.registry import layout_of
from fedward_common.algorithms.training import seed_all
from fedward_common.config import RunConfig
from fedward_common.errors import TaskError
from fedward_common.lora import adapt
from fedward_common.task import Task
from fedward_common.update import Layout


def fresh_model(config: RunConfig, task: Task) -> nn.Module:
    """The task's model, new under the run's seed, with the run's adapters in it. Raises `TaskError`."""
    seed_all(config.seed, "cpu")
    model = task.model()
    if not isinstance(model, nn.Module):
        raise TaskError(f"model() returned {type(model).__name__}: return a torch.nn.Module.")
    if config.lora is not None:
        adapt(model, config.lora, config.seed)
    return model


def laid_out(config: RunConfig, task: Task, model: nn.Module) -> Layout:
    """The layout of a `fresh_model`. Raises `TaskError`, also if the run cannot train such a model."""
    layout = layout_of(config.algorithm, task, model, {} if config.lora is None else config.lora.kinds)
    if problem := config.aggregation.check_layout(layout):
        raise TaskError(problem)
    return layout
