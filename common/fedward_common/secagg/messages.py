"""The wire form of what goes between a node and the server in a secure round: short, fixed binary layouts.

Nodes are named by index, 1 … n, their place in the round's sorted advertisements.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedward_common.errors import FedwardError
from fedward_common.secagg.graph import Parameters
from fedward_common.secagg.keys import Advertisement

SHARE = 33
COMMITMENT = 16
SECRETS = 2
"""That a node shares: the seed of its self-mask, its mask key. With a spare part (`secagg.spare`), a third."""
SIGNATURE = 64


def sealed_size(secrets: int) -> int:
    """Bytes of a share of each secret, sealed."""
    return secrets * SHARE + 16


SEALED = sealed_size(SECRETS)


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

    commitments: holder -> commitments to its shares (seed, mask key, seed of the spare part if there is one); the
    dealer itself too, if it holds shares of its own. seed_commitment: to the self-mask's seed. spare_commitment: to
    the spare part's, b"" without one.
    """

    sealed: Mapping[int, bytes]
    commitments: Mapping[int, tuple[bytes, ...]]
    seed_commitment: bytes
    spare_commitment: bytes = b""

    def to_bytes(self) -> bytes:
        """Count, then holders with sealed shares, then commitments, then the seeds'."""
        parts = [struct.pack("<HH", len(self.sealed), len(self.commitments))]
        parts += [struct.pack("<H", holder) + sealed for holder, sealed in self.sealed.items()]
        parts += [struct.pack("<H", holder) + b"".join(each) for holder, each in self.commitments.items()]
        return b"".join((*parts, self.seed_commitment, self.spare_commitment))

    @classmethod
    def from_bytes(cls, data: bytes, secrets: int = SECRETS) -> Dealt:
        """The inverse of `to_bytes`, of a node that shares so many secrets. Raises `MessageError`."""
        if len(data) < 4:
            raise MessageError("no dealt shares.")
        sealed_count, commitment_count = struct.unpack_from("<HH", data)
        size = sealed_size(secrets)
        cut = 4 + sealed_count * (2 + size)
        end = cut + commitment_count * (2 + secrets * COMMITMENT)
        sealed = entries_from_bytes(data[4:cut], size)
        each = entries_from_bytes(data[cut:end], secrets * COMMITMENT)
        # The mask key's own commitment is its public half.
        length = end + (secrets - 1) * COMMITMENT
        if len(data) != length or len(sealed) != sealed_count or len(each) != commitment_count:
            raise MessageError("dealt shares have another length than they say.")
        return cls(
            sealed,
            {holder: pieces(all_of_them, COMMITMENT) for holder, all_of_them in each.items()},
            *pieces(data[end:], COMMITMENT),
        )


def entries_to_bytes(entries: Mapping[int, bytes]) -> bytes:
    """Index and bytes of each entry."""
    return b"".join(struct.pack("<H", index) + entry for index, entry in entries.items())


def entries_from_bytes(data: bytes, size: int) -> dict[int, bytes]:
    """The inverse, for entries of `size` bytes; an index may stand there once. Raises `MessageError`."""
    step = 2 + size
    if len(data) % step:
        raise MessageError(f"{len(data)} bytes are no whole number of entries of {step}.")
    entries = list(struct.iter_unpack(f"<H{size}s", data))
    found: dict[int, bytes] = dict(entries)
    if len(found) != len(entries):
        ((index, _),) = Counter(index for index, _ in entries).most_common(1)
        raise MessageError(f"node {index} stands twice in a message.")
    return found


def revealed_from_bytes(data: bytes, due: Callable[[int], int]) -> dict[int, bytes]:
    """Entries of as many shares as `due` says for their index. Raises `MessageError`."""
    found: dict[int, bytes] = {}
    at = 0
    while at < len(data):
        if len(data) < at + 2:
            raise MessageError("revealed shares end within an entry.")
        (index,) = struct.unpack_from("<H", data, at)
        end = at + 2 + due(index) * SHARE
        if index in found:
            raise MessageError(f"node {index} stands twice in a message.")
        if len(data) < end:
            raise MessageError("revealed shares end within an entry.")
        found[index] = data[at + 2 : end]
        at = end
    return found


def pieces(data: bytes, size: int) -> tuple[bytes, ...]:
    """`data` in pieces of `size` bytes."""
    if len(data) == 2 * size:  # nearly always, and many times a round
        return data[:size], data[size:]
    return tuple(data[at : at + size] for at in range(0, len(data), size))


@dataclass(frozen=True)
class Delivery:
    """What a node needs to mask. sharers: who dealt shares. sealed: dealer -> what it sealed for this node, and behind
    it, unless the graph is complete, the mask partners that it drew (`indices_to_bytes`)."""

    sharers: bytes
    sealed: Mapping[int, bytes]


def delivered_size(parameters: Parameters, secrets: int = SECRETS) -> int:
    """Bytes of an entry of `Delivery.sealed`."""
    return sealed_size(secrets) if parameters.complete else sealed_size(secrets) + 2 * parameters.partners


@dataclass(frozen=True)
class Unmasking:
    """The server's last request. survivors, dropped: bitmaps. signatures: survivor -> its signature of the set."""

    survivors: bytes
    dropped: bytes
    signatures: Mapping[int, bytes]


def joined(parts: Sequence[bytes]) -> bytes:
    """Length-prefixed parts: no two lists of parts give the same bytes."""
    return b"".join(len(part).to_bytes(8) + part for part in parts)
