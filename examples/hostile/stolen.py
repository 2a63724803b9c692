"""What the attacker holds, and a secure round taken stage by stage: `server.py` lies with it.

The attacker has the whole server: its disk (SuperLink's database, runs, certificates), what its ServerApp knows of the
run, and so the word to every node. It has not the nodes' identity keys, nor the key that signs the roster, which can
live on another machine. The data scientist's manifest and the bundle are genuine.
"""

from __future__ import annotations

import itertools
import json
import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from fedward_common.algorithms.registry import build
from fedward_common.config import RunConfig
from fedward_common.local import LocalRunner
from fedward_common.manifest import Manifest
from fedward_common.messages import Failure, Purpose, Reason, Reply, Request
from fedward_common.roster import Roster
from fedward_common.secagg.graph import Parameters
from fedward_common.secagg.keys import Advertisement
from fedward_common.secagg.messages import (
    SHARE,
    Dealt,
    advertisements_to_bytes,
    entries_from_bytes,
    entries_to_bytes,
    members_to_bytes,
)
from fedward_common.secagg.server import Server
from fedward_common.secagg.terms import Terms
from fedward_common.secure import config_digest, schema
from fedward_common.steps import (
    ADVERTISEMENT,
    ADVERTISEMENTS,
    DEALT,
    DROPPED,
    MASKED,
    REVEALED,
    ROSTER,
    SEALED_SHARES,
    SHARERS,
    SIGNATURES,
    SURVIVORS,
    TERMS,
    blob,
    digest,
)
from fedward_common.summand import Group, Shape, decode
from fedward_common.task import Task
from fedward_common.update import Layout, Update, Vectors
from fedward_common.work import Work
from fedward_server.direct import DirectRuntime
from fedward_server.grid import FlowerTransport, RosterDirectory
from fedward_server.paths import ServerPaths
from fedward_server.transport import Transport
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.proto.runtime_pb2 import GetNodesRequest
from flwr.supercore.task_identity import TaskIdentity

