"""The enrolment authority on a machine of its own: the key that signs the roster, and each roster that it signed.

The server that aggregates then cannot let anybody in by itself: what it says of its members counts on nodes only with
this key's signature, and whoever holds the key sees every change before it signs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from fedward_common.errors import FedwardError
from fedward_common.files import owner_folder, write_atomic
from fedward_common.members import Change, changes
from fedward_common.roster import Roster, check_successor, open_roster, read_roster
from fedward_common.signing import generate, load_private, public_text, save_private
from pydantic import ValidationError


class AuthorityFolderError(FedwardError):
    """The authority's folder cannot be made or used, or what it is to sign is no roster."""


@dataclass(frozen=True)
class RosterAuthority:
    """The folder: `roster.key`, `roster.pub`, and `signed/<version>.json`, all that it has signed."""

    root: Path

    @classmethod
    def create(cls, root: Path) -> Self:
        """Make the key. Raises `AuthorityFolderError` if the folder is in use."""
        if root.exists() and any(root.iterdir()):
            raise AuthorityFolderError(f"{root}: not empty. A key is made once: choose an empty or new directory.")
        made = cls(root)
        owner_folder(root).chmod(0o700)
        owner_folder(made._signed)
        key = generate()
        write_atomic(root / "roster.pub", f"{public_text(key)}\n".encode())
        # Last: if it is there, all is.
        save_private(made._key, key)
        return made

    @classmethod
    def open(cls, root: Path) -> Self:
        """Raises `AuthorityFolderError` if there is no authority."""
        found = cls(root)
        if not found._key.exists():
            raise AuthorityFolderError(f"{root}: no authority here. 'fedward authority init' makes one.")
        return found

    def public_key(self) -> Ed25519PublicKey:
        """What servers, nodes and data scientists know the authority by."""
        return load_private(self._key).public_key()

    def last(self) -> Roster | None:
        """The newest roster that was signed here. Raises `SignatureError`, `RosterError` if its file was changed."""
        signed = sorted(self._signed.glob("*.json"))
        return open_roster(read_roster(signed[-1]), self.public_key()) if signed else None

    def differences(self, roster: Roster) -> list[Change]:
        """What signing `roster` would change.

        Raises `RosterError` if it is of another federation, older than the last one, or another one of its version:
        whoever holds one of the two could show each to half of the nodes.
        """
        last = self.last()
        check_successor(roster, last)
        return changes(last, roster)

    def sign(self, roster: Roster) -> dict[str, Any]:
        """The signed envelope; it is kept before it is returned. Raises as `differences` does."""
        self.differences(roster)
        envelope = roster.sign(load_private(self._key))
        write_atomic(self._signed / f"{roster.version:012d}.json", json.dumps(envelope).encode())
        return envelope

    @property
    def _key(self) -> Path:
        return self.root / "roster.key"

    @property
    def _signed(self) -> Path:
        return self.root / "signed"


def read_unsigned(path: Path) -> Roster:
    """A roster as 'fedward server roster export' writes it. Raises `AuthorityFolderError`."""
    try:
        return Roster.model_validate_json(path.read_bytes())
    except OSError as error:
        raise AuthorityFolderError(f"{path}: cannot be read: {error.strerror}.") from error
    except ValidationError as error:
        raise AuthorityFolderError(
            f"{path}: not a roster as 'fedward server roster export' writes it: {error.errors()[0]['msg']}."
        ) from error
