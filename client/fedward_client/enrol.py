"""A node's way into a federation, to new keys, and out again."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from hmac import compare_digest
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import httpx
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from fedward_common.enrolment import JoinToken, NodeKeys, certificate_sha256, flower_private_ssh, flower_public_ssh
from fedward_common.errors import FedwardError
from fedward_common.files import lock_file, owner_folder, sync_folder, write_atomic
from fedward_common.http import Service, ServiceError, Unreachable
from fedward_common.roster import Roster, RosterError, RosterNode, check_successor, open_roster, read_roster
from fedward_common.signing import SignatureError, load_private, parse_public, public_text, save_private

from fedward_client.kept_roster import keep_roster
from fedward_client.paths import NodePaths
from fedward_client.policy import load_policy

DEFAULT_PORT = 8443
_MAX_CA_BYTES = 64 * 1024
_KEY_FILES = ("flower.key", "flower.pub", "identity.key")


class EnrolError(FedwardError):
    """A node cannot join, rotate or leave."""


class CaMismatch(EnrolError):
    """The server's CA is not the one that the token names."""


@dataclass(frozen=True)
class Enrolled:
    """node.json. server: https URL; fleet_address: host:port of the gRPC link; authority: the roster key."""

    name: str
    node_id: str
    server: str
    fleet_address: str
    ca_sha256: str
    authority: str

    @classmethod
    def load(cls, paths: NodePaths) -> Self:
        """Read it; a rotation that was cut off is finished first. Raises `EnrolError`."""
        try:
            fields: Any = json.loads(paths.node.read_bytes())
            enrolled = cls(**fields)
        except FileNotFoundError as error:
            raise EnrolError(
                f"{paths.root}: this node is not enrolled. Ask the server admin for the 'fedward node join' command."
            ) from error
        except (ValueError, TypeError) as error:
            raise EnrolError(f"{paths.node}: damaged; restore it from a backup, or join again elsewhere.") from error
        if _accepted(paths).exists():
            _finish_rotation(paths)
        return enrolled

    def service(self, paths: NodePaths) -> Service:
        """A client of the Fedward service that signs as this node."""
        return Service(self.server, paths.ca.read_text(), load_private(paths.identity_key))


def join(
    url: str,
    token: str,
    state_dir: Path,
    clock: Callable[[], float] = time.time,
    authority: Ed25519PublicKey | None = None,
) -> Enrolled:
    """Enrol this machine with a one-off token. Raises `FedwardError`; then nothing is enrolled here.

    The secret is sent only to a server whose certificate is signed by the CA that the token names and, if the
    enrolment authority's key is given, whose roster this key has signed; else the server's word is taken for it.
    """
    parsed = JoinToken.parse(token)
    server, host = _address(url)
    paths = NodePaths(state_dir)
    if paths.node.exists():
        present = Enrolled.load(paths)
        raise EnrolError(
            f"{paths.root}: enrolled already, as {present.name!r} at {present.server}. "
            "Use 'fedward node leave' first, or another directory."
        )
    ca_pem = fetch_ca(server, parsed)
    owner_folder(paths.root)
    approval = _asks_approval(paths)
    with lock_file(paths.lock), Service(server, ca_pem) as service:
        if authority is not None:
            _check_signed(service.get("/roster"), authority)
        # Kept from an earlier try: if that one was cut off after the server had said yes, the same keys get in again.
        keys = _load_keys(paths.keys) if paths.identity_key.exists() else _make_keys(paths.keys)
        claim = keys.claim("enrolment", parsed.id, parsed.name, parsed.ca_sha256, int(clock()))
        try:
            answer = service.post("/enrol", json={**claim, "token": parsed.id, "secret": parsed.secret})
        except ServiceError as error:
            if error.code == "key_taken":
                shutil.rmtree(paths.keys)
            raise
        enrolled = Enrolled(
            name=parsed.name,
            node_id=str(answer["node_id"]),
            server=server,
            fleet_address=f"{host}:{int(answer['fleet_port'])}",
            ca_sha256=parsed.ca_sha256,
            authority=public_text(authority) if authority is not None else str(answer["authority"]),
        )
        roster = _check_roster(enrolled, keys, answer)
        write_atomic(paths.ca, ca_pem.encode())
        keep_roster(paths, None, roster, answer["roster"], approval, own=public_text(keys.identity))
        write_atomic(paths.node, (json.dumps(asdict(enrolled), indent=2) + "\n").encode())
    return enrolled


