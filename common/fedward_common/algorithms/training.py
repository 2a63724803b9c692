"""The one local training loop that all algorithms share, with hooks instead of copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import nn

from fedward_common.task import Data, Task
from fedward_common.update import Layout, Vector, Vectors

Positive = Annotated[float, Field(gt=0)]


class LocalOptions(BaseModel):
    """The `[local]` table of a run: SGD on the node."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    lr: Positive = Field(description="client learning rate η")
    momentum: float = Field(default=0.0, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0)
    batch_size: int = Field(default=32, ge=1)
    steps: int | None = Field(default=None, ge=1, description="K: the same number of steps on every node")
    epochs: int | None = Field(default=None, ge=1, description="passes over the node's own data (K_i ∝ n_i)")
    max_grad_norm: Positive | None = Field(default=None, description="clip the gradient's L2 norm before each step")
    max_seconds: Positive | None = Field(
        default=None, description="stop local training after that long and contribute what was done (partial work)"
    )

    @model_validator(mode="after")
    def _one_length(self) -> LocalOptions:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give exactly one of local.steps (equal K on every node) and local.epochs")
        return self


@dataclass(frozen=True)
class Local:
    """A node's side of one round: everything that an algorithm's client half may use.

    model: the task's model on `device`, to be loaded from vectors by `train`. seed: differs by run, node and round,
    equal for a repeated attempt. seconds: time left before the round's limit, None if none.
    """

    task: Task
    model: nn.Module
    data: Data
    layout: Layout
    options: LocalOptions
    round: int
    seed: int
    device: str = "cpu"
    seconds: float | None = None


class Hook:
    """Called by `train`; an algorithm overrides what it needs. Gradients may be changed in place."""

    def before_step(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        """After the backward pass, before the optimiser's step (so corrections go through momentum)."""

    def after_step(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        """After the optimiser's step."""

    def at_end(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        """After the last step."""


@dataclass(frozen=True)
class Trained:
    """What local training did.

    vectors: "model" (and "statistic") after the last step. steps: K_i. mass: Σ over steps of the coefficient with
    which that step's gradient entered the final displacement; plain SGD Σ_k η_k, with momentum ρ
    Σ_j η_j b_j, b_j = ρ b_{j−1} + 1. So −Δ/mass is the average gradient. complete: False if time ran out.
    metrics: sums over the examples seen: "examples", "loss".
    """

    vectors: Vectors
    steps: int
    mass: float
    complete: bool
    metrics: dict[str, float]


def train(local: Local, start: Vectors, hooks: Sequence[Hook] = ()) -> Trained:
    """Run local SGD from `start`."""
    raise NotImplementedError


def gradient(local: Local, at: Vectors) -> Vector:
    """∇f_i(w): the mean gradient over all local training data at `at`, flat, in the layout's trainable order."""
    raise NotImplementedError
