"""What a data scientist writes: a task. Model, data, loss, metrics; everything else is Fedward's.

    class Digits:
        def model(self) -> nn.Module: ...
        def data(self, config) -> Data: ...                  # from the node's own [data] table
        def loss(self, model, batch) -> torch.Tensor: ...    # mean over the batch
        def metrics(self, model, batch) -> dict[str, float]: ...  # means over the batch
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.utils.data import Dataset

from fedward_common.errors import TaskError

Batch = Any


class NoDataError(TaskError):
    """This node has no example to train on."""


@dataclass(frozen=True)
class Data:
    """A node's data. Both are map-style PyTorch datasets; `test` may be None. `collate` joins samples into a
    batch (PyTorch's default if None). `groups`: whose each training record is (a patient's id, a writer's), in the
    order of the records; for privacy by patient."""

    train: Dataset[Any]
    test: Dataset[Any] | None = None
    collate: Callable[[list[Any]], Batch] | None = None
    groups: Sequence[Any] | None = None


@runtime_checkable
class Task(Protocol):
    """A federated learning task.

    Optional attributes: `metric_names` (the names that `metrics` returns, such as `("accuracy",)`: a secure sum has a
    fixed place for each); `tensor_kinds` (shell pattern over state-dict names -> 'trainable' | 'statistic' |
    'counter' | 'private' | 'frozen'); `central_data(config) -> Data` for evaluation on the server (its `test`, or
    `train` if that is None); `shared_data(config) -> Dataset`, the same public examples on every node, made after the
    run's seed was set, for runs with `[task.shared]`; `losses(model, batch) -> Tensor`, the loss of each record, for
    ghost clipping; `representation(model, batch) -> Tensor`, [batch, features]: what the model makes of each record
    before its last layer (or the output of a projection head), with a gradient; for the algorithms `moon`,
    `fednp` and `fedphp`; `logits(model, batch) -> Tensor`, [batch, classes, …], with a gradient, for `fedphp`;
    `labels(dataset) -> Tensor`, 1-D and whole numbers: the label of each record, for weights by label distribution.
    """

    def model(self) -> nn.Module:
        """A fresh model. Called after the run's seed was set, so every site builds the same one."""

    def data(self, config: Mapping[str, Any]) -> Data:
        """The data of this node; `config` is the `[data]` table of its own configuration."""

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Mean loss over the batch, a scalar with a gradient."""

    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, float | torch.Tensor]:
        """Means over the batch, by name (may be empty). Called without gradient in eval mode."""


_NEEDED: dict[str, str] = {
    "model": "def model(self) -> nn.Module: return nn.Linear(64, 10)",
    "data": "def data(self, config) -> Data: return Data(train=TensorDataset(x, y), test=...)",
    "loss": "def loss(self, model, batch): x, y = batch; return F.cross_entropy(model(x), y)",
    "metrics": "def metrics(self, model, batch): return {'accuracy': ...}  # or return {}",
}


def check_task(task: object) -> Task:
    """`task` itself, if it has all that a task needs; else a `TaskError` that lists each missing method
    with an example of it."""
    missing = [name for name in _NEEDED if not callable(getattr(task, name, None))]
    if missing:
        lines = "\n".join(f"  {_NEEDED[name]}" for name in missing)
        lacks = ", ".join(missing)
        raise TaskError(f"{type(task).__name__} is not a task yet; it lacks {lacks}. Add:\n{lines}")
    return task  # type: ignore[return-value]


def metric_names(task: object) -> tuple[str, ...]:
    """The task's `metric_names`, () if it has none. Raises `TaskError` unless they are a sequence of names."""
    names = getattr(task, "metric_names", ())
    if isinstance(names, str) or not all(isinstance(name, str) and name for name in names):
        raise TaskError(f"metric_names = {names!r}: give a tuple of names, such as ('accuracy',).")
    return tuple(names)


def load_task(reference: str, root: Path | None = None) -> Task:
    """The task named by `module:attribute`; `root` (an unpacked bundle) is put first on the import path.

    The attribute is a class (called without arguments) or an instance. Raises `TaskError`.
    """
    module_name, _, attribute = reference.partition(":")
    if not module_name or not attribute:
        raise TaskError(f"task = {reference!r}: write it as 'module:Class', such as 'digits.task:Digits'.")
    if root is not None and str(root) not in sys.path:
        sys.path.insert(0, str(root))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        where = f" in {root}" if root is not None else ""
        raise TaskError(f"task = {reference!r}: cannot import {error.name!r}{where}.") from error
    if not hasattr(module, attribute):
        public = [name for name in vars(module) if not name.startswith("_")]
        raise TaskError(f"task = {reference!r}: {module_name!r} has no {attribute!r}; it has {public}.")
    found = getattr(module, attribute)
    if isinstance(found, type):
        try:
            signature(found).bind()
        except TypeError as error:
            raise TaskError(
                f"task = {reference!r}: {attribute} cannot be made without arguments ({error}). Give its "
                "__init__ defaults, or name an instance."
            ) from error
        found = found()
    return check_task(found)


def check_data(data: object) -> Data:
    """`data` itself if it is a `Data` with a non-empty training set, else a `TaskError` with the way out."""
    if not isinstance(data, Data):
        raise TaskError(
            f"data() returned {type(data).__name__}, expected fedward_common.task.Data(train=…, test=…)."
        )
    for name in ("train", "test"):
        part = getattr(data, name)
        if part is None and name == "test":
            continue
        if not isinstance(part, Sized) or not hasattr(part, "__getitem__"):
            raise TaskError(f"Data.{name} must be a map-style dataset (with __len__ and __getitem__).")
    if len(data.train) == 0:  # type: ignore[arg-type]
        raise NoDataError(
            "Data.train is empty: this node has no example to train on. Check the paths and filters in the "
            "node's [data] table."
        )
    return data
