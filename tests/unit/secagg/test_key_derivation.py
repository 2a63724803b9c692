"""Keys of a round against another library."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from fedward_common.secagg.keys import AdvertisementError, SealKey, mask_key, self_mask_key

CONTEXT = bytes(range(32))


def hkdf(secret: bytes, info: bytes, length: int) -> bytes:
    return HKDF(SHA256(), length, salt=CONTEXT, info=info).derive(secret)


def pair() -> tuple[X25519PrivateKey, bytes, X25519PrivateKey, bytes]:
    one, other = X25519PrivateKey.generate(), X25519PrivateKey.generate()
    return one, one.public_key().public_bytes_raw(), other, other.public_key().public_bytes_raw()


def test_both_ends_of_an_edge_derive_the_same_mask_key_by_hkdf():
    one, one_public, other, other_public = pair()
    key = mask_key(one, other_public, CONTEXT, (3, 300))
    assert key == mask_key(other, one_public, CONTEXT, (3, 300))
    secret = one.exchange(other.public_key())
    assert key == hkdf(secret, b"fedward secagg mask" + (3).to_bytes(2) + (300).to_bytes(2), 32)


def test_a_self_masks_key_is_derived_from_its_seed_by_hkdf():
    assert self_mask_key(b"s" * 32, CONTEXT) == hkdf(b"s" * 32, b"fedward secagg self", 32)


def test_another_round_or_pair_gives_another_key():
    one, _, _, other_public = pair()
    keys = {
        mask_key(one, other_public, context, pair)
        for context in (CONTEXT, CONTEXT[::-1])
        for pair in ((1, 2), (1, 3), (2, 3), (258, 3))
    }
    assert len(keys) == 8


def test_what_is_sealed_opens_with_the_key_by_hkdf():
    one, one_public, other, other_public = pair()
    sealed = SealKey(one, other_public, CONTEXT).seal(b"shares", 7, 8)
    assert SealKey(other, one_public, CONTEXT).open(sealed, 7, 8) == b"shares"
    way = (7).to_bytes(2) + (8).to_bytes(2)
    key = hkdf(one.exchange(other.public_key()), b"fedward secagg seal" + way, 16)
    assert AESGCM(key).decrypt(bytes(12), sealed, CONTEXT + way) == b"shares"


def test_what_is_sealed_for_one_way_does_not_open_the_other():
    one, one_public, other, other_public = pair()
    sealed = SealKey(one, other_public, CONTEXT).seal(b"shares", 7, 8)
    for sender, receiver in ((8, 7), (7, 9)):
        with pytest.raises(AdvertisementError, match="does not open"):
            SealKey(other, one_public, CONTEXT).open(sealed, sender, receiver)
    with pytest.raises(AdvertisementError, match="does not open"):
        SealKey(other, one_public, CONTEXT[::-1]).open(sealed, 7, 8)


@pytest.mark.parametrize("point", [bytes(32), (1).to_bytes(32, "little")])
def test_a_key_of_low_order_is_refused(point):
    with pytest.raises(AdvertisementError, match="low order"):
        mask_key(X25519PrivateKey.generate(), point, CONTEXT, (1, 2))
