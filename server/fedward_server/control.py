"""Flower's Control API, as far as Fedward needs it: register nodes, start and stop runs. Loopback only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import httpx
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key, load_ssh_public_key
from fedward_common.errors import FedwardError
from flwr.common.constant import Status
from flwr.common.serde import fab_to_proto, user_config_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
    StreamLogsRequest,
    UnregisterNodeRequest,
)
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.error import FlowerError
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from fedward_server.paths import ServerPaths

RunState = Literal["pending", "starting", "running", "finished"]
_STATES: dict[str, RunState] = {
    Status.PENDING: "pending",
    Status.STARTING: "starting",
    Status.RUNNING: "running",
    Status.FINISHED: "finished",
}


class ControlError(FedwardError):
    """The SuperLink cannot be reached, or refused."""


@dataclass(frozen=True)
class ControlNode:
    """A node as the SuperLink sees it. status: "registered" | "online" | "offline" | "unregistered"."""

    flower_id: int
    status: str
    last_seen: str


class Control:
    """A client of the Control API of the SuperLink that serves `paths` on `port`."""

    def __init__(self, paths: ServerPaths, port: int) -> None:
        self._client = ControlHttpClient.from_server_address(
            server_address=f"127.0.0.1:{port}",
            insecure=False,
            root_certificates=paths.public_ca.read_bytes(),
            interceptors=[RuntimeVersionHttpInterceptor(component_name="fedward")],
        )

    def _call(self, method: str, request: Any) -> Any:
        try:
            return getattr(self._client, method)(request)
        except FlowerError as error:
            raise ControlError(f"SuperLink refused {method}: {error.message}") from error
        except httpx.HTTPStatusError as error:
            text = error.response.text[:500]
            raise ControlError(f"SuperLink refused {method}: {error.response.status_code} {text}") from error
        except httpx.HTTPError as error:
            raise ControlError(f"SuperLink does not answer ({method}): {error}") from error

    def ping(self) -> None:
        """Raise `ControlError` unless the Control API answers."""
        self._call("ListRuns", ListRunsRequest(limit=1))

    def register_node(self, public_key: bytes) -> int:
        """Make a key (PEM or OpenSSH form) known; returns Flower's node id."""
        pem = public_key.startswith(b"-----BEGIN")
        key = load_pem_public_key(public_key) if pem else load_ssh_public_key(public_key)
        if not isinstance(key, EllipticCurvePublicKey):
            raise ControlError(f"a node's Flower key must be an EC key, this is {type(key).__name__}")
        return int(
            self._call("RegisterNode", RegisterNodeRequest(public_key=public_key_to_bytes(key))).node_id
        )

    def unregister_node(self, flower_id: int) -> None:
        """Cut a node off at once; its key can never come back."""
        self._call("UnregisterNode", UnregisterNodeRequest(node_id=flower_id))

    def list_nodes(self) -> list[ControlNode]:
        """All nodes that the SuperLink knows."""
        nodes = self._call("ListNodes", ListNodesRequest()).nodes_info
        return [
            ControlNode(int(node.node_id), str(node.status), str(node.last_activated_at)) for node in nodes
        ]

    def start_run(self, fab: bytes, config: Mapping[str, str | int]) -> int:
        """Submit a bundle; returns Flower's run id."""
        request = StartRunRequest(
            fab=fab_to_proto(Fab("", fab, {})), override_config=user_config_to_proto(dict(config))
        )
        run = int(self._call("StartRun", request).run_id)
        if run == 0:
            raise ControlError("SuperLink gave the run no id: the bundle may be over its 10 MB limit")
        return run

    def stop_run(self, flower_run: int) -> None:
        """Stop a run; a run that is over already is fine."""
        if self.run_state(flower_run) in ("pending", "starting", "running"):
            self._call("StopRun", StopRunRequest(run_id=flower_run))

    def run_log(self, flower_run: int) -> str:
        """What the ServerApp of a finished run printed; "" for a run that is not finished or not known."""
        if self.run_state(flower_run) != "finished":
            return ""
        try:
            answers = self._call("StreamLogs", StreamLogsRequest(run_id=flower_run))
            return "".join(answer.log_output for answer in answers)
        except (FlowerError, httpx.HTTPError) as error:
            # The stream is read after `_call` has returned.
            raise ControlError(f"SuperLink does not give the log of run {flower_run}: {error}") from error

    def run_state(self, flower_run: int) -> RunState | None:
        """State of a run, None if the SuperLink does not know it."""
        try:
            runs = self._call("ListRuns", ListRunsRequest(run_id=flower_run)).run_dict
        except ControlError as error:
            if "not found" in str(error).lower():
                return None
            raise
        run = runs.get(flower_run)
        return None if run is None else _STATES[run.status.status]
