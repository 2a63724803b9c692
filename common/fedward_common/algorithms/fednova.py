"""FedNova: changes are divided by how far a node's steps could carry it, so that many steps are no larger vote."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from fedward_common.algorithms.base import DELTA, MODEL, AlgorithmOptions, Cohort, ServerState, moved
from fedward_common.algorithms.fedavg import LocalSGD, ServerLR, advanced, changes
from fedward_common.algorithms.hooks import proximal
from fedward_common.algorithms.local_options import LocalOptions
from fedward_common.algorithms.node_half import Hook, Local
from fedward_common.update import Extent, Layout, Update, Vectors

ACCUMULATION = "accumulation"
"""Name of the update group ‖a_i‖₁, one number."""


class FedNovaOptions(AlgorithmOptions):
    """`[algorithm] name = "fednova"`."""

    name: Literal["fednova"] = "fednova"
    mu: float = Field(default=0.0, ge=0, description="weight μ of the proximal term μ/2 ‖y − w‖²")
    server_lr: ServerLR = 1.0

    def check(self, local: LocalOptions) -> str | None:
        most = (1 - math.sqrt(local.momentum)) ** 2
        if local.lr * self.mu > most:
            return (
                f"algorithm.mu = {self.mu:g} with local.lr = {local.lr:g} and local.momentum = {local.momentum:g}: the "
                "pull would swing past w, and gradients would count against themselves. lr · mu may be at most "
                f"(1 − √momentum)²: lower mu to {most / local.lr:.2g}, or momentum."
            )
        return None

    def check_privacy(self, unit: str) -> str | None:
        if unit == "site":
            return (
                "algorithm.name = 'fednova' with privacy.unit = 'site': how many steps a node did follows from how "
                "much data it has, and only the change is clipped and noised. Where all nodes do the same steps "
                "FedNova is FedAvg, with mu FedProx: choose fedavg or fedprox with local.steps, or remove [privacy]."
            )
        return None


class FedNova(LocalSGD[FedNovaOptions]):
    """Wang et al. 2020 (NeurIPS), Alg. 1 and Eq. 9, with p_i = n_i/Σ_S n_i.

    d_i = −Δ_i/(η ‖a_i‖₁). τ_eff = Σ_S p_i ‖a_i‖₁. w ← w − η_g τ_eff η Σ_S p_i d_i.
    a_i: with which weights a node's gradients stand in Δ_i, in units of η = `local.lr` (`accumulation`). η cancels:
    a node sends Δ_i/‖a_i‖₁ and ‖a_i‖₁, weighted by n_i. mu > 0: the local steps are FedProx's.

    Partial work counts by what was done: the few steps of a slow node are a full vote on the direction."""

    Options = FedNovaOptions
    neutral: ClassVar[Mapping[str, Any]] = {"mu": 0.0}

    def hooks(self, local: Local, message: Vectors) -> Sequence[Hook]:
        return proximal(local, self.options.mu, message[MODEL])

    def sends(self, layout: Layout) -> Mapping[str, Extent]:
        return {**super().sends(layout), ACCUMULATION: 1}

    def summed(self, layout: Layout, local: LocalOptions) -> Mapping[str, Extent]:
        return super().sends(layout) if local.same_steps else self.sends(layout)

    def completed(self, server: ServerState, mean: Update, local: LocalOptions) -> Update:
        if local.steps is None or not local.same_steps:
            return mean
        norm = np.array([accumulation(local, self.options.mu, server.round + 1, local.steps)])
        return replace(mean, groups={**mean.groups, ACCUMULATION: norm})

    def client(self, local: Local, message: Vectors, state: Vectors) -> tuple[Update, Vectors]:
        from fedward_common.algorithms.training import train

        trained = train(local, message, self.hooks(local, message))
        norm = accumulation(local.options, self.options.mu, local.round, trained.steps)
        groups = changes(trained, message)
        groups[DELTA] /= norm
        groups[ACCUMULATION] = np.array([norm])
        return Update(groups, float(local.examples), trained.metrics), {}

    def server(self, server: ServerState, mean: Update, cohort: Cohort) -> ServerState:
        tau_eff = float(mean.groups[ACCUMULATION][0])
        return advanced(server, mean, moved(server.model, mean.groups[DELTA], self.options.server_lr * tau_eff))


def accumulation(options: LocalOptions, mu: float, round_: int, steps: int) -> float:
    """‖a_i‖₁ after `steps` steps of that round: how far they carry y against a gradient that is 1 throughout, in units
    of `options.lr`.

    As the optimiser does it, momentum, the pull μ(y − w) and the rate's schedule included: exact for all of them
    together, where the paper has a closed form for each. No weight is negative (`FedNovaOptions.check`), so that their
    sum is the norm."""
    travelled, velocity = 0.0, 0.0
    for step in range(steps):
        velocity = options.momentum * velocity + 1.0 - mu * options.lr * travelled
        travelled += options.rate(round_, step) / options.lr * velocity
    return travelled