def fetch_ca(server: str, token: JoinToken) -> str:
    """The server's CA certificate (PEM), compared with the token. Raises `Unreachable`, `CaMismatch`.

    The one request that trusts nobody: it sends nothing secret, and what it brings is believed only if its hash fits.
    """
    content = b""
    try:
        with (
            httpx.Client(verify=False, trust_env=False, timeout=10.0) as client,
            client.stream("GET", f"{server}/ca.pem", params={"expected": token.ca_sha256}) as response,
        ):
            response.raise_for_status()
            for chunk in response.iter_bytes():
                content += chunk
                if len(content) > _MAX_CA_BYTES:
                    raise Unreachable(f"{server}/ca.pem is not a certificate: it is too long. Check the address.")
    except httpx.HTTPError as error:
        raise Unreachable(
            f"{server} cannot be reached, or is no Fedward server: {error or type(error).__name__}. Check the address."
        ) from error
    try:
        found = certificate_sha256(content)
    except ValueError as error:
        raise Unreachable(f"{server}/ca.pem is not a certificate: no Fedward server? Check the address.") from error
    if not compare_digest(found, token.ca_sha256):
        raise CaMismatch(
            f"the CA of {server} has the SHA-256 {found}, the token names {token.ca_sha256}. Either the token is of "
            "another server, or somebody stands between you and the server (man in the middle). Nothing secret has "
            "been sent. Check the address; the server admin sees the right hash with 'fedward server status'."
        )
    return content.decode("ascii")


def rotate_key(paths: NodePaths, clock: Callable[[], float] = time.time) -> Enrolled:
    """Replace both keys; node id, name, state and ledger stay. Raises `FedwardError`.

    May be repeated after being cut off at any point. The guard must not run: it holds the old keys.
    """
    approval = _asks_approval(paths)
    with lock_file(paths.lock):
        enrolled = Enrolled.load(paths)
        keys = (
            _load_keys(paths.next_keys)
            if (paths.next_keys / "identity.key").exists()
            else _make_keys(paths.next_keys)
        )
        claim = keys.claim("rotation", enrolled.node_id, enrolled.name, enrolled.ca_sha256, int(clock()))
        ca_pem = paths.ca.read_text()
        try:
            with Service(enrolled.server, ca_pem, load_private(paths.identity_key)) as service:
                answer = service.post("/nodes/rotate", json=claim)
        except ServiceError as error:
            if error.code != "key_unknown":
                raise
            # The old key is not known any more: an earlier try went through and its answer was lost.
            with Service(enrolled.server, ca_pem, keys.identity) as service:
                answer = service.post("/nodes/rotate", json=claim)
        roster = _check_roster(enrolled, keys, answer)
        known = open_roster(read_roster(paths.roster), parse_public(enrolled.authority))
        check_successor(roster, known)
        if roster != known:
            keep_roster(paths, known, roster, answer["roster"], approval, own=public_text(keys.identity))
        write_atomic(_accepted(paths), b"")
        _finish_rotation(paths)
    return enrolled


def leave(paths: NodePaths) -> Enrolled:
    """Leave the federation and delete the keys; journal, ledger and bundles stay. Raises `FedwardError`."""
    with lock_file(paths.lock):
        enrolled = Enrolled.load(paths)
        try:
            with enrolled.service(paths) as service:
                service.post("/nodes/leave")
        except ServiceError as error:
            if error.code not in ("key_unknown", "node_revoked", "node_left"):
                raise
        paths.node.unlink()
        sync_folder(paths.root)
        shutil.rmtree(paths.keys)
    return enrolled


