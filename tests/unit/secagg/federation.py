"""Nodes of a secure run as requests reach them, and an honest server over them, in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from fedward_common.config import RunConfig, parse_config
from fedward_common.messages import Purpose, Reply, Request
from fedward_common.node import MemoryStore
from fedward_common.roster import Roster, RosterNode
from fedward_common.secure import SecureParticipant, Standing, schema
from fedward_common.signing import public_text
from fedward_common.summand import Group, Shape
from fedward_common.update import Kind, Layout, TensorSpec
from fedward_common.work import Done, Work
from fedward_server.patience import Patience
from fedward_server.secure import Enrolled, SecureSum, Summed
from fedward_server.simulation import Faults, MemoryTransport, simulated_clock

RUN = "0123456789abcdef0123456789abcdef"
WIDTH = 6
SCALE = 65536.0
"""Of the weights."""
LAYOUT = Layout((TensorSpec("w", (WIDTH,), "float64", Kind.TRAINABLE),))


def config(**changes: Any) -> RunConfig:
    """A run of FedAvg."""
    return parse_config(
        {
            "name": "t", "task": "t:T", "rounds": 3, "algorithm": {"name": "fedavg"}, "local": {"lr": 1, "steps": 1},
            **changes,
        }
    )  # fmt: skip


@dataclass
class Site:
    """What one node's data come to: its update, its number of examples, its loss (also what it finds in a test)."""

    delta: Any
    examples: float
    loss: float

    def __call__(self, work: Work) -> Done:
        """Stands for the worker."""
        if work.op == "prepare":
            return Done(info={"layout": LAYOUT.to_json(), "metric_names": []})
        metrics = {"examples": self.examples, "loss": self.loss}
        if work.op in ("count", "evaluate"):
            return Done(metrics=metrics)
        info = {"steps": 1, "complete": True}
        return Done({"delta": self.delta.copy()}, weight=self.examples, metrics=metrics, info=info)


class Lost(Faults):
    """Replies that never arrive."""

    def __init__(self) -> None:
        self.lost: set[tuple[str, Purpose]] = set()

    def answers(self, name: str, request: Request, reply: Reply) -> Reply | None:
        return None if (name, request.purpose) in self.lost else reply


@dataclass
class Federation:
    """n enrolled nodes in one run."""

    n: int = 5
    config: RunConfig = field(default_factory=config)
    least: int = 2

    def __post_init__(self) -> None:
        rng = np.random.default_rng(7)
        self.sites = {
            # Numbers that are not found in a text by chance.
            f"node-{i}": Site(
                rng.normal(0, 0.1, WIDTH), float(rng.integers(10_000, 90_000)), float(rng.integers(10**6, 10**7)) / 1024
            )
            for i in range(self.n)
        }
        self.identities = {name: Ed25519PrivateKey.generate() for name in self.sites}
        self.roster = Roster(
            version=1,
            federation="test",
            nodes=tuple(
                RosterNode(name=name, node_id=f"{i + 1:032x}", flower_id=None, identity=public_text(identity))
                for i, (name, identity) in enumerate(self.identities.items())
            ),
        )
        self.stores = {name: MemoryStore() for name in self.sites}
        self.nodes = {name: self.started(name) for name in self.sites}
        self.faults = Lost()
        self.clock = simulated_clock()
        transport = MemoryTransport({name: self._handler(name) for name in self.nodes}, (), self.faults, self.clock)
        self.server = SecureSum(transport, RUN, Enrolled(RUN, self.config, lambda: self.roster), Patience(self.clock))

    def _handler(self, name: str) -> Callable[[Request], Reply]:
        return lambda request: self.nodes[name].handle(request)

    def started(self, name: str) -> SecureParticipant:
        """A node's process, as it is after a start."""
        node = self.roster.node(name)
        assert node is not None
        standing = Standing(node.id_bytes, self.identities[name], lambda: self.roster, lambda: self.roster, self.least)
        return SecureParticipant(RUN, self.config, self.stores[name], self.sites[name], standing)

    def shape(self, n: int) -> Shape:
        """Of a round of training."""
        return Shape((Group("delta", WIDTH, 1.0),), schema(True, False, ()), self.config.secure_sum.bits, n, SCALE)

    def train(self, round_: int = 1, attempt: int = 1) -> Summed:
        """One round, as an honest server has it."""
        request = Request(Purpose.TRAIN, RUN, round_, attempt, {"model": np.zeros(WIDTH)})
        return self.server.sum(dict.fromkeys(self.nodes, request), self.shape, 60.0, 2)
