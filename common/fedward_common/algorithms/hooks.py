"""What several algorithms add to a local step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from fedward_common.algorithms.node_half import Hook, Local, gradients, tensors
from fedward_common.update import Vector

if TYPE_CHECKING:
    from torch import nn

MaxCorrectedNorm = Annotated[
    Annotated[float, Field(gt=0)] | None,
    Field(description="clip the L2 norm of a step's gradient after the algorithm has corrected it"),
]


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


class Correction(Hook):
    """The term ⟨y, shift⟩: `shift` is added to each step's gradient, whose norm is then held to `max_norm`. Goes last,
    so that the norm is that of all terms."""

    def __init__(self, local: Local, shift: Vector, max_norm: float | None = None) -> None:
        self._shift = tensors(local, shift)
        self._max_norm = max_norm

    def before_step(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        import torch

        torch._foreach_add_(gradients(parameters), self._shift)
        if self._max_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, self._max_norm)
