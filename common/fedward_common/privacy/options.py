"""The `[privacy]` table: whose contribution a run hides, and by how much."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class PrivacyOptions(BaseModel):
    """Differential privacy of a run. Exactly one of noise_multiplier and target_epsilon is given."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    unit: Literal["record", "patient", "site"] = Field(
        description="what is hidden: a record, all records of a patient (Data.groups), or a site's whole contribution"
    )
    mechanism: Literal["distributed", "central"] | None = Field(
        default=None,
        description="by site, who adds the noise: each node its share under the masks, or the server to the sum that "
        "it has seen; by record or patient each node adds it to every local step",
    )
    clip: float = Field(
        gt=0,
        le=2.0**60,
        description="C: largest L2 norm of a node's update, or of a record's or patient's gradient in a step; larger "
        "ones are scaled",
    )
    clip_quantile: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="with mechanism = 'central', γ: after each round clip moves to where a share of γ of the updates "
        "is not scaled; clip is then the first one",
    )
    sampling_rate: float | None = Field(
        default=None, gt=0, le=1, description="by record or patient, q: each takes part in a local step by its own coin"
    )
    ghost_clipping: bool = Field(
        default=False,
        description="by record: clip without holding each record's gradient, for large models (needs task.losses)",
    )
    noise_multiplier: float | None = Field(
        default=None,
        gt=0,
        le=1e6,
        description="z: standard deviation of the noise of a round (by site) or of a local step, in units of clip",
    )
    target_epsilon: float | None = Field(
        default=None, gt=0, description="ε of all rounds together, from which z is calculated"
    )
    max_epsilon: float | None = Field(
        default=None, gt=0, description="the run ends before the round that would cross it; default target_epsilon"
    )
    delta: float = Field(default=1e-5, gt=0, lt=1, description="δ")
    noise: Literal["skellam", "discrete-gaussian"] = Field(
        default="skellam",
        description="the law of the noise that nodes add to whole numbers (distributed only). Shares of Skellam noise "
        "add up to Skellam noise exactly, those of discrete Gaussian noise nearly",
    )
    noise_on_dropout: Literal["surplus", "exact"] = Field(
        default="surplus",
        description="noise of nodes beyond the fewest that may be left: it stays, or it is taken off the sum again "
        "(distributed only)",
    )

    @model_validator(mode="after")
    def _of_the_unit(self) -> PrivacyOptions:
        if self.unit == "site":
            if self.mechanism is None:
                raise ValueError(
                    "privacy.unit = 'site' without privacy.mechanism: say who adds the noise. Set mechanism = "
                    "'distributed' (each node its share, under the masks) or 'central' (the server)."
                )
            if self.sampling_rate is not None:
                raise ValueError(
                    f"privacy.sampling_rate = {self.sampling_rate} with privacy.unit = 'site': it is about records and "
                    "patients within a site. Remove it; cohort.size draws sites."
                )
        else:
            if self.mechanism is not None:
                raise ValueError(
                    f"privacy.mechanism = {self.mechanism!r} with privacy.unit = {self.unit!r}: each node adds the "
                    "noise to its own local steps. Remove mechanism."
                )
            if self.sampling_rate is None:
                raise ValueError(
                    f"privacy.unit = {self.unit!r} without privacy.sampling_rate: give q, the chance of each "
                    f"{self.unit} to take part in a local step, such as 0.05."
                )
        if self.clip_quantile is not None and self.mechanism != "central":
            raise ValueError(
                f"privacy.clip_quantile = {self.clip_quantile} without mechanism = 'central': the server makes the "
                "count of scaled updates noisy, so it has to see it. Remove clip_quantile, or choose 'central'."
            )
        if self.ghost_clipping and self.unit != "record":
            raise ValueError(
                f"privacy.ghost_clipping = true with privacy.unit = {self.unit!r}: it knows the norm of each record's "
                "gradient, not of a sum of several. Set it to false, or unit = 'record'."
            )
        return self

    @model_validator(mode="after")
    def _one_of_two(self) -> PrivacyOptions:
        if (self.noise_multiplier is None) == (self.target_epsilon is None):
            raise ValueError(
                f"privacy.noise_multiplier = {self.noise_multiplier} and privacy.target_epsilon = "
                f"{self.target_epsilon}: give one of the two; the other follows from it."
            )
        return self

    @model_validator(mode="after")
    def _noise_that_drops_out(self) -> PrivacyOptions:
        if self.noise_on_dropout == "exact" and self.mechanism != "distributed":
            with_ = f"unit = {self.unit!r}, where each node's noise is for its own data"
            if self.mechanism is not None:
                with_ = f"mechanism = {self.mechanism!r}, where the server adds all of the noise"
            raise ValueError(
                f"privacy.noise_on_dropout = 'exact' with {with_}, whoever drops out: none of it is too much. Remove "
                "noise_on_dropout, or use unit = 'site' and mechanism = 'distributed'."
            )
        return self

    @model_validator(mode="after")
    def _law_of_shares(self) -> PrivacyOptions:
        if self.noise == "skellam":
            return self
        if self.mechanism != "distributed":
            raise ValueError(
                f"privacy.noise = {self.noise!r} without mechanism = 'distributed': it is the law of the shares that "
                "nodes add. Remove noise."
            )
        if self.noise_on_dropout == "exact":
            raise ValueError(
                f"privacy.noise = {self.noise!r} with noise_on_dropout = 'exact': a node's noise is then made of two "
                "parts, which together are of the same law only for Skellam noise. Remove one of the two."
            )
        return self

    @property
    def budget(self) -> float | None:
        """ε that the run may spend, None if nobody set a limit."""
        return self.max_epsilon if self.max_epsilon is not None else self.target_epsilon