def own_entry(roster: Roster, enrolled: Enrolled, identity: str) -> RosterNode | None:
    """This node's line in a roster, if it stands there with that identity key (base64url)."""
    entry = roster.node(enrolled.name)
    if entry is None or (entry.node_id, entry.identity) != (enrolled.node_id, identity):
        return None
    return entry


def is_listed(paths: NodePaths) -> bool:
    """Whether the newest roster here holds this node with its present key; if not, the authority has still to sign.

    Raises `FedwardError`.
    """
    enrolled = Enrolled.load(paths)
    roster = open_roster(read_roster(paths.roster), parse_public(enrolled.authority))
    return own_entry(roster, enrolled, public_text(load_private(paths.identity_key))) is not None


def standing(paths: NodePaths) -> None:
    """Ask the service whether this node is enrolled. Raises `ServiceError` that says why it is not."""
    enrolled = Enrolled.load(paths)
    with enrolled.service(paths) as service:
        service.get("/nodes/me")


def _address(url: str) -> tuple[str, str]:
    parts = urlsplit(url if "//" in url else f"https://{url}")
    try:
        port = parts.port or DEFAULT_PORT
    except ValueError as error:
        raise EnrolError(f"server address {url!r}: the port is not a number up to 65535.") from error
    if parts.scheme != "https" or not parts.hostname or parts.username or parts.path.strip("/") or parts.query:
        raise EnrolError(f"server address {url!r}: must be https://HOST:PORT, as 'fedward server invite' prints it.")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"https://{host}:{port}", host


def _make_keys(folder: Path) -> NodeKeys:
    keys = NodeKeys.generate()
    owner_folder(folder)
    write_atomic(folder / "flower.key", flower_private_ssh(keys.flower))
    write_atomic(folder / "flower.pub", flower_public_ssh(keys.flower))
    # Last: if it is there, all are.
    save_private(folder / "identity.key", keys.identity)
    return keys


def _load_keys(folder: Path) -> NodeKeys:
    flower = serialization.load_ssh_private_key((folder / "flower.key").read_bytes(), password=None)
    if not isinstance(flower, ec.EllipticCurvePrivateKey):
        raise EnrolError(f"{folder / 'flower.key'}: not an elliptic-curve key.")
    return NodeKeys(load_private(folder / "identity.key"), flower)


def _accepted(paths: NodePaths) -> Path:
    """There once the server knows the next keys and no others."""
    return paths.next_keys / "accepted"


def _finish_rotation(paths: NodePaths) -> None:
    for name in _KEY_FILES:
        source = paths.next_keys / name
        if source.exists():
            source.replace(paths.keys / name)
    sync_folder(paths.keys)
    shutil.rmtree(paths.next_keys)


def _check_signed(envelope: dict[str, Any], authority: Ed25519PublicKey) -> Roster:
    """Raises `EnrolError` unless the server's roster is in order and signed by the authority."""
    try:
        return open_roster(envelope, authority)
    except (SignatureError, RosterError) as error:
        raise EnrolError(f"the server's roster is not in order: {error}") from error


def _check_roster(enrolled: Enrolled, keys: NodeKeys, answer: dict[str, Any]) -> Roster:
    """The server must have entered what we proved, or say that its authority has still to sign it.

    That word is believed: a server that wants to leave a node out can do so anyway. Raises `EnrolError`.
    """
    roster = _check_signed(answer["roster"], parse_public(enrolled.authority))
    if own_entry(roster, enrolled, public_text(keys.identity)) is None and answer.get("waits") is None:
        raise EnrolError("the server's roster does not hold this node's key. Tell the server admin.")
    return roster


def _asks_approval(paths: NodePaths) -> bool:
    # A node has a policy once it has joined; its admin may have put one there before.
    return paths.policy.exists() and load_policy(paths.policy).approve_roster_changes
