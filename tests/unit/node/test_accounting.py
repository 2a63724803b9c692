"""The journal's sums are the bytes that arrive at a server, over real sockets, whatever goes wrong on the way."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from counting_fleet import FAB, METHODS, NODE, RUN, Fleet, ids
from fedward_client import guard as guard_module
from fedward_client import link as link_module
from fedward_client.guard import Guard
from fedward_client.journal import Journal, Note
from fedward_client.journal_lines import tail
from fedward_client.journal_verify import Report, verify
from fedward_client.link import Link, LinkDown, RunGone, Ticket
from fedward_client.paths import NodePaths
from fedward_client.policy import Policy
from fedward_client.settings import NodeSettings
from fedward_client.traffic import Traffic
from fedward_common.messages import Purpose, Reply, Request
from fedward_common.records import request_to_message
from flwr.supercore.error import ApiErrorCode
from flwr.supercore.task_identity import TaskIdentity

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    for name, value in (("_run_id", RUN), ("_node_id", 1), ("_task_id", 1)):
        monkeypatch.setattr(TaskIdentity, name, value)
    fleet = Fleet(tmp_path)
    yield fleet
    fleet.close()


class Node:
    """A link and its journal, without a guard."""

    def __init__(self, fleet: Fleet, folder: Path) -> None:
        self.paths = NodePaths(folder)
        self.traffic = Traffic()
        self.journal = Journal(self.paths.journal, self.paths.sent, "n", self.traffic)
        self.journal.opened()
        self.link = Link(fleet.address, fleet.ca, fleet.key, NODE, self.traffic)
        self.link.connect()

    def answer(self, number: int, **vectors: np.ndarray) -> str:
        """Journal and send a reply; returns the hash that the journal holds."""
        reply = Reply(Purpose.TRAIN, "r", number, vectors=vectors, metrics={"loss": 0.5})
        outgoing = self.link.pack(reply, ticket())
        self.journal.message(Note("r", number, 0, "train", "answered"), outgoing.size, outgoing.sha256)
        try:
            self.link.send(outgoing)
        finally:
            self.link.drop(outgoing)
        return outgoing.sha256

    def stop(self) -> Report:
        self.link.close()
        self.journal.closed()
        return verify(self.paths.journal, self.paths.sent)


@pytest.fixture
def node(fleet: Fleet, tmp_path: Path) -> Node:
    return Node(fleet, tmp_path)


def ticket() -> Ticket:
    return Ticket(RUN, "e" * 64, 1, NODE, "1", time.time(), 600.0, "train", None, None, "train", "r", 1, 0)


def noise(size: int) -> np.ndarray:
    return np.random.default_rng(size).standard_normal(size)


def arrived(fleet: Fleet, report: Report) -> None:
    """Asserts that the journal accounts for exactly what arrived."""
    assert report.problems == []
    pushes = {"PushMessages", "PushObject"}
    control = {name: (tally.count, tally.bytes) for name, tally in report.control.items()}
    for name in set(METHODS) - pushes:
        assert control.get(name, (0, 0)) == (fleet.calls[name], fleet.received[name]), name
    for name in pushes:
        assert control.get(name, (0, 0))[0] == fleet.calls[name]
    pushed = sum(control.get(name, (0, 0))[1] for name in pushes) + report.messages - report.withheld
    assert pushed == sum(fleet.received[name] for name in pushes)
    assert report.sent is not None and report.sent.total == report.total == fleet.total


def test_without_trouble(fleet: Fleet, node: Node) -> None:
    fleet.offer(request_to_message(Request(Purpose.TRAIN, "r", 1, vectors={"model": noise(1_500_000)}), NODE, 600.0))
    received = node.link.receive()
    assert received is not None and received.request.vectors["model"].size == 1_500_000
    assert node.link.receive() is None
    info = node.link.run_info(RUN)
    assert node.link.bundle(info) == FAB
    small, large = node.answer(1, delta=noise(10)), node.answer(2, delta=noise(1_500_000))
    report = node.stop()
    arrived(fleet, report)
    assert report.withheld == 0
    assert report.messages == sum(entry["bytes"] for entry in tail(node.paths.journal, 9)) > 8 * 1_500_000
    # The hash is that of the root object, and every object's id is its content's hash: all of the message is in it.
    assert [tree.object_id for tree in fleet.announced] == [small, large]
    assert {object_id for tree in fleet.announced for object_id in ids(tree)} == set(fleet.objects)
    # Without trouble the session's id is all that an upload takes beyond the message: 36 characters and two bytes.
    uploads = fleet.calls["PushObject"]
    assert uploads == len(fleet.objects)
    headers = report.control["PushObject"].bytes - 38 * uploads
    assert 0 < headers < 500 * uploads


def test_a_server_that_takes_parcels(fleet: Fleet, node: Node) -> None:
    fleet.parcels = True
    fleet.offer(request_to_message(Request(Purpose.TRAIN, "r", 1, vectors={"model": noise(10_000)}), NODE, 600.0))
    received = node.link.receive()
    assert received is not None and np.array_equal(received.request.vectors["model"], noise(10_000))
    assert node.link.receive() is None

    sent = node.answer(1, delta=noise(10_000))
    assert sent in fleet.objects
    assert not any(fleet.calls[name] for name in ("PullObject", "PushObject", "ConfirmMessageReceived"))
    # What is large goes in parts.
    node.answer(2, delta=noise(1_500_000))
    assert fleet.calls["PushObject"] > 2
    assert set(ids(fleet.announced[0])) <= set(fleet.objects)
    arrived(fleet, node.stop())


def test_a_parcel_whose_arrival_is_not_heard_of(fleet: Fleet, node: Node) -> None:
    fleet.parcels = True
    fleet.offer(request_to_message(Request(Purpose.TRAIN, "r", 1), NODE, 600.0))
    assert node.link.receive() is not None
    failures = [True, True]
    fleet.trouble = lambda method: "busy" if method == "PushMessages" and failures and failures.pop() else ""
    node.answer(1, delta=noise(100))
    assert fleet.calls["PushMessages"] == 3
    report = node.stop()
    arrived(fleet, report)
    # Repeated bytes are no message's bytes.
    assert report.control["PushMessages"].bytes > 2 * 800 and report.withheld == 0


def test_a_parcel_that_never_left_is_withheld(fleet: Fleet, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet.parcels = True
    fleet.offer(request_to_message(Request(Purpose.TRAIN, "r", 1), NODE, 600.0))
    assert node.link.receive() is not None
    outgoing = node.link.pack(Reply(Purpose.TRAIN, "r", 1, vectors={"delta": noise(100)}), ticket())
    node.journal.message(Note("r", 1, 0, "train", "answered"), outgoing.size, outgoing.sha256)
    size = outgoing.size
    node.link.drop(outgoing)
    report = node.stop()
    arrived(fleet, report)
    assert report.withheld == size and not fleet.objects


def test_a_database_that_is_busy(fleet: Fleet, node: Node) -> None:
    failures = {"PushMessages": 2, "PushObject": 3}
    refusals = [False, False]

    def trouble(method: str) -> str:
        if failures.get(method, 0) == 0:
            return ""
        failures[method] -= 1
        return "database is locked"

    fleet.trouble = trouble
    fleet.store = lambda object_id: refusals.pop() if refusals else True
    node.answer(1, delta=noise(100))
    report = node.stop()
    arrived(fleet, report)
    assert report.control["PushMessages"].count == 3
    assert report.control["PushObject"].count == len(fleet.objects) + 5
    # Repeated bytes are no message's bytes.
    assert report.control["PushObject"].bytes > 800 and report.withheld == 0


def test_objects_that_the_server_has_already(fleet: Fleet, node: Node) -> None:
    node.answer(1, delta=noise(1_500_000))
    fleet.has = lambda object_id: object_id in fleet.objects
    before = fleet.received["PushObject"]
    node.answer(2, delta=noise(1_500_000))
    assert fleet.received["PushObject"] - before < 10_000
    report = node.stop()
    arrived(fleet, report)
    assert report.withheld > 8 * 1_500_000


def test_a_run_that_is_over(fleet: Fleet, node: Node) -> None:
    over = json.dumps({"code": ApiErrorCode.FLEET_RUN_STATUS_NOT_ALLOWED, "public_message": "over"})
    fleet.trouble = lambda method: over if method == "PushObject" and len(fleet.objects) == 2 else ""
    with pytest.raises(RunGone):
        node.answer(1, delta=noise(1_500_000))
    report = node.stop()
    arrived(fleet, report)
    # Of three chunks of the vector, the last never left.
    assert len(fleet.objects) == 2 and 1_000_000 < report.withheld < 5_000_000


def test_a_message_that_is_sent_again_is_the_same(fleet: Fleet, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "_PUSH_TRIES", 1)
    outgoing = node.link.pack(Reply(Purpose.TRAIN, "r", 1, vectors={"delta": noise(1_500_000)}), ticket())
    node.journal.message(Note("r", 1, 0, "train", "answered"), outgoing.size, outgoing.sha256)
    left = [False, True, False]
    fleet.store = lambda object_id: left.pop() if left else True
    for _ in range(2):
        with pytest.raises(LinkDown):
            node.link.send(outgoing)
    node.link.send(outgoing)
    arrived(fleet, node.stop())
    assert {tree.object_id for tree in fleet.announced} == {outgoing.sha256} and len(fleet.announced) == 3
    assert set(ids(fleet.announced[0])) == set(fleet.objects)


def test_a_count_in_mid_upload_is_exact_too(fleet: Fleet, node: Node) -> None:
    counted: list[Report] = []

    def store(object_id: str) -> bool:
        node.journal.control()
        counted.append(verify(node.paths.journal, node.paths.sent))
        return True

    fleet.store = store
    node.answer(1, delta=noise(1_500_000))
    assert [report.problems for report in counted] == [[]] * len(fleet.objects)
    unsent = [report.sent.unsent for report in counted if report.sent]
    assert unsent == sorted(unsent, reverse=True) and unsent[0] > 5_000_000 and unsent[-1] == 0
    arrived(fleet, node.stop())


def test_the_guard_journals_before_the_first_byte_leaves(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard_module.sandbox, "hide_memory", lambda: None)
    paths = NodePaths(tmp_path / "node")
    paths.root.mkdir()

    def link(traffic: Traffic) -> Link:
        return Link(fleet.address, fleet.ca, fleet.key, NODE, traffic)

    member = SimpleNamespace(
        paths=paths, name="a", server="s", node_id="n", roster=lambda: None, link=link,
        listed=lambda: True, pending=lambda: [],
    )  # fmt: skip
    guard = Guard(member, NodeSettings(), Policy())  # type: ignore[arg-type]
    on_disk: list[bool] = []

    def announced(tree: object) -> None:
        entries = tail(paths.journal, 1)
        on_disk.append([entry["sha256"] for entry in entries] == [tree.object_id])  # type: ignore[attr-defined]

    fleet.arrived = announced
    for number in range(1, 4):
        fleet.offer(request_to_message(Request(Purpose.TRAIN, "run", number), NODE, 600.0))
    stop = threading.Event()
    thread = threading.Thread(target=guard.run, args=(stop,))
    thread.start()
    try:
        end = time.monotonic() + 30
        # Announced, and sent to its last byte: a request is forgotten once its answer has left.
        while (len(on_disk) < 3 or any((paths.root / "inflight").iterdir())) and time.monotonic() < end:
            time.sleep(0.05)
    finally:
        stop.set()
        thread.join()
    assert on_disk == [True, True, True]
    entries = tail(paths.journal, 9)
    # A run without a signed manifest is refused, and the refusal is a message like any other.
    assert {(entry["outcome"], entry["verdict"]) for entry in entries} == {
        ("manifest_invalid", "the run carries no signed manifest")
    }
    assert all(entry["bundle"] == entry["config"] == "" and entry["protections"] == [] for entry in entries)
    report = verify(paths.journal, paths.sent)
    polls = report.control["PullMessages"]
    if polls.count == fleet.calls["PullMessages"] + 1:
        # The guard's last poll was counted and then interrupted, before it left.
        assert 0 < polls.bytes - fleet.received["PullMessages"] < 1000
        fleet.calls["PullMessages"], fleet.received["PullMessages"] = polls.count, polls.bytes
    arrived(fleet, report)
