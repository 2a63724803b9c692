"""FedDyn: each node's loss is bent round by round until its own optimum is that of all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
from pydantic import Field

from fedward_common.algorithms.base import (
    DELTA,
    MODEL,
    AlgorithmOptions,
    Cohort,
    ServerState,
    SumAlgorithm,
    moved,
    parts_by_site,
)
from fedward_common.algorithms.fedavg import advanced, changes
from fedward_common.algorithms.hooks import Correction, MaxCorrectedNorm, proximal
from fedward_common.algorithms.node_half import Local
from fedward_common.update import Extent, Kind, Layout, Update, Vectors

GRADIENT = "h"
"""Mean of the h_i over all N nodes, in the server's state."""
NODE_GRADIENT = "h_i"


class FedDynOptions(AlgorithmOptions):
    """`[algorithm] name = "feddyn"`."""

    name: Literal["feddyn"] = "feddyn"
    alpha: float = Field(default=0.1, gt=0, description="weight α of the term α/2 ‖y − w‖²")
    max_corrected_norm: MaxCorrectedNorm = None

    def check_privacy(self, unit: str) -> str | None:
        return parts_by_site("feddyn", "gradient h_i follows") if unit == "site" else None


class FedDyn(SumAlgorithm[FedDynOptions]):
    """Acar et al. 2021 (ICLR), Alg. 1. Every node counts the same.

    Local steps on f_i(y) − ⟨h_i, y⟩ + α/2 ‖y − w‖². h_i ← h_i − α Δ_i, which is ∇f_i(y_i) where the steps reached
    that minimum. h ← h − α (|S|/N) mean_S Δ_i: the mean of h_i over all N. w ← mean_S y_i − h/α.

    `local.weight_decay` is part of f_i. The paper's h₀ is 0 on both sides, whatever ∇f_i(w₀) is.
    """

    Options = FedDynOptions
    uniform = True
    mirrored = True

    def initial(self, layout: Layout, vectors: Vectors) -> ServerState:
        return ServerState({**vectors, GRADIENT: np.zeros_like(vectors[MODEL])})

    def keeps(self, layout: Layout) -> Mapping[str, Extent]:
        return {NODE_GRADIENT: Kind.TRAINABLE}

    def client(self, local: Local, message: Vectors, state: Vectors) -> tuple[Update, Vectors]:
        from fedward_common.algorithms.training import train

        alpha, h_i = self.options.alpha, state[NODE_GRADIENT]
        hooks = (
            *proximal(local, alpha, message[MODEL]),
            Correction(local, -h_i, self.options.max_corrected_norm),
        )
        trained = train(local, message, hooks)
        groups = changes(trained, message)
        return Update(groups, 1.0, trained.metrics), {NODE_GRADIENT: h_i - alpha * groups[DELTA]}

    def server(self, server: ServerState, mean: Update, cohort: Cohort) -> ServerState:
        alpha, delta = self.options.alpha, mean.groups[DELTA]
        h = moved(server.vectors[GRADIENT], delta, -alpha * cohort.replied / cohort.enrolled)
        return advanced(server, mean, moved(moved(server.model, delta), h, -1 / alpha), **{GRADIENT: h})
