"""A node that announces its reply and is gone before the reply's objects are there costs a round only that reply.

Stock Flower hands out an announced reply at once and then waits for its objects: one test shows both ways side by
side, on the same SuperLink.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from federation import TOY, Federation, fedward, until
from fedward_client.enrol import Enrolled
from fedward_client.link import Incoming, Link, LinkRefused, Outgoing, RunGone
from fedward_client.membership import Membership
from fedward_client.paths import NodePaths
from fedward_common.bundle import build_bundle
from fedward_common.local import LocalRunner
from fedward_common.manifest import Manifest
from fedward_common.messages import Failure, Purpose, Reason, Reply, Request
from fedward_common.node import MemoryStore, Participant
from fedward_common.task import load_task
from fedward_server.control import Control
from fedward_server.paths import ServerPaths
from fedward_server.settings import load_settings
from flwr.app import Message
from flwr.proto.message_pb2 import PushObjectRequest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

RUN = """
name = "dead"
task = "toy.task:Toy"
rounds = {rounds}

[algorithm]
name = "scaffold"

[local]
lr = 0.1
steps = 5

[secure_sum]
enabled = false

[cohort]
nodes = ["a", "b", "c"]
min_nodes = {min_nodes}
quorum = 2
wait = 180
deadline = {deadline}

[evaluation]
every = 0
"""


class Announced(Exception):
    """The server knows of a reply, and has none of its objects."""


class HalfLink(Link):
    """A link that breaks off between a reply's announcement and its first object, once told to. It sends small replies
    as large ones are sent, too: they travel whole otherwise, and are there or not."""

    breaks = False

    def pack_message(self, message: Message) -> Outgoing:
        self._parcels = False
        return super().pack_message(message)

    def _push_object(self, request: PushObjectRequest, announced: int) -> None:
        if self.breaks:
            raise Announced
        super()._push_object(request, announced)

    def vanish(self) -> None:
        """What a killed process leaves: no farewell, no more heartbeats."""
        self._closed.set()
        self._channel.close()


class ByHand(threading.Thread):
    """An enrolled node in this process. It answers properly, but of what `breaks` says it only announces the reply;
    after that it is dead, or (`survives`) alive and silent about it.
    """

    def __init__(
        self, folder: Path, answer: Callable[[Link, Incoming], Reply], breaks: set[Purpose], survives: bool = False
    ) -> None:
        super().__init__(name="by-hand", daemon=True)
        paths = NodePaths(folder)
        entry = Membership.open(paths).roster().node(Enrolled.load(paths).name)
        assert entry is not None and entry.flower_id is not None
        address = Enrolled.load(paths).fleet_address
        self.link = HalfLink(address, paths.ca.read_bytes(), paths.flower_key, int(entry.flower_id))
        self.announced = 0
        self.refused = ""
        self._answer = answer
        self._breaks = breaks
        self._survives = survives
        self._stop_it = threading.Event()
        self.link.connect()

    def run(self) -> None:
        while not self._stop_it.is_set():
            try:
                incoming = self.link.receive()
                if incoming is None:
                    time.sleep(0.05)
                    continue
                reply = self._answer(self.link, incoming)
                self.link.breaks = incoming.request.purpose in self._breaks
                self.link.send(self.link.pack(reply, incoming.ticket))
            except RunGone:
                continue
            except LinkRefused as refused:
                self.refused = str(refused)
                return
            except Announced:
                self.announced += 1
                if not self._survives:
                    self.link.vanish()
                    return

    def end(self) -> None:
        self._stop_it.set()
        self.join(20)
        self.link.vanish()


class Honest:
    """Answers as a node without policy and sandbox would."""

    def __init__(self, name: str, site: int) -> None:
        self._name = name
        self._site = site
        self._participant: Participant | None = None

    def __call__(self, link: Link, incoming: Incoming) -> Reply:
        if self._participant is None:
            settings = link.run_info(incoming.ticket.flower_run).settings
            envelope = json.loads(str(settings["fedward-manifest"]))
            config = Manifest.model_validate_json(envelope["manifest"]).run_config()
            runner = LocalRunner(config, load_task(config.task, TOY), self._name, {"site": self._site})
            self._participant = Participant(config, MemoryStore(), runner.do)
        return self._participant.handle(incoming.request)


def two_honest_nodes(federation: Federation) -> None:
    for i, name in enumerate(("a", "b")):
        federation.join(name, {"site": i})
        federation.start_node(name)


def test_the_round_closes_at_its_deadline_with_all_the_others(federation: Federation) -> None:
    two_honest_nodes(federation)
    dead = ByHand(federation.join("c", {}), Honest("c", 2), {Purpose.TRAIN})
    dead.start()
    try:
        run = federation.submit(RUN.format(rounds=2, min_nodes=3, deadline=15))
        end = federation.finished(run, 300)
    finally:
        dead.end()
    assert end["status"] == "finished", end
    assert dead.announced == 1
    first, second = federation.events(run, "round")
    # A round takes nothing in after its deadline: what is in the sum had been folded in by then.
    assert first["replies"] == ["a", "b"]
    assert first["failures"] == {"c": "upload_lost (announced, but not uploaded by the deadline)"}
    # Far from the three minutes that the SuperLink waits for the objects.
    assert first["seconds"] < 60
    assert second["replies"] == ["a", "b"] and list(second["failures"]) == ["c"]


def test_nobody_waits_for_a_node_that_is_revoked_in_mid_upload(federation: Federation) -> None:
    two_honest_nodes(federation)
    doomed = ByHand(federation.join("c", {}), Honest("c", 2), {Purpose.TRAIN}, survives=True)
    doomed.start()
    try:
        run = federation.submit(RUN.format(rounds=2, min_nodes=2, deadline=240))
        until("the announcement", lambda: doomed.announced, 180)
        assert not federation.events(run, "round")
        fedward("server", "node", "revoke", "c", "--dir", federation.state)
        end = federation.finished(run, 200)
        until("the node hears of it", lambda: doomed.refused, 30)
    finally:
        doomed.end()
    assert end["status"] == "finished", end
    first, second = federation.events(run, "round")
    assert first["replies"] == second["replies"] == ["a", "b"]
    assert first["failures"]["c"].startswith("upload_lost")
    assert first["seconds"] < 120
    assert list(second["failures"]) == ["c"]


PROBE = """
[project]
name = "probe"
version = "1.0.0"
description = "Asks two nodes the same thing in two ways."
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedward"
fab-include = ["probe/**/*.py"]

