"""A ServerApp's calls without HTTP, on the same database as the Fleet API."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fedward_common import parcels
from fedward_server.direct import DirectRuntime
from fedward_server.grid import _pull_each, _push_each, _Read
from flower_state import ANSWER, DELTA, PARCEL, Server, whole
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import NOOP_FLWR_AID
from flwr.proto.runtime_pb2 import PullAppMessagesRequest


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    return Server(tmp_path / "superlink.db", monkeypatch)


@pytest.fixture
def runtime(server: Server, tmp_path: Path) -> DirectRuntime:
    return DirectRuntime(tmp_path / "superlink.db", server.run)


def sent(server: Server, runtime: DirectRuntime, count: int) -> list[Message]:
    """Requests on their way."""
    made = [server.request(DELTA) for _ in range(count)]
    pairs = [(remove_content_from_message(message), objects) for message, objects in made]
    assert runtime.push_whole(pairs) == [message.object_id for message, _ in made]
    return [message for message, _ in made]


def test_there_and_back(server: Server, runtime: DirectRuntime) -> None:
    requests = {message.object_id: message for message in sent(server, runtime, 6)}
    answers = {}
    for _ in requests:
        (asked,) = server.pull(PARCEL).messages_list
        answer, parts = server.reply(requests[asked.metadata.message_id], ANSWER)
        server.push(answer, parts)
        answers[asked.metadata.message_id] = parts
    got = {}
    calls = 0
    while len(got) < len(requests):
        found = runtime.PullMessages(PullAppMessagesRequest(message_ids=sorted(set(requests) - set(got)))).messages_list
        got |= {proto.metadata.reply_to_message_id: parcels.take(proto) for proto in found}
        calls += 1
        assert found and calls <= len(requests)
    assert got == answers
    # Few at a time, since each may be large; and nothing is left behind.
    assert calls > 1
    assert len(server.state.object_store) == server.replies() == server.state.num_message_ins() == 0


@pytest.mark.parametrize("whole_one", [True, False])
def test_a_transport_sends_and_reads_both_kinds(server: Server, runtime: DirectRuntime, whole_one: bool) -> None:
    def record(size: int) -> Any:
        # Anew each time: what was sent is emptied.
        return ConfigRecord({"d": bytes(size)}) if whole_one else ArrayRecord({"w": Array(np.arange(size))})

    message, objects = server.request(record(5))
    (message_id,) = _push_each(runtime, server.run, [message])
    assert {name: server.stored(name) for name in objects} == objects
    (found,) = server.pull(PARCEL).messages_list
    assert found.metadata.message_id == message_id
    assert parcels.take(found) == (objects if whole_one else {})
    # The answer, as such a node sends it.
    answer, parts = server.reply(message, record(6))
    if whole_one:
        server.push(answer, parts)
    else:
        session = server.announce(answer)
        for name, content in parts.items():
            assert server.state.store_object(server.run, session, name, content)
    read = _Read(runtime, server.run)
    pulled = _pull_each(runtime, server.run, {message_id: "a"}, lambda: False, lambda names: names, read)
    ((request_id, reply),) = list(pulled)
    assert request_id == message_id and isinstance(reply, Message)
    assert reply.content["fedward"] == record(6)
    while read.delete_one():
        pass
    assert not any(server.stored(name) for name in parts)


def test_a_reply_that_comes_one_by_one_is_announced(server: Server, runtime: DirectRuntime) -> None:
    (asked,) = sent(server, runtime, 1)
    server.pull(PARCEL)
    answer, parts = server.reply(asked, ANSWER)
    session = server.announce(answer)
    (found,) = runtime.PullMessages(PullAppMessagesRequest(message_ids=[asked.object_id])).messages_list
    assert found.metadata.message_id == answer.object_id and not parcels.take(found)
    for name, content in parts.items():
        assert server.state.store_object(server.run, session, name, content)


def test_a_node_that_is_gone_gets_nothing(server: Server, runtime: DirectRuntime) -> None:
    message, objects = server.request(DELTA)
    stranger = Message(RecordDict({"fedward": DELTA}), server.node + 1, "train", ttl=60.0)
    other, parts = whole(stranger, server.run)
    pairs = [(remove_content_from_message(m), p) for m, p in ((message, objects), (other, parts))]
    assert runtime.push_whole(pairs) == [message.object_id, ""]
    assert server.stored(other.object_id) is None


def test_a_revoked_nodes_request_comes_back(server: Server, runtime: DirectRuntime) -> None:
    (asked,) = sent(server, runtime, 1)
    server.state.delete_node(NOOP_FLWR_AID, server.node)
    (found,) = runtime.PullMessages(PullAppMessagesRequest(message_ids=[asked.object_id])).messages_list
    assert found.HasField("error") and found.metadata.reply_to_message_id == asked.object_id


def test_a_wait_ends_when_something_was_written(server: Server, runtime: DirectRuntime) -> None:
    runtime.wait(0.0)
    start = time.monotonic()
    runtime.wait(0.3)
    assert 0.3 <= time.monotonic() - start < 1.0
    (asked,) = sent(server, runtime, 1)
    runtime.wait(5.0)  # that was this process itself
    answer, parts = server.reply(asked, ANSWER)
    thread = threading.Timer(0.2, server.push, (answer, parts))
    start = time.monotonic()
    thread.start()
    runtime.wait(5.0)
    assert 0.1 < time.monotonic() - start < 2.0
    thread.join()
