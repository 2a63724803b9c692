"""Keystreams against another library's AES, and what their words look like."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from Crypto.Cipher import AES
from fedward_common.secagg import masks
from fedward_common.secagg.cells import words_a_cell
from fedward_common.secagg.masks import KEY_BYTES, Keystream, MaskError, add_keystreams

from .by_hand import cells_by_hand, words_by_hand

PART = masks._PART
SIZES = [0, 1, 3, 4, 5, 1000, PART - 1, PART, PART + 1, 2 * PART + 7]
"""At 32 bits a part is this many words."""
ALL_BITS = range(12, 33, 4)


def key(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def oracle(key: bytes, count: int) -> np.ndarray:
    """The words by the textbook: one counter block after another, each encrypted on its own by another library."""
    first = int.from_bytes(key[16:], "big")
    blocks = b"".join(((first + i) % 2**128).to_bytes(16, "big") for i in range(-(-count // 4)))
    return np.frombuffer(AES.new(key[:16], AES.MODE_ECB).encrypt(blocks), "<u4")[:count]


def cells(key: bytes, count: int) -> list[int]:
    """The same as 64-bit numbers."""
    return [int(cell) for cell in oracle(key, 2 * count).view("<u8")]


def as_words(key: bytes, length: int) -> list[int]:
    """A keystream as words of 32 bits, two to a cell."""
    return words_by_hand(cells(key, -(-length // 2)), length, 32)


@pytest.mark.parametrize("size", SIZES)
def test_cells_are_aes_128_in_counter_mode(size):
    words = np.zeros(size, np.uint32)
    add_keystreams(words, 32, [key(1)], [])
    assert words.tolist() == as_words(key(1), size)


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("size", SIZES)
def test_keystreams_are_added_and_subtracted_in_place(size, bits):
    rng = np.random.default_rng(size)
    start = rng.integers(0, 1 << bits, size, np.uint32)
    words = start.copy()
    plus, minus = [key(1), key(2), key(3)], [key(4), key(5)]
    add_keystreams(words, bits, plus, minus)
    expected = cells_by_hand(start, bits)
    for sign, keys in ((1, plus), (-1, minus)):
        for k in keys:
            expected = [(a + sign * b) % 2**64 for a, b in zip(expected, cells(k, len(expected)), strict=True)]
    assert words.tolist() == words_by_hand(expected, size, bits)


def test_the_published_vector():
    """NIST SP 800-38A, F.5.1 (CTR-AES128): the keystream is plaintext xor ciphertext."""
    words = np.zeros(16, np.uint32)
    aes_key, counter = "2b7e151628aed2a6abf7158809cf4f3c", "f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff"
    add_keystreams(words, 32, [bytes.fromhex(aes_key + counter)], [])
    # Cell i holds the words i and i + 8.
    assert words.reshape(2, 8).T.tobytes().hex(" ", 16).split() == [
        "ec8cdf7398607cb0f2d21675ea9ea1e4",
        "362b7c3c6773516318a077d7fc5073ae",
        "6a2cc3787889374fbeb4c81b17ba6c44",
        "e89c399ff0f198c6d40a31db156cabfe",
    ]


@pytest.mark.parametrize("before", [1, 2, 5])
@pytest.mark.parametrize("bits", [32, 64, 128])
def test_the_counter_carries_over_its_whole_width(bits, before):
    key = bytes(range(16)) + (2**bits - before).to_bytes(16, "big")
    words = np.zeros(40, np.uint32)
    add_keystreams(words, 32, [key], [])
    assert words.tolist() == as_words(key, 40)


def test_no_keys_change_nothing():
    words = np.arange(10, dtype=np.uint32)
    add_keystreams(words, 20, [], [])
    assert words.tolist() == list(range(10))


def test_a_part_of_a_vector_can_be_masked():
    words = np.zeros(10, np.uint32)
    add_keystreams(words[2:7], 32, [key(1)], [])
    assert words[2:7].tolist() == as_words(key(1), 5)
    assert not words[:2].any() and not words[7:].any()


@pytest.mark.parametrize(
    "words",
    [
        np.zeros(10, np.uint32)[::2],
        np.zeros(10, np.uint32)[::-1],
        np.zeros((2, 5), np.uint32),
        np.zeros(10, np.int32),
        np.zeros(10, np.uint64),
        np.zeros(10, ">u4"),
        np.frombuffer(bytes(40), np.uint32),
    ],
    ids=["strided", "reversed", "matrix", "signed", "wide", "big-endian", "read-only"],
)
def test_other_words_are_refused(words):
    with pytest.raises(MaskError, match="contiguous, writable vector of uint32"):
        add_keystreams(words, 20, [key(1)], [])


@pytest.mark.parametrize("length", [0, 16, KEY_BYTES - 1, KEY_BYTES + 1])
def test_a_key_of_another_length_is_refused_before_anything_is_added(length):
    words = np.zeros(10, np.uint32)
    with pytest.raises(MaskError, match=f"has {KEY_BYTES} bytes, this has {length}"):
        add_keystreams(words, 20, [key(1)], [bytes(length)])
    assert not words.any()
    with pytest.raises(MaskError):
        Keystream(bytes(length))


def test_a_stream_goes_on_where_it_stopped():
    stream = Keystream(key(1))
    counts = [3, 0, 1, PART + 5, 8, 2 * PART, 7]
    got = np.concatenate([stream.words(count).copy() for count in counts])
    assert np.array_equal(got, oracle(key(1), sum(counts)))


def test_a_stream_keeps_its_buffer():
    stream = Keystream(key(1))
    first = stream.words(100)
    assert np.shares_memory(first, stream.words(100)) and np.shares_memory(first, stream.words(7))


def test_a_stream_without_a_key_takes_one_from_the_operating_system(monkeypatch):
    asked = []

    def urandom(count):
        asked.append(count)
        return key(7)

    monkeypatch.setattr(masks.os, "urandom", urandom)
    assert np.array_equal(Keystream().words(10), oracle(key(7), 10))
    assert asked == [KEY_BYTES]


def test_two_streams_without_a_key_differ():
    assert not np.array_equal(Keystream().words(8), Keystream().words(8))


def chi_square(words: np.ndarray) -> float:
    """Pearson's statistic of the bytes' frequencies: 255 degrees of freedom if every byte is equally likely."""
    raw = words.view(np.uint8)
    expected = len(raw) / 256
    return float(((np.bincount(raw, minlength=256) - expected) ** 2).sum() / expected)


def test_masked_words_look_uniform():
    """One 1 % test a byte position, and one over all: χ²(255) is in (184, 345) but for 2 in 10 000 (keys are fixed)."""
    words = np.full(1 << 18, 5, np.uint32)
    assert chi_square(words) > 1e6
    add_keystreams(words, 32, [key(1), key(2)], [key(3)])
    assert 184 < chi_square(words) < 345
    for position in range(4):
        assert 184 < chi_square(words.view(np.uint8)[position::4].copy()) < 345


@pytest.mark.parametrize("bits", ALL_BITS)
def test_every_bit_of_every_word_of_a_cell_is_masked(bits):
    """Each bit is a fair coin over words that were all alike: 512 of 1024 ones, within six standard deviations."""
    length = 1024 * words_a_cell(bits)
    words = np.full(length, 5, np.uint32)
    add_keystreams(words, bits, [key(1)], [key(2)])
    assert words.max() < 1 << bits
    for column in words.reshape(-1, 1024):
        for bit in range(bits):
            assert abs(int((column >> np.uint32(bit) & np.uint32(1)).sum()) - 512) < 96


def test_words_are_not_correlated_with_the_next_or_across_keys():
    first, second = Keystream(key(1)).words(1 << 16), Keystream(key(2)).words(1 << 16)
    for a, b in [(first, second), (first[:-1], first[1:])]:
        assert abs(np.corrcoef(a, b)[0, 1]) < 4 / 2**8
