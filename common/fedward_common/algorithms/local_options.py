"""The `[local]` table of a run: SGD on the node."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedward_common.algorithms.schedule import Schedule

Positive = Annotated[float, Field(gt=0)]


class LocalOptions(BaseModel):
    """How a node trains."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    lr: Positive = Field(description="client learning rate η")
    schedule: Schedule | None = Field(default=None, description="how η moves; without the table it stays")
    momentum: float = Field(default=0.0, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0)
    batch_size: int = Field(default=32, ge=1)
    steps: int | None = Field(default=None, ge=1, description="K: the same number of steps on every node")
    epochs: int | None = Field(default=None, ge=1, description="passes over the node's own data (K_i ∝ n_i)")
    max_grad_norm: Positive | None = Field(default=None, description="clip the gradient's L2 norm a step")
    max_seconds: Positive | None = Field(
        default=None, description="stop local training after that long and send what was done (partial work)"
    )

    @model_validator(mode="after")
    def _one_length(self) -> LocalOptions:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give exactly one of local.steps (equal K on every node) and local.epochs")
        return self

    def rate(self, round_: int, step: int) -> float:
        """η of a step (from 0) of a round (from 1)."""
        if self.schedule is None:
            return self.lr
        return self.lr * self.schedule.factor(round_ - 1 if self.schedule.by == "round" else step)

    @property
    def same_steps(self) -> bool:
        """Whether every node does the same steps, so that what follows from their number is known to all."""
        return self.steps is not None and self.max_seconds is None


def mass(options: LocalOptions, round_: int) -> float:
    """`Trained.mass` of that round's training, if it does all of its `options.steps`."""
    assert options.steps is not None
    total, weight = 0.0, 0.0
    for step in range(options.steps):
        weight = options.momentum * weight + 1.0
        total += options.rate(round_, step) * weight
    return total
