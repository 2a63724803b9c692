"""A node's keys for one secure round: made fresh, advertised once, signed with the node's identity.

Two X25519 pairs, because one of them may be revealed: from the mask key come the pairwise masks (it is recovered when
its owner drops out), from the seal key come the keys under which shares travel (it never leaves the node).
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fedward_common.errors import FedwardError
from fedward_common.secagg.masks import KEY_BYTES

Identities = Callable[[bytes], Ed25519PublicKey | None]
"""Node id (16 bytes) -> the identity key that the roster gives it; None: not in the roster."""

_SEAL_KEY = 16
# Each sealing key seals one message, so its nonce need not differ from another's.
_NONCE = bytes(12)


class AdvertisementError(FedwardError):
    """A key, signature or sealed share is not what it must be."""


@dataclass(frozen=True)
class Advertisement:
    """A node's public keys for one round of one run. node: its id. serial: random, names this advertisement.

    signature: the identity key's, over all of it and the run; zeros where nodes have no enrolled identity.
    """

    node: bytes
    serial: bytes
    mask_key: bytes
    seal_key: bytes
    signature: bytes

    SIZE: ClassVar[int] = 160

    def to_bytes(self) -> bytes:
        """160 bytes."""
        return self.node + self.serial + self.mask_key + self.seal_key + self.signature

    @classmethod
    def from_bytes(cls, data: bytes) -> Advertisement:
        """The inverse of `to_bytes`. Raises `AdvertisementError`."""
        if len(data) != cls.SIZE:
            raise AdvertisementError(f"an advertisement has {cls.SIZE} bytes, this has {len(data)}.")
        return cls(data[:16], data[16:32], data[32:64], data[64:96], data[96:])

    def signed(self, run: str) -> bytes:
        """What the signature covers."""
        body = self.node + self.serial + self.mask_key + self.seal_key
        return b"fedward:secagg-advertisement:1\n" + run.encode() + b"\n" + body

    def verify(self, run: str, identity: Ed25519PublicKey) -> None:
        """Raises `AdvertisementError` unless `identity` signed this advertisement for `run`."""
        try:
            identity.verify(self.signature, self.signed(run))
        except InvalidSignature as error:
            text = f"the advertisement of node {self.node.hex()} is not signed by its identity."
            raise AdvertisementError(text) from error


@dataclass(frozen=True)
class KeyPairs:
    """An advertisement with its private halves."""

    advertisement: Advertisement
    mask: X25519PrivateKey
    seal: X25519PrivateKey

    SIZE: ClassVar[int] = Advertisement.SIZE + 64

    def to_bytes(self) -> bytes:
        """224 bytes, the private halves among them."""
        return self.advertisement.to_bytes() + self.mask.private_bytes_raw() + self.seal.private_bytes_raw()

    @classmethod
    def from_bytes(cls, data: bytes) -> KeyPairs:
        """The inverse of `to_bytes`. Raises `AdvertisementError`."""
        if len(data) != cls.SIZE:
            raise AdvertisementError(f"an advertisement with its keys has {cls.SIZE} bytes, this has {len(data)}.")
        at = Advertisement.SIZE
        mask, seal = (X25519PrivateKey.from_private_bytes(data[i : i + 32]) for i in (at, at + 32))
        return cls(Advertisement.from_bytes(data[:at]), mask, seal)

    @classmethod
    def make(cls, node: bytes, run: str, identity: Ed25519PrivateKey | None) -> KeyPairs:
        """Fresh keys; unsigned if the node has no identity."""
        mask, seal = X25519PrivateKey.generate(), X25519PrivateKey.generate()
        bare = Advertisement(
            node, os.urandom(16), mask.public_key().public_bytes_raw(), seal.public_key().public_bytes_raw(), bytes(64)
        )
        if identity is None:
            return cls(bare, mask, seal)
        signature = identity.sign(bare.signed(run))
        return cls(Advertisement(bare.node, bare.serial, bare.mask_key, bare.seal_key, signature), mask, seal)


class Keyring:
    """A node's outstanding advertisements in one run: one that was used can never be used again. In memory only,
    unless whoever holds it writes down `to_bytes`."""

    _MOST = 4

    def __init__(self, node: bytes, run: str, identity: Ed25519PrivateKey | None) -> None:
        self._node = node
        self._run = run
        self._identity = identity
        self._outstanding: dict[bytes, KeyPairs] = {}

    def advertise(self) -> Advertisement:
        """A fresh advertisement. Of those that the server never used, the oldest are forgotten."""
        made = KeyPairs.make(self._node, self._run, self._identity)
        self._outstanding[made.advertisement.serial] = made
        while len(self._outstanding) > self._MOST:
            self._outstanding.pop(next(iter(self._outstanding)))
        return made.advertisement

    def take(self, advertisement: Advertisement) -> KeyPairs | None:
        """The keys behind one of this node's advertisements, once; None if there are none."""
        found = self._outstanding.pop(advertisement.serial, None)
        return found if found is not None and found.advertisement == advertisement else None

    def put(self, keys: KeyPairs) -> None:
        """Keys that an earlier process of this node made and did not use."""
        self._outstanding[keys.advertisement.serial] = keys

    def to_bytes(self) -> bytes:
        """All outstanding keys, private halves included: for the node's own memory, never for the wire."""
        return b"".join(keys.to_bytes() for keys in self._outstanding.values())

    @classmethod
    def from_bytes(cls, node: bytes, run: str, identity: Ed25519PrivateKey | None, data: bytes) -> Keyring:
        """The inverse. Raises `AdvertisementError`."""
        ring = cls(node, run, identity)
        for at in range(0, len(data), KeyPairs.SIZE):
            ring.put(KeyPairs.from_bytes(data[at : at + KeyPairs.SIZE]))
        return ring


