"""A real Fedward service over TLS on loopback, with a stand-in for Flower's Control API."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from fedward_client.enrol import Enrolled, join
from fedward_common.credential import Credential
from fedward_common.enrolment import JoinToken
from fedward_common.errors import FedwardError
from fedward_common.http import Service, pinned
from fedward_common.roster import Roster, open_roster, read_roster
from fedward_server.authority import init, open_server
from fedward_server.enrolment import Enrolment, invite
from fedward_server.paths import ServerPaths
from fedward_server.publication import authority_key
from fedward_server.settings import make_settings
from fedward_server.store import audit_lines
from fedward_server.web.app import create_app
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, uses_nist_ec_curve
from starlette.types import ASGIApp


class ControlDown(FedwardError):
    """The SuperLink does not answer."""


@dataclass
class Listed:
    flower_id: int
    status: str


class FakeControl:
    """Behaves as Flower's handlers do: PEM keys on NIST curves only, a key once and never again."""

    def __init__(self) -> None:
        self.nodes: dict[int, bytes] = {}
        self.gone: set[int] = set()
        self.keys_seen: set[bytes] = set()
        self.down = False
        self._lock = threading.Lock()

    def register_node(self, public_key: bytes) -> int:
        with self._lock:
            self._answer()
            if not uses_nist_ec_curve(bytes_to_public_key(public_key)) or public_key in self.keys_seen:
                raise FedwardError("refused by the SuperLink")
            self.keys_seen.add(public_key)
            flower_id = 10**18 + len(self.keys_seen)
            self.nodes[flower_id] = public_key
            return flower_id

    def unregister_node(self, flower_id: int) -> None:
        with self._lock:
            self._answer()
            if self.nodes.pop(flower_id, None) is None:
                raise FedwardError("no such node")
            self.gone.add(flower_id)

    def list_nodes(self) -> list[Listed]:
        self._answer()
        online = [Listed(flower_id, "online") for flower_id in self.nodes]
        return online + [Listed(flower_id, "unregistered") for flower_id in self.gone]

    def forget_everything(self) -> None:
        """The SuperLink's database is lost."""
        self.nodes, self.gone, self.keys_seen = {}, set(), set()

    def _answer(self) -> None:
        if self.down:
            raise ControlDown("the SuperLink does not answer")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def serving(app: ASGIApp, port: int, certificate: Path, key: Path) -> Any:
    """An application under uvicorn with TLS, until the block ends."""
    config = uvicorn.Config(
        app, port=port, ssl_certfile=certificate, ssl_keyfile=key, log_config=None, timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.005)
    try:
        assert server.started
        yield
    finally:
        server.should_exit = True
        thread.join()


class Site:
    """A server and its folder of nodes."""

    def __init__(self, root: Path, authority: Ed25519PublicKey | None = None) -> None:
        """authority: the key that signs the roster elsewhere; else the server does."""
        self.root = root
        self.paths = ServerPaths(root / "server")
        self.port = free_port()
        init(self.paths, make_settings(name="localhost", service_port=self.port), authority)
        self.settings, self.store = open_server(self.paths)
        self.control = FakeControl()
        self.now: Callable[[], float] = time.time
        self.enrolment = Enrolment(self.paths, self.settings, self.store, self.control, clock=lambda: self.now())
        self.app = create_app(self.paths, self.store, self.enrolment, self.control)
        self.url = self.settings.url

    def running(self) -> Any:
        return serving(self.app, self.port, self.paths.server_certificate, self.paths.server_key)

    def invite(self, name: str = "hospital-a", ttl: float = 60.0, tags: tuple[str, ...] = ()) -> JoinToken:
        return invite(self.paths, self.store, name, ttl, tags)

    def join(self, name: str = "hospital-a") -> Enrolled:
        return join(self.url, str(self.invite(name)), self.root / name)

    def audit(self, action: str) -> list[dict[str, Any]]:
        with self.store.transaction() as session:
            return [{"actor": line.actor, **line.detail} for line in audit_lines(session) if line.action == action]

    def roster(self) -> Roster:
        return open_roster(read_roster(self.paths.roster), authority_key(self.paths))

    def scientist(self) -> Service:
        credential = Credential.load(self.paths.credential)
        return Service(self.url, credential.ca, credential.key)

    def raw(self) -> httpx.Client:
        """A client that sends exactly what it is told."""
        context = pinned(self.paths.public_ca.read_text())
        return httpx.Client(base_url=self.url, verify=context, trust_env=False)

    def whole_store(self) -> bytes:
        """Every byte of the store's files."""
        return b"".join(path.read_bytes() for path in self.paths.root.glob("fedward.db*"))


def body_of(response: httpx.Response) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(response.content)
    return body
