"""What a node and the server say to each other at enrolment: tokens, proofs of possession, node keys."""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509 import load_pem_x509_certificate

from fedward_common.errors import FedwardError
from fedward_common.signing import SignatureError, canonical, decode, encode, public_text, sign, verify

MAX_CLOCK_SKEW = 300
"""Seconds by which a sender's clock may be off."""

_TOKEN = re.compile(
    r"FW1([0-9a-f]{64})::([a-z0-9][a-z0-9_.-]{0,63}~[0-9a-f]{8})\.([A-Za-z0-9_-]{43})", re.ASCII
)


class TokenError(FedwardError):
    """A token is not in a token's form."""


@dataclass(frozen=True)
class JoinToken:
    """`FW1<SHA-256 of the CA certificate>::<id>.<secret>`; the id is `<node name>~<8 hex digits>`."""

    ca_sha256: str
    id: str
    secret: str

    @classmethod
    def make(cls, ca_sha256: str, name: str) -> JoinToken:
        """A fresh token for a node name (256-bit secret)."""
        return cls(ca_sha256, f"{name}~{secrets.token_hex(4)}", secrets.token_urlsafe(32))

    @classmethod
    def parse(cls, text: str) -> JoinToken:
        """Raises `TokenError`."""
        match = _TOKEN.fullmatch(text.strip())
        if match is None:
            raise TokenError(
                "this is not a join token (FW1…::….…). "
                "Copy the whole command that 'fedward server invite' prints."
            )
        return cls(*match.groups())

    def __str__(self) -> str:
        return f"FW1{self.ca_sha256}::{self.id}.{self.secret}"

    def __repr__(self) -> str:
        return f"JoinToken({self.id!r}, secret withheld)"

    @property
    def name(self) -> str:
        """The node name that the token is bound to."""
        return self.id.rpartition("~")[0]


def secret_digest(secret: str) -> str:
    """What the server stores of a secret. A plain hash is enough: 256 random bits cannot be guessed."""
    return hashlib.sha256(secret.encode()).hexdigest()


def certificate_sha256(pem: bytes) -> str:
    """Hex SHA-256 of a certificate's DER. Raises `ValueError` if `pem` is no certificate."""
    certificate = load_pem_x509_certificate(pem)
    return hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).hexdigest()


def generate_flower_key() -> ec.EllipticCurvePrivateKey:
    """A fresh key for Flower's node authentication (P-256)."""
    return ec.generate_private_key(ec.SECP256R1())


def flower_private_ssh(key: ec.EllipticCurvePrivateKey) -> bytes:
    """The private key in OpenSSH form, as `flower-supernode --auth-supernode-private-key` reads it."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )


def flower_public_ssh(key: ec.EllipticCurvePrivateKey) -> bytes:
    """The public key in OpenSSH form."""
    return key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)


def flower_public_pem(key: ec.EllipticCurvePrivateKey | ec.EllipticCurvePublicKey) -> str:
    """The public key as PEM, as Flower's Control API takes it."""
    public = key.public_key() if isinstance(key, ec.EllipticCurvePrivateKey) else key
    return public.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    ).decode("ascii")


def parse_flower_public(pem: str) -> ec.EllipticCurvePublicKey:
    """The inverse of `flower_public_pem`; P-256 only. Raises `SignatureError`."""
    try:
        key = serialization.load_pem_public_key(pem.encode())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise SignatureError("the Flower key is not a public key in PEM form.") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise SignatureError("the Flower key must be an elliptic-curve key on P-256.")
    return key


def challenge(bound: str, name: str, ca_sha256: str, identity: str, flower_key: str, seconds: int) -> str:
    """The text that a node signs with both its keys.

    bound: token id (enrolment) or node id (rotation). The CA's hash ties the proof to this one server.
    """
    fields: dict[str, Any] = {
        "bound": bound, "name": name, "ca": ca_sha256,
        "identity": identity, "flower_key": flower_key, "time": seconds,
    }  # fmt: skip
    return canonical(fields)


@dataclass(frozen=True)
class NodeKeys:
    """A node's two private keys."""

    identity: Ed25519PrivateKey
    flower: ec.EllipticCurvePrivateKey

    @classmethod
    def generate(cls) -> NodeKeys:
        """Fresh keys."""
        return cls(Ed25519PrivateKey.generate(), generate_flower_key())

    def claim(self, kind: str, bound: str, name: str, ca_sha256: str, seconds: int) -> dict[str, Any]:
        """Public keys, time and the proof that the private ones are held, as JSON fields."""
        identity, flower_key = public_text(self.identity), flower_public_pem(self.flower)
        text = challenge(bound, name, ca_sha256, identity, flower_key, seconds)
        return {
            "name": name,
            "ca": ca_sha256,
            "identity": identity,
            "flower_key": flower_key,
            "time": seconds,
            "identity_proof": sign(kind, text, self.identity),
            "flower_proof": encode(self.flower.sign(f"{kind}\n{text}".encode(), ec.ECDSA(hashes.SHA256()))),
        }


def check_proofs(
    kind: str,
    text: str,
    identity: tuple[Ed25519PublicKey, str],
    flower: tuple[ec.EllipticCurvePublicKey, str],
) -> None:
    """Raises `SignatureError` unless both (key, proof) pairs fit the challenge `text`."""
    verify(kind, text, identity[1], identity[0])
    try:
        flower[0].verify(decode(flower[1]), f"{kind}\n{text}".encode(), ec.ECDSA(hashes.SHA256()))
    except InvalidSignature as error:
        raise SignatureError("the proof by the Flower key is wrong.") from error
