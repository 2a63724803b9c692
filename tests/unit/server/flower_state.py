"""Flower's own state and database under our Fleet API, with one run and one node, and messages for them."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fedward_common import parcels
from fedward_server import fleet as fleets
from fedward_server.database import LinkState, ObjectStore
from fedward_server.fleet import Fleet
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import NOOP_FLWR_AID, SUPERLINK_NODE_ID
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse, PushMessagesRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore import sql_mixin
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation import NoOpFederationManager

PARCEL = (parcels.HEADER, "1")
DELTA = ConfigRecord({"delta": b"d" * 1000})
ANSWER = ConfigRecord({"delta": b"a" * 1000})


def context(*headers: tuple[str, str]) -> Any:
    def abort(code: Any, text: str) -> None:
        raise PermissionError(text)

    return SimpleNamespace(invocation_metadata=lambda: headers, is_active=lambda: True, abort=abort)


@cache
def migrated() -> bytes:
    """An empty database with Flower's tables, which take a second to make."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "superlink.db"
        store = ObjectStore(str(path))
        store.initialize()
        with sqlite3.connect(path) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return path.read_bytes()


class Server:
    """A Fleet whose state has a run, that counts as running, and a node."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path.write_bytes(migrated())
        monkeypatch.setattr(sql_mixin, "run_migrations", lambda engine: None)
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
        self.node = self.state.create_node(NOOP_FLWR_AID, "", b"key", 30.0)
        self.state.activate_node(self.node, 30.0)
        monkeypatch.setattr(fleets, "check_abort", lambda *arguments: None)
        for name, value in (("_run_id", self.run), ("_node_id", SUPERLINK_NODE_ID), ("_task_id", 1)):
            monkeypatch.setattr(TaskIdentity, name, value)

    def request(self, record: Any) -> tuple[Message, dict[str, bytes]]:
        """A message to the node, as the ServerApp makes it, and its objects."""
        content = RecordDict({"fedward": ConfigRecord({"json": "{}"}), "vectors": record})
        return whole(Message(content, self.node, "train", ttl=60.0), self.run)

    def reply(self, request: Message, record: Any) -> tuple[Message, dict[str, bytes]]:
        return whole(Message(RecordDict({"fedward": record}), reply_to=request), self.run, self.node)

    def announce(self, message: Message) -> str:
        session: str = self.state.start_session(self.run)
        envelope = remove_content_from_message(message)
        assert self.state.store_message_and_object_tree(envelope, get_object_tree(message), session)[0]
        return session

    def push(self, message: Message, objects: Mapping[str, bytes]) -> None:
        sent = message_to_proto(remove_content_from_message(message))
        request = PushMessagesRequest(node=Node(node_id=self.node), messages_list=[sent])
        parcels.fill(request.messages_list[0], objects)
        self.fleet.PushMessages(request, context())

    def pull(self, *headers: tuple[str, str]) -> PullMessagesResponse:
        return self.fleet.PullMessages(PullMessagesRequest(node=Node(node_id=self.node)), context(*headers))

    def stored(self, name: str) -> bytes | None:
        return self.state.object_store.get(name)

    def replies(self) -> int:
        return self.state.num_message_res()


def whole(message: Message, run: int, source: int = SUPERLINK_NODE_ID) -> tuple[Message, dict[str, bytes]]:
    message.metadata.__dict__["_run_id"] = run
    message.metadata.__dict__["_src_node_id"] = source
    message.metadata.__dict__["_message_id"] = message.object_id
    return message, {name: item.deflate() for name, item in get_all_nested_objects(message).items()}
