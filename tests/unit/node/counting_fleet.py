"""A small Fleet API over TLS on loopback that notes every byte of a request which arrives."""

from __future__ import annotations

import hashlib
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from fedward_common import parcels
from flwr.app import Message
from flwr.common.serde import message_to_proto
from flwr.proto import fab_pb2, fleet_pb2, heartbeat_pb2, message_pb2, run_pb2
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

NODE = 77
RUN = 4711
FAB = b"a bundle"
METHODS = {
    "ActivateNode": fleet_pb2.ActivateNodeRequest,
    "DeactivateNode": fleet_pb2.DeactivateNodeRequest,
    "PullMessages": fleet_pb2.PullMessagesRequest,
    "PushMessages": fleet_pb2.PushMessagesRequest,
    "SendNodeHeartbeat": heartbeat_pb2.SendNodeHeartbeatRequest,
    "ConfirmMessageReceived": message_pb2.ConfirmMessageReceivedRequest,
    "PullObject": message_pb2.PullObjectRequest,
    "PushObject": message_pb2.PushObjectRequest,
    "GetRun": run_pb2.GetRunRequest,
    "GetFab": fab_pb2.GetFabRequest,
}


class Fleet:
    """received: bytes of requests and of the headers that a client's code set, by method. trouble: the error that a
    call ends in after it has arrived, or "". has: whether an object need not be uploaded; store: whether it could be
    stored. arrived: called with each announcement. parcels: whether it knows what a parcel is."""

    def __init__(self, folder: Path) -> None:
        self.received: dict[str, int] = defaultdict(int)
        self.calls: dict[str, int] = defaultdict(int)
        self.waiting: list[Message] = []
        self.objects: dict[str, bytes] = {}
        self.announced: list[message_pb2.ObjectTree] = []
        self.parcels = False
        self.trouble: Callable[[str], str] = lambda method: ""
        self.has: Callable[[str], bool] = lambda object_id: False
        self.store: Callable[[str], bool] = lambda object_id: True
        self.arrived: Callable[[message_pb2.ObjectTree], None] = lambda tree: None
        self._give: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self.ca, key = certificate()
        self._server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.max_receive_message_length", -1)])
        handlers = {name: self._handler(name, kind) for name, kind in METHODS.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("flwr.proto.Fleet", handlers),))
        port = self._server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, self.ca)]))
        self._server.start()
        self.address = f"127.0.0.1:{port}"
        private = ec.generate_private_key(ec.SECP256R1())
        self.key = folder / "flower.key"
        self.key.write_bytes(
            private.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
            )
        )

    @property
    def total(self) -> int:
        with self._lock:
            return sum(self.received.values())

    def offer(self, message: Message) -> None:
        """Have a message wait for the node."""
        message.metadata.__dict__["_message_id"] = message.object_id
        objects = get_all_nested_objects(message)
        self._give |= {object_id: item.deflate() for object_id, item in objects.items()}
        self.waiting.append(message)

    def close(self) -> None:
        self._server.stop(0).wait()

    def _handler(self, name: str, kind: Any) -> grpc.RpcMethodHandler:
        def parse(data: bytes) -> Any:
            with self._lock:
                self.received[name] += len(data)
                self.calls[name] += 1
            return kind.FromString(data)

        def answer(request: Any, context: grpc.ServicerContext) -> Any:
            # gRPC adds its own name and version; all other headers are the client's.
            headers = [item for item in context.invocation_metadata() if item[0] != "user-agent"]
            with self._lock:
                self.received[name] += sum(len(key) + len(value) for key, value in headers)
            error = self.trouble(name)
            if error:
                context.abort(grpc.StatusCode.INTERNAL, error)
            response = getattr(self, f"_{name}")(request)
            if self.parcels and name == "PullMessages" and (parcels.HEADER, "1") in headers:
                for message in response.messages_list:
                    parcels.fill(message, self._give)
            return response

        return grpc.unary_unary_rpc_method_handler(answer, parse, lambda response: response.SerializeToString())

    def _ActivateNode(self, request: Any) -> Any:
        return fleet_pb2.ActivateNodeResponse(node_id=NODE)

    def _DeactivateNode(self, request: Any) -> Any:
        return fleet_pb2.DeactivateNodeResponse()

    def _SendNodeHeartbeat(self, request: Any) -> Any:
        return heartbeat_pb2.SendNodeHeartbeatResponse(success=True)

    def _PullMessages(self, request: Any) -> Any:
        with self._lock:
            messages = [message_to_proto(self.waiting.pop(0))] if self.waiting else []
        return fleet_pb2.PullMessagesResponse(messages_list=messages)

    def _PullObject(self, request: Any) -> Any:
        content = self._give[request.object_id]
        return message_pb2.PullObjectResponse(object_found=True, object_available=True, object_content=content)

    def _ConfirmMessageReceived(self, request: Any) -> Any:
        return message_pb2.ConfirmMessageReceivedResponse()

    def _PushMessages(self, request: Any) -> Any:
        objects = parcels.take(request.messages_list[0])
        if objects:
            parcels.verify(request.messages_list[0].metadata.message_id, objects)
            self.objects |= objects
            self.arrived(message_pb2.ObjectTree(object_id=request.messages_list[0].metadata.message_id))
            return fleet_pb2.PushMessagesResponse()
        tree = request.message_object_trees[0]
        self.arrived(tree)
        self.announced.append(tree)
        wanted = [object_id for object_id in ids(tree) if not self.has(object_id) and object_id not in self.objects]
        return fleet_pb2.PushMessagesResponse(objects_to_push=wanted, session_id="5" * 36)

    def _PushObject(self, request: Any) -> Any:
        assert request.object_id == hashlib.sha256(request.object_content).hexdigest()
        stored = self.store(request.object_id)
        if stored:
            self.objects[request.object_id] = request.object_content
        return message_pb2.PushObjectResponse(stored=stored)

    def _GetRun(self, request: Any) -> Any:
        return run_pb2.GetRunResponse(run=run_pb2.Run(run_id=request.run_id, fab_hash="f" * 64))

    def _GetFab(self, request: Any) -> Any:
        return fab_pb2.GetFabResponse(fab=fab_pb2.Fab(hash_str=hashlib.sha256(FAB).hexdigest(), content=FAB))


def ids(tree: message_pb2.ObjectTree) -> list[str]:
    """The ids of a tree's objects, children first, each once."""
    found = [object_id for child in tree.children for object_id in ids(child)]
    return list(dict.fromkeys([*found, tree.object_id]))


def certificate() -> tuple[bytes, bytes]:
    """A self-signed certificate for 127.0.0.1 and its key, as PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fleet")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return made.public_bytes(serialization.Encoding.PEM), private
