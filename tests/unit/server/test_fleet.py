"""The Fleet API over Flower's own servicer, state and database: who sends no header gets exactly what Flower gives."""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fedward_common import parcels
from fedward_common.records import deflate_once
from fedward_server import fleet as fleets
from fedward_server.database import LinkState, ObjectStore
from fedward_server.fleet import Fleet
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.common.constant import NOOP_FLWR_AID
from flwr.proto.fleet_pb2 import PullMessagesResponse
from flwr.proto.message_pb2 import PullObjectRequest, PushObjectRequest
from flwr.server.superlink.fleet.grpc_rere.fleet_servicer import FleetServicer
from flwr.server.superlink.fleet.message_handler import message_handler
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.superlink.federation import NoOpFederationManager

PARCEL = ((parcels.HEADER, "1"),)


def context(*headers: tuple[str, str]) -> Any:
    def abort(code: Any, text: str) -> None:
        raise PermissionError(text)

    return SimpleNamespace(invocation_metadata=lambda: headers, is_active=lambda: True, abort=abort)


class Server:
    """A Fleet with a state in which every run is running, and one push session is open for what `announce` is given."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store = ObjectStore(str(path))
        store.initialize()
        self.state = LinkState(str(path), NoOpFederationManager(), store)
        self.state.initialize()
        self.fleet = Fleet.__new__(Fleet)
        self.fleet.state_factory = SimpleNamespace(state=lambda: self.state)  # type: ignore[assignment]
        self.fleet.objectstore_factory = SimpleNamespace(store=lambda: store)  # type: ignore[assignment]
        self.run = self.state.create_run(
            None, None, None, {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP
        )
        monkeypatch.setattr(message_handler, "check_abort", lambda *arguments: None)

    def announce(self, message: Message) -> str:
        session: str = self.state.start_session(self.run)
        self.state.preregister_object_tree(get_object_tree(message), session)
        return session

    def push(self, session: str, object_id: str, content: bytes, *headers: tuple[str, str]) -> bool:
        request = PushObjectRequest(run_id=self.run, session_id=session, object_id=object_id, object_content=content)
        return bool(self.fleet.PushObject(request, context(*headers)).stored)

    def pull(self, object_id: str, *headers: tuple[str, str]) -> Any:
        request = PullObjectRequest(run_id=self.run, object_id=object_id)
        return self.fleet.PullObject(request, context(*headers))


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    return Server(tmp_path / "superlink.db", monkeypatch)


def message(record: Any) -> tuple[Message, dict[str, bytes]]:
    asked = Metadata(
        run_id=5, message_id="asked", src_node_id=1, dst_node_id=7, reply_to_message_id="", group_id="",
        created_at=time.time(), ttl=60.0, message_type="train",
    )  # fmt: skip
    content = RecordDict({"fedward": ConfigRecord({"json": "{}"}), "vectors": record})
    made = Message(content, reply_to=make_message(metadata=asked, content=RecordDict()))
    made.metadata.__dict__["_message_id"] = made.object_id
    return made, {name: item.deflate() for name, item in get_all_nested_objects(made).items()}


def small() -> tuple[Message, dict[str, bytes]]:
    return message(ConfigRecord({"delta": b"d" * 1000}))


def test_a_parcel_is_stored_and_handed_out_object_by_object(server: Server) -> None:
    sent, objects = small()
    session = server.announce(sent)
    assert server.push(session, sent.object_id, parcels.wrap(objects), *PARCEL)
    for name, content in objects.items():
        assert server.pull(name).object_content == content


def test_objects_one_by_one_are_handed_out_as_a_parcel(server: Server) -> None:
    sent, objects = small()
    session = server.announce(sent)
    for name, content in objects.items():
        assert server.push(session, name, content)
    got = server.pull(sent.object_id, *PARCEL)
    assert parcels.unwrap(got.object_content) == objects
    # Without the header, Flower's answer.
    assert server.pull(sent.object_id).object_content == objects[sent.object_id]


def test_a_message_that_is_not_whole_yet_is_no_parcel(server: Server) -> None:
    sent, objects = small()
    session = server.announce(sent)
    assert not server.pull(sent.object_id, *PARCEL).object_available
    assert server.push(session, sent.object_id, objects[sent.object_id])
    assert server.pull(sent.object_id, *PARCEL).object_content == objects[sent.object_id]


def test_large_vectors_are_not_in_a_parcel(server: Server) -> None:
    sent, objects = message(ArrayRecord({"w": Array(np.ones(4, np.float32))}))
    session = server.announce(sent)
    for name, content in objects.items():
        server.push(session, name, content)
    assert server.pull(sent.object_id, *PARCEL).object_content == objects[sent.object_id]


def test_all_of_a_parcel_or_nothing(server: Server) -> None:
    sent, objects = small()
    session = server.announce(sent)
    first = next(iter(objects))
    wrong = {**objects, first: objects[first] + b"x"}  # its id is no hash of it
    assert not server.push(session, sent.object_id, parcels.wrap(dict(reversed(wrong.items()))), *PARCEL)
    assert not any(server.pull(name).object_available for name in objects)
    assert server.push(session, sent.object_id, parcels.wrap(objects), *PARCEL)
    # Once more: it is there already, as Flower says of a single object.
    assert not server.push(session, sent.object_id, parcels.wrap(objects), *PARCEL)


@pytest.mark.parametrize(
    "parcel", [b"", b"FWPARCEL1", parcels.MAGIC + b"a" * 71, parcels.MAGIC + b"a" * 64 + b"\xff" * 8]
)
def test_bytes_that_are_no_parcel(server: Server, parcel: bytes) -> None:
    sent, objects = small()
    session = server.announce(sent)
    with pytest.raises(PermissionError, match="parcel"):
        server.push(session, sent.object_id, parcel, *PARCEL)
    assert not any(server.pull(name).object_available for name in objects)


def test_wrapped_is_unwrapped() -> None:
    objects = deflate_once([])
    assert parcels.unwrap(parcels.wrap(objects)) == {}
    objects = {"a" * 64: b"", "b" * 64: parcels.MAGIC, "c" * 64: bytes(1000)}
    assert parcels.unwrap(parcels.wrap(objects)) == objects


@pytest.mark.parametrize(
    ("headers", "held"), [((), 0.0), ((("fedward-wait", "0.4"),), 0.4), ((("fedward-wait", "x"),), 0.0)]
)
def test_only_who_says_so_waits(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, headers: Any, held: float
) -> None:
    monkeypatch.setattr(Fleet, "arrivals", fleets.Arrivals(tmp_path / "superlink.db"), raising=False)
    monkeypatch.setattr(FleetServicer, "PullMessages", lambda *arguments: PullMessagesResponse())
    start = time.monotonic()
    server.fleet.PullMessages(SimpleNamespace(node=SimpleNamespace(node_id=5)), context(*headers))  # type: ignore[arg-type]
    assert held <= time.monotonic() - start < held + 0.3


def test_flowers_superlink_serves_it() -> None:
    superlink = importlib.import_module("flwr.superlink.cli.flower_superlink")
    assert hasattr(superlink, "FleetServicer"), "Flower takes its servicer from elsewhere now"
