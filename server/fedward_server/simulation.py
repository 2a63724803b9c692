"""A whole federation in one process: the round engine and the node's own code over an in-memory transport."""

from __future__ import annotations

import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from fedward_common.algorithms.registry import build
from fedward_common.config import RunConfig
from fedward_common.errors import ConfigError, TaskError
from fedward_common.local import LocalRunner
from fedward_common.messages import Failure, Reason, Reply, Request
from fedward_common.node import MemoryStore, Participant, StateStore
from fedward_common.roster import Roster, RosterNode
from fedward_common.secure import SecureParticipant, Standing
from fedward_common.signing import generate, public_text
from fedward_common.task import Task, metric_names
from fedward_common.update import Vectors
from fedward_common.work import Done, Work

from fedward_server.checkpoint import Checkpoints
from fedward_server.collecting import Collector, PlainCollector, SecureCollector
from fedward_server.events import EventLog
from fedward_server.fencing import read_owner
from fedward_server.paths import RunPaths
from fedward_server.rounds import Outcome, Rounds
from fedward_server.transport import Clock, Deadline, Peer, never

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

    def exchange(
        self, requests: Mapping[str, Request], seconds: float, over: Callable[[], bool] = never
    ) -> Iterator[tuple[str, Reply]]:
        """See `Transport`. A handler that raises is logged and answers with a failure."""
        deadline = Deadline(self._clock, seconds)
        for name in self._faults.order(list(requests)):
            if deadline.over or over():
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

    def __init__(self, make: Callable[[str], LocalRunner], prepared: Done, keep: int) -> None:
        self._make = make
        self._prepared = prepared
        self._keep = keep
        self._runners: OrderedDict[str, LocalRunner] = OrderedDict()

    def do(self, node: str, work: Work) -> Done:
        """Do a node's work. Preparing is free: all nodes share one task, whose layout is known."""
        if work.op == "prepare":
            return self._prepared
        runner = self._runners.pop(node, None) or self._make(node)
        self._runners[node] = runner
        while len(self._runners) > self._keep:
            self._runners.popitem(last=False)
        return runner.do(work)


@dataclass(frozen=True)
class _Federation:
    """Identities of simulated nodes, as enrolment would give them."""

    roster: Roster
    identities: Mapping[str, Ed25519PrivateKey]

    @classmethod
    def of(cls, names: tuple[str, ...]) -> _Federation:
        identities = {name: generate() for name in names}
        nodes = tuple(
            RosterNode(
                name=name,
                node_id=hashlib.sha256(name.encode()).hexdigest()[:32],
                flower_id=None,
                identity=public_text(identity),
            )
            for name, identity in identities.items()
        )
        return cls(Roster(version=1, federation="simulation", nodes=nodes), identities)

    def standing(self, name: str) -> Standing:
        node = self.roster.node(name)
        assert node is not None
        return Standing(node.id_bytes, self.identities[name], lambda: self.roster, lambda: self.roster, 2)


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
    trained = len(set(configs) - set(config.evaluation.holdout))
    cohort = min(trained, config.cohort.size or trained)
    # Refused before anything starts.
    config.aggregation.check_cohort(cohort)
    if config.secure_sum.enabled:
        config.secure_sum.parameters(cohort)
    server = LocalRunner(config, task, "server", base, device)
    first = {**server.do(Work("initial")).vectors, **(initial or {})}
    prepared = Done(info={"layout": server.layout.to_json(), "metric_names": metric_names(task)})
    pool = RunnerPool(lambda name: LocalRunner(config, task, name, configs[name], device), prepared, keep)

    federation = _Federation.of(tuple(configs))

    def participant(name: str) -> Handler:
        def execute(work: Work) -> Done:
            return pool.do(name, work)

        if not config.secure_sum.enabled:
            return Participant(config, store(name), execute).handle
        return SecureParticipant(paths.root.name, config, store(name), execute, federation.standing(name)).handle

    clock = simulated_clock()
    algorithm = build(config.algorithm)
    transport = MemoryTransport(
        {name: participant(name) for name in configs}, config.cohort.tags, faults, clock
    )
    collector: Collector = PlainCollector(config, algorithm, server.layout, transport, clock)
    if config.secure_sum.enabled:
        names = metric_names(task)
        collector = SecureCollector.over(
            transport, clock, paths.root.name, config, algorithm, server.layout, names,
            lambda: federation.roster, paths.ledger,
        )  # fmt: skip
    return Rounds(
        config,
        algorithm,
        server.layout,
        first,
        transport,
        collector,
        paths,
        epoch if epoch is not None else _next_epoch(paths),
        log or EventLog(paths.events),
        lambda vectors: server.do(Work("evaluate", vectors=vectors, split="central")).metrics,
        should_stop,
        clock=clock,
    ).run()
