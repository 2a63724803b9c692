"""What an algorithm's half on the node is given, may change in the local steps, and gets back from `training`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fedward_common.algorithms.local_options import LocalOptions
from fedward_common.update import Kind, Layout, Vector, Vectors

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.utils.data import Dataset

    from fedward_common.batches import Batch
    from fedward_common.privacy.sampled import SampledSteps
    from fedward_common.task import Data, Task


@dataclass
class Progress:
    """What local training reports beside its result; `train` adds to it. complete: no training ran out of
    time."""

    steps: int = 0
    complete: bool = True


@dataclass(frozen=True)
class Local:
    """A node's side of one round: everything that an algorithm's client half may use.

    model: the task's model on `device`; `train` loads the broadcast tensors into it, private tensors and
    counters are as the round shall start with them. seed: differs by run, node and round, equal for a
    repeated attempt. seconds: time left before the round's limit, None if none. private: how gradients are to be
    clipped and noised (privacy by record or by patient), None if they are not. apart: the node's own training
    examples by themselves, where data.train has public ones behind them (`[task.shared]`)."""

    task: Task
    model: nn.Module
    data: Data
    layout: Layout
    options: LocalOptions
    round: int
    seed: int
    device: str = "cpu"
    seconds: float | None = None
    private: SampledSteps | None = None
    apart: Dataset[Any] | None = None
    progress: Progress = field(default_factory=Progress, compare=False)

    @property
    def own(self) -> Dataset[Any]:
        """The node's own training examples: the first of data.train, in the same order."""
        return self.data.train if self.apart is None else self.apart

    @property
    def examples(self) -> int:
        """n_i: how many own training examples the node has, its weight."""
        from fedward_common import batches

        return batches.length(self.own)

    @property
    def in_pass(self) -> int:
        """Examples of one pass over data.train: the node's own and the public ones."""
        from fedward_common import batches

        return batches.length(self.data.train)


def derived(seed: int, name: str) -> int:
    """Another seed for the same node and round."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "big") >> 1


class Hook:
    """Called by `train`, all but `loss` without gradient recording; an algorithm overrides what it needs.

    parameters: the trainable tensors in the layout's order, so that `tensors(local, vector)` matches them
    one by one. Gradients may be changed in place."""

    def loss(self, model: nn.Module, batch: Batch, loss: torch.Tensor) -> torch.Tensor:
        """The loss to step on, from the task's; with gradient recording on. Private steps take the task's loss."""
        return loss

    def before_step(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        """After the backward pass (and `max_grad_norm`), before the optimiser's step, so that corrections
        go through momentum."""

    def after_step(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        """After the optimiser's step."""

    def at_end(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        """After the last step."""


@dataclass(frozen=True)
class Trained:
    """What local training did.

    vectors: "model" (and "statistic") after the last step. steps: K_i. mass: Σ over steps of the
    coefficient with which that step's gradient entered the final displacement; plain SGD Σ_k η_k, with
    momentum ρ Σ_j η_j b_j, b_j = ρ b_{j−1} + 1. So −Δ/mass is the average gradient (weight decay and what
    hooks add counted as part of it). complete: False if time ran out. metrics: sums over the examples
    seen: "examples", "loss"; none where gradients are private, since nothing would make them so."""

    vectors: Vectors
    steps: int
    mass: float
    complete: bool
    metrics: dict[str, float]


def gradients(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of `parameters`, to be changed in place."""
    return [parameter.grad for parameter in parameters]  # type: ignore[misc]


def tensors(local: Local, vector: Vector) -> list[torch.Tensor]:
    """A trainable vector as tensors on the node's device, one for each parameter that a hook is given."""
    return [tensor.to(local.device) for tensor in local.layout.unpack(vector, Kind.TRAINABLE).values()]
