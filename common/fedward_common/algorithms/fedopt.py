"""Server optimisers: the cohort's mean update taken as a gradient step by momentum, Adam, Yogi or Adagrad.

Float buffers never go through the optimiser; they are averaged.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
from pydantic import Field

from fedward_common.algorithms.base import DELTA, MODEL, AlgorithmOptions, Cohort, ServerState, chunks
from fedward_common.algorithms.fedavg import LocalSGD, ServerLR, advanced
from fedward_common.update import Layout, Update, Vector, Vectors

MOMENTUM = "m"
SECOND = "v"


class FedAvgMOptions(AlgorithmOptions):
    """`[algorithm] name = "fedavgm"`."""

    name: Literal["fedavgm"] = "fedavgm"
    server_lr: ServerLR = 1.0
    server_momentum: float = Field(default=0.9, ge=0, lt=1, description="β")


class AdaptiveOptions(AlgorithmOptions):
    """What FedAdam, FedYogi and FedAdagrad share."""

    server_lr: ServerLR = 0.1
    beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of the first moment")
    tau: float = Field(default=1e-3, gt=0, description="τ: a large one makes the step less adaptive")


class FedAdamOptions(AdaptiveOptions):
    """`[algorithm] name = "fedadam"`."""

    name: Literal["fedadam"] = "fedadam"
    beta2: float = Field(default=0.99, ge=0, lt=1, description="decay of the second moment")


class FedYogiOptions(AdaptiveOptions):
    """`[algorithm] name = "fedyogi"`."""

    name: Literal["fedyogi"] = "fedyogi"
    beta2: float = Field(default=0.99, ge=0, lt=1, description="decay of the second moment")


class FedAdagradOptions(AdaptiveOptions):
    """`[algorithm] name = "fedadagrad"`."""

    name: Literal["fedadagrad"] = "fedadagrad"
    beta1: float = Field(default=0.0, ge=0, lt=1, description="decay of the first moment")


class FedAvgM(LocalSGD[FedAvgMOptions]):
    """Hsu et al. 2019: m ← β m + mean Δ, w ← w + η_g m."""

    Options = FedAvgMOptions
    neutral: ClassVar[Mapping[str, Any]] = {"server_momentum": 0.0}

    def initial(self, layout: Layout, vectors: Vectors) -> ServerState:
        return ServerState({**vectors, MOMENTUM: np.zeros_like(vectors[MODEL])})

    def server(self, server: ServerState, mean: Update, cohort: Cohort) -> ServerState:
        w, m, delta = server.model, server.vectors[MOMENTUM], mean.groups[DELTA]
        new_w, new_m = np.empty_like(w), np.empty_like(m)
        for part in chunks(len(w)):
            moment = self.options.server_momentum * m[part].astype(np.float64) + delta[part]
            new_m[part] = moment
            new_w[part] = w[part] + self.options.server_lr * moment
        return advanced(server, mean, new_w, **{MOMENTUM: new_m})


A = TypeVar("A", bound=AdaptiveOptions)


class Adaptive(LocalSGD[A]):
    """Reddi et al. 2021 (ICLR), Alg. 2, without bias correction; m₀ = 0, v₀ = τ².

    m ← β₁ m + (1 − β₁) Δ, v by the subclass, w ← w + η_g m / (√v + τ), Δ the cohort's mean update.
    """

    def initial(self, layout: Layout, vectors: Vectors) -> ServerState:
        w = vectors[MODEL]
        moments = {MOMENTUM: np.zeros_like(w), SECOND: np.full_like(w, self.options.tau**2)}
        return ServerState({**vectors, **moments})

    @abstractmethod
    def second(self, v: Vector, square: Vector) -> Vector:
        """The next second moment from the last one and Δ², both float64."""

    def server(self, server: ServerState, mean: Update, cohort: Cohort) -> ServerState:
        options, w, delta = self.options, server.model, mean.groups[DELTA]
        m, v = server.vectors[MOMENTUM], server.vectors[SECOND]
        new_w, new_m, new_v = np.empty_like(w), np.empty_like(m), np.empty_like(v)
        for part in chunks(len(w)):
            step = delta[part].astype(np.float64)
            first = options.beta1 * m[part].astype(np.float64) + (1 - options.beta1) * step
            second = self.second(v[part].astype(np.float64), step**2)
            new_m[part], new_v[part] = first, second
            new_w[part] = w[part] + options.server_lr * first / (np.sqrt(second) + options.tau)
        return advanced(server, mean, new_w, **{MOMENTUM: new_m, SECOND: new_v})


# With τ far above every |Δ| the denominator √v + τ is τ(1 + √β₂) for Adam, 2τ for Yogi and Adagrad (v₀ = τ²).
_FLAT = 1e8


class FedAdam(Adaptive[FedAdamOptions]):
    """v ← β₂ v + (1 − β₂) Δ²."""

    Options = FedAdamOptions
    neutral: ClassVar[Mapping[str, Any]] = {"server_lr": _FLAT, "tau": _FLAT, "beta1": 0.0, "beta2": 0.0}

    def second(self, v: Vector, square: Vector) -> Vector:
        return self.options.beta2 * v + (1 - self.options.beta2) * square


class FedYogi(Adaptive[FedYogiOptions]):
    """v ← v − (1 − β₂) Δ² sign(v − Δ²)."""

    Options = FedYogiOptions
    neutral: ClassVar[Mapping[str, Any]] = {"server_lr": 2 * _FLAT, "tau": _FLAT, "beta1": 0.0}

    def second(self, v: Vector, square: Vector) -> Vector:
        change: Vector = (1 - self.options.beta2) * square * np.sign(v - square)
        return v - change


class FedAdagrad(Adaptive[FedAdagradOptions]):
    """v ← v + Δ²."""

    Options = FedAdagradOptions
    neutral: ClassVar[Mapping[str, Any]] = {"server_lr": 2 * _FLAT, "tau": _FLAT, "beta1": 0.0}

    def second(self, v: Vector, square: Vector) -> Vector:
        return v + square
