"""A small federation for tests of the engine: real `Participant`s over made-up local work in plain NumPy.

The algorithm is SCAFFOLD (option II) on quadratics, written down once more and independently, because its invariant
c = mean over N of c_i breaks whenever engine and nodes disagree on what was in a sum.
"""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any, Literal

import numpy as np
from fedward_common.algorithms.base import AlgorithmOptions, ServerState, SumAlgorithm
from fedward_common.config import RunConfig
from fedward_common.messages import Purpose, Reply, Request
from fedward_common.node import MemoryStore, Participant
from fedward_common.update import Kind, Layout, TensorSpec
from fedward_common.work import Done, Work
from fedward_server.collecting import PlainCollector
from fedward_server.events import EventLog, read_events
from fedward_server.paths import RunPaths
from fedward_server.rounds import Outcome, Rounds
from fedward_server.simulation import Faults, MemoryTransport, simulated_clock

SIZE = 7
LAYOUT = Layout((TensorSpec("w", (SIZE,), "float64", Kind.TRAINABLE),))
RATE, STEPS = 0.1, 5


class ToyOptions(AlgorithmOptions):
    name: Literal["toy"] = "toy"


class Toy(SumAlgorithm[ToyOptions]):
    Options = ToyOptions
    uniform = True

    def initial(self, layout, vectors):
        return ServerState({**vectors, "c": np.zeros(SIZE)})

    def broadcast(self, server):
        return {"model": server.vectors["model"], "c": server.vectors["c"]}

    def sends(self, layout):
        return {"delta": Kind.TRAINABLE, "delta_c": Kind.TRAINABLE}

    def keeps(self, layout):
        return {"c_i": Kind.TRAINABLE}

    def client(self, local, message, state):
        raise NotImplementedError("the tests' nodes work by Node.execute")

    def server(self, server, mean, cohort):
        share = cohort.replied / cohort.enrolled
        return dataclasses.replace(
            server.with_vectors(
                model=server.model + mean.groups["delta"], c=server.vectors["c"] + share * mean.groups["delta_c"]
            ),
            round=cohort.round,
        )


class Node:
    """One site: f_i(y) = a_i/2 · ‖y − b_i‖²."""

    def __init__(self, config: RunConfig, index: int) -> None:
        rng = np.random.default_rng(index)
        self.optimum = rng.normal(size=SIZE)
        self.curvature = rng.uniform(0.5, 1.5)
        self.store = MemoryStore()
        self.config = config
        self.asked: list[Request] = []
        self.restart()

    def restart(self) -> None:
        """The process dies; what is stored stays."""
        self.participant = Participant(self.config, self.store, self.execute)

    def handle(self, request: Request) -> Reply:
        self.asked.append(request)
        return self.participant.handle(request)

    def execute(self, work: Work) -> Done:
        if work.op == "prepare":
            return Done(info={"layout": LAYOUT.to_json()})
        model = work.vectors["model"]
        if work.op == "evaluate":
            loss = float(np.sum((model - self.optimum) ** 2))
            return Done(metrics={"examples": 10.0, "loss": 10 * loss})
        c, c_i = work.vectors["c"], work.state.get("c_i", np.zeros(SIZE))
        y = model.copy()
        for _ in range(STEPS):
            y -= RATE * (self.curvature * (y - self.optimum) - c_i + c)
        after = c_i - c - (y - model) / (STEPS * RATE)
        return Done(
            vectors={"delta": y - model, "delta_c": after - c_i},
            state={"c_i": after},
            weight=1.0,
            metrics={"examples": 10.0, "loss": 1.0 + self.curvature},
        )

    @property
    def kept(self) -> np.ndarray:
        """c_i as committed."""
        return self.store.committed()[1].get("c_i", np.zeros(SIZE))

    def purposes(self) -> list[Purpose]:
        return [request.purpose for request in self.asked]


class Crash(BaseException):
    """kill -9 of the server, as far as it can be had in one process: nothing may catch it."""


