"""The roster on the server: as the store has it, as the authority signed it, as all may read it.

The key that signs it lives here, or on a machine of its own ('fedward authority'). Then a change is in the store at
once, and in the public roster only when a signed one has been installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from fedward_common.errors import FedwardError
from fedward_common.files import write_atomic
from fedward_common.roster import (
    Roster,
    RosterNode,
    RosterScientist,
    accept_roster,
    open_roster,
    read_roster,
    write_roster,
)
from fedward_common.signing import key_id, load_private, parse_public
from sqlalchemy.orm import Session

from fedward_server.paths import ServerPaths
from fedward_server.refusal import Refusal
from fedward_server.settings import Settings
from fedward_server.store import Store, active_nodes, add_audit, current_number, scientists

ROSTER_NUMBER = "roster"


class PublicationError(FedwardError):
    """A roster cannot be exported or installed."""


def key_is_apart(paths: ServerPaths) -> bool:
    """Whether the key that signs the roster lives on another machine."""
    return paths.roster_public.exists()


def authority_key(paths: ServerPaths) -> Ed25519PublicKey:
    """The public key under which the roster is signed, here or elsewhere. Raises `SignatureError`."""
    if key_is_apart(paths):
        return parse_public(paths.roster_public.read_text(encoding="ascii").strip())
    return load_private(paths.roster_key).public_key()


def no_roster() -> Refusal:
    """The refusal of what needs a roster before the authority has signed the first."""
    return Refusal(
        "roster_unsigned",
        "the enrolment authority has not signed this server's first roster yet. "
        "Try again when the server admin has installed it.",
        503,
    )


def signed_envelope(paths: ServerPaths) -> dict[str, Any] | None:
    """The public roster's envelope, not verified; None before the first was signed."""
    return read_roster(paths.roster) if paths.roster.exists() else None


def signed_roster(paths: ServerPaths) -> Roster | None:
    """The public roster, verified. Raises `SignatureError`, `RosterError`."""
    envelope = signed_envelope(paths)
    return None if envelope is None else open_roster(envelope, authority_key(paths))


def present_roster(session: Session, settings: Settings) -> Roster:
    """The roster as it has to be, from the store."""
    return Roster(
        version=current_number(session, ROSTER_NUMBER),
        federation=settings.name,
        nodes=tuple(
            RosterNode(
                name=node.name,
                node_id=node.node_id,
                flower_id=node.flower_id,
                identity=node.identity,
                tags=tuple(node.tags),
            )
            for node in active_nodes(session)
        ),
        scientists=tuple(RosterScientist(name=one.name, key=one.key) for one in scientists(session)),
    )


def publish_roster(paths: ServerPaths, settings: Settings, store: Store) -> dict[str, Any] | None:
    """Bring the public roster up to date and return its envelope.

    With the key apart this can change nothing: the envelope is the last one installed, None before the first.
    The transaction keeps two processes from writing the older of two rosters last.
    """
    if key_is_apart(paths):
        return signed_envelope(paths)
    key = load_private(paths.roster_key)
    with store.transaction() as session:
        envelope = present_roster(session, settings).sign(key)
        write_roster(paths.roster, envelope)
    return envelope


def waiting_roster(paths: ServerPaths, settings: Settings, store: Store) -> Roster | None:
    """The roster that waits for the authority's signature; None if the public one is up to date or the key is here."""
    if not key_is_apart(paths):
        return None
    with store.transaction() as session:
        present = present_roster(session, settings)
    return None if present == signed_roster(paths) else present


def export_roster(paths: ServerPaths, settings: Settings, store: Store) -> Roster | None:
    """The roster to have signed elsewhere, which `install_roster` will know again; None if nothing waits.

    Raises `PublicationError` if the key is here.
    """
    _require_apart(paths)
    roster = waiting_roster(paths, settings, store)
    if roster is not None:
        write_atomic(paths.exported_roster, roster.model_dump_json().encode())
    return roster


def install_roster(paths: ServerPaths, settings: Settings, store: Store, envelope: Mapping[str, Any]) -> Roster:
    """Publish a roster that the authority signed: the one that was exported last, or the one that the store has now.

    What changed after the export waits for the next signature. Raises `SignatureError`, `RosterError` (by another
    key, of another federation, older than the public one) and `PublicationError` (not what this server asked for).
    """
    _require_apart(paths)
    with store.transaction() as session:
        known = signed_roster(paths)
        roster = accept_roster(envelope, authority_key(paths), known)
        if roster == known:
            return roster
        if roster not in (present_roster(session, settings), _exported(paths)):
            raise PublicationError(
                f"roster version {roster.version} is signed, but is neither what this server exported last nor what "
                "it has now. Run 'fedward server roster export' and have that signed."
            )
        write_roster(paths.roster, envelope)
        add_audit(session, "server", "roster_installed", version=roster.version, sha256=roster.sha256())
    return roster


def read_signed(paths: ServerPaths) -> Roster:
    """The public roster, where one is needed. Raises `SignatureError`, `RosterError`, `Refusal("roster_unsigned")`."""
    roster = signed_roster(paths)
    if roster is None:
        raise no_roster()
    return roster


def _require_apart(paths: ServerPaths) -> None:
    if not key_is_apart(paths):
        raise PublicationError(
            f"this server holds the key that signs the roster ({key_id(authority_key(paths))}) and publishes each "
            "change by itself: there is nothing to export or install."
        )


def _exported(paths: ServerPaths) -> Roster | None:
    if not paths.exported_roster.exists():
        return None
    return Roster.model_validate_json(paths.exported_roster.read_bytes())
