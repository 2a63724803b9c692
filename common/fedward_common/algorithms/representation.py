"""What a model makes of a batch, before its last layer and after it: the task's `representation` and `logits`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedward_common.errors import TaskError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fedward_common.algorithms.node_half import Local
    from fedward_common.batches import Batch

REPRESENTATION = {
    "representation": "def representation(self, model, batch): return model.body(batch[0])  # [batch, features]"
}
"""What an algorithm asks of a task (`Algorithm.asks`) if it uses `represent`."""
LOGITS = {"logits": "def logits(self, model, batch): return model(batch[0])  # [batch, classes, …]"}
"""The same for `predict`."""


def represent(local: Local, model: nn.Module, batch: Batch) -> torch.Tensor:
    """The task's representation of `batch` by `model`, [batch, features].

    A pass of its own, beside the one of the task's loss: it leaves the model's buffers and PyTorch's random streams as
    they were, so that batch norm counts a batch once, and passes of several models over one batch draw the same
    numbers. Raises `TaskError` unless the task returns a float tensor with two axes."""
    z = _beside(local, model, batch, "representation", "[batch, features]")
    if z.dim() != 2 or not z.is_floating_point():
        raise TaskError(
            f"representation() returned a tensor of shape {tuple(z.shape)} and dtype {z.dtype}: return floats, one row "
            "for each record of the batch (.flatten(1))."
        )
    return z


def predict(local: Local, model: nn.Module, batch: Batch) -> torch.Tensor:
    """The task's logits of `batch` by `model`, [batch, classes, …], in a pass as that of `represent`. Raises
    `TaskError` unless the task returns a float tensor with two axes or more."""
    z = _beside(local, model, batch, "logits", "[batch, classes, …]")
    if z.dim() < 2 or not z.is_floating_point():
        raise TaskError(
            f"logits() returned a tensor of shape {tuple(z.shape)} and dtype {z.dtype}: return floats, one for each "
            "class on the second axis."
        )
    return z


def _beside(local: Local, model: nn.Module, batch: Batch, method: str, form: str) -> torch.Tensor:
    import torch

    from fedward_common.algorithms.training import spared

    task: Any = local.task
    with spared(model), torch.random.fork_rng(devices=_devices(local.device)):
        z = getattr(task, method)(model, batch)
    if not isinstance(z, torch.Tensor):
        raise TaskError(f"{method}() returned {type(z).__name__}: return a tensor, {form}.")
    return z


def _devices(device: str) -> list[int]:
    import torch

    if not device.startswith("cuda"):
        return []
    index = torch.device(device).index
    return [torch.cuda.current_device() if index is None else index]
