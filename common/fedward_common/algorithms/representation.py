"""What a model makes of a batch before its last layer: the task's `representation`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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


def represent(local: Local, model: nn.Module, batch: Batch) -> torch.Tensor:
    """The task's representation of `batch` by `model`, [batch, features].

    A pass of its own, beside the one of the task's loss: it leaves the model's buffers and PyTorch's random streams as
    they were, so that batch norm counts a batch once, and passes of several models over one batch draw the same
    numbers. Raises `TaskError` unless the task returns a float tensor with two axes."""
    import torch

    task: Any = local.task
    with _buffers_untouched(model), torch.random.fork_rng(devices=_devices(local.device)):
        z = task.representation(model, batch)
    if not isinstance(z, torch.Tensor):
        raise TaskError(f"representation() returned {type(z).__name__}: return a tensor, [batch, features].")
    if z.dim() != 2 or not z.is_floating_point():
        raise TaskError(
            f"representation() returned a tensor of shape {tuple(z.shape)} and dtype {z.dtype}: return floats, one row "
            "for each record of the batch (.flatten(1))."
        )
    return z


@contextmanager
def _buffers_untouched(model: nn.Module) -> Iterator[None]:
    # Copies stand in for the buffers, rather than being written back: what autograd saved stays as it was.
    own = [(module, name, buffer) for module in model.modules() for name, buffer in module.named_buffers(recurse=False)]
    try:
        for module, name, buffer in own:
            setattr(module, name, buffer.clone())
        yield
    finally:
        for module, name, buffer in own:
            setattr(module, name, buffer)


def _devices(device: str) -> list[int]:
    import torch

    if not device.startswith("cuda"):
        return []
    index = torch.device(device).index
    return [torch.cuda.current_device() if index is None else index]
