"""The `Transport` over Flower's Grid. The only user of Flower's server internals in a run.

Stock `Grid.pull_messages` blocks until every object of every announced reply has arrived: one node that dies in
mid-upload stalls all others for minutes. Here each reply is pulled on its own, root object first, with a short
backoff and the round's deadline.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import httpx
from fedward_common import parcels
from fedward_common.messages import Failure, Reason, Reply, Request
from fedward_common.records import (
    RecordError,
    VectorRecord,
    assemble,
    deflate_once,
    is_small,
    message_to_reply,
    release,
    request_to_message,
    vector_record,
)
from fedward_common.roster import KIND as ROSTER_KIND
from fedward_common.roster import Roster
from fedward_common.update import Vector
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PushAppMessagesRequest
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import (
    InflatableObject,
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_push_object_fn_protobuf
from flwr.supercore.protobuf.client import ProtobufRequestContext
from flwr.superlink.grid import HttpGrid

from fedward_server.direct import DirectRuntime
from fedward_server.transport import Peer, never

_FASTEST = 0.02
_SLOWEST = 0.25
_SLOWDOWN = 1.2
"""How much longer the next wait is where nothing came: a reply is then seen late by a fifth of its time at most."""
_ONLINE_EVERY = 2.0
_READ_AT_MOST = 16 * 2**20
"""Bytes of replies that were read and still stand in the database."""
_SERVER = Node(node_id=SUPERLINK_NODE_ID)


class Directory(Protocol):
    """Who is behind Flower's node ids."""

    def peers(self, online: set[int]) -> dict[int, Peer]:
        """The nodes of the federation among `online` Flower ids."""


