"""Signed requests: who sends this, is it fresh, and has it been seen before?

A request is opened (key known, clock right) before its body is read, and accepted (signature, nonce) after. There
are no bearer tokens: what is sent once is worth nothing to whoever sees it.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from typing import Annotated, Protocol

from anyio import to_thread
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from fastapi import Depends, Request
from fedward_common.enrolment import MAX_CLOCK_SKEW
from fedward_common.signing import Authorization, SignatureError, parse_public
from sqlalchemy.orm import Session

from fedward_server.audit import Refusals
from fedward_server.enrolment import check_clock, not_enrolled
from fedward_server.refusal import Refusal
from fedward_server.store import Store, node_by_identity, remember_nonce, scientist_by_key


@dataclass(frozen=True)
class Sender:
    """Who signed. id: the node's id, or the data scientist's name. refused: why it is known but not let in."""

    id: str
    name: str
    public: Ed25519PublicKey
    refused: Refusal | None = None


class Directory(Protocol):
    """Finds a sender by key id."""

    def __call__(self, session: Session, key_id: str, /) -> Sender | None: ...


def scientist_directory(session: Session, key_id: str, /) -> Sender | None:
    """Data scientists."""
    person = scientist_by_key(session, key_id)
    return None if person is None else Sender(person.name, person.name, parse_public(person.key))


def node_directory(session: Session, key_id: str, /) -> Sender | None:
    """Nodes; one that is not enrolled any more is found, so that it can be told so."""
    node = node_by_identity(session, key_id)
    if node is None:
        return None
    return Sender(node.node_id, node.name, parse_public(node.identity), not_enrolled(node.status))


class Gate:
    """Opens and accepts signed requests."""

    def __init__(self, store: Store, refusals: Refusals) -> None:
        self._store = store
        self._refusals = refusals

    async def open(self, request: Request, directory: Directory) -> OpenRequest:
        """Check what can be checked before the body is read. Raises `Refusal`."""
        header = request.headers.get("Authorization", "")
        target = request.scope["raw_path"].decode("latin-1")
        query = request.scope["query_string"].decode("latin-1")
        return await to_thread.run_sync(
            self._open, header, request.method, f"{target}?{query}" if query else target, directory
        )

    def _open(self, header: str, method: str, target: str, directory: Directory) -> OpenRequest:
        if not header:
            raise Refusal("auth_missing", "this request must be signed; it has no Authorization header.", 401)
        try:
            authorization = Authorization.parse(header)
        except SignatureError as error:
            raise Refusal("auth_malformed", str(error), 401) from error
        opened = OpenRequest(self, authorization, method, target, None)
        with self._store.transaction() as session:
            sender = directory(session, authorization.key)
        if sender is None:
            refusal = Refusal("key_unknown", "the key that signed this request is not known here.", 401)
            raise self.refuse(opened, refusal)
        opened = OpenRequest(self, authorization, method, target, sender)
        try:
            check_clock(authorization.seconds, time.time())
        except Refusal as refusal:
            raise self.refuse(opened, refusal) from None
        return opened

    def refuse(self, opened: OpenRequest, refusal: Refusal) -> Refusal:
        """Note the refusal in the audit."""
        actor = opened.sender.name if opened.sender is not None else "unknown"
        path = opened.target.partition("?")[0][:200]
        self._refusals.add(
            actor, "request_refused", refusal.code, key=opened.authorization.key, request=f"{opened.method} {path}"
        )
        return refusal

    def accept(self, opened: OpenRequest, body_sha256: str) -> Sender:
        """The sender, now proven; the request cannot be used a second time. Raises `Refusal`."""
        authorization, sender = opened.authorization, opened.sender
        assert sender is not None
        try:
            authorization.verify(sender.public, opened.method, opened.target, body_sha256)
        except SignatureError as error:
            raise self.refuse(opened, Refusal("signature_wrong", str(error), 401)) from error
        now = time.time()
        with self._store.transaction() as session:
            # Kept for as long as the clock check lets the same request in, and a little longer.
            kept = remember_nonce(session, authorization.key, authorization.nonce, now, now - 3 * MAX_CLOCK_SKEW)
        if not kept:
            raise self.refuse(opened, Refusal("request_repeated", "this very request has been sent before.", 401))
        if sender.refused is not None:
            raise self.refuse(opened, sender.refused)
        return sender


@dataclass(frozen=True)
class OpenRequest:
    """A request whose sender is known by name but not proven yet."""

    gate: Gate
    authorization: Authorization
    method: str
    target: str
    sender: Sender | None

    async def accept(self, body_sha256: str) -> Sender:
        """Prove the sender with the hash (hex) of the body. Raises `Refusal`."""
        return await to_thread.run_sync(self.gate.accept, self, body_sha256)


def gate_of(request: Request) -> Gate:
    """The application's gate."""
    gate = request.app.state.gate
    assert isinstance(gate, Gate)
    return gate


async def open_scientist(request: Request) -> OpenRequest:
    """For routes that read a large body themselves: open now, `accept` with the body's hash before anything else."""
    return await gate_of(request).open(request, scientist_directory)


async def _signed(request: Request, directory: Directory) -> Sender:
    opened = await gate_of(request).open(request, directory)
    return await opened.accept(hashlib.sha256(await request.body()).hexdigest())


async def signed_scientist(request: Request) -> Sender:
    """Dependency: the data scientist who signed this request."""
    return await _signed(request, scientist_directory)


async def signed_node(request: Request) -> Sender:
    """Dependency: the node that signed this request."""
    return await _signed(request, node_directory)


OpenedByScientist = Annotated[OpenRequest, Depends(open_scientist)]
ByScientist = Annotated[Sender, Depends(signed_scientist)]
ByNode = Annotated[Sender, Depends(signed_node)]
