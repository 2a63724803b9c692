"""A server's state directory with one data scientist, two nodes and a Flower that runs nothing."""

from __future__ import annotations

import io
import time
import uuid
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from fedward_common.config import RunConfig, parse_config
from fedward_common.errors import FedwardError
from fedward_common.manifest import Manifest
from fedward_common.roster import Roster, RosterNode, RosterScientist
from fedward_common.signing import generate, key_id, public_text
from fedward_server.events import EventLog
from fedward_server.paths import RunPaths, ServerPaths
from fedward_server.runs import RunManager
from fedward_server.store import Scientist, Store

PYPROJECT = """
[project]
name = "toy"
version = "1.0.0"
[tool.flwr.app]
publisher = "tests"
[tool.flwr.app.components]
serverapp = "fedward_server.app:app"
clientapp = "{clientapp}"
[tool.flwr.app.config]
fedward-manifest = ""
fedward-epoch = 0
"""


def make_bundle(clientapp: str = "fedward_client.app:app") -> bytes:
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        archive.writestr("pyproject.toml", PYPROJECT.format(clientapp=clientapp))
        archive.writestr("toy_task/__init__.py", "")
    return memory.getvalue()


def make_config(**tables: Any) -> RunConfig:
    return parse_config(
        {
            "name": "toy", "task": "toy_task:Toy", "rounds": 3, "algorithm": {"name": "fedavg"},
            "local": {"epochs": 1, "batch_size": 8, "lr": 0.1}, "secure_sum": {"enabled": False}, **tables,
        }
    )  # fmt: skip


class FlowerDown(FedwardError):
    pass


class FakeFlower:
    """A SuperLink that runs nothing: tests set the states."""

    def __init__(self) -> None:
        self.started: list[dict[str, str | int]] = []
        self.states: dict[int, str | None] = {}
        self.stopped: list[int] = []
        self.down = False
        self.refuses = ""

    def ping(self) -> None:
        if self.down:
            raise FlowerDown("no answer")

    def start_run(self, fab: bytes, config: Mapping[str, str | int]) -> int:
        self.ping()
        if self.refuses:
            raise FlowerDown(self.refuses)
        self.started.append(dict(config))
        number = len(self.started)
        self.states[number] = "pending"
        return number

    def stop_run(self, flower_run: int) -> None:
        self.stopped.append(flower_run)
        self.states[flower_run] = "finished"

    def run_log(self, flower_run: int) -> str:
        return f"Traceback of run {flower_run}" if self.states.get(flower_run) == "finished" else ""

    def run_state(self, flower_run: int) -> str | None:
        self.ping()
        return self.states.get(flower_run)


class World:
    """A state directory with one data scientist and two nodes, and managers on it."""

    def __init__(self, root: Path) -> None:
        self.paths = ServerPaths(root)
        self.key = generate()
        self.store = Store.create(self.paths.database)
        self.flower = FakeFlower()
        self.now = time.time()
        self.prepared = 0
        with self.store.transaction() as session:
            session.add(Scientist(name="ada", key=public_text(self.key), key_id=key_id(self.key), created=0.0))
        nodes = [
            RosterNode(name=name, node_id=uuid.uuid4().hex, flower_id=None, identity=public_text(generate()), tags=tags)
            for name, tags in (("clinic-a", ("ward",)), ("clinic-b", ()))
        ]
        self.roster = Roster(
            version=1, federation="test", nodes=tuple(nodes),
            scientists=(RosterScientist(name="ada", key=public_text(self.key)),),
        )  # fmt: skip
        self.manager = self.new_manager()

    def new_manager(self) -> RunManager:
        return RunManager(
            self.paths, self.store, self.flower, lambda: self.roster, self.prepare, max_runs=2,
            clock=lambda: self.now, follow_every=0.0,
        )  # fmt: skip

    def prepare(self) -> None:
        self.prepared += 1

    def manifest(
        self, config: RunConfig | None = None, bundle: bytes | None = None, initial: bytes | None = None
    ) -> Manifest:
        return Manifest.make(uuid.uuid4().hex, config or make_config(), bundle or make_bundle(), initial, "ada")

    def submit(
        self, config: RunConfig | None = None, key: Ed25519PrivateKey | None = None, bundle: bytes | None = None
    ) -> str:
        data = bundle or make_bundle()
        manifest = self.manifest(config, data)
        self.now += 1.0
        return self.manager.submit(manifest.sign(key or self.key), data, None, None, "ada").id

    def run(self, run_id: str) -> RunPaths:
        return self.paths.run(run_id)

    def say(self, run_id: str, kind: str, **fields: Any) -> None:
        EventLog(self.run(run_id).events).append(kind, **fields)

    def tick(self, seconds: float = 3.0) -> None:
        self.now += seconds
        self.manager.tick()

    def status(self, run_id: str) -> str:
        return self.manager.view(run_id).status
