"""A whole federation in one process: the round engine and the node's own code over an in-memory transport."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from fedward_common.algorithms.registry import build_sum
from fedward_common.config import RunConfig
from fedward_common.errors import ConfigError, TaskError
from fedward_common.local import Done, LocalRunner, Work
from fedward_common.messages import Failure, Reason, Reply, Request
from fedward_common.node import MemoryStore, Participant, StateStore
from fedward_common.task import Task
from fedward_common.update import Vectors

from fedward_server.checkpoint import Checkpoints
from fedward_server.events import EventLog
from fedward_server.fencing import read_owner
from fedward_server.paths import RunPaths
from fedward_server.rounds import Outcome, Rounds
from fedward_server.transport import Clock, Deadline, Peer

_LOG = logging.getLogger(__name__)

Handler = Callable[[Request], Reply]


class Faults:
    """What goes wrong between server and nodes: nothing. Tests override what they need; raising is a crash of the
    server."""

    def order(self, names: list[str]) -> Iterable[str]:
        """The order in which nodes answer."""
        return names

    def online(self, name: str) -> bool:
        """Whether the node can be reached now."""
        return True

    def delivers(self, name: str, request: Request) -> bool:
        """Whether the request reaches the node."""
        return True

    def answers(self, name: str, request: Request, reply: Reply) -> Reply | None:
        """The reply as it arrives; None: lost."""
        return reply


class MemoryTransport:
    """A `Transport` that calls the nodes' handlers one after another, each when its reply is asked for."""

    def __init__(
        self,
        nodes: Mapping[str, Handler],
        tags: tuple[str, ...] = (),
        faults: Faults | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._nodes = nodes
        self._tags = tags
        self._faults = faults or Faults()
        self._clock = clock or Clock()
        self._down = 0
        self._up = 0

    def online(self) -> list[Peer]:
        """Every node that the faults leave reachable."""
        return [Peer(name, self._tags) for name in self._nodes if self._faults.online(name)]

    def exchange(self, requests: Mapping[str, Request], seconds: float) -> Iterator[tuple[str, Reply]]:
        """See `Transport`. A handler that raises is logged and answers with a failure."""
        deadline = Deadline(self._clock, seconds)
        for name in self._faults.order(list(requests)):
            if deadline.over:
                return
            request = requests[name]
            if not self._faults.online(name) or not self._faults.delivers(name, request):
                continue
            self._down += _bytes(request.vectors)
            reply = self._faults.answers(name, request, self._call(name, request))
            if reply is not None and not deadline.over:
                self._up += _bytes(reply.vectors)
                yield name, reply

    def bytes_moved(self) -> tuple[int, int]:
        """Bytes of vectors handed over so far."""
        return self._down, self._up

    def _call(self, name: str, request: Request) -> Reply:
        try:
            return self._nodes[name](request)
        except Exception as error:  # noqa: BLE001 (logged, and answered as a failure)
            # As on a real node: task code may raise anything, the server hears a reason from the fixed list.
            _LOG.exception("%s failed in %s of round %d", name, request.purpose.value, request.round)
            reason = Reason.TASK_ERROR if isinstance(error, TaskError) else Reason.WORKER_CRASHED
            return Reply(
                request.purpose, request.run, request.round, request.attempt, failure=Failure(reason, "see the log")
            )


def _bytes(vectors: Vectors) -> int:
    return sum(vector.nbytes for vector in vectors.values())


class RunnerPool:
    """The runners of many nodes, made when first needed; at most `keep` of them (model and data) in memory."""

    def __init__(self, make: Callable[[str], LocalRunner], layout: str, keep: int) -> None:
        self._make = make
        self._layout = layout
        self._keep = keep
        self._runners: OrderedDict[str, LocalRunner] = OrderedDict()

    def do(self, node: str, work: Work) -> Done:
        """Do a node's work. Preparing is free: all nodes share one task, whose layout is known."""
        if work.op == "prepare":
            return Done(info={"layout": self._layout})
        runner = self._runners.pop(node, None) or self._make(node)
        self._runners[node] = runner
        while len(self._runners) > self._keep:
            self._runners.popitem(last=False)
        return runner.do(work)


def simulated_clock() -> Clock:
    """A clock on which waiting takes no time: nobody comes back by being waited for."""
    slept = 0.0

    def sleep(seconds: float) -> None:
        nonlocal slept
        slept += seconds

    return Clock(lambda: time.monotonic() + slept, sleep)


def node_data(
    config: RunConfig, nodes: int | Mapping[str, Mapping[str, Any]], base: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Data configuration by node name. For a number of nodes: `base` with "partition" i of "partitions" n; the names
    that `config` gives come first. Raises `ConfigError` if there are fewer nodes than names."""
    if not isinstance(nodes, int):
        return {name: {**base, **own} for name, own in nodes.items()}
    named = [*config.cohort.nodes, *config.evaluation.holdout]
    if nodes < max(1, len(named)):
        raise ConfigError(
            f"{nodes} simulated nodes, but the run names {len(named)} ({', '.join(named)}): simulate at least as many."
        )
    width = len(str(nodes - 1))
    numbered = [f"node-{i:0{width}d}" for i in range(nodes)]
    names = [*named, *(name for name in numbered if name not in named)][:nodes]
    return {name: {**base, "partition": i, "partitions": nodes} for i, name in enumerate(names)}


def _next_epoch(paths: RunPaths) -> int:
    owner, checkpoint = read_owner(paths), Checkpoints(paths).newest()
    return 1 + max(owner.epoch if owner else 0, checkpoint.epoch if checkpoint else 0)


def simulate(
    config: RunConfig,
    task: Task,
    nodes: int | Mapping[str, Mapping[str, Any]],
    paths: RunPaths,
    *,
    data: Mapping[str, Any] | None = None,
    initial: Vectors | None = None,
    store: Callable[[str], StateStore] = lambda name: MemoryStore(),
    device: str = "cpu",
    keep: int = 128,
    epoch: int | None = None,
    log: EventLog | None = None,
    faults: Faults | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Run `config` over simulated nodes in this process; the same code as in a real run.

    nodes: how many, or a data configuration by name; data: what all share of it. epoch: by default one more than
    the last that wrote to `paths`. initial: "model", "statistic" to
    start from (default: the task's model). store: a node's state; one that outlives the process allows to resume
    from `paths`. keep: runners (model and data) held in memory at once.
    """
    base = data or {}
    configs = node_data(config, nodes, base)
    server = LocalRunner(config, task, "server", base, device)
    first = {**server.do(Work("initial")).vectors, **(initial or {})}
    pool = RunnerPool(
        lambda name: LocalRunner(config, task, name, configs[name], device), server.layout.to_json(), keep
    )

    def participant(name: str) -> Handler:
        return Participant(config, store(name), lambda work: pool.do(name, work)).handle

    clock = simulated_clock()
    algorithm = build_sum(config.algorithm)
    return Rounds(
        config,
        algorithm,
        server.layout,
        first,
        MemoryTransport({name: participant(name) for name in configs}, config.cohort.tags, faults, clock),
        paths,
        epoch if epoch is not None else _next_epoch(paths),
        log or EventLog(paths.events),
        lambda vectors: server.do(Work("evaluate", vectors=vectors, split="central")).metrics,
        should_stop,
        clock=clock,
    ).run()
