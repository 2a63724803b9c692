"""The round engine over nodes with their own files, whose processes may die and come back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from fedward_client.state import FileStore
from fedward_common.algorithms.registry import build
from fedward_common.config import RunConfig
from fedward_common.local import LocalRunner
from fedward_common.messages import Purpose, Reply, Request
from fedward_common.node import Participant
from fedward_common.update import Vectors
from fedward_common.work import Done, Work
from fedward_server.collecting import PlainCollector
from fedward_server.events import EventLog, read_events
from fedward_server.paths import RunPaths
from fedward_server.rounds import Outcome, Rounds
from fedward_server.simulation import Faults, MemoryTransport, simulated_clock

NODES = {f"n{i}": {"n": 6 + 2 * i, "seed": i, "test": 5} for i in range(4)}
"""Four sites of the suite's task, of unequal size."""

Bad = Callable[[Work, Done], Done]
"""What a site's task code makes of the work that it has done."""


class Killed(BaseException):
    """kill -9 of the server, as far as it can be had in one process: nothing may catch it."""


class Site:
    """One node."""

    def __init__(self, config: RunConfig, task: Any, name: str, data: Mapping[str, Any], folder: Path) -> None:
        self._arguments = (config, task, name, data)
        self._folder = folder
        self.bad: Bad = lambda work, done: done
        self.start()

    def start(self) -> None:
        """A new process on the same files; the old one, if there was one, is dead."""
        runner = LocalRunner(*self._arguments)
        self.layout = runner.layout
        self.store = FileStore(self._folder)
        self.participant = Participant(
            self._arguments[0], self.store, lambda work: self.bad(work, runner.do(work))
        )

    def handle(self, request: Request) -> Reply:
        return self.participant.handle(request)

    @property
    def kept(self) -> Vectors:
        """What it has at the end of a run."""
        assert self.store.pending() is None
        return self.store.committed()[1]


class Federation:
    """Sites that live on while servers come and go."""

    def __init__(
        self, folder: Path, config: RunConfig, task: Any, nodes: Mapping[str, Mapping[str, Any]] = NODES
    ) -> None:
        self.config = config
        self.sites = {name: Site(config, task, name, data, folder / name) for name, data in nodes.items()}
        self.paths = RunPaths(folder / "run")
        self._initial = LocalRunner(config, task, "server", {}).do(Work("initial")).vectors
        self._epoch = 0

    def run(self, faults: Faults | None = None, log: EventLog | None = None) -> Outcome:
        """A server process, from the newest checkpoint to the run's end."""
        self._epoch += 1
        clock = simulated_clock()
        handlers = {name: site.handle for name, site in self.sites.items()}
        transport = MemoryTransport(handlers, (), faults, clock)
        algorithm: Any = build(self.config.algorithm)
        layout = next(iter(self.sites.values())).layout
        return Rounds(
            self.config,
            algorithm,
            layout,
            self._initial,
            transport,
            PlainCollector(self.config, algorithm, layout, transport, clock),
            self.paths,
            self._epoch,
            log or EventLog(self.paths.events),
            clock=clock,
        ).run()

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event, _ in read_events(self.paths.events) if event["event"] == kind]

    def bits(self, outcome: Outcome) -> dict[str, bytes]:
        """All that the run has left: the server's vectors, and what every node keeps."""
        assert outcome.status == "finished", outcome.reason
        vectors = {f"server.{name}": vector for name, vector in outcome.state.vectors.items()}
        for site, node in self.sites.items():
            vectors |= {f"{site}.{name}": vector for name, vector in node.kept.items()}
        return {name: vector.tobytes() for name, vector in vectors.items()}


class Undelivered(Faults):
    """TRAIN does not reach these nodes in that round."""

    def __init__(self, names: Collection[str], round_: int) -> None:
        self._names, self._round = names, round_

    def concerns(self, name: str, request: Request) -> bool:
        return name in self._names and request.purpose is Purpose.TRAIN and request.round == self._round

    def delivers(self, name: str, request: Request) -> bool:
        return not self.concerns(name, request)


class Lost(Undelivered):
    """It does, and the reply is lost; before that, `then` happens to the node."""

    def __init__(self, names: Collection[str], round_: int, then: Callable[[str], object] = lambda name: None) -> None:
        super().__init__(names, round_)
        self._then = then

    def delivers(self, name: str, request: Request) -> bool:
        return True

    def answers(self, name: str, request: Request, reply: Reply) -> Reply | None:
        if not self.concerns(name, request):
            return reply
        self._then(name)
        return None


def kept_by_all(federation: Federation, name: str) -> np.ndarray:
    """A kept vector of all nodes, (nodes, length): zeros for those that have none yet."""
    kept = [site.kept.get(name) for site in federation.sites.values()]
    length = next(len(vector) for vector in kept if vector is not None)
    return np.array([np.zeros(length) if vector is None else vector for vector in kept], np.float64)
