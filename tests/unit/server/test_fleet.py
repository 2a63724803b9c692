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
from fedward_server import fleet as fleets
from fedward_server.fleet import Fleet
from flower_state import ANSWER, DELTA, PARCEL, Server, context, whole
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.proto.fleet_pb2 import PullMessagesResponse
from flwr.server.superlink.fleet.grpc_rere.fleet_servicer import FleetServicer
from flwr.supercore.error import FlowerError
from flwr.supercore.inflatable.inflatable_object import (
    get_object_id,
    iterate_object_tree,
)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    return Server(tmp_path / "superlink.db", monkeypatch)




def test_a_message_is_handed_out_whole_and_then_gone(server: Server) -> None:
    sent, objects = server.request(DELTA)
    assert server.state.store_whole(remove_content_from_message(sent), objects)
    (got,) = server.pull(PARCEL).messages_list
    assert got.metadata.message_id == sent.object_id
    assert parcels.take(got) == objects
    assert not any(server.stored(name) for name in objects)
    assert not server.pull(PARCEL).messages_list


def test_a_node_without_the_header_gets_the_same_one_by_one(server: Server) -> None:
    sent, objects = server.request(DELTA)
    server.state.store_whole(remove_content_from_message(sent), objects)
    found = server.pull()
    assert not parcels.take(found.messages_list[0])
    (tree,) = found.message_object_trees
    assert {node.object_id for node in iterate_object_tree(tree)} == set(objects)
    assert tree.object_id == sent.object_id
    assert {name: server.stored(name) for name in objects} == objects
    server.state.object_store.delete(sent.object_id)
    assert not any(server.stored(name) for name in objects)


def test_objects_that_flower_stored_one_by_one_are_handed_out_whole(server: Server) -> None:
    sent, objects = server.request(DELTA)
    session = server.announce(sent)
    for name, content in objects.items():
        assert server.state.store_object(server.run, session, name, content)
    assert parcels.take(server.pull(PARCEL).messages_list[0]) == objects


def test_a_message_that_is_not_whole_yet_is_announced(server: Server) -> None:
    sent, objects = server.request(DELTA)
    session = server.announce(sent)
    server.state.store_object(server.run, session, sent.object_id, objects[sent.object_id])
    found = server.pull(PARCEL)
    assert not parcels.take(found.messages_list[0]) and len(found.message_object_trees) == 1
    assert server.stored(sent.object_id) == objects[sent.object_id]


@pytest.mark.parametrize("limit", [100, parcels.LIMIT])
def test_what_is_large_or_an_array_is_not_in_a_parcel(
    server: Server, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(parcels, "LIMIT", limit)
    arrays = ArrayRecord({"w": Array(np.ones(4, np.float32))})
    sent, objects = server.request(DELTA if limit == 100 else arrays)
    server.state.store_whole(remove_content_from_message(sent), objects)
    assert not parcels.take(server.pull(PARCEL).messages_list[0])
    assert {name: server.stored(name) for name in objects} == objects


def test_what_messages_share_is_stored_once_and_until_the_last_has_gone(server: Server) -> None:
    shared = ConfigRecord({"model": b"m" * 1000})
    sent = [server.request(shared) for _ in range(3)]
    (model,) = set.intersection(*({n for n, c in objects.items() if b"m" * 1000 in c} for _, objects in sent))
    for message, objects in sent:
        server.state.store_whole(remove_content_from_message(message), objects)
    for _ in sent:
        assert server.stored(model)
        assert model in parcels.take(server.pull(PARCEL).messages_list[0])
    assert server.stored(model) is None
    assert len(server.state.object_store) == 0


def test_an_answer_with_its_objects_is_stored_once(server: Server) -> None:
    asked, objects = server.request(DELTA)
    server.state.store_whole(remove_content_from_message(asked), objects)
    answer, parts = server.reply(asked, ANSWER)
    for _ in range(2):
        server.push(answer, parts)
        assert server.replies() == 1
    assert {name: server.stored(name) for name in parts} == parts
    # It was pulled, and the node, which did not hear of that, sends it once more.
    server.state.delete_messages({asked.object_id})
    server.state.object_store.delete(answer.object_id)
    server.push(answer, parts)
    assert server.replies() == 0 and not any(server.stored(name) for name in parts)


def test_all_of_an_answer_or_nothing(server: Server) -> None:
    asked, objects = server.request(DELTA)
    server.state.store_whole(remove_content_from_message(asked), objects)
    answer, parts = server.reply(asked, ANSWER)
    first, *others = parts
    bad: list[dict[str, bytes]] = [
        {**parts, first: parts[first] + b"x"},
        {first: parts[first]},
        {**parts, get_object_id(b"no object"): b"no object"},
    ]
    for wrong in bad:
        with pytest.raises(PermissionError, match=r"parcel|Unexpected|split"):
            server.push(answer, wrong)
    # A parent before its child, and without it.
    server.push(answer, dict(reversed(parts.items())))
    server.push(answer, {name: parts[name] for name in others})
    assert server.replies() == 0
    assert not any(server.stored(name) for name in parts)
    server.push(answer, parts)
    assert server.replies() == 1


def test_a_run_that_is_over_takes_no_answer(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, objects = server.request(DELTA)
    server.state.store_whole(remove_content_from_message(asked), objects)
    answer, parts = server.reply(asked, ANSWER)
    monkeypatch.setattr(fleets, "check_abort", lambda *arguments: "Run is finished.")
    with pytest.raises(FlowerError):
        server.push(answer, parts)
    assert server.replies() == 0


@pytest.mark.parametrize("parts_with_it", [True, False])
def test_an_answer_in_another_nodes_name_is_refused(server: Server, parts_with_it: bool) -> None:
    asked, objects = server.request(DELTA)
    server.state.store_whole(remove_content_from_message(asked), objects)
    answer, parts = whole(Message(RecordDict({"fedward": ANSWER}), reply_to=asked), server.run, server.node + 1)
    with pytest.raises(PermissionError, match="not that of the node"):
        server.push(answer, parts if parts_with_it else {})
    # As the node that was asked, but sent by another one.
    answer, parts = server.reply(asked, ANSWER)
    server.node += 1
    with pytest.raises(PermissionError, match="not that of the node"):
        server.push(answer, parts if parts_with_it else {})
    assert server.replies() == 0 and not any(server.stored(name) for name in parts)


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
