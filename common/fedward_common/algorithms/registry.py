"""All algorithms, one line each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedward_common.algorithms.base import AlgorithmOptions, SumAlgorithm
from fedward_common.algorithms.ditto import Ditto
from fedward_common.algorithms.fedadaptive import FedAdaptive
from fedward_common.algorithms.fedavg import FedAvg
from fedward_common.algorithms.fedbn import FedBN
from fedward_common.algorithms.feddc import FedDC
from fedward_common.algorithms.feddyn import FedDyn
from fedward_common.algorithms.fednova import FedNova
from fedward_common.algorithms.fednp import FedNP
from fedward_common.algorithms.fedopt import FedAdagrad, FedAdam, FedAvgM, FedYogi
from fedward_common.algorithms.fedper import FedPer
from fedward_common.algorithms.fedphp import FedPHP
from fedward_common.algorithms.fedprox import FedProx
from fedward_common.algorithms.fedrep import FedRep
from fedward_common.algorithms.moon import Moon
from fedward_common.algorithms.perfedavg import PerFedAvg
from fedward_common.algorithms.scaffold import Scaffold
from fedward_common.errors import TaskError
from fedward_common.update import Kind, Layout

if TYPE_CHECKING:
    from torch import nn

ALGORITHMS: dict[str, type[SumAlgorithm[Any]]] = {
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "scaffold": Scaffold,
    "fednova": FedNova,
    "feddc": FedDC,
    "feddyn": FedDyn,
    "moon": Moon,
    "fednp": FedNP,
    "fedadaptive": FedAdaptive,
    "fedavgm": FedAvgM,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "fedadagrad": FedAdagrad,
    "perfedavg": PerFedAvg,
    "fedper": FedPer,
    "fedrep": FedRep,
    "fedphp": FedPHP,
    "ditto": Ditto,
    "fedbn": FedBN,
}


def parse_options(value: Any) -> AlgorithmOptions:
    """The `[algorithm]` table as the options of the algorithm it names. Raises ValueError with the known
    names."""
    if isinstance(value, AlgorithmOptions):
        return value
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError(f"give algorithm.name, one of {sorted(ALGORITHMS)}")
    found = ALGORITHMS.get(value["name"])
    if found is None:
        raise ValueError(f"algorithm.name = {value['name']!r} is not known: use one of {sorted(ALGORITHMS)}")
    return found.Options.model_validate(value)


def build(options: AlgorithmOptions) -> SumAlgorithm[Any]:
    """The algorithm with these options."""
    return ALGORITHMS[options.name](options)


def layout_of(
    options: AlgorithmOptions, task: object, model: nn.Module, first: Mapping[str, Kind] | None = None
) -> Layout:
    """The layout of the task's model as the algorithm sees it: the kinds in `first` (shell pattern -> kind), then the
    algorithm's own, then the task's `tensor_kinds`. Raises `TaskError`, also if the algorithm cannot work with such a
    model or asks for a method that the task lacks."""
    algorithm = build(options)
    missing = [name for name in algorithm.asks if not callable(getattr(task, name, None))]
    if missing:
        examples = "; ".join(algorithm.asks[name] for name in missing)
        raise TaskError(
            f"{type(task).__name__} lacks {', '.join(missing)}, which algorithm.name = {options.name!r} asks of a "
            f"task. Choose another algorithm, or add: {examples}"
        )
    own: Mapping[str, Kind | str] = {**(first or {}), **algorithm.kinds(model)}
    named: Mapping[str, Kind | str] = getattr(task, "tensor_kinds", {})
    layout = Layout.of(model, {**own, **{pattern: kind for pattern, kind in named.items() if pattern not in own}})
    problem = algorithm.check_layout(layout)
    if problem:
        raise TaskError(problem)
    return layout
