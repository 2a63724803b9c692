"""Invitations, enrolment, rotation, leaving and revocation; and keeping Flower's list of nodes like ours."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hmac import compare_digest
from typing import Any, Protocol

from fedward_common.config import Name
from fedward_common.enrolment import (
    MAX_CLOCK_SKEW,
    JoinToken,
    challenge,
    check_proofs,
    flower_public_pem,
    parse_flower_public,
    secret_digest,
)
from fedward_common.errors import ConfigError, FedwardError
from fedward_common.signing import SignatureError, key_id, parse_public
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from sqlalchemy import select
from sqlalchemy.orm import Session

from fedward_server.audit import Refusals
from fedward_server.authority import Identity
from fedward_server.paths import ServerPaths
from fedward_server.publication import (
    ROSTER_NUMBER,
    key_is_apart,
    no_roster,
    publish_roster,
    waiting_roster,
)
from fedward_server.refusal import Refusal
from fedward_server.settings import Settings
from fedward_server.store import (
    Node,
    NodeStatus,
    Store,
    Token,
    active_node,
    active_nodes,
    add_audit,
    consume_token,
    next_number,
)

ENROL = "enrolment"
ROTATE = "rotation"

log = logging.getLogger(__name__)


class ControlNode(Protocol):
    """A node as the SuperLink lists it; an unregistered one has status "unregistered"."""

    @property
    def flower_id(self) -> int: ...

    @property
    def status(self) -> str: ...


class NodeControl(Protocol):
    """What enrolment needs of Flower's Control API. All raise a `FedwardError` if the SuperLink fails or refuses."""

    def register_node(self, public_key: bytes) -> int: ...

    def unregister_node(self, flower_id: int) -> None: ...

    def list_nodes(self) -> Sequence[ControlNode]: ...


class Claim(BaseModel):
    """A node's public keys and the proof that it holds the private ones. time: its clock, Unix seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str = Field(max_length=64)
    ca: str = Field(pattern=r"^[0-9a-f]{64}$")
    identity: str = Field(max_length=64)
    flower_key: str = Field(max_length=1024)
    time: int = Field(ge=0, le=2**40)
    identity_proof: str = Field(max_length=128)
    flower_proof: str = Field(max_length=256)


class EnrolRequest(Claim):
    """A claim with a token's id and secret."""

    token: str = Field(max_length=128)
    secret: str = Field(max_length=128)


@dataclass(frozen=True)
class Admission:
    """What a node learns when it is in. roster: the latest signed one. waits: the version that holds what was just
    entered, if the authority has still to sign it elsewhere: `roster` does not know of it then."""

    node_id: str
    name: str
    fleet_port: int
    authority: str
    roster: dict[str, Any]
    waits: int | None


def check_clock(sender: float, now: float) -> None:
    """Raises `Refusal("clock_off")` if the sender's clock is too far from ours."""
    if abs(sender - now) > MAX_CLOCK_SKEW:
        raise Refusal(
            "clock_off",
            f"the sender's clock says {_utc(sender)}, the server's {_utc(now)}: they may differ by "
            f"{MAX_CLOCK_SKEW} seconds. Set the clock that is wrong (NTP keeps it right).",
            401,
        )


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(sep=" ", timespec="seconds")


def check_name(name: str) -> str:
    """Raises `ConfigError` if a node or a data scientist may not have this name."""
    try:
        return TypeAdapter(Name).validate_python(name)
    except ValidationError as error:
        raise ConfigError(
            f"name = {name!r}: 1 to 64 lower-case letters, digits, '-', '_' and '.', "
            "with a letter or digit at both ends."
        ) from error


def invite(paths: ServerPaths, store: Store, name: str, ttl: float, tags: Sequence[str] = ()) -> JoinToken:
    """A token for one node of that name, good for `ttl` seconds.

    Raises `ConfigError`, and `Refusal("roster_unsigned")` as long as there is no roster for a node to check.
    """
    _require_roster(paths)
    token = JoinToken.make(Identity.of(paths).ca_sha256, check_name(name))
    now = time.time()
    kept = sorted({check_name(tag) for tag in tags})
    with store.transaction() as session:
        if active_node(session, name) is not None:
            raise ConfigError(f"a node named {name!r} is enrolled already. Choose another name, or revoke it first.")
        session.add(
            Token(
                id=token.id,
                secret_sha256=secret_digest(token.secret),
                name=name,
                tags=kept,
                created=now,
                expires=now + ttl,
            )
        )
        add_audit(session, "server", "invited", name=name, token=token.id, tags=kept, seconds=ttl)
    return token


def _require_roster(paths: ServerPaths) -> None:
    if key_is_apart(paths) and not paths.roster.exists():
        raise no_roster()


