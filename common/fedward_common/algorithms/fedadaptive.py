"""Adaptive aggregation weights: a node's examples count less, the further its labels are from everybody's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from fedward_common.algorithms.base import DELTA, AlgorithmOptions, Cohort, ServerState, moved
from fedward_common.algorithms.fedavg import LocalSGD, ServerLR, advanced
from fedward_common.errors import TaskError
from fedward_common.update import Extent, Layout, Update, Vector, Vectors

if TYPE_CHECKING:
    from fedward_common.algorithms.node_half import Local

LABELS = "labels"
"""Label counts, C numbers. On the server: Σ n_i p_i over all nodes that have told theirs. In a broadcast: q, their
distribution. Kept by a node: its own n_i p_i. In an update: see `FedAdaptive`."""
TOLD = "told"
"""Kept by a node: 1 once its label counts were in a sum."""


class FedAdaptiveOptions(AlgorithmOptions):
    """`[algorithm] name = "fedadaptive"`."""

    name: Literal["fedadaptive"] = "fedadaptive"
    classes: int = Field(ge=2, le=10_000, description="C: labels are whole numbers from 0 to C − 1")
    distance: Literal["hellinger", "kl"] = Field(
        default="hellinger", description="d(p_i, q) between a node's label distribution and the summed one"
    )
    strength: float = Field(default=1.0, ge=0, description="s: how fast the discount falls with d; with 0 it is FedAvg")
    floor: float = Field(
        default=0.1, ge=1e-3, lt=1, description="φ for an endless distance: no node counts less than this"
    )
    census_rounds: int = Field(
        default=1, ge=1, description="first rounds in which a node tells its label counts, once, in the sum"
    )
    server_lr: ServerLR = 1.0

    def check_privacy(self, unit: str) -> str | None:
        return (
            f"algorithm.name = 'fedadaptive' with privacy.unit = '{unit}': label counts and the weights that follow "
            "from them are data that no noise hides. Choose fedavg, fedprox or a server optimiser, or remove [privacy]."
        )


class FedAdaptive(LocalSGD[FedAdaptiveOptions]):
    """Weights u_i = n_i φ(d(p_i, q)), φ(d) = floor + (1 − floor) e^{−s d}: w ← w + η_g Σ u_i Δ_i / Σ u_i.

    p_i: the node's label distribution; q: that of Σ n_i p_i over the census, the first `census_rounds` rounds; φ = 1
    until there is a q. Hellinger: d = √(½ Σ(√p − √q)²), within [0, 1]. KL: d = Σ p ln(p/q), infinite for a node with
    a class that q lacks. FedDisco (Ye et al. 2023, ICML) has the idea, with weights ∝ ReLU(n_i − a d_i + b) and the
    server's knowledge of every node's d_i.

    The counts travel in the sum of the updates, as the group "labels" = n_i p_i / u_i: its weighted mean times Σ u_i is
    Σ n_i p_i. A node tells them once: sums of one unchanging vector over cohorts that change could be solved for it.
    """

    Options = FedAdaptiveOptions
    neutral: ClassVar[Mapping[str, Any]] = {"strength": 0.0}
    asks: ClassVar[Mapping[str, str]] = {
        LABELS: "def labels(self, dataset): return dataset.tensors[1]  # the label of each record, 1-D and whole"
    }

    def initial(self, layout: Layout, vectors: Vectors) -> ServerState:
        return ServerState({**vectors, LABELS: np.zeros(self.options.classes)})

    def broadcast(self, server: ServerState) -> Vectors:
        message = dict(super().broadcast(server))
        # No count is below zero, and neither rounding nor quantisation takes one there: such an entry is the work of a
        # node that lies, and counts as no example.
        counts = np.maximum(server.vectors[LABELS], 0.0)
        if counts.any():
            message[LABELS] = counts / counts.sum()
        return message

    def keeps(self, layout: Layout) -> Mapping[str, Extent]:
        return {LABELS: self.options.classes, TOLD: 1}

    def sends(self, layout: Layout) -> Mapping[str, Extent]:
        return {**super().sends(layout), LABELS: self.options.classes}

    def client(self, local: Local, message: Vectors, state: Vectors) -> tuple[Update, Vectors]:
        counts = state[LABELS] if state[LABELS].any() else self._counts(local)
        update, _ = super().client(local, message, {})
        weight = update.weight * self.discount(counts / counts.sum(), message.get(LABELS))
        tells = not state[TOLD].any() and local.round <= self.options.census_rounds
        told = counts / weight if tells else np.zeros_like(counts)
        kept = {LABELS: counts, TOLD: np.ones(1) if tells else state[TOLD]}
        return Update({**update.groups, LABELS: told}, weight, update.metrics), kept

    def discount(self, p: Vector, q: Vector | None) -> float:
        """φ of a node with the label distribution p, from floor to 1."""
        options = self.options
        if q is None or options.strength == 0:
            return 1.0
        measure = {"hellinger": hellinger, "kl": kl}[options.distance]
        # In this order: f + (1 − f) rounds to 1 for every f, so that φ(0) is 1, and no φ is under the floor.
        return options.floor + (1.0 - options.floor) * math.exp(-options.strength * measure(p, q))

    def server(self, server: ServerState, mean: Update, cohort: Cohort) -> ServerState:
        counts = moved(server.vectors[LABELS], mean.groups[LABELS], mean.weight)
        model = moved(server.model, mean.groups[DELTA], self.options.server_lr)
        return advanced(server, mean, model, **{LABELS: counts})

    def _counts(self, local: Local) -> Vector:
        """n_i p_i. Raises `TaskError`."""
        import torch

        classes, n = self.options.classes, local.examples
        labels = local.task.labels(local.own)  # type: ignore[attr-defined]
        if not isinstance(labels, torch.Tensor) or labels.dim() != 1 or labels.is_floating_point():
            shape = tuple(labels.shape) if isinstance(labels, torch.Tensor) else type(labels).__name__
            raise TaskError(f"labels() returned {shape}: return a 1-D integer tensor, a label for each example.")
        if len(labels) != n:
            raise TaskError(f"labels() returned {len(labels)} labels for {n} examples: return one for each.")
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= classes:
            raise TaskError(
                f"labels() returned labels from {low} to {high}, but algorithm.classes = {classes}: they must be from "
                f"0 to {classes - 1}. Correct labels(), or set classes."
            )
        return torch.bincount(labels.cpu().to(torch.int64), minlength=classes).to(torch.float64).numpy()


def hellinger(p: Vector, q: Vector) -> float:
    """√(½ Σ(√p − √q)²), from 0 to 1."""
    return float(np.sqrt(0.5 * np.sum((np.sqrt(p) - np.sqrt(q)) ** 2)))


def kl(p: Vector, q: Vector) -> float:
    """Σ p ln(p/q) over p > 0, from 0; infinite where q is 0 and p is not."""
    there = p > 0
    if (q[there] == 0).any():
        return math.inf
    # Not under 0, where the sum of equal distributions would round to.
    return max(0.0, float(np.sum(p[there] * np.log(p[there] / q[there]))))
