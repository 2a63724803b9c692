"""SCAFFOLD: control variates that take the drift between nodes out of local steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

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
)
from fedward_common.algorithms.fedavg import ServerLR, advanced, changes
from fedward_common.algorithms.local_options import LocalOptions, mass
from fedward_common.algorithms.node_half import Hook, Local, gradients, tensors
from fedward_common.update import Extent, Kind, Layout, Update, Vectors

if TYPE_CHECKING:
    import torch
    from torch import nn

CONTROL = "c"
"""Server control variate c, in the server's state and (after the warm start) in broadcasts."""
NODE_CONTROL = "c_i"
DELTA_CONTROL = "delta_c"


class ScaffoldOptions(AlgorithmOptions):
    """`[algorithm] name = "scaffold"`."""

    name: Literal["scaffold"] = "scaffold"
    option: Literal["I", "II"] = Field(
        default="II", description="c_i from one more pass over the local data (I) or from the steps (II)"
    )
    server_lr: ServerLR = 1.0
    max_corrected_norm: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="clip the L2 norm of the corrected gradient g − c_i + c"
    )
    warm_start_rounds: int = Field(default=0, ge=0, description="first rounds as FedAvg; c, c_i stay at 0")

    def check(self, local: LocalOptions) -> str | None:
        if local.epochs is not None and self.max_corrected_norm is None:
            return (
                f"local.epochs = {local.epochs} gives nodes different numbers of steps, with which SCAFFOLD "
                "can run away. Give local.steps instead, or clip with algorithm.max_corrected_norm."
            )
        return None

    def check_privacy(self, unit: str) -> str | None:
        if unit == "site":
            return (
                "algorithm.name = 'scaffold' with privacy.unit = 'site': a node's control variate follows from its "
                "whole update, the server's from the clipped ones, and their means would part. Choose fedavg, fedprox "
                "or a server optimiser, or remove [privacy]."
            )
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
        return self.options.option == "II" and local.steps is not None and local.max_seconds is None

    def completed(self, server: ServerState, mean: Update, local: LocalOptions) -> Update:
        if not self._follows(local):
            return mean
        delta_c = np.zeros_like(mean.groups[DELTA])
        if server.round >= self.options.warm_start_rounds:
            delta_c -= server.vectors[CONTROL]
            delta_c -= mean.groups[DELTA] / mass(local, server.round + 1)
        return replace(mean, groups={**mean.groups, DELTA_CONTROL: delta_c})

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
        correction = _Correction(tensors(local, c - c_i), self.options.max_corrected_norm)
        trained = train(local, message, (correction,))
        groups = changes(trained, message)
        if full is not None:
            # Decay is part of the steps' gradient, so it is part of f_i.
            new = full + local.options.weight_decay * w if local.options.weight_decay else full
        else:
            new = c_i - c - groups[DELTA] / trained.mass
        new = new.astype(c_i.dtype, copy=False)
        groups[DELTA_CONTROL] = new - c_i
        return Update(groups, 1.0, trained.metrics), {NODE_CONTROL: new}

    def server(self, server: ServerState, mean: Update, cohort: Cohort) -> ServerState:
        share = cohort.replied / cohort.enrolled
        return advanced(
            server,
            mean,
            moved(server.model, mean.groups[DELTA], self.options.server_lr),
            **{CONTROL: moved(server.vectors[CONTROL], mean.groups[DELTA_CONTROL], share)},
        )


class _Correction(Hook):
    def __init__(self, correction: list[torch.Tensor], max_norm: float | None) -> None:
        self._correction = correction
        self._max_norm = max_norm

    def before_step(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        import torch

        torch._foreach_add_(gradients(parameters), self._correction)
        if self._max_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, self._max_norm)