[tool.flwr.app.components]
serverapp = "probe.server:app"
clientapp = "fedward_client.app:app"

[tool.flwr.app.config]
folder = ""
"""
SERVER = '''
import json, time
from pathlib import Path

from fedward_common.messages import Purpose, Request
from fedward_common.records import request_to_message
from fedward_server.grid import FlowerTransport, NumberedDirectory
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    folder = Path(context.run_config["folder"])
    began = time.monotonic()

    def tell(**what):
        with (folder / "told.jsonl").open("a") as file:
            file.write(json.dumps({**what, "after": time.monotonic() - began}) + "\\n")

    transport = FlowerTransport(grid, NumberedDirectory())
    nodes = [peer.name for peer in transport.online()]
    for name, reply in transport.exchange({name: Request(Purpose.PREPARE, "ours") for name in nodes}, 10.0):
        tell(way="ours", node=name, failure=str(reply.failure))
    tell(way="ours", over=True)

    request = Request(Purpose.PREPARE, "stock")
    ids = list(grid.push_messages([request_to_message(request, int(name[5:]), 600.0) for name in nodes]))
    while not (folder / "go").exists():
        time.sleep(0.1)
    tell(way="stock", pulls=True)
    messages = grid.pull_messages(ids)
    tell(way="stock", over=True, replies=len(messages))
'''


def test_stock_flower_waits_where_we_do_not(federation: Federation, tmp_path: Path) -> None:
    # The guard refuses a run without a signed manifest: its refusal is a reply like any other.
    folder = federation.join("a", {})
    federation.start_node("a")
    half = ByHand(
        federation.join("c", {}),
        lambda link, incoming: refusal(incoming.request),
        {Purpose.PREPARE},
        survives=True,
    )
    project = tmp_path / "probe"
    (project / "probe").mkdir(parents=True)
    (project / "pyproject.toml").write_text(PROBE)
    (project / "probe" / "__init__.py").write_text("")
    (project / "probe" / "server.py").write_text(SERVER)
    told = tmp_path / "told.jsonl"

    def lines() -> list[dict[str, Any]]:
        return [json.loads(line) for line in told.read_text().splitlines()] if told.exists() else []

    def honest_reply_is_there() -> bool:
        journal = folder / "journal.jsonl"
        answered = journal.exists() and '"stock"' in journal.read_text()
        return answered and not list((folder / "inflight").glob("*.json"))

    half.start()
    paths = ServerPaths(federation.state)
    control = Control(paths, load_settings(paths).control_port)
    run = control.start_run(build_bundle(project), {"folder": str(tmp_path)})
    try:
        until("our way is over", lambda: any("over" in line for line in lines()), 120)
        until("both have announced", lambda: half.announced == 2 and honest_reply_is_there(), 60)
        (tmp_path / "go").touch()
        until("stock Flower pulls", lambda: lines()[-1].get("pulls"), 20)
        time.sleep(40)
        stock = [line for line in lines() if line["way"] == "stock"]
    finally:
        half.end()
        control.stop_run(run)

    # Ours: the honest reply as soon as it is there, and the other given up at the deadline.
    first, second, over = (line for line in lines() if line["way"] == "ours")
    assert first["failure"].startswith("manifest_invalid") and first["after"] < 10
    assert second["failure"].startswith("upload_lost") and over["after"] < 20
    # Stock: four times as long, and not even the reply that was there from the start.
    assert [set(line) for line in stock] == [{"way", "pulls", "after"}]


def refusal(request: Request) -> Reply:
    return Reply(request.purpose, request.run, request.round, request.attempt, failure=Failure(Reason.POLICY))
