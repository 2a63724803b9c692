"""The node's link to the server over Flower's gRPC Fleet API. The only user of Flower's node internals.

Built on `FleetStub` and Flower's node-authentication interceptor, not on `grpc_request_response`: that one exits
the process when activation fails, swallows a vanished node, and retries for ever against a server that has
revoked it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from fedward_common import parcels
from fedward_common.errors import FedwardError
from fedward_common.messages import WAIT_HEADER, Purpose, Reply, Request
from fedward_common.records import (
    assemble,
    deflate_once,
    is_small,
    message_to_request,
    release,
    reply_to_message,
)
from flwr.app import Message, Metadata, RecordDict
from flwr.app.message import make_message, remove_content_from_message
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL
from flwr.common.serde import fab_from_proto, message_from_proto, message_to_proto, run_from_proto
from flwr.proto.fab_pb2 import GetFabRequest
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
)
from flwr.proto.fleet_pb2_grpc import FleetStub
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.run_pb2 import GetRunRequest
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.grpc import create_channel
from flwr.supercore.inflatable.inflatable_object import (
    InflatableObject,
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.interceptors import RuntimeVersionClientInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from fedward_client.traffic import Traffic

_SMALL = 15.0
"""Seconds for a call that carries no tensor."""
_LARGE = 120.0
"""Seconds for a call that may carry some megabytes."""
_PUSH_TRIES = 6
_NO_SESSION = {ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED, ApiErrorCode.FLEET_NODE_DEACTIVATION_FAILED}
_RUN_OVER = {
    ApiErrorCode.FLEET_RUN_STATUS_NOT_ALLOWED,
    ApiErrorCode.FLEET_GET_RUN_FAILED,
    ApiErrorCode.FLEET_GET_FAB_FAILED,
}


class LinkDown(FedwardError):
    """The server cannot be reached now; trying again later makes sense."""


class LinkRefused(FedwardError):
    """The server refuses this node (revoked, unknown key, clock off); trying again does not help."""


class RunGone(FedwardError):
    """The run that a message or reply belongs to is over."""


@dataclass(frozen=True)
class RunInfo:
    """What the server says of a run: Flower's id, the bundle's hash and the run's settings."""

    flower_run: int
    bundle_sha256: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Ticket:
    """What is needed to answer a message, in JSON's types: kept on disk until the answer has left."""

    flower_run: int
    message_id: str
    source: int
    destination: int
    group: str
    created_at: float
    ttl: float
    message_type: str
    source_task: int | None
    destination_task: int | None
    purpose: str
    run: str
    round: int
    attempt: int

    @classmethod
    def of(cls, metadata: Metadata, request: Request) -> Ticket:
        """The ticket of a received message."""
        return cls(
            metadata.run_id,
            metadata.message_id,
            metadata.src_node_id,
            metadata.dst_node_id,
            metadata.group_id,
            metadata.created_at,
            metadata.ttl,
            metadata.message_type,
            metadata.src_task_id,
            metadata.dst_task_id,
            request.purpose.value,
            request.run,
            request.round,
            request.attempt,
        )

    def message(self) -> Message:
        """A message without content that a reply can refer to."""
        metadata = Metadata(
            run_id=self.flower_run,
            message_id=self.message_id,
            src_node_id=self.source,
            dst_node_id=self.destination,
            reply_to_message_id="",
            group_id=self.group,
            created_at=self.created_at,
            ttl=self.ttl,
            message_type=self.message_type,
            src_task_id=self.source_task,
            dst_task_id=self.destination_task,
        )
        return make_message(metadata=metadata, content=RecordDict())

    def request(self) -> Request:
        """The request without its vectors: enough to refuse it."""
        return Request(Purpose(self.purpose), self.run, self.round, self.attempt)


@dataclass(frozen=True)
class Incoming:
    """A request with the ticket to answer it."""

    request: Request
    ticket: Ticket


@dataclass(frozen=True)
class Outgoing:
    """A message that is ready to leave. However often it is sent, it is the same one, and the server takes it once.

    objects: its parts by Flower's object id, children first, where each is an upload of its own: a small message's go
    with the announcement, to a server that takes that. ready: uploads that are made already.
    left: bytes of each call that it needs and that was not made yet, by object id ("": the announcement).
    size: bytes of them all, as long as no call is repeated; without the server's session id in each upload.
    """

    message: Message
    announcement: PushMessagesRequest
    objects: dict[str, InflatableObject]
    ready: dict[str, PushObjectRequest]
    left: dict[str, int]
    size: int

    @property
    def sha256(self) -> str:
        """Flower's id of the message: SHA-256 of its root object, which holds the metadata and its children's ids,
        each the SHA-256 of the child. So it stands for every byte that the message holds."""
        return str(self.message.metadata.message_id)