class RosterDirectory:
    """Names and tags from the roster file, read again when it changes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._changed = 0.0
        self._envelope = b""
        self._roster: Roster | None = None

    def roster(self) -> Roster:
        """The roster as it is now."""
        changed = self._path.stat().st_mtime
        if self._roster is None or changed != self._changed:
            # The service of this same server wrote the file; nodes, not the ServerApp, verify its signature.
            self._envelope = self._path.read_bytes()
            self._roster = Roster.model_validate_json(json.loads(self._envelope)[ROSTER_KIND])
            self._changed = changed
        return self._roster

    def envelope(self) -> bytes:
        """The same as it was signed."""
        self.roster()
        return self._envelope

    def peers(self, online: set[int]) -> dict[int, Peer]:
        known = {int(n.flower_id): Peer(n.name, n.tags) for n in self.roster().nodes if n.flower_id is not None}
        return {flower_id: peer for flower_id, peer in known.items() if flower_id in online}


class NumberedDirectory:
    """Without enrolment (a stock SuperLink, Flower's simulation runtime): nodes are named by their Flower id."""

    def peers(self, online: set[int]) -> dict[int, Peer]:
        return {flower_id: Peer(f"node-{flower_id}", ()) for flower_id in online}


@dataclass
class _Arriving:
    """A reply that was announced and whose objects have not all been seen."""

    name: str
    message_id: str
    objects: dict[str, bytes]
    """Of a small reply all of them, else none."""
    next_try: float = 0.0
    delay: float = _FASTEST


class _Untying:
    """Takes apart the reference cycle that httpx ties around each response (its stream knows it): requests and
    responses of megabytes would else stay until the garbage collector comes by, which counts objects, not bytes."""

    def intercept(
        self, context: ProtobufRequestContext, call_next: Callable[[ProtobufRequestContext], httpx.Response]
    ) -> httpx.Response:
        response = call_next(context)
        if response.is_closed:  # read to its end
            response.stream = httpx.ByteStream(b"")
        return response


class FlowerTransport:
    """Requests out, replies in, over a Grid. One exchange at a time.

    runtime: Flower's Runtime API without HTTP (`direct.py`), if this process may open the SuperLink's database.
    """

    def __init__(self, grid: Grid, directory: Directory, runtime: DirectRuntime | None = None) -> None:
        self._grid = grid
        self._client: Any = runtime
        if runtime is None and isinstance(grid, HttpGrid):
            self._client = grid._runtime_client
            self._client._interceptors = (*self._client._interceptors, _Untying())
        self._directory = directory
        self._flower_ids: dict[str, int] = {}
        self._read = _Read(self._client, _run_id(grid)) if self._client is not None else None
        self._down = 0
        self._up = 0

    def bytes_moved(self) -> tuple[int, int]:
        """Tensor bytes sent to and received from nodes so far."""
        return self._down, self._up

    def online(self) -> list[Peer]:
        """The nodes that the SuperLink can reach now."""
        online = set(self._grid.get_node_ids())
        peers = self._directory.peers(online)
        self._flower_ids.update({peer.name: flower_id for flower_id, peer in peers.items()})
        return sorted(peers.values(), key=lambda peer: peer.name)

    def exchange(
        self, requests: Mapping[str, Request], seconds: float, over: Callable[[], bool] = never
    ) -> Iterator[tuple[str, Reply]]:
        """Send each node its request and yield each reply as it arrives; see `Transport`."""
        if not requests:
            return
        deadline = time.monotonic() + seconds
        waiting = self._push(requests, ttl=seconds + 60.0)
        for message_id, answer in self._pull(waiting, lambda: time.monotonic() >= deadline or over()):
            name = waiting[message_id]
            request = requests[name]
            reply = self._decode(answer, request) if isinstance(answer, Message) else _failed(request, answer)
            # The caller's copy is to be the only one: the next reply is pulled while this frame waits.
            del answer
            yield name, reply
            del reply

    def _push(self, requests: Mapping[str, Request], ttl: float) -> dict[str, str]:
        """Message id -> node name for what was sent."""
        messages = self._messages(requests, ttl)
        self._down += sum(_size(request.vectors.values()) for request in requests.values())
        ids = self._grid.push_messages(messages) if self._client is None else self._push_each(messages)
        return {message_id: name for message_id, name in zip(ids, requests, strict=True) if message_id}

    def _messages(self, requests: Mapping[str, Request], ttl: float) -> list[Message]:
        """The requests as messages, in order. Equal vectors are hashed, sent and stored once."""
        shared: dict[tuple[int, ...], VectorRecord] = {}
        messages = []
        for name, request in requests.items():
            key = tuple(id(vector) for vector in request.vectors.values())
            if key not in shared:
                shared[key] = vector_record(request.vectors)
            messages.append(request_to_message(request, self._flower_ids[name], ttl, shared[key]))
        return messages

    def _push_each(self, messages: list[Message]) -> list[str]:
        return _push_each(self._client, _run_id(self._grid), messages)

    def _pull(self, waiting: Mapping[str, str], over: Callable[[], bool]) -> Iterator[tuple[str, Message | Failure]]:
        if self._read is None:
            return _pull_whole(self._grid, waiting, over)
        return _pull_each(self._client, _run_id(self._grid), waiting, over, self._still_there, self._read)

    def _still_there(self, names: set[str]) -> set[str]:
        online = set(self._grid.get_node_ids())
        return {name for name in names if self._flower_ids[name] in online}

    def _decode(self, message: Message, request: Request) -> Reply:
        try:
            reply = message_to_reply(message)
        except RecordError as error:
            unavailable = message.has_error()
            reason = Reason.OFFLINE if unavailable else Reason.BAD_UPDATE
            return _failed(request, Failure(reason, str(error)))
        release(message)
        self._up += _size(reply.vectors.values())
        if (reply.run, reply.round, reply.attempt) != (request.run, request.round, request.attempt):
            return _failed(request, Failure(Reason.BAD_UPDATE, "the reply answers another request"))
        return reply


def _size(vectors: Iterable[Vector]) -> int:
    return sum(vector.nbytes for vector in vectors)


def _failed(request: Request, failure: Failure) -> Reply:
    return Reply(request.purpose, request.run, request.round, request.attempt, failure=failure)


def _run_id(grid: Grid) -> int:
    return int(grid.run.run_id)


def _pull_whole(
    grid: Grid, waiting: Mapping[str, str], over: Callable[[], bool]
) -> Iterator[tuple[str, Message | Failure]]:
    """Replies by the public Grid API (Flower's in-memory grid has no uploads to wait for)."""
    open_ids = set(waiting)
    delay = _FASTEST
    while open_ids and not over():
        messages = list(grid.pull_messages(open_ids))
        for message in messages:
            open_ids.discard(message.metadata.reply_to_message_id)
            yield message.metadata.reply_to_message_id, message
        delay = _FASTEST if messages else min(_SLOWDOWN * delay, _SLOWEST)
        time.sleep(delay)


class _Read:
    """Replies that were read and may be deleted from the server's database. That takes as long as reading them, and is
    done while there is nothing else to do, or at once if much has come together."""

    def __init__(self, client: Any, run_id: int) -> None:
        self._client = client
        self._run_id = run_id
        self._messages: deque[tuple[str, int]] = deque()
        self._bytes = 0

    def add(self, message_id: str, size: int) -> None:
        self._messages.append((message_id, size))
        self._bytes += size
        while self._bytes > _READ_AT_MOST:
            self.delete_one()

    def delete_one(self) -> bool:
        """Whether there was one."""
        if not self._messages:
            return False
        message_id, size = self._messages.popleft()
        self._bytes -= size
        request = ConfirmMessageReceivedRequest(node=_SERVER, run_id=self._run_id, message_object_id=message_id)
        self._client.ConfirmMessageReceived(request)
        return True


def _pull_each(
    client: Any, run_id: int, waiting: Mapping[str, str], over: Callable[[], bool], still_there: Any, read: _Read
) -> Iterator[tuple[str, Message | Failure]]:
    """Replies one by one: a reply whose upload has not ended holds up no other."""
    announced: dict[str, _Arriving] = {}
    open_ids = set(waiting)
    delay, next_look = _FASTEST, time.monotonic() + _ONLINE_EVERY
    pause = client.wait if isinstance(client, DirectRuntime) else time.sleep
    while open_ids and not over():
        progress = False
        silent = open_ids - set(announced)
        if silent:
            response = client.PullMessages(PullAppMessagesRequest(message_ids=sorted(silent)))
            for proto in response.messages_list:
                request_id = proto.metadata.reply_to_message_id
                if request_id in silent:
                    announced[request_id] = _Arriving(
                        waiting[request_id], proto.metadata.message_id, parcels.take(proto)
                    )
                    progress = True
        for request_id, arriving in list(announced.items()):
            if time.monotonic() < arriving.next_try:
                continue
            outcome = _try_pull(client, run_id, arriving.message_id, arriving.objects, read)
            if outcome is None:
                arriving.next_try = time.monotonic() + arriving.delay
                arriving.delay = min(_SLOWDOWN * arriving.delay, _SLOWEST)
                continue
            progress = True
            del announced[request_id]
            open_ids.discard(request_id)
            yield request_id, outcome
            del outcome
        if time.monotonic() >= next_look:
            next_look = time.monotonic() + _ONLINE_EVERY
            there = still_there({waiting[request_id] for request_id in open_ids})
            for request_id in [r for r in open_ids if waiting[r] not in there]:
                lost = Reason.UPLOAD_LOST if request_id in announced else Reason.OFFLINE
                announced.pop(request_id, None)
                open_ids.discard(request_id)
                yield request_id, Failure(lost, "the node went offline or was revoked")
        delay = _FASTEST if progress else min(_SLOWDOWN * delay, _SLOWEST)
        if open_ids and not (not progress and read.delete_one()):
            pause(delay)
    for request_id in open_ids & set(announced):
        yield request_id, Failure(Reason.UPLOAD_LOST, "announced, but not uploaded by the deadline")


class _NotYet(Exception):
    """An object's upload goes on."""


class _Lost(Exception):
    """An object will never come."""


def _try_pull(
    client: Any, run_id: int, message_id: str, objects: dict[str, bytes], read: _Read
) -> Message | Failure | None:
    """The whole message, None if its upload goes on, or why it will never come. `objects` came with it.

    A sender pushes children before parents, so while the root (the message itself, tiny) is missing nothing large
    is fetched in vain.
    """

    size = 0

    def pull(object_id: str) -> bytes:
        nonlocal size
        if objects:
            return objects[object_id]
        response = client.PullObject(PullObjectRequest(node=_SERVER, run_id=run_id, object_id=object_id))
        if not response.object_found:
            raise _Lost("the upload was given up")
        if not response.object_available:
            raise _NotYet
        size += len(response.object_content)
        return cast(bytes, response.object_content)

    try:
        message = assemble(message_id, pull)
    except _NotYet:
        return None
    except _Lost as lost:
        return Failure(Reason.UPLOAD_LOST, str(lost))
    except RecordError as error:
        return Failure(Reason.BAD_UPDATE, str(error))
    except httpx.HTTPStatusError as error:
        return Failure(Reason.UPLOAD_LOST, f"HTTP {error.response.status_code}")
    if objects:
        objects.clear()
    else:
        read.add(message_id, size)
    return message


def _push_each(client: Any, run_id: int, messages: list[Message]) -> list[str]:
    """`Grid.push_messages` that serialises one chunk of tensors at a time, not the whole broadcast at once; small
    messages are written with all that they hold, where that is possible."""
    with no_object_id_recompute():
        contents = deflate_once(record for message in messages for record in message.content.values())
        for message in messages:
            message.metadata.__dict__["_message_id"] = message.object_id
        if isinstance(client, DirectRuntime) and all(is_small(message, contents) for message in messages):
            sent = client.push_whole([_whole(message, contents) for message in messages])
        else:
            sent = _push_parts(client, run_id, messages, contents)
    for message in messages:
        release(message)
    return sent


def _whole(message: Message, contents: Mapping[str, bytes]) -> tuple[Message, dict[str, bytes]]:
    """A message without its content, and all its objects, children first."""
    objects = get_all_nested_objects(message).items()
    return remove_content_from_message(message), {name: contents.get(name) or item.deflate() for name, item in objects}


def _push_parts(client: Any, run_id: int, messages: list[Message], contents: dict[str, bytes]) -> list[str]:
    objects: dict[str, InflatableObject] = {}
    for message in messages:
        objects.update(get_all_nested_objects(message))
    response = client.PushMessages(
        PushAppMessagesRequest(
            messages_list=[message_to_proto(remove_content_from_message(message)) for message in messages],
            message_object_trees=[get_object_tree(message) for message in messages],
        )
    )
    push = make_push_object_fn_protobuf(client.PushObject, _SERVER, run_id, response.session_id)
    wanted = set(response.objects_to_push)
    for object_id in list(objects):
        item = objects.pop(object_id)
        if object_id in wanted:
            content = contents.pop(object_id) if object_id in contents else item.deflate()
            push(object_id, content)
    return list(response.message_ids)