T = TypeVar("T")
Replies = dict[str, Reply]
WEIGHT_SCALE = 1024.0
"""No site has as many digits."""
_attempts = itertools.count(time.time_ns() // 1_000_000)


class _Grid:
    """As much of Flower's Grid as a transport needs, over the database."""

    def __init__(self, runtime: DirectRuntime, flower_run: int) -> None:
        self.run = SimpleNamespace(run_id=flower_run)
        self._runtime = runtime

    def get_node_ids(self) -> list[int]:
        return [node.node_id for node in self._runtime.GetNodes(GetNodesRequest()).nodes]


@dataclass
class Stolen:
    """The server of one run. broadcast, layout, metric_names: the model, its form, and what the task measures.
    seconds: how long it waits for answers. heard: (node, purpose, reply) of all that it was told."""

    transport: Transport
    run: str
    config: RunConfig
    roster: Callable[[], Roster]
    broadcast: Vectors
    layout: Layout
    metric_names: tuple[str, ...]
    names: list[str]
    seconds: float = 60.0
    heard: list[tuple[str, Purpose, Reply]] = field(default_factory=list)
    envelope: Callable[[], bytes] = lambda: b""
    database: tuple[Path, int] | None = None
    """The SuperLink's, and Flower's id of the run in it; None in memory."""
    assume_identity: Callable[[], None] = lambda: None
    """Makes what this process says the word of the run's ServerApp; the attacker has two runs."""
    plain: Stolen | None = None
    """Another run, without secure aggregation."""

    @classmethod
    def from_disk(cls, folder: Path, run: str, task: Task, names: list[str], wait: float = 120.0) -> Stolen:
        """The server in `folder`, once `names` are online. Raises `TimeoutError`."""
        paths = ServerPaths(folder.resolve())
        [home] = paths.runs.glob(f"{run}*")
        text = json.loads(paths.run(home.name).manifest.read_text(encoding="utf-8"))["manifest"]
        config = Manifest.model_validate_json(text).run_config()
        flower_run = _patiently("the run to be at Flower", wait, lambda: _flower_run(paths.database, home.name))
        runtime = DirectRuntime(paths.superlink_database, flower_run)
        [known] = runtime._state.get_run_info(run_ids=[flower_run])
        directory = RosterDirectory(paths.roster)

        def assume_identity() -> None:
            TaskIdentity.run_id, TaskIdentity.node_id = flower_run, SUPERLINK_NODE_ID
            TaskIdentity.task_id = known.primary_task_id

        # The transport asks a grid for its run and the nodes online, and the runtime for all else.
        transport = FlowerTransport(_Grid(runtime, flower_run), directory, runtime)  # type: ignore[arg-type]
        _patiently("all nodes", wait, lambda: set(names) <= {peer.name for peer in transport.online()})
        runner = LocalRunner(config, task, "server", {})
        initial = runner.do(Work("initial"))
        return cls(
            transport, home.name, config, directory.roster, initial.vectors, runner.layout,
            tuple(initial.info["metric_names"]), names, envelope=directory.envelope,
            database=(paths.superlink_database, flower_run), assume_identity=assume_identity,
        )  # fmt: skip

    def ask(self, requests: Mapping[str, Request], lost: int = 0) -> Replies:
        """One request to each named node; its reply, or a failure that says that none came. lost: how many of them are
        not waited for."""
        self.assume_identity()
        found: Replies = {}
        for name, reply in self.transport.exchange(
            requests, self.seconds, lambda: len(found) >= len(requests) - lost
        ):
            found[name] = reply
        for name, request in requests.items():
            silent = Reply(request.purpose, request.run, failure=Failure(Reason.NO_REPLY))
            self.heard.append((name, request.purpose, found.setdefault(name, silent)))
        return found

    def ask_all(self, purpose: Purpose, **told: Any) -> Replies:
        """The same request to all; of no round unless told so."""
        return self.ask(dict.fromkeys(self.names, Request(purpose, self.run, **told)))

    def ready(self, wait: float = 180.0) -> None:
        """Until all nodes take part in the run. Raises `TimeoutError`."""
        said: list[str] = []

        def prepared() -> bool:
            replies = self.ask_all(Purpose.PREPARE, settings={"layout": self.layout.digest()})
            said[:] = [f"{name}: {reply.failure}" for name, reply in sorted(replies.items()) if reply.failure]
            return not said

        _patiently(lambda: f"all nodes to be ready: {'; '.join(said)}", wait, prepared)
        self.heard.clear()

    def advertisements(self) -> dict[str, Advertisement]:
        """A fresh advertisement of each node that answers, sorted by node id, as the protocol numbers them."""
        replies = self.ask_all(Purpose.ADVERTISE)
        found = {
            name: Advertisement.from_bytes(reply.vectors[ADVERTISEMENT].tobytes())
            for name, reply in replies.items()
            if reply.failure is None
        }
        return dict(sorted(found.items(), key=lambda item: item[1].node))

    def shape(self, n: int) -> Shape:
        """The vector of one node in a round of training of n."""
        summed = build(self.config.algorithm).summed(self.layout, self.config.local)
        groups = tuple(
            Group(name, self.layout.size(kind), self.config.secure_sum.range) for name, kind in summed.items()
        )
        return Shape(groups, schema(True, False, self.metric_names), self.config.secure_sum.bits, n, WEIGHT_SCALE)

    @contextmanager
    def edited(self, change: Callable[[dict[str, Any]], None]) -> Iterator[None]:
        """While the block runs, the database holds another manifest than the one that was signed."""
        assert self.database is not None
        file, run = self.database
        key = run - 2**64 if run >= 2**63 else run  # SQLite's integers have a sign
        with sqlite3.connect(file, timeout=30) as link:
            [(settings,)] = link.execute("SELECT override_config FROM run WHERE run_id = ?", (key,)).fetchall()
        told = json.loads(settings)
        envelope = json.loads(told["fedward-manifest"])
        manifest = json.loads(envelope["manifest"])
        change(manifest)
        envelope["manifest"] = json.dumps(manifest)
        told["fedward-manifest"] = json.dumps(envelope)

        def write(text: str) -> None:
            with sqlite3.connect(file, timeout=30) as link:
                link.execute("UPDATE run SET override_config = ? WHERE run_id = ?", (text, key))

        write(json.dumps(told))
        try:
            yield
        finally:
            write(settings)


def _flower_run(database: Path, run: str) -> int | None:
    with sqlite3.connect(database, timeout=30) as link:
        rows = link.execute("SELECT flower_run_id FROM runs WHERE id = ?", (run,)).fetchall()
    return int(rows[0][0]) if rows and rows[0][0] else None


def _patiently(what: str | Callable[[], str], seconds: float, find: Callable[[], Any]) -> Any:
    end = time.monotonic() + seconds
    while not (found := find()):
        if time.monotonic() > end:
            raise TimeoutError(f"waited {seconds:g} s for {what if isinstance(what, str) else what()}")
        time.sleep(0.5)
    return found


@dataclass(frozen=True)
class Told:
    """What a node is told when a round starts. cohort: how many nodes are said to take part. roster: digest of the
    one that the round is for; envelope: that roster, as somebody signed it."""

    advertisements: tuple[Advertisement, ...]
    parameters: Parameters
    broadcast: Vectors
    cohort: int
    roster: str
    envelope: bytes


class Round:
    """One round of training, from fresh advertisements on. Each stage takes what every node is to be told, and without
    it tells them the truth; the answers are kept. For complete graphs, that is up to thirty nodes."""

    def __init__(
        self, server: Stolen, attempt: int | None = None, advertised: Mapping[str, Advertisement] | None = None
    ) -> None:
        self.server = server
        self.number = 1
        self.attempt = next(_attempts) if attempt is None else attempt
        self.advertised = dict(advertised or server.advertisements())
        self.names = list(self.advertised)
        self.dealt: dict[str, Dealt] = {}
        self.masked: dict[str, Any] = {}
        self.signatures: dict[frozenset[str], dict[str, bytes]] = defaultdict(dict)
        self.revealed: Replies = {}

    @property
    def truth(self) -> Told:
        """What an honest server tells."""
        server, n = self.server, len(self.names)
        return Told(
            tuple(self.advertised.values()), server.config.secure_sum.parameters(n), server.broadcast, n,
            server.roster().digest, server.envelope(),
        )  # fmt: skip

    def index(self, name: str) -> int:
        """A node's number in the round."""
        return self.names.index(name) + 1

    def all(self, told: T, names: Collection[str] | None = None) -> dict[str, T]:
        """The same for all nodes, or for those of `names`."""
        return dict.fromkeys(self.names if names is None else names, told)

    def others(self, *names: str) -> list[str]:
        """All but these."""
        return [name for name in self.names if name not in names]

    def members(self, names: Collection[str]) -> Any:
        """A set of nodes on the wire."""
        return blob(members_to_bytes(map(self.index, names), len(self.names)))

    def ask(self, purpose: Purpose, vectors: Mapping[str, Vectors], lost: int = 0) -> Replies:
        """A request of this round to each node in `vectors`."""
        run = self.server.run
        requests = {name: Request(purpose, run, self.number, self.attempt, told) for name, told in vectors.items()}
        return self.server.ask(requests, lost)

    # --- the stages

    def start(self, told: Mapping[str, Told] | None = None) -> Replies:
        """Have the nodes train, and deal shares of their secrets."""
        requests = {}
        for name, said in (told or self.all(self.truth)).items():
            shape = self.server.shape(len(said.advertisements))
            terms = {"shape": shape.to_json(), "parameters": asdict(said.parameters), "roster": said.roster}
            vectors = {**said.broadcast, ADVERTISEMENTS: blob(advertisements_to_bytes(said.advertisements))}
            if said.envelope:
                vectors[ROSTER] = blob(said.envelope)
            settings = {TERMS: terms, "cohort": said.cohort, "seconds": 60.0}
            requests[name] = Request(
                Purpose.TRAIN, self.server.run, self.number, self.attempt, vectors, settings=settings
            )
        replies = self.server.ask(requests)
        self.dealt |= {
            name: Dealt.from_bytes(reply.vectors[DEALT].tobytes())
            for name, reply in replies.items()
            if DEALT in reply.vectors
        }
        return replies

    def mask(self, dealers: Mapping[str, Collection[str]] | None = None, lost: int = 0) -> Replies:
        """Tell each node who dealt, and have its masked vector."""
        told = {}
        for name, said in (dealers or self.all(self.dealt, self.dealt)).items():
            sealed = {self.index(d): self.dealt[d].sealed[self.index(name)] for d in said if d != name}
            told[name] = {SHARERS: self.members(said), SEALED_SHARES: blob(entries_to_bytes(sealed))}
        replies = self.ask(Purpose.MASK, told, lost)
        self.masked |= {name: reply.vectors[MASKED] for name, reply in replies.items() if MASKED in reply.vectors}
        return replies

    def agree(self, survivors: Mapping[str, Collection[str]] | None = None) -> Replies:
        """Have each node sign a survivor set."""
        sets = {n: frozenset(s) for n, s in (survivors or self.all(self.masked, self.masked)).items()}
        replies = self.ask(Purpose.AGREE, {n: {SURVIVORS: self.members(s)} for n, s in sets.items()})
        for name, reply in replies.items():
            if SIGNATURES in reply.vectors:
                self.signatures[sets[name]][name] = reply.vectors[SIGNATURES].tobytes()
        return replies

    def unmasking(self, survivors: Collection[str], dropped: Collection[str] | None = None) -> Vectors:
        """The request to reveal shares, with all signatures of that set that there are."""
        gone = [name for name in self.dealt if name not in survivors] if dropped is None else dropped
        shown = {self.index(n): s for n, s in self.signatures[frozenset(survivors)].items()}
        return {
            SURVIVORS: self.members(survivors),
            DROPPED: self.members(gone),
            SIGNATURES: blob(entries_to_bytes(shown)),
        }

    def unmask(self, told: Mapping[str, Vectors] | None = None) -> Replies:
        """Have each node reveal its shares."""
        replies = self.ask(Purpose.UNMASK, told or self.all(self.unmasking(self.masked), self.masked))
        self.revealed |= {name: reply for name, reply in replies.items() if REVEALED in reply.vectors}
        return replies

    # --- what comes of it

    @property
    def shape(self) -> Shape:
        """Of the vectors in this round."""
        return self.server.shape(len(self.names))

    def sum(self) -> Update:
        """The mean that the answers give, worked out as an honest server does. Raises `Aborted`, `WrongSum`."""
        server, truth, shape = self.server, self.truth, self.shape
        terms = Terms(
            run=server.run, round=self.number, attempt=self.attempt, purpose=Purpose.TRAIN.value,
            model=digest(server.broadcast), config=config_digest(server.config), roster=truth.roster,
            shape=shape.to_json(), length=shape.length, bits=shape.bits,
            parameters=truth.parameters, advertisements=truth.advertisements,
        )  # fmt: skip
        machine = Server(terms, server.roster().identities.get)
        for name, dealt in self.dealt.items():
            machine.deal(self.index(name), dealt)
        machine.close_dealing()
        for name, packed in self.masked.items():
            machine.masked(self.index(name), packed)
        machine.close_masking()
        for name, signature in self.signatures[frozenset(self.masked)].items():
            machine.signed(self.index(name), signature)
        machine.close_agreement()
        for name, reply in self.revealed.items():
            machine.revealed(self.index(name), entries_from_bytes(reply.vectors[REVEALED].tobytes(), SHARE))
        return decode(shape, machine.unmask(), len(self.masked))

    def altered(self, **changes: Any) -> Told:
        """The truth, with changes."""
        return replace(self.truth, **changes)