def mask_key(own: X25519PrivateKey, other: bytes, context: bytes, pair: tuple[int, int]) -> bytes:
    """The key of the mask between the nodes with indices `pair` (the lower first), bound to the round's context."""
    low, high = pair
    info = b"fedward secagg mask" + low.to_bytes(2) + high.to_bytes(2)
    return _derive(_exchange(own, other), context, info, KEY_BYTES)


def self_mask_key(seed: bytes, context: bytes) -> bytes:
    """The key of the mask that a node adds by itself, from its 32-byte seed."""
    return _derive(seed, context, b"fedward secagg self", KEY_BYTES)


def spare_key(seed: bytes, context: bytes) -> bytes:
    """The key of the stream that a node's spare part is drawn from (`secagg.spare`), from its 32-byte seed."""
    return _derive(seed, context, b"fedward secagg spare", KEY_BYTES)


class SealKey:
    """Seals what two nodes say to each other in one round, one message each way."""

    def __init__(self, own: X25519PrivateKey, other: bytes, context: bytes) -> None:
        self._secret = _exchange(own, other)
        self._context = context

    def seal(self, plain: bytes, sender: int, receiver: int, told: bytes = b"") -> bytes:
        """`plain` encrypted, 16 bytes longer. Indices say which way it goes. told: what the receiver is told in the
        open; it is sealed with it."""
        key, data = self._key(sender, receiver)
        return AESGCM(key).encrypt(_NONCE, plain, data + told)

    def open(self, sealed: bytes, sender: int, receiver: int, told: bytes = b"") -> bytes:
        """The inverse of `seal`. Raises `AdvertisementError`."""
        key, data = self._key(sender, receiver)
        try:
            return AESGCM(key).decrypt(_NONCE, sealed, data + told)
        except InvalidTag as error:
            raise AdvertisementError(f"what node {sender} sealed for node {receiver} does not open.") from error

    def _key(self, sender: int, receiver: int) -> tuple[bytes, bytes]:
        way = sender.to_bytes(2) + receiver.to_bytes(2)
        return _derive(self._secret, self._context, b"fedward secagg seal" + way, _SEAL_KEY), self._context + way


def _exchange(own: X25519PrivateKey, other: bytes) -> bytes:
    try:
        return own.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError as error:  # a point of low order: every exchange with it gives zero
        raise AdvertisementError("a public key is of low order.") from error


def _derive(secret: bytes, context: bytes, info: bytes, length: int) -> bytes:
    """HKDF-SHA256 (RFC 5869) with `context` as salt, for at most 32 bytes: two HMACs, without the objects that the
    library makes for it, which take three times as long."""
    return hmac.digest(hmac.digest(context, secret, "sha256"), info + b"\x01", "sha256")[:length]
