"""The manifest of a run: what a data scientist signs, and what server and nodes check."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from fedward_common.config import RunConfig, parse_config
from fedward_common.errors import FedwardError
from fedward_common.roster import Roster
from fedward_common.signing import open_envelope, sign_envelope

KIND = "manifest"
_SHA256 = r"^[0-9a-f]{64}$"


class ManifestError(FedwardError):
    """A manifest breaks its rules or does not fit what it is sent with."""


class Manifest(BaseModel):
    """Binds run id, configuration, bundle and starting model to the person who starts the run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    run: str = Field(pattern=r"^[0-9a-f]{32}$")
    config: dict[str, Any]
    bundle: str = Field(pattern=_SHA256, description="SHA-256 of the bundle's bytes")
    initial: str | None = Field(default=None, pattern=_SHA256, description="SHA-256 of the starting model")
    scientist: str
    created: AwareDatetime

    @classmethod
    def make(
        cls, run: str, config: RunConfig, bundle: bytes, initial: bytes | None, scientist: str
    ) -> Manifest:
        """A manifest for a run that is about to be submitted."""
        return cls(
            run=run,
            config=config.model_dump(mode="json"),
            bundle=hashlib.sha256(bundle).hexdigest(),
            initial=None if initial is None else hashlib.sha256(initial).hexdigest(),
            scientist=scientist,
            created=datetime.now(UTC).replace(microsecond=0),
        )

    def run_config(self) -> RunConfig:
        """The configuration, checked. Raises `ConfigError`."""
        return parse_config(self.config)

    def sign(self, key: Ed25519PrivateKey) -> dict[str, Any]:
        """The signed envelope."""
        return sign_envelope(KIND, self.model_dump(mode="json"), key)

    def check_bundle(self, data: bytes) -> None:
        """Raises `ManifestError` unless `data` is the bundle that was signed."""
        digest = hashlib.sha256(data).hexdigest()
        if digest != self.bundle:
            raise ManifestError(f"the bundle is {digest[:12]}, the manifest says {self.bundle[:12]}.")

    def check_initial(self, data: bytes | None) -> None:
        """Raises `ManifestError` unless `data` is the starting model that was signed (None: none)."""
        digest = None if data is None else hashlib.sha256(data).hexdigest()
        if digest != self.initial:
            raise ManifestError("the starting model is not the one that the manifest names.")


def open_manifest(envelope: Mapping[str, Any], roster: Roster) -> Manifest:
    """The manifest in an envelope signed by a data scientist of `roster`.

    Raises `SignatureError`, `ManifestError`.
    """
    payload = open_envelope(KIND, envelope, roster.scientist_keys())
    try:
        manifest = Manifest.model_validate(payload)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ManifestError(f"the signed manifest breaks its rules: {where}: {first['msg']}") from error
    signer = roster.scientist_of(envelope["key"])
    if signer is None or signer.name != manifest.scientist:
        raise ManifestError(f"the manifest names {manifest.scientist!r}, but somebody else signed it.")
    return manifest
