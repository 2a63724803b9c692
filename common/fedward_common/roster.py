"""The roster: who belongs to a federation, signed by its authority."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedward_common.errors import FedwardError
from fedward_common.explain import NAME_PATTERN
from fedward_common.files import write_atomic
from fedward_common.signing import (
    SignatureError,
    canonical,
    key_id,
    keys_by_id,
    open_envelope,
    parse_public,
    sign_envelope,
)

KIND = "roster"


def _public_key(text: str) -> str:
    try:
        parse_public(text)
    except SignatureError as error:
        raise ValueError(str(error)) from error
    return text


PublicKeyText = Annotated[str, AfterValidator(_public_key)]
FlowerId = Annotated[str, Field(pattern=r"^-?[0-9]{1,20}$")]
# People decide by what a roster shows them: no text in it may hide or imitate anything on a terminal.
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
Federation = Annotated[str, Field(pattern=r"^[A-Za-z0-9.:%_-]{1,253}$")]


class RosterError(FedwardError):
    """A roster is not what its rules ask for, or is older than the one already known."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RosterNode(_Frozen):
    """One enrolled node. node_id: Fedward's stable id; flower_id: changes with the node's key."""

    name: Name
    node_id: str = Field(pattern=r"^[0-9a-f]{32}$")
    flower_id: FlowerId | None
    identity: PublicKeyText
    tags: tuple[Name, ...] = ()

    @property
    def id_bytes(self) -> bytes:
        """The node id as 16 bytes."""
        return bytes.fromhex(self.node_id)


class RosterScientist(_Frozen):
    """One data scientist."""

    name: Name
    key: PublicKeyText


class Roster(_Frozen):
    """A version of the roster; `version` grows by one with each change."""

    version: int = Field(ge=1)
    federation: Federation
    nodes: tuple[RosterNode, ...] = ()
    scientists: tuple[RosterScientist, ...] = ()

    @model_validator(mode="after")
    def _unique(self) -> Roster:
        for what, values in (
            ("node name", [node.name for node in self.nodes]),
            ("node id", [node.node_id for node in self.nodes]),
            ("identity key", [node.identity for node in self.nodes]),
            ("scientist", [scientist.name for scientist in self.scientists]),
            ("scientist's key", [scientist.key for scientist in self.scientists]),
        ):
            if len(set(values)) != len(values):
                raise ValueError(f"a {what} stands in the roster twice")
        return self

    def node(self, name: str) -> RosterNode | None:
        """The node of that name."""
        return next((node for node in self.nodes if node.name == name), None)

    @cached_property
    def identities(self) -> Mapping[bytes, Ed25519PublicKey]:
        """Node id (16 bytes) -> identity key."""
        return {node.id_bytes: parse_public(node.identity) for node in self.nodes}

    @cached_property
    def digest(self) -> str:
        """Version and SHA-256: nodes that name the same digest know the same members."""
        text = canonical(self.model_dump(mode="json"))
        return f"{self.version}:{hashlib.sha256(text.encode()).hexdigest()}"

    def scientist_keys(self) -> dict[str, Ed25519PublicKey]:
        """Key id -> public key of every data scientist."""
        return keys_by_id(*(parse_public(scientist.key) for scientist in self.scientists))

    def scientist_of(self, key: str) -> RosterScientist | None:
        """The data scientist whose key has that id."""
        return next((person for person in self.scientists if key_id(parse_public(person.key)) == key), None)

    def sha256(self) -> str:
        """Hex SHA-256 of the text that is signed: names this very roster, whoever signed it."""
        return hashlib.sha256(canonical(self.model_dump(mode="json")).encode()).hexdigest()

    def sign(self, key: Ed25519PrivateKey) -> dict[str, Any]:
        """The signed envelope."""
        return sign_envelope(KIND, self.model_dump(mode="json"), key)


def open_roster(envelope: Mapping[str, Any], authority: Ed25519PublicKey) -> Roster:
    """The roster in an envelope signed by `authority`. Raises `SignatureError`, `RosterError`."""
    payload = open_envelope(KIND, envelope, keys_by_id(authority))
    try:
        return Roster.model_validate(payload)
    except ValidationError as error:
        raise RosterError(f"the roster is signed but breaks its rules: {error.errors()[0]['msg']}") from error


def accept_roster(envelope: Mapping[str, Any], authority: Ed25519PublicKey, known: Roster | None) -> Roster:
    """`open_roster`, refusing a roster older than `known` (a replay could bring a revoked node back).

    Raises `SignatureError`, `RosterError`.
    """
    roster = open_roster(envelope, authority)
    check_successor(roster, known)
    return roster


def check_successor(roster: Roster, known: Roster | None) -> None:
    """Raises `RosterError` unless `roster` is `known` itself or a later one of the same federation."""
    if known is None or roster == known:
        return
    if roster.federation != known.federation:
        raise RosterError(f"the roster is of {roster.federation!r}, the known one of {known.federation!r}.")
    if roster.version < known.version:
        raise RosterError(f"the roster has version {roster.version}, but {known.version} is known already.")
    if roster.version == known.version:
        raise RosterError(f"two different rosters have version {roster.version}.")


def write_roster(path: Path, envelope: Mapping[str, Any]) -> None:
    """Write an envelope atomically; the roster is public."""
    write_atomic(path, json.dumps(envelope).encode(), mode=0o644)


def read_roster(path: Path) -> dict[str, Any]:
    """The envelope in a file, not verified. Raises `RosterError`."""
    try:
        return parse_roster(path.read_bytes())
    except FileNotFoundError as error:
        raise RosterError(f"{path}: there is no roster.") from error
    except RosterError as error:
        raise RosterError(f"{path}: {error}") from error


def parse_roster(data: bytes) -> dict[str, Any]:
    """The envelope in bytes, not verified. Raises `RosterError`."""
    try:
        envelope = json.loads(data)
    except ValueError as error:
        raise RosterError("not JSON.") from error
    if not isinstance(envelope, dict):
        raise RosterError("not a signed roster.")
    return envelope
