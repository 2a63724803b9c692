"""FedProx: a pull back to the global model in every local step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from fedward_common.algorithms.base import MODEL
from fedward_common.algorithms.fedavg import Averaging, AveragingOptions
from fedward_common.algorithms.hooks import proximal
from fedward_common.algorithms.node_half import Hook, Local
from fedward_common.update import Vectors


class FedProxOptions(AveragingOptions):
    """`[algorithm] name = "fedprox"`."""

    name: Literal["fedprox"] = "fedprox"
    mu: float = Field(default=0.01, ge=0, description="weight μ of the proximal term μ/2 ‖y − w‖²")


class FedProx(Averaging[FedProxOptions]):
    """Li et al. 2020 (MLSys), Alg. 2: local steps on f_i(y) + μ/2 ‖y − w‖², w frozen at the round's start.

    Partial work counts: with `local.max_seconds` a slow node contributes the steps it did, at its full
    weight n_i."""

    Options = FedProxOptions
    neutral: ClassVar[Mapping[str, Any]] = {"mu": 0.0}

    def hooks(self, local: Local, message: Vectors) -> Sequence[Hook]:
        return proximal(local, self.options.mu, message[MODEL])