class Link:
    """One authenticated channel. `connect` first; all methods are thread-safe and raise `LinkDown`, `LinkRefused`
    or `RunGone`. All that they send is counted in `traffic`."""

    def __init__(
        self, address: str, ca_pem: bytes, key: Path, flower_id: int | None, traffic: Traffic | None = None
    ) -> None:
        private = load_ssh_private_key(key.read_bytes(), None)
        if not isinstance(private, ec.EllipticCurvePrivateKey):
            raise FedwardError(f"{key}: not an EC key. 'fedward node rotate-key' makes a new one.")
        public = private.public_key()
        self._public = public_key_to_bytes(public)
        self.traffic = traffic or Traffic()
        # The interceptor modules are loaded late in Flower's own code; this import keeps that order.
        from flwr.client.grpc_rere_client.node_auth_client_interceptor import NodeAuthClientInterceptor

        self._open: Callable[[], grpc.Channel] = functools.partial(
            create_channel,
            server_address=address,
            insecure=False,
            root_certificates=ca_pem,
            interceptors=[
                RuntimeVersionClientInterceptor(component_name="SuperNode"),
                NodeAuthClientInterceptor(private, public),
                # The last one sees the headers of all others, and the call before any of them waits for its end.
                _Headers(self.traffic, self._started),
            ],
        )
        self._channel = self._open()
        self._stub = FleetStub(self._channel)
        self._silent = False
        self._parcels = False
        self._node = Node(node_id=flower_id or 0)
        self._closed = threading.Event()
        self._interrupted = threading.Event()
        self._waiting: Any = None
        self._received: ConfirmMessageReceivedRequest | None = None
        self._heartbeat: threading.Thread | None = None
        self._refusal: LinkRefused | None = None
        self.bytes_down = 0

    @property
    def flower_id(self) -> int:
        """Flower's id of this node (0 before the first connect)."""
        return int(self._node.node_id)

    def connect(self) -> int:
        """Activate the node and keep it alive; returns Flower's node id.

        A session that a killed predecessor left open is ended first: its lease would last a minute. After a call that
        was never answered, the line is a new one: TCP tries a cut one again only after as long as it has been cut.
        """
        if self._silent:
            self._silent = False
            old, self._channel = self._channel, self._open()
            self._stub = FleetStub(self._channel)
            old.close()
        request = ActivateNodeRequest(public_key=self._public, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
        try:
            response = self._call(self._stub.ActivateNode, request)
        except _ActivationFailed:
            if not self._node.node_id:
                raise LinkRefused(
                    "the server does not know this node's key: it was revoked or never enrolled"
                ) from None
            self._end_stale_session()
            try:
                response = self._call(self._stub.ActivateNode, request)
            except _ActivationFailed as error:
                raise LinkRefused(f"the server does not activate this node: {error}") from error
        self._node = Node(node_id=response.node_id)
        if self._heartbeat is None:
            self._heartbeat = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
            self._heartbeat.start()
        return int(response.node_id)

    def _end_stale_session(self) -> None:
        try:
            self._call(self._stub.DeactivateNode, DeactivateNodeRequest(node_id=self._node.node_id))
        except _ActivationFailed:
            # Not active after all: the activation that follows tells.
            return

    def _beat(self) -> None:
        request = SendNodeHeartbeatRequest(heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
        while not self._closed.wait(0.7 * HEARTBEAT_DEFAULT_INTERVAL):
            request.node.CopyFrom(self._node)
            try:
                self._call(self._stub.SendNodeHeartbeat, request)
            except LinkDown:
                continue
            except LinkRefused as refused:
                self._refusal = refused
                return

    def receive(self, wait: float = 0.0) -> Incoming | None:
        """The next request for this node, or None if none comes within `wait` seconds (a server that is busy, or stock,
        may answer at once). Raises `RecordError` for a message that is no request of ours."""
        received = self.receive_message(wait)
        if received is None:
            return None
        message, metadata = received
        request = message_to_request(message)
        release(message)
        return Incoming(request, Ticket.of(metadata, request))

    def receive_message(self, wait: float = 0.0) -> tuple[Message, Metadata] | None:
        """The next message for this node, whatever it holds, with the metadata that an answer needs; or None."""
        if self._refusal is not None:
            raise self._refusal
        if self._interrupted.is_set():
            raise LinkDown("interrupted")
        self._confirm()
        request = PullMessagesRequest(node=self._node)
        response = self._call(functools.partial(self._ask, wait), request, wait + _LARGE)
        if not response.messages_list:
            return None
        objects = parcels.take(response.messages_list[0])
        envelope = message_from_proto(response.messages_list[0])
        run, message_id = envelope.metadata.run_id, envelope.metadata.message_id
        self._parcels = self._parcels or bool(objects)
        if objects:
            self.bytes_down += sum(map(len, objects.values()))
            return assemble(message_id, objects.__getitem__), envelope.metadata
        message = assemble(message_id, functools.partial(self._pull, run))
        self._received = ConfirmMessageReceivedRequest(node=self._node, run_id=run, message_object_id=message_id)
        return message, envelope.metadata

    def _confirm(self) -> None:
        """Let the server delete the message received last: its work has begun by now and does not wait for that."""
        if self._received is not None:
            request, self._received = self._received, None
            # Of a run that is over the server has deleted all by itself.
            with contextlib.suppress(RunGone):
                self._call(self._stub.ConfirmMessageReceived, request)

    def _ask(self, wait: float, request: PullMessagesRequest, timeout: float) -> Any:
        """Ask for messages and wait for one, until `interrupt`."""
        headers = ((parcels.HEADER, "1"), (WAIT_HEADER, str(wait)))
        try:
            return self._stub.PullMessages.future(request, timeout=timeout, metadata=headers).result()
        except grpc.FutureCancelledError:
            raise LinkDown("interrupted, or the line is silent") from None
        finally:
            self._waiting = None

    def _started(self, method: str, call: Any) -> None:
        if method == "PullMessages":
            self._waiting = call
            if self._interrupted.is_set():
                call.cancel()

    def interrupt(self) -> None:
        """End a `receive` that waits, and each that would."""
        self._interrupted.set()
        self._end_wait()

    def _end_wait(self) -> None:
        waiting = self._waiting
        if waiting is not None:
            waiting.cancel()

    def _pull(self, run: int, object_id: str) -> bytes:
        request = PullObjectRequest(node=self._node, run_id=run, object_id=object_id)
        deadline = time.monotonic() + _LARGE
        delay = 0.02
        while True:
            response = self._call(self._stub.PullObject, request, _LARGE)
            if not response.object_found:
                raise RunGone(f"object {object_id[:12]} of run {run} is gone")
            if response.object_available:
                self.bytes_down += len(response.object_content)
                return bytes(response.object_content)
            if time.monotonic() > deadline:
                raise LinkDown(f"object {object_id[:12]} of run {run} did not become available")
            time.sleep(delay)
            # Slow growth: the server uploads at this very moment, and this wait is part of the round.
            delay = min(1.2 * delay, 1.0)

    def pack(self, reply: Reply, ticket: Ticket) -> Outgoing:
        """A reply made ready to leave; sends nothing."""
        return self.pack_message(reply_to_message(reply, ticket.message()))

    def pack_message(self, message: Message) -> Outgoing:
        """`pack` for a message."""
        with no_object_id_recompute():
            contents = deflate_once(message.content.values())
            message.metadata.__dict__["_message_id"] = message.object_id
            objects = get_all_nested_objects(message)
            announcement = PushMessagesRequest(
                node=self._node, messages_list=[message_to_proto(remove_content_from_message(message))]
            )
            ready: dict[str, PushObjectRequest] = {}
            if self._parcels and is_small(message, contents):
                whole = {name: contents.get(name) or item.deflate() for name, item in objects.items()}
                parcels.fill(announcement.messages_list[0], whole)
                objects = {}
            else:
                announcement.message_object_trees.append(get_object_tree(message))
            left = {"": announcement.ByteSize()}
            for object_id, item in objects.items():
                if object_id in contents:
                    upload = ready[object_id] = self._upload(message, object_id, contents.pop(object_id))
                else:
                    # Large: it is made again when it is sent, so that one part at a time is in memory twice.
                    upload = self._upload(message, object_id, item.deflate())
                left[object_id] = upload.ByteSize()
        return Outgoing(message, announcement, objects, ready, left, sum(left.values()))

    def send(self, outgoing: Outgoing) -> None:
        """Announce a message and upload its objects; each upload is tried again on a passing error. After `LinkDown`
        the message may be sent once more."""
        message = outgoing.message
        response = self._announce(outgoing.announcement, outgoing.left.pop("", 0))
        wanted = set(response.objects_to_push)
        with no_object_id_recompute():
            for object_id, item in outgoing.objects.items():
                if object_id in wanted:
                    request = outgoing.ready.get(object_id) or self._upload(message, object_id, item.deflate())
                    request.session_id = response.session_id
                    self._push_object(request, outgoing.left.pop(object_id, 0))
        self.drop(outgoing)

    def drop(self, outgoing: Outgoing) -> None:
        """What of a message has not left by now never will; frees its memory."""
        if outgoing.left:
            self.traffic.withhold(outgoing.sha256, sum(outgoing.left.values()))
            outgoing.left.clear()
        outgoing.objects.clear()
        outgoing.ready.clear()
        outgoing.announcement.Clear()
        release(outgoing.message)

    def _upload(self, message: Message, object_id: str, content: bytes) -> PushObjectRequest:
        return PushObjectRequest(
            node=self._node,
            run_id=message.metadata.run_id,
            object_id=object_id,
            object_content=content,
        )

    def _push_object(self, request: PushObjectRequest, announced: int) -> None:
        """Upload one object, with retries. A server whose database was busy raises nothing: it says "not
        stored"."""
        delay, unheard = 0.1, False
        for _ in range(_PUSH_TRIES):
            try:
                stored = self._call(self._stub.PushObject, request, _LARGE, announced).stored
            except LinkDown as error:
                lost, unheard = error, True
            else:
                # What is stored already is not stored again: then the answer to an earlier attempt was lost.
                if stored or unheard:
                    return
                lost = LinkDown(f"the server did not store object {request.object_id[:12]}")
            announced = 0
            if self._closed.wait(delay):
                break
            delay *= 2
        raise lost

    def _announce(self, request: PushMessagesRequest, announced: int) -> Any:
        """Announce a message, with retries: a busy server ("database is locked") must not cost a trained update."""
        delay, seconds = 0.1, _SMALL if request.message_object_trees else _LARGE
        for _ in range(_PUSH_TRIES - 1):
            try:
                return self._call(self._stub.PushMessages, request, seconds, announced)
            except LinkDown:
                announced = 0
                if self._closed.wait(delay):
                    raise
                delay *= 2
        return self._call(self._stub.PushMessages, request, seconds, announced)

    def run_info(self, run: int) -> RunInfo:
        """What the server says of Flower's run `run`."""
        response = self._call(self._stub.GetRun, GetRunRequest(node=self._node, run_id=run))
        info = run_from_proto(response.run)
        return RunInfo(run, info.fab_hash, dict(info.override_config))

    def bundle(self, info: RunInfo) -> bytes:
        """The bundle of a run, as bytes."""
        request = GetFabRequest(node=self._node, hash_str=info.bundle_sha256, run_id=info.flower_run)
        return bytes(fab_from_proto(self._call(self._stub.GetFab, request, _LARGE).fab).content)

    def close(self) -> None:
        """Tell the server that the node goes, if it can be reached, and close the channel."""
        self._closed.set()
        if self._node.node_id:
            # If the server does not hear it, the lease runs out by itself.
            with contextlib.suppress(LinkDown, LinkRefused):
                self._call(self._stub.DeactivateNode, DeactivateNodeRequest(node_id=self._node.node_id), 2.0)
        self._channel.close()

    def _call(self, call: Any, request: Any, seconds: float = _SMALL, announced: int = 0) -> Any:
        """Make a call; `announced` bytes of the request stand in the journal as part of a message."""
        self.traffic.call(request.DESCRIPTOR.name.removesuffix("Request"), request.ByteSize(), announced)
        try:
            return call(request, timeout=seconds)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                self._silent = True
                self._end_wait()
            raise _translate(error) from error
        except ValueError as error:
            # Another thread has opened a new line meanwhile.
            if "closed channel" not in str(error).lower() and "channel closed" not in str(error).lower():
                raise
            raise LinkDown(f"the line was given up: {error}") from error


class _Headers(grpc.UnaryUnaryClientInterceptor):  # type: ignore[misc]
    """Counts the headers of each call, and tells of it as it starts."""

    def __init__(self, traffic: Traffic, started: Callable[[str, Any], None]) -> None:
        self._traffic = traffic
        self._started = started

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        method = client_call_details.method.rsplit("/", 1)[-1]
        size = sum(len(key) + len(value) for key, value in client_call_details.metadata or ())
        self._traffic.headers(method, size)
        call = continuation(client_call_details, request)
        self._started(method, call)
        return call


class _ActivationFailed(LinkDown):
    """The server has no session to give to (or to take from) this key."""


def _translate(error: grpc.RpcError) -> FedwardError:
    code = error.code()
    text = str(error.details() or "")
    flower = FlowerError.from_json(text)
    if flower is not None:
        text = flower.message
        if flower.code in _NO_SESSION:
            return _ActivationFailed(text)
        if flower.code in _RUN_OVER:
            return RunGone(text)
    if code == grpc.StatusCode.UNAUTHENTICATED:
        if "timestamp" in text.lower():
            return LinkRefused(
                "this node's clock and the server's differ too much: set the clock (NTP) and start again"
            )
        return LinkRefused(f"the server refuses this node ({text}): it was revoked, or its key was replaced")
    if code == grpc.StatusCode.UNAVAILABLE and "certificate" in text.lower():
        return LinkRefused(f"the server's certificate does not fit the CA pinned at enrolment: {text}")
    return LinkDown(f"{code.name}: {text}")