class Enrolment:
    """Lets nodes in and out. One for a process; threads may share it.

    Flower's list is changed inside our transaction: if Flower fails, the transaction is undone, so that a token is
    given back and nobody is half enrolled; if we die before the commit, Flower knows a key that we do not, and
    `reconcile` removes it.
    """

    def __init__(
        self,
        paths: ServerPaths,
        settings: Settings,
        store: Store,
        control: NodeControl,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._paths = paths
        self._settings = settings
        self._store = store
        self._control = control
        self._clock = clock
        self._identity = Identity.of(paths)
        self.refusals = Refusals(store)

    def enrol(self, request: EnrolRequest) -> Admission:
        """Let a node in. Raises `Refusal`, with an audit line."""
        try:
            return self._enrol(request)
        except Refusal as refusal:
            self.refusals.add(request.name, "enrol_refused", refusal.code, token=request.token)
            raise

    def _enrol(self, request: EnrolRequest) -> Admission:
        self._check_foreign(request.ca)
        _require_roster(self._paths)
        now = self._clock()
        check_clock(request.time, now)
        with self._store.transaction() as session:
            node = self._admit(session, request, now)
        return self._admission(node)

    def _admit(self, session: Session, request: EnrolRequest, now: float) -> Node:
        token = _check_token(session, request)
        identity, flower_key = _check_claim(ENROL, request.token, request)
        present = active_node(session, request.name)
        if token.used_at is not None:
            # The very node that used it, asking again: the answer to its first try was lost.
            if present is not None and (present.identity, present.flower_key) == (identity, flower_key):
                return present
            raise _used(token)
        if token.expires <= now:
            raise Refusal(
                "token_expired",
                f"the token expired at {_utc(token.expires)}. Ask the server admin for a new one.",
                403,
            )
        if present is not None:
            raise Refusal(
                "name_taken",
                f"a node named {request.name!r} is enrolled already. Ask the server admin for a token "
                "with another name, or to revoke the old node first.",
                409,
            )
        _check_new_keys(session, identity, flower_key)
        if not consume_token(session, request.token, now):
            raise _used(token)
        node = Node(
            node_id=secrets.token_hex(16),
            name=request.name,
            flower_id=str(self._register(flower_key)),
            identity=identity,
            identity_id=key_id(parse_public(identity)),
            flower_key=flower_key,
            tags=token.tags,
            enrolled=now,
            changed=now,
        )
        session.add(node)
        next_number(session, ROSTER_NUMBER)
        add_audit(session, request.name, "enrolled", node_id=node.node_id, token=request.token)
        return node

    def rotate(self, node_id: str, claim: Claim) -> Admission:
        """Replace both keys of a node; name, node id and all that hangs on them stay. Raises `Refusal`."""
        self._check_foreign(claim.ca)
        now = self._clock()
        check_clock(claim.time, now)
        with self._store.transaction() as session:
            node = _still_active(session, node_id)
            if claim.name != node.name:
                raise Refusal("name_differs", f"this node is {node.name!r}, not {claim.name!r}.")
            identity, flower_key = _check_claim(ROTATE, node_id, claim)
            old = None
            # The answer to an earlier try may have been lost: the same keys again change nothing.
            if (identity, flower_key) != (node.identity, node.flower_key):
                _check_new_keys(session, identity, flower_key)
                old, node.flower_id = node.flower_id, str(self._register(flower_key))
                node.identity, node.identity_id = identity, key_id(parse_public(identity))
                node.flower_key, node.changed = flower_key, now
                next_number(session, ROSTER_NUMBER)
                add_audit(session, node.name, "keys_rotated", node_id=node_id, identity=node.identity_id)
        admission = self._admission(node)
        if old is not None:
            self._cut_off(node.name, old)
        return admission

    def leave(self, node_id: str) -> None:
        """A node goes by its own will."""
        with self._store.transaction() as session:
            node = _still_active(session, node_id)
            flower_id = self._dismiss(session, node, NodeStatus.LEFT, node.name)
        publish_roster(self._paths, self._settings, self._store)
        self._cut_off(node.name, flower_id)

    def revoke(self, name: str) -> bool:
        """Put a node out at once; its keys can never come back. Raises `ConfigError` if there is no such node.

        False: the SuperLink does not answer, so that the node is off the roster but its link is cut only when the
        SuperLink is up again.
        """
        with self._store.transaction() as session:
            node = active_node(session, name)
            if node is None:
                raise ConfigError(f"no enrolled node is named {name!r}. 'fedward server node list' shows all.")
            flower_id = self._dismiss(session, node, NodeStatus.REVOKED, "server")
        publish_roster(self._paths, self._settings, self._store)
        return self._cut_off(name, flower_id)

    def reconcile(self) -> int:
        """Make Flower's list of nodes like ours; returns how many nodes changed there.

        Registers nodes that the SuperLink does not know (its database was lost) and unregisters those that are not
        enrolled (revoked while it was down, or left over from a crash). Raises what `control` raises.
        """
        changed = 0
        with self._store.transaction() as session:
            known = {str(node.flower_id) for node in self._control.list_nodes() if node.status != "unregistered"}
            nodes = active_nodes(session)
            for node in nodes:
                if node.flower_id not in known:
                    node.flower_id = str(self._control.register_node(node.flower_key.encode()))
                    changed += 1
                    add_audit(session, "server", "registered_again", name=node.name, node_id=node.node_id)
            if changed:
                next_number(session, ROSTER_NUMBER)
            for flower_id in known - {node.flower_id for node in nodes}:
                self._control.unregister_node(int(flower_id))
                changed += 1
                add_audit(session, "server", "unregistered_stray", flower_id=flower_id)
        self.publish()
        return changed

    def publish(self) -> dict[str, Any] | None:
        """Bring the public roster up to date, if its key is here; returns the envelope (None: none was signed yet)."""
        return publish_roster(self._paths, self._settings, self._store)

    def check_foreign(self, ca: str) -> None:
        """Raises `Refusal("token_foreign")`, with an audit line, if a token with that CA hash is not ours."""
        try:
            self._check_foreign(ca)
        except Refusal as refusal:
            self.refusals.add("unknown", "enrol_refused", refusal.code, ca=ca)
            raise

    def _check_foreign(self, ca: str) -> None:
        if not compare_digest(ca, self._identity.ca_sha256):
            raise Refusal(
                "token_foreign",
                "the token is of another server: it carries another CA's hash. "
                "Check the address, or ask this server's admin for a token.",
                403,
            )

    def _register(self, flower_key: str) -> int:
        try:
            return self._control.register_node(flower_key.encode())
        except FedwardError as error:
            log.error("registration at the SuperLink failed: %s", error)
            raise Refusal(
                "link_unavailable",
                "the server cannot register nodes at the moment; nothing has changed and the token is still good. "
                "Try again in a minute.",
                503,
            ) from error

    def _dismiss(self, session: Session, node: Node, status: NodeStatus, actor: str) -> str | None:
        node.status, node.changed = status, self._clock()
        flower_id, node.flower_id = node.flower_id, None
        next_number(session, ROSTER_NUMBER)
        add_audit(session, actor, str(status), name=node.name, node_id=node.node_id)
        return flower_id

    def _cut_off(self, name: str, flower_id: str | None) -> bool:
        if flower_id is None:
            return True
        try:
            self._control.unregister_node(int(flower_id))
        except FedwardError as error:
            log.warning("%s: not unregistered at the SuperLink yet, will be tried again: %s", name, error)
            return False
        return True

    def _admission(self, node: Node) -> Admission:
        roster = self.publish()
        if roster is None:
            raise no_roster()
        waiting = waiting_roster(self._paths, self._settings, self._store)
        waits = waiting.version if waiting is not None else None
        if waits is not None:
            log.warning("%s: roster version %d waits for the authority's signature", node.name, waits)
        return Admission(node.node_id, node.name, self._settings.fleet_port, self._identity.roster_key, roster, waits)


NOT_ENROLLED = {
    NodeStatus.REVOKED: "this node has been revoked by the server admin. Ask for a new token to enrol again.",
    NodeStatus.LEFT: "this node has left the federation. Ask the server admin for a token to enrol again.",
}


def not_enrolled(status: str) -> Refusal | None:
    """The refusal "node_revoked" or "node_left"; None for an enrolled node."""
    if status == NodeStatus.ACTIVE:
        return None
    return Refusal(f"node_{status}", NOT_ENROLLED[NodeStatus(status)], 403)


def _still_active(session: Session, node_id: str) -> Node:
    # It was when its request was let in; a revocation may have come in between.
    node = session.get_one(Node, node_id)
    refusal = not_enrolled(node.status)
    if refusal is not None:
        raise refusal
    return node


def _check_token(session: Session, request: EnrolRequest) -> Token:
    token = session.get(Token, request.token)
    # The same work for an id that does not exist: the time taken tells nothing.
    stored = token.secret_sha256 if token is not None else "0" * 64
    right = compare_digest(secret_digest(request.secret), stored)
    if token is None or not right:
        raise Refusal("token_wrong", "the token is not one of this server's. Copy it whole, or ask for a new one.", 403)
    if request.name != token.name:
        raise Refusal(
            "token_other_name", f"the token is for a node named {token.name!r}, not {request.name!r}.", 403
        )
    return token


def _used(token: Token) -> Refusal:
    return Refusal(
        "token_used",
        f"the token for {token.name!r} has been used already; each is good for one node. "
        "Ask the server admin for a new one, and to revoke the node if it was not you who used it.",
        403,
    )


def _check_claim(kind: str, bound: str, claim: Claim) -> tuple[str, str]:
    """The two public keys in their one valid spelling. Raises `Refusal("proof_wrong")`."""
    text = challenge(bound, claim.name, claim.ca, claim.identity, claim.flower_key, claim.time)
    try:
        identity, flower = parse_public(claim.identity), parse_flower_public(claim.flower_key)
        check_proofs(kind, text, (identity, claim.identity_proof), (flower, claim.flower_proof))
    except SignatureError as error:
        raise Refusal("proof_wrong", f"the node does not prove that it holds its keys: {error}", 403) from error
    return claim.identity, flower_public_pem(flower)


def _check_new_keys(session: Session, identity: str, flower_key: str) -> None:
    taken = session.scalars(select(Node).where((Node.identity == identity) | (Node.flower_key == flower_key))).first()
    if taken is not None:
        raise Refusal("key_taken", "one of the keys belongs to a node already. Make fresh keys.", 409)
