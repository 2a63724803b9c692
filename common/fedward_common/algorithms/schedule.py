"""The `[local.schedule]` table: how the client learning rate moves, from round to round or within a round."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Share = Annotated[float, Field(gt=0, le=1, description="the lowest rate, as a share of local.lr")]
Length = Annotated[int, Field(ge=1)]


class _Schedule(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    by: Literal["round", "step"] = Field(
        default="round", description="what is counted, from 0: rounds of the run, or local steps of each round"
    )


class Cyclical(_Schedule):
    """Smith 2017, triangular: up from `floor` in `half_cycle` counts, and down again."""

    shape: Literal["cyclical"]
    half_cycle: Length = Field(description="L: counts from the lowest rate to the highest")
    floor: Share = 0.1

    def factor(self, count: int) -> float:
        """lr at `count`, as a share of `local.lr`."""
        cycle = math.floor(1 + count / (2 * self.half_cycle))
        x = abs(count / self.half_cycle - 2 * cycle + 1)
        return self.floor + (1 - self.floor) * max(0.0, 1 - x)


class Cosine(_Schedule):
    """Half a cosine from 1 to `floor` in `period` counts; `floor` from then on (Loshchilov and Hutter 2017, one
    period)."""

    shape: Literal["cosine"]
    period: Length = Field(description="counts until the lowest rate")
    floor: Share = 0.01

    def factor(self, count: int) -> float:
        """lr at `count`, as a share of `local.lr`."""
        turn = min(count / self.period, 1.0)
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * turn)) / 2


class StepDecay(_Schedule):
    """× `ratio` after every `every` counts."""

    shape: Literal["step"]
    every: Length = Field(description="counts between two falls")
    ratio: Annotated[float, Field(gt=0, lt=1, description="what each fall leaves of the rate")] = 0.5

    def factor(self, count: int) -> float:
        """lr at `count`, as a share of `local.lr`."""
        return self.ratio ** (count // self.every)


Schedule = Annotated[Cyclical | Cosine | StepDecay, Field(discriminator="shape")]
