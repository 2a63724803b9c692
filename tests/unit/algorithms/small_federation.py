"""A federation in one process for tests: participants with memory stores, and a plain server loop."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from fedward_common.algorithms.base import Cohort, ServerState
from fedward_common.algorithms.registry import build
from fedward_common.config import RunConfig, parse_config
from fedward_common.local import LocalRunner
from fedward_common.messages import Purpose, Reply, Request, Stamp
from fedward_common.node import MemoryStore, Participant
from fedward_common.task import Data
from fedward_common.update import Update
from fedward_common.work import Work
from torch import nn
from torch.utils.data import TensorDataset

torch.set_num_threads(1)


def configure(algorithm: Mapping[str, Any] | str, local: Mapping[str, Any], **more: Any) -> RunConfig:
    table = {"name": algorithm} if isinstance(algorithm, str) else dict(algorithm)
    more = {"secure_sum": {"enabled": False}, **more}
    return parse_config(
        {"name": "test", "task": "tests:Task", "rounds": 1, "algorithm": table, "local": dict(local), **more}
    )


class Quadratic:
    """f_i(w) = mean over rows of ½ Σ a (w − b)², float64, w₀ = start."""

    def __init__(self, start: Sequence[float] = (0.0,)) -> None:
        self.start = list(start)

    def model(self) -> nn.Module:
        model = nn.Module()
        model.w = nn.Parameter(torch.tensor(self.start, dtype=torch.float64))
        return model

    def data(self, config: Mapping[str, Any]) -> Data:
        a = torch.tensor(config["a"], dtype=torch.float64).reshape(-1, len(self.start))
        b = torch.tensor(config["b"], dtype=torch.float64).reshape(-1, len(self.start))
        return Data(TensorDataset(a, b))

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        a, b = batch
        return (0.5 * a * (model.w - b) ** 2).sum(1).mean()

    def metrics(self, model: Any, batch: Any) -> dict[str, float]:
        return {}


class Net(nn.Module):
    """Two layers with batch norm between them."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.body = nn.Linear(4, 6, dtype=dtype)
        self.norm = nn.BatchNorm1d(6, dtype=dtype)
        self.head = nn.Linear(6, 3, dtype=dtype)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.body(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x))


class Classes:
    """Three classes of random points; each node's differ by its seed. config: n, seed, test."""

    def __init__(self, dtype: torch.dtype = torch.float32, kinds: Mapping[str, str] | None = None) -> None:
        self.dtype = dtype
        self.tensor_kinds = dict(kinds or {})

    def model(self) -> nn.Module:
        return Net(self.dtype)

    def data(self, config: Mapping[str, Any]) -> Data:
        generator = torch.Generator().manual_seed(config["seed"])

        def draw(count: int) -> TensorDataset:
            x = torch.randn(count, 4, generator=generator, dtype=self.dtype) + config["seed"] % 3
            return TensorDataset(x, torch.randint(0, 3, (count,), generator=generator))

        train = draw(config["n"])
        return Data(train, draw(config["test"]) if config.get("test") else None)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def logits(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0])

    def representation(self, model: Any, batch: Any) -> torch.Tensor:
        return model.features(batch[0])

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).double().mean()}


class Federation:
    """Runs rounds over named nodes; keeps what the server knows: its state and each node's last included stamp."""

    def __init__(self, config: RunConfig, task: Any, nodes: Mapping[str, Mapping[str, Any]]) -> None:
        self.config = config
        self.algorithm: Any = build(config.algorithm)
        self.runners = {name: LocalRunner(config, task, name, data) for name, data in nodes.items()}
        self.stores = {name: MemoryStore() for name in nodes}
        self.nodes = {
            name: Participant(config, self.stores[name], runner.do) for name, runner in self.runners.items()
        }
        first = next(iter(self.runners.values()))
        self.layout = first.layout
        initial = dict(first.do(Work("initial")).vectors)
        initial.pop("counter", None)
        self.state: ServerState = self.algorithm.initial(self.layout, initial)
        self.included: dict[str, Stamp] = {}
        self.attempt = 0
        self.hurried: set[str] = set()
        """Nodes whose time is up at once: they do one step."""

    def ask(self, name: str) -> Reply:
        self.attempt += 1
        return self.nodes[name].handle(
            Request(
                Purpose.TRAIN,
                "run",
                self.state.round + 1,
                self.attempt,
                self.algorithm.broadcast(self.state),
                self.included.get(name),
                {"seconds": 0.0} if name in self.hurried else {},
            )
        )

    def round(self, cohort: Sequence[str] | None = None, lost: Collection[str] = ()) -> list[Reply]:
        """One round; replies of `lost` nodes never reach the server."""
        cohort = list(self.nodes) if cohort is None else list(cohort)
        replies = [(name, self.ask(name)) for name in cohort]
        arrived = [(name, reply) for name, reply in replies if name not in lost]
        for _, reply in replies:
            assert reply.failure is None, reply.failure
        if arrived:
            counts = Cohort(self.state.round + 1, len(self.nodes), len(cohort), len(arrived))
            self.state = self.algorithm.server(self.state, mean([reply for _, reply in arrived]), counts)
            for name, reply in arrived:
                self.included[name] = Stamp(reply.round, reply.attempt)
        return [reply for _, reply in replies]

    def kept(self, name: str) -> Mapping[str, np.ndarray]:
        """What the node will have after its next settlement."""
        pending = self.stores[name].pending()
        if pending is not None and pending[0] == self.included.get(name):
            return pending[1]
        return self.stores[name].committed()[1]


def mean(replies: Sequence[Reply]) -> Update:
    """The weighted mean as the server computes it, in float64."""
    weight = sum(reply.weight for reply in replies)
    groups = {
        name: sum(reply.weight * reply.vectors[name].astype(np.float64) for reply in replies) / weight
        for name in replies[0].vectors
    }
    return Update(groups, weight, {})
