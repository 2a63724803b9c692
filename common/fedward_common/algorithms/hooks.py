"""What several algorithms add to a local step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedward_common.algorithms.node_half import Hook, Local, gradients, tensors
from fedward_common.update import Vector

if TYPE_CHECKING:
    from torch import nn


def proximal(local: Local, weight: float, anchor: Vector) -> tuple[Hook, ...]:
    """The term weight/2 ‖y − anchor‖²; no hook for weight 0, so that not a bit of the step differs."""
    return (_Proximal(local, weight, anchor),) if weight else ()


class _Proximal(Hook):
    def __init__(self, local: Local, weight: float, anchor: Vector) -> None:
        self._weight = weight
        self._anchor = tensors(local, anchor)

    def before_step(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        import torch

        drift = torch._foreach_sub(list(parameters), self._anchor)
        torch._foreach_add_(gradients(parameters), drift, alpha=self._weight)
