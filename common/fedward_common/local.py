"""Task code at work on one node: builds the model, loads the data, trains and evaluates.

The same class runs in a worker process (under the guard), in the in-process simulator and in a stock Flower
ClientApp. It knows nothing of policies, keys or links.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from fedward_common import batches
from fedward_common.algorithms.base import MODEL, STATISTIC
from fedward_common.algorithms.node_half import Local
from fedward_common.algorithms.registry import build
from fedward_common.algorithms.training import checked_loss, seed_all
from fedward_common.config import RunConfig
from fedward_common.errors import TaskError, UpdateError
from fedward_common.model import fresh_model, laid_out
from fedward_common.privacy.sampled import SampledSteps, sampled_steps
from fedward_common.shared_data import check_public, check_shared, mixed
from fedward_common.task import Data, Task, check_data, check_task, metric_names
from fedward_common.update import Kind, Layout, Vector, Vectors
from fedward_common.work import PRIVATE, Done, Work

_EVALUATION_BATCH = 256


@dataclass(frozen=True)
class _Built:
    """The task's model on the device, and what of it stays on the node, as it was when new."""

    model: nn.Module
    layout: Layout
    private: Vector
    counter: Vector


class LocalRunner:
    """Runs `Work` for one node of one run.

    Integer buffers (`num_batches_tracked`) start every round as in the new model, so that a round does
    not depend on what this process did before. device: a PyTorch device, or "auto" for a GPU if there is
    one."""

    def __init__(
        self, config: RunConfig, task: Task, node: str, data_config: Mapping[str, Any], device: str = "cpu"
    ) -> None:
        self._config = config
        self._task = check_task(task)
        self._node = node
        self._data_config = data_config
        self._device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        self._algorithm = build(config.algorithm)

    @property
    def layout(self) -> Layout:
        """Layout of the task's model."""
        return self._built.layout

    def do(self, work: Work) -> Done:
        """Do one piece of work. Raises `TaskError` (the task lacks something), `UpdateError` (the vectors
        do not fit the model) or whatever the task's code raises."""
        doers = {
            "prepare": self._prepare,
            "count": self._count,
            "initial": self._initial,
            "train": self._train,
            "evaluate": self._evaluate,
        }
        if work.op not in doers:
            raise ValueError(f"op = {work.op!r}: expected one of {sorted(doers)}")
        return doers[work.op](work)

    def _prepare(self, work: Work) -> Done:
        layout, _ = self._built.layout, self._training
        return Done(info=self._told(layout))

    def _count(self, work: Work) -> Done:
        return Done(metrics={"examples": float(batches.length(self._data.train))})

    def _told(self, layout: Layout) -> dict[str, Any]:
        return {"layout": layout.to_json(), "metric_names": list(metric_names(self._task))}

    def _initial(self, work: Work) -> Done:
        # A fresh model: the one at hand may have been trained.
        model = fresh_model(self._config, self._task)
        state = model.state_dict()
        names = {MODEL: Kind.TRAINABLE, STATISTIC: Kind.STATISTIC, "counter": Kind.COUNTER}
        layout = self.layout
        vectors = {name: layout.pack(state, kind) for name, kind in names.items() if layout.size(kind)}
        return Done(vectors, info=self._told(layout))

    def _train(self, work: Work) -> Done:
        built, layout = self._built, self._built.layout
        self._load(work)
        update, state = self._algorithm.client(local := self._local(work, work.round), work.vectors, self._kept(work))
        if layout.size(Kind.PRIVATE):
            state = {**state, PRIVATE: layout.pack(built.model.state_dict(), Kind.PRIVATE)}
        info = {"steps": local.progress.steps, "complete": local.progress.complete}
        return Done(update.groups, state, update.weight, update.metrics, info)

    def _local(self, work: Work, seed: int | str) -> Local:
        built = self._built
        return Local(
            task=self._task,
            model=built.model,
            data=self._training,
            layout=built.layout,
            options=self._config.local,
            round=work.round,
            seed=self._seed(seed),
            device=self._device,
            seconds=work.seconds,
            private=self._private,
            apart=self._data.train,
        )

    def _kept(self, work: Work) -> Vectors:
        """The vectors that the algorithm keeps on this node."""
        layout = self.layout
        extents = self._algorithm.keeps(layout)
        kept = {name: work.state[name] for name in extents if name in work.state}
        if len(kept) < len(extents):
            private = work.state.get(PRIVATE, self._built.private)
            kept = dict(self._algorithm.begin(layout, {**work.vectors, PRIVATE: private}))
        for name, extent in extents.items():
            _fits(f"kept vector {name!r}", kept[name], layout.extent(extent)[0])
        return kept

    def _evaluate(self, work: Work) -> Done:
        dataset, collate = self._split(work.split)
        if dataset is None or batches.length(dataset) == 0:
            return Done(metrics={"examples": 0.0})
        self._load(work)
        model = self._built.model
        if work.split != "central":
            # A node judges the model that it would use itself.
            own = self._algorithm.personal(self._local(work, "evaluate"), work.vectors, self._kept(work))
            if own is not work.vectors:
                self._put(own)
        model.eval()
        read = batches.reader(dataset, collate, self._device)
        count = batches.length(dataset)
        sums = {"examples": float(count), "loss": 0.0}
        size = max(_EVALUATION_BATCH, self._config.local.batch_size)
        with torch.no_grad():
            for indices in torch.arange(count).split(size):  # type: ignore[no-untyped-call]
                batch = read(indices)
                loss = checked_loss(self._task.loss(model, batch), needs_grad=False)
                sums["loss"] += len(indices) * float(loss)
                for name, mean in _checked_metrics(self._task.metrics(model, batch)).items():
                    sums[name] = sums.get(name, 0.0) + len(indices) * mean
        return Done(metrics=sums)

    def _load(self, work: Work) -> None:
        """Bring the model to the broadcast, with this node's own private tensors and new counters."""
        built, layout = self._built, self._built.layout
        state = built.model.state_dict()
        self._put(work.vectors)
        layout.copy_into(state, work.state.get(PRIVATE, built.private), Kind.PRIVATE)
        layout.copy_into(state, built.counter, Kind.COUNTER)

    def _put(self, vectors: Vectors) -> None:
        layout, state = self.layout, self._built.model.state_dict()
        for name, kind in ((MODEL, Kind.TRAINABLE), (STATISTIC, Kind.STATISTIC)):
            size = layout.size(kind)
            if size and name not in vectors:
                raise UpdateError(f"the broadcast lacks {name!r}; it has {sorted(vectors)}")
            if size:
                layout.copy_into(state, vectors[name], kind)

    def _split(self, name: str) -> tuple[Dataset[Any] | None, batches.Collate | None]:
        if name == "train":
            return self._data.train, self._data.collate
        if name == "test":
            return self._data.test, self._data.collate
        if name == "central":
            data = self._central_data
            return data.test if data.test is not None else data.train, data.collate
        raise ValueError(f"split = {name!r}: expected 'test', 'train' or 'central'")

    @cached_property
    def _built(self) -> _Built:
        model = fresh_model(self._config, self._task)
        if self._private is not None:
            from fedward_common.privacy.dp_sgd import check_model

            check_model(model)
        layout = laid_out(self._config, self._task, model)
        state = model.state_dict()
        return _Built(
            model.to(self._device), layout, layout.pack(state, Kind.PRIVATE), layout.pack(state, Kind.COUNTER)
        )

    @cached_property
    def _private(self) -> SampledSteps | None:
        by_steps = self._config.privacy is not None and self._config.privacy.unit != "site"
        return sampled_steps(self._config) if by_steps else None

    @cached_property
    def _data(self) -> Data:
        # A random split into train and test must come out the same after a restart.
        seed_all(self._seed("data"), "cpu")
        return _flattened(check_data(self._task.data(self._data_config)))

    @cached_property
    def _training(self) -> Data:
        """What this node trains on: its own data, and as many public examples as the run asks for."""
        shared = self._config.shared
        if shared is None:
            return self._data
        check_shared(self._task)
        seed_all(self._config.seed, "cpu")
        public = check_public(self._task.shared_data(self._data_config))  # type: ignore[attr-defined]
        return mixed(self._data, public, shared, self._seed("shared"))

    @cached_property
    def _central_data(self) -> Data:
        make = getattr(self._task, "central_data", None)
        if not callable(make):
            raise TaskError(
                f"evaluation.central needs central_data(config) -> Data in {type(self._task).__name__}: "
                "add it, or set evaluation.central = false."
            )
        seed_all(self._config.seed, "cpu")
        return _flattened(check_data(make(self._data_config)))

    def _seed(self, what: int | str) -> int:
        text = json.dumps([self._config.seed, self._node, what])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def _flattened(data: Data) -> Data:
    if data.collate is not None:
        return data
    test = data.test if data.test is None else batches.flattened(data.test)
    return Data(batches.flattened(data.train), test, groups=data.groups)


def _fits(what: str, vector: Vector, size: int) -> None:
    if vector.shape != (size,):
        raise UpdateError(f"{what} has shape {vector.shape}, the model needs ({size},)")


def _checked_metrics(metrics: object) -> dict[str, float]:
    """Means over a batch as plain floats, else a `TaskError`."""
    if not isinstance(metrics, Mapping):
        raise TaskError(f"metrics() returned {type(metrics).__name__}: return a dict of name -> batch mean.")
    plain = {}
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise TaskError(f"metrics() has the key {name!r}: names are strings.")
        if name in ("examples", "loss"):
            raise TaskError(f"metrics() returned {name!r}, which Fedward fills in: choose another name.")
        if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
            value = value.item()
        if not isinstance(value, Real):
            raise TaskError(
                f"metrics()[{name!r}] is a {type(value).__name__}: return a number, the mean over the batch "
                "(for a tensor, .mean())."
            )
        plain[name] = float(value)
    return plain
