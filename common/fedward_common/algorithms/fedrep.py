"""FedRep: a shared representation, and heads that are fitted to it before it moves."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fedward_common.algorithms.base import only_by_site
from fedward_common.algorithms.fedavg import changes
from fedward_common.algorithms.head import HeadOptions, PrivateHead
from fedward_common.algorithms.node_half import Local
from fedward_common.algorithms.phases import Phases
from fedward_common.update import Kind, Update, Vectors


class FedRepOptions(HeadOptions):
    """`[algorithm] name = "fedrep"`."""

    name: Literal["fedrep"] = "fedrep"
    head_steps: int = Field(default=10, ge=1, description="steps on the head a round, before the body's K steps")

    def check_privacy(self, unit: str) -> str | None:
        return only_by_site(
            self.name, unit, "the body's steps would depend on the head's, which the account of K steps does not hold"
        )


class FedRep(PrivateHead[FedRepOptions]):
    """Collins et al. 2021 (ICML), Alg. 1: each round `head_steps` steps on the head h_i with the body φ as it came,
    then K steps on the body with the head as it is now. φ ← φ + η_g Σ n_i Δ_i / Σ n_i (the paper weighs nodes equally).

    Float buffers that are sent move with the body's steps only."""

    Options = FedRepOptions

    def client(self, local: Local, message: Vectors, state: Vectors) -> tuple[Update, Vectors]:
        from fedward_common.algorithms.training import train

        phases = Phases(local)
        train(phases.next("head"), message, moves=(Kind.PRIVATE,), steps=self.options.head_steps)
        trained = train(phases.next(), message, moves=(Kind.TRAINABLE,))
        return Update(changes(trained, message), float(local.examples), trained.metrics), {}
