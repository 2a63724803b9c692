"""SCAFFOLD: control variates that take the drift between nodes out of local steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from fedward_common.algorithms import control
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
from fedward_common.algorithms.control import CONTROL, DELTA_CONTROL, NODE_CONTROL
from fedward_common.algorithms.fedavg import ServerLR, advanced, changes
from fedward_common.algorithms.hooks import Correction, MaxCorrectedNorm
from fedward_common.algorithms.local_options import LocalOptions
from fedward_common.algorithms.node_half import Local
from fedward_common.update import Extent, Kind, Layout, Update, Vectors


class ScaffoldOptions(AlgorithmOptions):
    """`[algorithm] name = "scaffold"`."""

    name: Literal["scaffold"] = "scaffold"
    option: Literal["I", "II"] = Field(
        default="II", description="c_i from one more pass over the local data (I) or from the steps (II)"
    )
    server_lr: ServerLR = 1.0
    max_corrected_norm: MaxCorrectedNorm = None
    warm_start_rounds: int = Field(default=0, ge=0, description="first rounds as FedAvg; c, c_i stay at 0")

    def check(self, local: LocalOptions) -> str | None:
        return control.steps_problem("SCAFFOLD", local, self.max_corrected_norm)

    def check_privacy(self, unit: str) -> str | None:
        if unit == "site":
            return parts_by_site("scaffold", "control variate follows")
        if self.option == "I":
            return (
                f"algorithm.option = 'I' with privacy.unit = '{unit}': its control variate is a gradient over all "
                "records, without noise. Choose option 'II', whose control variate follows from the noised steps."
            )
        return None


class Scaffold(SumAlgorithm[ScaffoldOptions]):
    """Karimireddy et al. 2020 (ICML), Alg. 1; c and c_i have the sign of a gradient. Every node counts
    the same.

    y ← y − η(g_i(y) − c_i + c), the correction before momentum.
    I: c_i⁺ = ∇f_i(w). II: c_i⁺ = c_i − c − Δ_i/m, m = K η for plain SGD, the exact mass with momentum.
    w ← w + η_g mean_S Δ_i. c ← c + (|S|/N) mean_S(c_i⁺ − c_i), so that c = mean over all N of c_i.
    """

    Options = ScaffoldOptions
    uniform = True
    mirrored = True
    neutral: ClassVar[Mapping[str, Any]] = {"warm_start_rounds": 1}

    def initial(self, layout: Layout, vectors: Vectors) -> ServerState:
        return ServerState({**vectors, CONTROL: np.zeros_like(vectors[MODEL])})

    def broadcast(self, server: ServerState) -> Vectors:
        message = dict(super().broadcast(server))
        # A broadcast without c tells the node that it is still warming up.
        if server.round >= self.options.warm_start_rounds:
            message[CONTROL] = server.vectors[CONTROL]
        return message

    def keeps(self, layout: Layout) -> Mapping[str, Extent]:
        return {NODE_CONTROL: Kind.TRAINABLE}

    def sends(self, layout: Layout) -> Mapping[str, Extent]:
        return {**super().sends(layout), DELTA_CONTROL: Kind.TRAINABLE}

    def summed(self, layout: Layout, local: LocalOptions) -> Mapping[str, Extent]:
        return super().sends(layout) if self._follows(local) else self.sends(layout)

    def _follows(self, local: LocalOptions) -> bool:
        # Option II with equal K: Δc_i = −c − Δ_i/m with one m for all, so mean Δc = −c − mean Δ / m.
        return self.options.option == "II" and local.same_steps

    def completed(self, server: ServerState, mean: Update, local: LocalOptions) -> Update:
        if not self._follows(local):
            return mean
        if server.round < self.options.warm_start_rounds:
            return replace(mean, groups={**mean.groups, DELTA_CONTROL: np.zeros_like(mean.groups[DELTA])})
        return control.completed(server, mean, local)

    def client(self, local: Local, message: Vectors, state: Vectors) -> tuple[Update, Vectors]:
        from fedward_common.algorithms.training import gradient, train

        c_i = state[NODE_CONTROL]
        if CONTROL not in message:
            trained = train(local, message)
            groups = {**changes(trained, message), DELTA_CONTROL: np.zeros_like(c_i)}
            return Update(groups, 1.0, trained.metrics), {NODE_CONTROL: c_i}
        w, c = message[MODEL], message[CONTROL]
        # Before training, since it has to leave the model as training left it.
        full = gradient(local, message) if self.options.option == "I" else None
        correction = Correction(local, c - c_i, self.options.max_corrected_norm)
        trained = train(local, message, (correction,))
        groups = changes(trained, message)
        if full is None:
            new = control.renewed(c_i, c, groups[DELTA], trained.mass)
        else:
            # Decay is part of the steps' gradient, so it is part of f_i.
            new = full + local.options.weight_decay * w if local.options.weight_decay else full
            new = new.astype(c_i.dtype, copy=False)
        groups[DELTA_CONTROL] = new - c_i
        return Update(groups, 1.0, trained.metrics), {NODE_CONTROL: new}

    def server(self, server: ServerState, mean: Update, cohort: Cohort) -> ServerState:
        return advanced(
            server,
            mean,
            moved(server.model, mean.groups[DELTA], self.options.server_lr),
            **{CONTROL: control.advanced_control(server, mean, cohort)},
        )
