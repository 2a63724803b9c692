"""The wire form of what goes between a node and the server in a secure round: short, fixed binary layouts.

Nodes are named by index, 1 … n, their place in the round's sorted advertisements.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedward_common.errors import FedwardError
from fedward_common.secagg.graph import Parameters
from fedward_common.secagg.keys import Advertisement

SHARE = 33
COMMITMENT = 16
DIGEST = 16
SEALED = 2 * SHARE + DIGEST + 16
"""Two shares and the digest of the dealer's mask partners, sealed."""
SIGNATURE = 64


class MessageError(FedwardError):
    """Bytes that are no message of the protocol."""


def members_to_bytes(members: Iterable[int], n: int) -> bytes:
    """A set of indices as a bitmap of ⌈n/8⌉ bytes."""
    bits = np.zeros(n, dtype=np.uint8)
    for member in members:
        bits[member - 1] = 1
    return np.packbits(bits).tobytes()


def members_from_bytes(data: bytes, n: int) -> frozenset[int]:
    """The inverse of `members_to_bytes`; refuses every other spelling. Raises `MessageError`."""
    if len(data) != (n + 7) // 8:
        raise MessageError(f"a set of {n} nodes has {(n + 7) // 8} bytes, this has {len(data)}.")
    bits = np.unpackbits(np.frombuffer(data, dtype=np.uint8))
    if bits[n:].any():
        raise MessageError("a set of nodes names more nodes than there are.")
    return frozenset(int(i) + 1 for i in np.flatnonzero(bits))


def indices_to_bytes(indices: Sequence[int]) -> bytes:
    """Indices in order, two bytes each."""
    return struct.pack(f"<{len(indices)}H", *indices)


def indices_from_bytes(data: bytes) -> tuple[int, ...]:
    """The inverse of `indices_to_bytes`. Raises `MessageError`."""
    if len(data) % 2:
        raise MessageError(f"{len(data)} bytes are no whole number of indices.")
    return struct.unpack(f"<{len(data) // 2}H", data)


def advertisements_to_bytes(advertisements: Iterable[Advertisement]) -> bytes:
    """All of them, one after another."""
    return b"".join(advertisement.to_bytes() for advertisement in advertisements)


def advertisements_from_bytes(data: bytes) -> tuple[Advertisement, ...]:
    """The inverse. Raises `MessageError`."""
    size = Advertisement.SIZE
    if len(data) % size:
        raise MessageError(f"{len(data)} bytes are no whole number of advertisements.")
    return tuple(Advertisement.from_bytes(data[at : at + size]) for at in range(0, len(data), size))


@dataclass(frozen=True)
class Dealt:
    """What a node deals. sealed: holder -> sealed shares, in the order drawn (the first are its mask partners).

    commitments: holder -> commitments to its two shares (seed, mask key); the dealer itself too, if it holds shares
    of its own. seed_commitment: to the self-mask's seed.
    """

    sealed: Mapping[int, bytes]
    commitments: Mapping[int, tuple[bytes, bytes]]
    seed_commitment: bytes

    def to_bytes(self) -> bytes:
        """Count, then holders with sealed shares, then commitments, then the seed's."""
        parts = [struct.pack("<HH", len(self.sealed), len(self.commitments))]
        parts += [struct.pack("<H", holder) + sealed for holder, sealed in self.sealed.items()]
        parts += [struct.pack("<H", holder) + a + b for holder, (a, b) in self.commitments.items()]
        return b"".join((*parts, self.seed_commitment))

    @classmethod
    def from_bytes(cls, data: bytes) -> Dealt:
        """The inverse of `to_bytes`. Raises `MessageError`."""
        if len(data) < 4:
            raise MessageError("no dealt shares.")
        sealed_count, commitment_count = struct.unpack_from("<HH", data)
        cut = 4 + sealed_count * (2 + SEALED)
        end = cut + commitment_count * (2 + 2 * COMMITMENT)
        sealed = entries_from_bytes(data[4:cut], SEALED)
        both = entries_from_bytes(data[cut:end], 2 * COMMITMENT)
        if len(data) != end + COMMITMENT or len(sealed) != sealed_count or len(both) != commitment_count:
            raise MessageError("dealt shares have another length than they say.")
        return cls(
            sealed, {holder: (pair[:COMMITMENT], pair[COMMITMENT:]) for holder, pair in both.items()}, data[end:]
        )


def entries_to_bytes(entries: Mapping[int, bytes]) -> bytes:
    """Index and bytes of each entry."""
    return b"".join(struct.pack("<H", index) + entry for index, entry in entries.items())


def entries_from_bytes(data: bytes, size: int) -> dict[int, bytes]:
    """The inverse, for entries of `size` bytes; an index may stand there once. Raises `MessageError`."""
    step = 2 + size
    if len(data) % step:
        raise MessageError(f"{len(data)} bytes are no whole number of entries of {step}.")
    found: dict[int, bytes] = {}
    for at in range(0, len(data), step):
        (index,) = struct.unpack_from("<H", data, at)
        if index in found:
            raise MessageError(f"node {index} stands twice in a message.")
        found[index] = data[at + 2 : at + step]
    return found


@dataclass(frozen=True)
class Delivery:
    """What a node needs to mask. sharers: who dealt shares. sealed: dealer -> what it sealed for this node, and behind
    it, unless the graph is complete, the mask partners that it drew (`indices_to_bytes`)."""

    sharers: bytes
    sealed: Mapping[int, bytes]


def delivered_size(parameters: Parameters) -> int:
    """Bytes of an entry of `Delivery.sealed`."""
    return SEALED if parameters.complete else SEALED + 2 * parameters.partners


@dataclass(frozen=True)
class Unmasking:
    """The server's last request. survivors, dropped: bitmaps. signatures: survivor -> its signature of the set."""

    survivors: bytes
    dropped: bytes
    signatures: Mapping[int, bytes]


def joined(parts: Sequence[bytes]) -> bytes:
    """Length-prefixed parts: no two lists of parts give the same bytes."""
    return b"".join(len(part).to_bytes(8) + part for part in parts)
