"""Four sites whose ledgers are real files, with the guards' own code, and a server that remembers their heads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from click.testing import Result
from fedward_client.commands.ledger import app
from fedward_client.guard import Guard
from fedward_client.paths import NodePaths
from fedward_client.policy import Policy
from fedward_client.session import refuse
from fedward_client.settings import NodeSettings
from fedward_client.state import FileStore
from fedward_common.algorithms.registry import build
from fedward_common.chain import Head
from fedward_common.config import RunConfig, parse_config
from fedward_common.messages import Purpose, Reply, Request
from fedward_common.node import Participant, Refused
from fedward_common.privacy.anchor import default_place, server_place
from fedward_common.privacy.ledger import verify
from fedward_common.roster import Roster, RosterNode
from fedward_common.signing import generate, public_text, save_private
from fedward_common.update import Kind, Layout, TensorSpec
from fedward_common.work import Done, Work
from fedward_server.anchoring import AnchoringTransport
from fedward_server.collecting import SecureCollector
from fedward_server.events import Event, EventLog, read_events
from fedward_server.ledger_heads import LedgerHeads
from fedward_server.paths import RunPaths
from fedward_server.rounds import Outcome, Rounds
from fedward_server.simulation import Faults, MemoryTransport, simulated_clock
from typer.testing import CliRunner

SITES = 4
LAYOUT = Layout((TensorSpec("w", (5,), "float32", Kind.TRAINABLE),))


def config(rounds: int = 2, private: bool = True) -> RunConfig:
    privacy = {"unit": "site", "mechanism": "distributed", "clip": 1.0, "noise_multiplier": 4.0}
    tables = {
        "name": "r", "task": "t:T", "rounds": rounds, "algorithm": {"name": "fedavg"}, "evaluation": {"every": 0},
        "local": {"lr": 0.1, "steps": 1}, "cohort": {"min_nodes": SITES - 1, "max_failed_rounds": 3},
    }  # fmt: skip
    return parse_config({**tables, "privacy": privacy} if private else tables)


def work(asked: Work) -> Done:
    if asked.op == "prepare":
        return Done(info={"layout": LAYOUT.to_json(), "metric_names": []})
    metrics = {"examples": 10.0, "loss": 1.0}
    return Done(vectors={"delta": np.full(5, 0.1, np.float32)}, weight=10.0, metrics=metrics, info={"complete": True})


class Site:
    """A node in its own folder. Its guard is started anew by `restart`."""

    def __init__(self, folder: Path, index: int) -> None:
        self.name, self.paths = f"site-{index}", NodePaths(folder)
        self.id = f"{index:x}" * 32
        self.identity = generate()
        folder.mkdir()
        self.paths.keys.mkdir()
        save_private(self.paths.identity_key, self.identity)
        fields = ("name", "node_id", "server", "fleet_address", "ca_sha256", "authority")
        self.paths.node.write_text(json.dumps({**dict.fromkeys(fields, "x"), "node_id": self.id}))
        self.roster: Roster | None = None
        self.restart()

    def restart(self) -> None:
        member = SimpleNamespace(
            paths=self.paths, name=self.name, server="https://one", node_id=self.id,
            newest=lambda: self.roster, roster=lambda: self.roster,
        )  # fmt: skip
        self.guard = Guard(member, NodeSettings(), Policy())  # type: ignore[arg-type]
        self.participants: dict[str, Participant] = {}

    def handle(self, run: str, config: RunConfig, request: Request) -> Reply:
        try:
            if run not in self.participants:
                store = FileStore(self.paths.run(run) / "state")
                self.participants[run] = self.guard._participant(run, config, store, work)
            return self.participants[run].handle(request)
        except Refused as refused:
            return refuse(request, refused.failure)

    def head(self) -> Head:
        last = verify(self.paths.ledger).last
        assert last is not None
        return last.head

    def remembered(self) -> tuple[Path, ...]:
        """The ledger and all that this node keeps to hold it against."""
        return (self.paths.ledger, default_place(self.paths.ledger), server_place(self.paths.ledger))

    def roll_back(self, snapshot: Path) -> None:
        """The disk as it was then; the guard starts on it."""
        shutil.rmtree(self.paths.root)
        shutil.copytree(snapshot, self.paths.root)
        self.restart()

    def command(self, *arguments: str) -> Result:
        return CliRunner().invoke(app, [*arguments, "--dir", str(self.paths.root)], env={"COLUMNS": "200"})


class Watching(Faults):
    """Keeps what passes; tests do things in between."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Request, Reply]] = []

    def answers(self, name: str, request: Request, reply: Reply) -> Reply | None:
        self.seen.append((name, request, reply))
        return reply


class Federation:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sites = [Site(folder / f"site-{index}", index + 1) for index in range(SITES)]
        nodes = tuple(
            RosterNode(name=site.name, node_id=site.id, flower_id=None, identity=public_text(site.identity))
            for site in self.sites
        )
        self.roster = Roster(version=1, federation="f", nodes=nodes)
        for site in self.sites:
            site.roster = self.roster
        self.heads = LedgerHeads(folder / "heads.json")

    def run(self, name: str, rounds: int = 2, faults: Faults | None = None) -> Outcome:
        paths, clock, settings = RunPaths(self.folder / "runs" / name), simulated_clock(), config(rounds)
        log, algorithm = EventLog(paths.events), build(settings.algorithm)

        def handler(site: Site):
            return lambda request: site.handle(name, settings, request)

        nodes = {site.name: handler(site) for site in self.sites}
        inner = MemoryTransport(nodes, (), faults, clock)
        transport = AnchoringTransport(inner, lambda: self.roster, self.heads, log)
        collector = SecureCollector.over(
            transport, clock, name, settings, algorithm, LAYOUT, (), lambda: self.roster, paths.ledger
        )
        initial = {"model": np.zeros(5, np.float32)}
        return Rounds(
            settings, algorithm, LAYOUT, initial, transport, collector, paths, 1, log, clock=clock, grace=5.0
        ).run()

    def events(self, run: str, kind: str) -> list[Event]:
        paths = RunPaths(self.folder / "runs" / run)
        return [event for event, _ in read_events(paths.events) if event["event"] == kind]

    def answered(self, run: str) -> list[set[str]]:
        """Who was in the sum of each round."""
        return [set(event["replies"]) for event in self.events(run, "round")]


def purposes(seen: list[tuple[str, Request, Reply]], name: str) -> list[Purpose]:
    return [request.purpose for node, request, _ in seen if node == name]
