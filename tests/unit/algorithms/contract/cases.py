"""What the contract suite has to know of an algorithm beyond what its class declares.

One line of `CASES` an algorithm, and none for one that runs as it is built from its name. Everything here has a
default that makes a check ask less, never one that leaves the algorithm out in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from fedward_common.algorithms.base import Algorithm
from fedward_common.algorithms.registry import ALGORITHMS
from fedward_common.config import RunConfig
from small_federation import Classes, Quadratic, configure

from .quadratics import FixedPoint, discounted, drifted, normalised, optimum

Options = Mapping[str, Any]
NONE: Options = {}


class Points(Classes):
    """The suite's task: three classes, a model with batch norm (float buffers and an integer one)."""

    metric_names = ("accuracy",)

    def labels(self, dataset: Any) -> torch.Tensor:
        return dataset.tensors[1]


class Parabolas(Quadratic):
    """The suite's quadratics, in two coordinates; labelled by the sign of the optimum's first one."""

    def __init__(self) -> None:
        super().__init__([3.0, -1.0])

    def labels(self, dataset: Any) -> torch.Tensor:
        return (dataset.tensors[1][:, 0] > 0).long()

    def representation(self, model: Any, batch: Any) -> torch.Tensor:
        return 0.1 * batch[0] + torch.tanh(model.w)


@dataclass(frozen=True)
class Case:
    """options: without which it refuses to be built, or to run `task`. task: takes `dtype` and `kinds` (private tensors
    of the test's own), both optional.

    fixed_point: where the quadratics lead to with `on_quadratics` on top of `options`; None: no closed form is known,
    and only a shared optimum is asked for. quadratics: their task; None: it cannot train such a model. rounds: on
    them, until less than 1e-6 is missing. mirrors: kept vector -> the server's vector that is its mean (or sum) over
    all N nodes; what a `mirrored` algorithm owes. epochs: options with which it takes `local.epochs`, where those of
    `options` refuse them. sensitivity: by how much a run of the suite may enlarge the rounding of its secure sums (5
    was seen).
    """

    options: Options = field(default_factory=dict)
    task: Callable[..., Any] = Points
    fixed_point: FixedPoint | None = None
    on_quadratics: Options = field(default_factory=dict)
    quadratics: Callable[[], Any] | None = Parabolas
    rounds: int = 25
    mirrors: Mapping[str, tuple[str, Callable[..., np.ndarray]]] = field(default_factory=dict)
    epochs: Options = field(default_factory=dict)
    sensitivity: float = 100.0


# Far from where √v dominates the denominator, so that a constant step converges.
_TAME = {"tau": 1.0, "server_lr": 1.5, "beta1": 0.1}

CASES: Mapping[str, Case] = {
    "fedavg": Case(fixed_point=drifted()),
    "fedprox": Case(fixed_point=drifted(mu=0.5), on_quadratics={"mu": 0.5}),
    "scaffold": Case(fixed_point=optimum, mirrors={"c_i": ("c", np.mean)}, epochs={"max_corrected_norm": 1e6}),
    "fedavgm": Case(fixed_point=drifted(), on_quadratics={"server_momentum": 0.3}),
    "fedadam": Case(fixed_point=drifted(), on_quadratics={**_TAME, "beta2": 0.5}),
    "fedyogi": Case(fixed_point=drifted(), on_quadratics={**_TAME, "beta2": 0.5}),
    "fedadaptive": Case(
        {"classes": 3},
        fixed_point=discounted(2.0, 0.2),
        on_quadratics={"classes": 2, "strength": 2.0, "floor": 0.2},
    ),
    "fednova": Case(fixed_point=normalised),
    "feddc": Case(
        fixed_point=optimum,
        rounds=60,
        mirrors={"h_i": ("h", np.mean), "c_i": ("c", np.mean)},
        epochs={"max_corrected_norm": 1e6},
    ),
    "feddyn": Case(fixed_point=optimum, on_quadratics={"alpha": 1.0}, rounds=60, mirrors={"h_i": ("h", np.mean)}),
    "fednp": Case(quadratics=None, mirrors={"natural_k": ("natural", np.sum)}),
    "perfedavg": Case(fixed_point=drifted(alpha=0.1), on_quadratics={"alpha": 0.1}),
    "fedper": Case({"head": ["head.*"]}, quadratics=None),
    "fedrep": Case({"head": ["head.*"]}, quadratics=None),
    "fedphp": Case(fixed_point=drifted(), on_quadratics={"lam": 0.0}),
    "ditto": Case(fixed_point=drifted()),
    "fedbn": Case(quadratics=None),
    "fedadagrad": Case(fixed_point=drifted(), on_quadratics={**_TAME, "server_lr": 4.0}),
}

NAMES = sorted(ALGORITHMS)
LOCAL = {"lr": 0.1, "steps": 3, "batch_size": 4}


def case(name: str) -> Case:
    """The algorithm's case."""
    return CASES.get(name, Case())


def options(name: str, more: Options = NONE) -> dict[str, Any]:
    """The `[algorithm]` table."""
    return {"name": name, **case(name).options, **more}


def config(name: str, more: Options = NONE, **tables: Any) -> RunConfig:
    """A run's configuration; tables: over the suite's own."""
    return configure(options(name, more), tables.pop("local", LOCAL), **tables)


def task(name: str, dtype: torch.dtype = torch.float32, kinds: Mapping[str, str] | None = None) -> Any:
    """The algorithm's task."""
    return case(name).task(dtype=dtype, kinds=kinds)


def kind(name: str) -> type[Algorithm[Any]]:
    """Its class, as it is registered now."""
    return ALGORITHMS[name]
