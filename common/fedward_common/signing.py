"""Ed25519 keys, signed envelopes and signed HTTP requests.

Raw keys and signatures are base64url text without padding. What is signed begins with its kind, so that an
envelope of one kind can never pass for another.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedward_common.errors import FedwardError
from fedward_common.files import write_atomic

PublicKeys = Mapping[str, Ed25519PublicKey]
"""Key id -> public key."""

_KIND = re.compile(r"[a-z][a-z-]{0,31}")
_AUTHORIZATION = re.compile(
    r"Fedward ([0-9a-f]{16}):([0-9]{1,12}):([A-Za-z0-9_-]{16,64}):([A-Za-z0-9_-]{86})", re.ASCII
)


class SignatureError(FedwardError):
    """A key cannot be read, or a signature is missing, malformed, by an unknown key, or wrong."""


def generate() -> Ed25519PrivateKey:
    """A fresh private key."""
    return Ed25519PrivateKey.generate()


def save_private(path: Path, key: Ed25519PrivateKey) -> None:
    """Write a private key (PKCS#8 PEM), readable by its owner only."""
    write_atomic(path, private_pem(key))


def private_pem(key: Ed25519PrivateKey) -> bytes:
    """A private key as unencrypted PKCS#8 PEM."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def load_private(path: Path) -> Ed25519PrivateKey:
    """Read what `save_private` wrote. Raises `SignatureError`."""
    try:
        return parse_private(path.read_bytes())
    except FileNotFoundError as error:
        raise SignatureError(f"{path}: no such key file.") from error
    except SignatureError as error:
        raise SignatureError(f"{path}: {error}") from error


def parse_private(pem: bytes) -> Ed25519PrivateKey:
    """A private key from PKCS#8 PEM. Raises `SignatureError`."""
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError) as error:
        raise SignatureError("not a private key in PEM form without a password.") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise SignatureError(f"an Ed25519 key is needed, this is {type(key).__name__}.")
    return key


def encode(data: bytes) -> str:
    """base64url without padding."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")


def decode(text: str) -> bytes:
    """The inverse of `encode`; refuses every other spelling. Raises `SignatureError`."""
    try:
        data = base64.urlsafe_b64decode(text.encode("ascii") + b"=" * (-len(text) % 4))
    except (ValueError, binascii.Error, UnicodeEncodeError) as error:
        raise SignatureError("not base64url text.") from error
    if encode(data) != text:
        raise SignatureError("not base64url text in its one valid spelling.")
    return data


def raw_public(key: Ed25519PrivateKey | Ed25519PublicKey) -> bytes:
    """The 32 bytes of a public key."""
    public = key.public_key() if isinstance(key, Ed25519PrivateKey) else key
    return public.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)


def public_text(key: Ed25519PrivateKey | Ed25519PublicKey) -> str:
    """A public key as base64url text (43 characters)."""
    return encode(raw_public(key))


def parse_public(text: str) -> Ed25519PublicKey:
    """The inverse of `public_text`. Raises `SignatureError`."""
    raw = decode(text)
    if len(raw) != 32:
        raise SignatureError(f"an Ed25519 public key has 32 bytes, this has {len(raw)}.")
    return Ed25519PublicKey.from_public_bytes(raw)


def read_public(text: str) -> Ed25519PublicKey:
    """The public key that was typed, or the one in the file that was named. Raises `SignatureError`."""
    path = Path(text)
    try:
        return parse_public((path.read_text(encoding="ascii") if path.is_file() else text).strip())
    except (SignatureError, UnicodeDecodeError, OSError) as error:
        raise SignatureError(
            f"{text[:80]!r} is neither a public key (43 characters, as 'fedward authority init' prints it) "
            "nor a file that holds one."
        ) from error


def key_id(key: Ed25519PrivateKey | Ed25519PublicKey) -> str:
    """The first 16 hex digits of the SHA-256 of the raw public key."""
    return hashlib.sha256(raw_public(key)).hexdigest()[:16]


def keys_by_id(*keys: Ed25519PublicKey) -> dict[str, Ed25519PublicKey]:
    """Public keys under their ids, as `open_envelope` wants them."""
    return {key_id(key): key for key in keys}


def canonical(payload: Any) -> str:
    """JSON with sorted keys and no spaces. Raises `ValueError` on NaN and infinities."""
    return json.dumps(payload, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def sign(kind: str, text: str, key: Ed25519PrivateKey) -> str:
    """Signature of `text` as a `kind` (lower-case letters and hyphens)."""
    return encode(key.sign(_signed_bytes(kind, text)))


def verify(kind: str, text: str, signature: str, key: Ed25519PublicKey) -> None:
    """Raises `SignatureError` unless `signature` is `key`'s for `text` as a `kind`."""
    try:
        key.verify(decode(signature), _signed_bytes(kind, text))
    except (InvalidSignature, UnicodeEncodeError) as error:
        raise SignatureError(
            f"the signature of this {kind} is wrong: it was changed, or another key signed it."
        ) from error


