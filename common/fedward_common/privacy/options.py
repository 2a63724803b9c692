"""The `[privacy]` table: whose contribution a run hides, and by how much."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class PrivacyOptions(BaseModel):
    """Differential privacy of a run. Exactly one of noise_multiplier and target_epsilon is given."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    unit: Literal["site"] = Field(description="what is hidden: a site's whole contribution to a round")
    mechanism: Literal["distributed", "central"] = Field(
        description="who adds the noise: each node its share under the masks, or the server to the sum that it has seen"
    )
    clip: float = Field(gt=0, le=2.0**60, description="C: largest L2 norm of a node's update; larger ones are scaled")
    noise_multiplier: float | None = Field(
        default=None, gt=0, le=1e6, description="z: standard deviation of a round's noise in units of clip"
    )
    target_epsilon: float | None = Field(
        default=None, gt=0, description="ε of all rounds together, from which z is calculated"
    )
    max_epsilon: float | None = Field(
        default=None, gt=0, description="the run ends before the round that would cross it; default target_epsilon"
    )
    delta: float = Field(default=1e-5, gt=0, lt=1, description="δ")

    @model_validator(mode="after")
    def _one_of_two(self) -> PrivacyOptions:
        if (self.noise_multiplier is None) == (self.target_epsilon is None):
            raise ValueError(
                f"privacy.noise_multiplier = {self.noise_multiplier} and privacy.target_epsilon = "
                f"{self.target_epsilon}: give one of the two; the other follows from it."
            )
        return self

    @property
    def budget(self) -> float | None:
        """ε that the run may spend, None if nobody set a limit."""
        return self.max_epsilon if self.max_epsilon is not None else self.target_epsilon
