"""A data scientist's credential: one file with the server's address, its CA and the private key."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedward_common.errors import FedwardError
from fedward_common.files import write_atomic
from fedward_common.signing import SignatureError, parse_private, private_pem

_TEXTS = ("server", "ca", "name", "authority")


class CredentialError(FedwardError):
    """A credential cannot be read."""


@dataclass(frozen=True)
class Credential:
    """server: https URL; ca: PEM; name: the data scientist's; authority: the roster key (base64url)."""

    server: str
    ca: str
    name: str
    key: Ed25519PrivateKey
    authority: str

    def save(self, path: Path) -> None:
        """Write it, readable by its owner only."""
        fields = {
            "version": 1,
            "server": self.server,
            "name": self.name,
            "ca": self.ca,
            "authority": self.authority,
            "key": private_pem(self.key).decode("ascii"),
        }
        write_atomic(path, (json.dumps(fields, indent=2) + "\n").encode())

    @classmethod
    def load(cls, path: Path) -> Credential:
        """Raises `CredentialError`."""
        try:
            fields: Any = json.loads(path.read_bytes())
            if not isinstance(fields, dict) or fields.get("version") != 1:
                raise CredentialError(f"{path}: not a Fedward credential of version 1.")
            private = parse_private(str(fields["key"]).encode())
            server, ca, name, authority = (str(fields[key]) for key in _TEXTS)
        except FileNotFoundError as error:
            raise CredentialError(
                f"{path}: no such file. The server admin makes one with 'fedward server scientist add'."
            ) from error
        except (ValueError, KeyError, SignatureError) as error:
            raise CredentialError(f"{path}: not a whole credential; ask the server admin for one.") from error
        return cls(server, ca, name, private, authority)