class Bomb:
    """Counts steps; goes off at each step named."""

    def __init__(self, *at: int) -> None:
        self.at = set(at)
        self.steps = 0

    def tick(self) -> None:
        self.steps += 1
        if self.steps in self.at:
            raise Crash


class Bombed(Faults):
    """The server may die before a request is delivered, and after the node has answered."""

    def __init__(self, bomb: Bomb) -> None:
        self.bomb = bomb

    def delivers(self, name, request):
        self.bomb.tick()
        return True

    def answers(self, name, request, reply):
        self.bomb.tick()
        return reply


class Lossy(Bombed):
    """Requests and replies get lost, on top."""

    def __init__(self, bomb: Bomb, rate: float, seed: int) -> None:
        super().__init__(bomb)
        self.rng, self.rate, self.lost = random.Random(seed), rate, 0

    def _loses(self, request: Request) -> bool:
        lost = request.purpose is not Purpose.FINISH and self.rng.random() < self.rate
        self.lost += lost and request.purpose is Purpose.TRAIN
        return lost

    def delivers(self, name, request):
        return super().delivers(name, request) and not self._loses(request)

    def answers(self, name, request, reply):
        reply = super().answers(name, request, reply)
        return None if self._loses(request) else reply


class Shuffled(Faults):
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def order(self, names):
        return self.rng.sample(names, len(names))


class BombedLog(EventLog):
    def __init__(self, path: Path, bomb: Bomb) -> None:
        super().__init__(path)
        self.bomb = bomb

    def append(self, kind, **fields):
        self.bomb.tick()
        event = super().append(kind, **fields)
        self.bomb.tick()
        return event


def config(**tables: Any) -> RunConfig:
    base = {"name": "test", "task": "toy:Toy", "rounds": 3, "algorithm": {"name": "toy"}, "seed": 1}
    base["secure_sum"] = {"enabled": False}
    return RunConfig.model_validate({**base, "local": {"lr": RATE, "steps": STEPS}, **tables})


class World:
    """Nodes that live on while servers come and go."""

    def __init__(self, root: Path, config: RunConfig, nodes: int = 4) -> None:
        self.config = config
        self.nodes = {f"node-{i}": Node(config, i) for i in range(nodes)}
        self.paths = RunPaths(root / "run-1")
        self.epoch = 0

    def rounds(self, faults: Faults | None = None, bomb: Bomb | None = None, **changes: Any) -> Rounds:
        """A new server process."""
        self.epoch += 1
        clock = simulated_clock()
        handlers = {name: node.handle for name, node in self.nodes.items()}
        transport = changes.get("transport", MemoryTransport(handlers, (), faults, clock))
        algorithm = Toy(ToyOptions())
        arguments: dict[str, Any] = {
            "config": self.config,
            "algorithm": algorithm,
            "layout": LAYOUT,
            "initial": {"model": np.zeros(SIZE)},
            "transport": transport,
            "collector": PlainCollector(changes.get("config", self.config), algorithm, LAYOUT, transport, clock),
            "paths": self.paths,
            "epoch": self.epoch,
            "log": BombedLog(self.paths.events, bomb or Bomb()),
            "clock": clock,
        }
        return Rounds(**{**arguments, **changes})

    def run(self, faults: Faults | None = None, bomb: Bomb | None = None, **changes: Any) -> Outcome:
        return self.rounds(faults, bomb, **changes).run()

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        return [event for event, _ in read_events(self.paths.events) if kind in (None, event["event"])]

    def mean_kept(self) -> np.ndarray:
        return np.mean([node.kept for node in self.nodes.values()], axis=0)


def same_bits(left: Outcome, right: Outcome) -> bool:
    """Equal server states, to the last bit."""
    a, b = left.state.vectors, right.state.vectors
    return left.state.round == right.state.round and {n: v.tobytes() for n, v in a.items()} == {
        n: v.tobytes() for n, v in b.items()
    }
