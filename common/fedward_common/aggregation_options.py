"""The `[aggregation]` table of a run: what a cohort's updates become before the algorithm's server half takes its step.

With every rule but the mean each node counts once: a count of examples is a node's own word.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedward_common.errors import ConfigError
from fedward_common.update import Kind, Layout


class AggregationOptions(BaseModel):
    """A rule's own settings. Subclasses give `rule` as a Literal."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    single_updates: ClassVar[bool] = True
    """Whether the rule needs them, so that a secure sum cannot carry it."""

    rule: str

    @property
    def least(self) -> int:
        """Fewest updates that the rule can be applied to."""
        return 1

    @property
    def need(self) -> str:
        """`least`, in a sentence for who has fewer."""
        return f"aggregation.rule = {self} needs the updates of at least {self.least} nodes in a round"

    def check_cohort(self, n: int) -> None:
        """Raise `ConfigError` unless the rule can be applied to the updates of `n` nodes."""
        if n < self.least:
            raise ConfigError(f"a round has {n} nodes, but {self.need}. Take more nodes, or a rule that needs fewer.")

    def check_layout(self, layout: Layout) -> str | None:
        """Why the rule cannot protect a model of that layout (with the way out), or None."""
        return None

    def __str__(self) -> str:
        settings = ", ".join(f"{name} = {value}" for name, value in self if name != "rule" and value is not None)
        return f'"{self.rule}" ({settings})' if settings else f'"{self.rule}"'


class Mean(AggregationOptions):
    """The weighted mean Σ w_i x_i / Σ w_i: one node can move it anywhere."""

    single_updates = False
    rule: Literal["mean"] = "mean"


class _Selecting(AggregationOptions):
    byzantine: int = Field(ge=1, description="f: nodes of a round that may send anything at all")

    @property
    def least(self) -> int:
        return 2 * self.byzantine + 3


class Krum(_Selecting):
    """Blanchard et al. 2017 (NeurIPS): the one update with the smallest sum of squared distances to its n − f − 2
    nearest others; n ≥ 2f + 3."""

    rule: Literal["krum"] = "krum"


class MultiKrum(_Selecting):
    """The same paper: the mean of the m updates with the smallest such sums."""

    rule: Literal["multi_krum"] = "multi_krum"
    keep: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="m: updates in the mean; default all but byzantine"
    )

    @property
    def least(self) -> int:
        # Where more than n − f are kept, one of f liars is among them whatever it sends.
        return max(super().least, self.byzantine + (self.keep or 1))

    def kept(self, n: int) -> int:
        """m of n updates."""
        return self.keep or n - self.byzantine


class Bulyan(_Selecting):
    """El Mhamdi et al. 2018 (ICML), over Krum: θ = n − 2f updates chosen one by one, then for each coordinate the mean
    of the θ − 2f values nearest to their median; n ≥ 4f + 3."""

    rule: Literal["bulyan"] = "bulyan"

    @property
    def least(self) -> int:
        return 4 * self.byzantine + 3


class Median(AggregationOptions):
    """Yin et al. 2018 (ICML), algorithm 1, option I: the median of each coordinate; fewer than half may lie."""

    rule: Literal["median"] = "median"

    @property
    def least(self) -> int:
        return 3  # of two, each is as good a median as the other


class TrimmedMean(AggregationOptions):
    """Yin et al. 2018, option II: the mean of each coordinate without its b largest and b smallest values; as many may
    lie."""

    rule: Literal["trimmed_mean"] = "trimmed_mean"
    trim: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="b: values of a coordinate that are left out at each end"
    )
    share: Annotated[float, Field(gt=0, lt=0.5)] | None = Field(
        default=None, description="β: b as a share of the updates that came, rounded down"
    )

    @model_validator(mode="after")
    def _one_of_two(self) -> TrimmedMean:
        if (self.trim is None) == (self.share is None):
            raise ValueError("give exactly one of aggregation.trim (values at each end) and aggregation.share (of n)")
        return self

    @property
    def least(self) -> int:
        # ⌊βn⌋ = 0 would trim nobody.
        return 2 * self.trim + 1 if self.trim is not None else math.ceil(1 / self._beta)

    def cut(self, n: int) -> int:
        """b of n updates."""
        return self.trim if self.trim is not None else int(self._beta * n)

    @property
    def _beta(self) -> Fraction:
        # As it was written: 0.29 · 100 is 29, and 28.999999999999996 in floats.
        return Fraction(str(self.share))


class GeometricMedian(AggregationOptions):
    """Pillutla, Kakade & Harchaoui 2022 (IEEE TSP, "RFA"): argmin_z Σ ‖v_i − z‖ by the smoothed Weiszfeld algorithm;
    fewer than half may lie. Lengths are in units of the median distance of the updates from where the search starts."""

    rule: Literal["geometric_median"] = "geometric_median"
    iterations: int = Field(default=100, ge=1, description="most steps of the search")
    tolerance: float = Field(default=1e-6, gt=0, description="a step as short as that ends the search")
    smoothing: float = Field(default=1e-6, gt=0, description="ν: distances under it count as ν")

    @property
    def least(self) -> int:
        return 3


class NormBound(AggregationOptions):
    """Sun et al. 2019: the mean of the updates, each scaled down to an L2 norm of at most C. The node bounds its own,
    so that it works under secure aggregation too; without, the server bounds it once more."""

    single_updates = False
    rule: Literal["norm_bound"] = "norm_bound"
    bound: float = Field(
        gt=0, le=2.0**60, description="C: largest L2 norm of a node's change of the parameters; larger ones are scaled"
    )

    def check_layout(self, layout: Layout) -> str | None:
        count = layout.size(Kind.STATISTIC)
        if not count:
            return None
        return (
            f'aggregation.rule = "norm_bound" with {count:,} float buffers that are averaged, such as batch norm\'s '
            "running means: no bound on the change of parameters holds them, and one node could move them anywhere. "
            'Use GroupNorm or LayerNorm, or mark them as "private" in tensor_kinds.'
        )


RULES: Mapping[str, type[AggregationOptions]] = {
    "mean": Mean,
    "krum": Krum,
    "multi_krum": MultiKrum,
    "bulyan": Bulyan,
    "median": Median,
    "trimmed_mean": TrimmedMean,
    "geometric_median": GeometricMedian,
    "norm_bound": NormBound,
}