def _signed_bytes(kind: str, text: str) -> bytes:
    if not _KIND.fullmatch(kind):
        raise ValueError(f"kind {kind!r} must be lower-case letters and hyphens")
    # No kind holds a line break, so kind and text cannot be split in another place.
    return f"fedward:{kind}:1\n".encode() + text.encode("utf-8")


def sign_envelope(kind: str, payload: Mapping[str, Any], key: Ed25519PrivateKey) -> dict[str, Any]:
    """{kind: canonical JSON text of `payload`, "key": key id, "signature": base64url}."""
    text = canonical(dict(payload))
    return {kind: text, "key": key_id(key), "signature": sign(kind, text, key)}


def open_envelope(kind: str, envelope: Mapping[str, Any], public_keys: PublicKeys) -> dict[str, Any]:
    """The payload of an envelope signed by one of `public_keys`. Raises `SignatureError`."""
    if not isinstance(envelope, Mapping) or set(envelope) != {kind, "key", "signature"}:
        raise SignatureError(f"a signed {kind} has the fields {kind}, key and signature, nothing else.")
    text, signer, signature = envelope[kind], envelope["key"], envelope["signature"]
    if not (isinstance(text, str) and isinstance(signer, str) and isinstance(signature, str)):
        raise SignatureError(f"the fields of a signed {kind} must be text.")
    public = public_keys.get(signer)
    if public is None:
        raise SignatureError(f"this {kind} is signed by the key {signer[:16]!r}, which is not trusted here.")
    verify(kind, text, signature, public)
    try:
        payload = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SignatureError(f"this {kind} is signed, but is not JSON.") from error
    if not isinstance(payload, dict):
        raise SignatureError(f"this {kind} is signed, but is not a JSON object.")
    return payload


def authorize(key: Ed25519PrivateKey, method: str, target: str, body: bytes, now: float | None = None) -> str:
    """The `Authorization` header of a signed request. target: path, with `?query` if there is one."""
    seconds = int(time.time() if now is None else now)
    nonce = secrets.token_urlsafe(18)
    signature = key.sign(_request_bytes(method, target, seconds, nonce, hashlib.sha256(body).hexdigest()))
    return f"Fedward {key_id(key)}:{seconds}:{nonce}:{encode(signature)}"


@dataclass(frozen=True)
class Authorization:
    """A signed request's header, not verified yet. seconds: the sender's clock, Unix time."""

    key: str
    seconds: int
    nonce: str
    signature: str

    @classmethod
    def parse(cls, header: str) -> Authorization:
        """Raises `SignatureError`."""
        match = _AUTHORIZATION.fullmatch(header)
        if match is None:
            raise SignatureError(
                "the Authorization header is not 'Fedward <key id>:<unix seconds>:<nonce>:<signature>'."
            )
        key, seconds, nonce, signature = match.groups()
        return cls(key, int(seconds), nonce, signature)

    def verify(self, public: Ed25519PublicKey, method: str, target: str, body_sha256: str) -> None:
        """Raises `SignatureError` unless `public` signed this request. body_sha256: hex."""
        signed = _request_bytes(method, target, self.seconds, self.nonce, body_sha256)
        try:
            public.verify(decode(self.signature), signed)
        except InvalidSignature as error:
            raise SignatureError(
                "the request's signature is wrong: it was changed, or another key signed it."
            ) from error


def _request_bytes(method: str, target: str, seconds: int, nonce: str, body_sha256: str) -> bytes:
    return f"{method}\n{target}\n{seconds}\n{nonce}\n{body_sha256}".encode()
