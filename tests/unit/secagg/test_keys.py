"""Where keys come from and how long they are: 128 bits at least, of a cryptographic source, none twice."""

from __future__ import annotations

import os
from collections import Counter

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from fedward_common.secagg import client, keys, masks
from fedward_common.secagg.keys import KeyPairs, Keyring, SealKey, mask_key, self_mask_key

from .cohort import RUN, Cohort

LEAST = 16
"""Bytes of a key."""


def pair_of(made: KeyPairs) -> tuple[bytes, bytes]:
    return made.mask.private_bytes_raw(), made.seal.private_bytes_raw()


def test_key_pairs_are_fresh_each_time() -> None:
    made = [KeyPairs.make(bytes(16), RUN, None) for _ in range(300)]
    secret = [key for one in made for key in pair_of(one)]
    public = [key for one in made for key in (one.advertisement.mask_key, one.advertisement.seal_key)]
    assert len(set(secret)) == len(set(public)) == 600
    assert len({one.advertisement.serial for one in made}) == 300
    assert {len(key) for key in (*secret, *public)} == {32}


def test_an_advertisement_is_used_once() -> None:
    keyring = Keyring(bytes(16), RUN, Ed25519PrivateKey.generate())
    shown = [keyring.advertise() for _ in range(6)]
    assert [keyring.take(one) is not None for one in shown] == [False, False, True, True, True, True]
    assert all(keyring.take(one) is None for one in shown)


def test_seeds_and_pairs_come_from_the_systems_randomness(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[bytes] = []
    generated: list[X25519PrivateKey] = []

    class Source:
        @staticmethod
        def urandom(size: int) -> bytes:
            drawn.append(os.urandom(size))
            return drawn[-1]

    class Generator:
        @staticmethod
        def generate() -> X25519PrivateKey:
            generated.append(X25519PrivateKey.generate())
            return generated[-1]

    for module in (client, keys, masks):
        monkeypatch.setattr(module, "os", Source)
    monkeypatch.setattr(keys, "X25519PrivateKey", Generator)
    cohort = Cohort(5)
    clients = [cohort.client(i) for i in range(1, 6)]
    assert all(one._keys and {one._keys.mask, one._keys.seal} <= set(generated) for one in clients)
    assert len(generated) == 10
    seeds = [one._seed for one in clients]
    assert set(seeds) <= set(drawn) and len(set(seeds)) == 5
    assert {len(seed) for seed in seeds} == {32}
    masks.Keystream()
    assert len(drawn[-1]) == 32


def test_every_key_of_a_round_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of masks, self-masks and seals, over two rounds; both ends of a pair come to the same one."""
    used: list[tuple[str, bytes]] = []

    def recorded(kind: str, function: object) -> object:
        def derive(*arguments: object) -> bytes:
            used.append((kind, function(*arguments)))  # type: ignore[operator]
            return used[-1][1]

        return derive

    def cipher(key: bytes) -> AESGCM:
        used.append(("seal", key))
        return AESGCM(key)

    monkeypatch.setattr(client, "mask_key", recorded("mask", mask_key))
    monkeypatch.setattr(client, "self_mask_key", recorded("self", self_mask_key))
    monkeypatch.setattr(keys, "AESGCM", cipher)
    n, rounds = 6, 2
    cohort = Cohort(n)
    for round_ in range(rounds):
        terms = cohort.new_terms(round_ + 1)
        clients = {i: cohort.client(i, terms) for i in range(1, n + 1)}
        server = cohort.server(terms)
        for i, one in clients.items():
            server.deal(i, one.deal())
        for i, delivery in server.close_dealing().items():
            clients[i].mask(delivery, cohort.sites[i - 1].words.copy())
    times = Counter(used)
    # Two ends derive a mask's key; a seal's is used by who seals and by who opens.
    assert Counter(kind for kind, _ in times) == {
        "mask": rounds * n * (n - 1) // 2, "self": rounds * n, "seal": rounds * n * (n - 1),
    }  # fmt: skip
    assert {(kind, count) for (kind, _), count in times.items()} == {("mask", 2), ("self", 1), ("seal", 2)}
    assert len({key for _, key in used}) == len(times)
    assert {(kind, len(key)) for kind, key in used} == {("mask", 32), ("self", 32), ("seal", LEAST)}


def test_derived_keys_have_no_bit_that_is_known() -> None:
    """256 bits of 2000 keys: each bit is one in half of them, within six standard deviations."""
    own, other = X25519PrivateKey.generate(), X25519PrivateKey.generate().public_key().public_bytes_raw()
    found = [mask_key(own, other, os.urandom(32), (1, 2)) for _ in range(2000)]
    ones = np.unpackbits(np.array([np.frombuffer(key, np.uint8) for key in found]), axis=1).sum(axis=0, dtype=np.int64)
    assert np.abs(ones - 1000).max() < 6 * np.sqrt(2000) / 2


def test_a_seal_is_bound_to_its_round_and_its_way() -> None:
    one, two = X25519PrivateKey.generate(), X25519PrivateKey.generate()
    ends = [(one, two.public_key().public_bytes_raw()), (two, one.public_key().public_bytes_raw())]
    sealed = SealKey(*ends[0], b"round").seal(b"a share", 1, 2)
    assert SealKey(*ends[1], b"round").open(sealed, 1, 2) == b"a share"
    for context, sender, receiver in ((b"other", 1, 2), (b"round", 2, 1), (b"round", 1, 3)):
        with pytest.raises(keys.AdvertisementError, match="does not open"):
            SealKey(*ends[1], context).open(sealed, sender, receiver)
