"""FedDC: each node learns how far its local models drift, and the server takes the drift back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

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
from fedward_common.algorithms.fedavg import advanced, changes
from fedward_common.algorithms.hooks import Correction, MaxCorrectedNorm, proximal
from fedward_common.algorithms.local_options import LocalOptions
from fedward_common.algorithms.node_half import Local
from fedward_common.update import Extent, Kind, Layout, Update, Vectors

DRIFT = "h"
"""Mean drift h̄ over all N nodes, in the server's state."""
NODE_DRIFT = "h_i"


class FedDCOptions(AlgorithmOptions):
    """`[algorithm] name = "feddc"`."""

    name: Literal["feddc"] = "feddc"
    alpha: float = Field(default=0.1, ge=0, description="weight α of the penalty α/2 ‖y − (w − h_i)‖²")
    max_corrected_norm: MaxCorrectedNorm = None

    def check(self, local: LocalOptions) -> str | None:
        return control.steps_problem("FedDC", local, self.max_corrected_norm)

    def check_privacy(self, unit: str) -> str | None:
        return parts_by_site("feddc", "drift and control variate follow") if unit == "site" else None


class FedDC(SumAlgorithm[FedDCOptions]):
    """Gao et al. 2022 (CVPR: Local Drift Decoupling and Correction), as in the authors' code. Every node counts the
    same.

    Local steps on f_i(y) + α/2 ‖y − (w − h_i)‖² + ⟨y, c − c_i⟩. h_i ← h_i + Δ_i. c_i⁺ = c_i − c − Δ_i/m, as in
    SCAFFOLD (`control`); the penalty's gradient is part of it.
    w ← mean_S y_i + h̄, h̄ ← h̄ + (|S|/N) mean_S Δ_i: the mean of h_i over all N. So is c of the c_i.

    Other than the authors' code: it scales α and c by a node's share of the examples, and divides by the first
    round's η when η has moved since; here m has the η and momentum that each step had.
    """

    Options = FedDCOptions
    uniform = True
    mirrored = True

    def initial(self, layout: Layout, vectors: Vectors) -> ServerState:
        zeros = np.zeros_like(vectors[MODEL])
        return ServerState({**vectors, CONTROL: zeros, DRIFT: zeros.copy()})

    def broadcast(self, server: ServerState) -> Vectors:
        return {**super().broadcast(server), CONTROL: server.vectors[CONTROL]}

    def keeps(self, layout: Layout) -> Mapping[str, Extent]:
        return {NODE_DRIFT: Kind.TRAINABLE, NODE_CONTROL: Kind.TRAINABLE}

    def sends(self, layout: Layout) -> Mapping[str, Extent]:
        return {**super().sends(layout), DELTA_CONTROL: Kind.TRAINABLE}

    def summed(self, layout: Layout, local: LocalOptions) -> Mapping[str, Extent]:
        return super().sends(layout) if local.same_steps else self.sends(layout)

    def completed(self, server: ServerState, mean: Update, local: LocalOptions) -> Update:
        return control.completed(server, mean, local) if local.same_steps else mean

    def client(self, local: Local, message: Vectors, state: Vectors) -> tuple[Update, Vectors]:
        from fedward_common.algorithms.training import train

        h_i, c_i = state[NODE_DRIFT], state[NODE_CONTROL]
        w, c = message[MODEL], message[CONTROL]
        hooks = (
            *proximal(local, self.options.alpha, w - h_i),
            Correction(local, c - c_i, self.options.max_corrected_norm),
        )
        trained = train(local, message, hooks)
        groups = changes(trained, message)
        new = control.renewed(c_i, c, groups[DELTA], trained.mass)
        groups[DELTA_CONTROL] = new - c_i
        return Update(groups, 1.0, trained.metrics), {NODE_DRIFT: h_i + groups[DELTA], NODE_CONTROL: new}

    def server(self, server: ServerState, mean: Update, cohort: Cohort) -> ServerState:
        delta = mean.groups[DELTA]
        drift = moved(server.vectors[DRIFT], delta, cohort.replied / cohort.enrolled)
        return advanced(
            server,
            mean,
            moved(moved(server.model, delta), drift),
            **{DRIFT: drift, CONTROL: control.advanced_control(server, mean, cohort)},
        )
