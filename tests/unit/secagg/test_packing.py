"""Words of b bits: their place in the bytes, long sums, and refusals."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from fedward_common.secagg import packing
from fedward_common.secagg.cells import words_a_cell
from fedward_common.secagg.packing import PackedSum, PackingError, pack, packed_size, unpack

from .by_hand import cells_by_hand, summed_by_hand, words_by_hand

ALL_BITS = range(12, 33, 4)
PART = packing._PART


def random(length: int, bits: int = 32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**bits, length, np.uint32)


@pytest.mark.parametrize(
    ("bits", "size"),
    [(12, 1_500_000), (16, 2_000_000), (20, 2_500_005), (24, 3_000_000), (28, 3_500_000), (32, 4_000_000)],
)
def test_a_million_words(bits, size):
    assert packed_size(1_000_000, bits) == size


@pytest.mark.parametrize("bits", ALL_BITS)
def test_the_size_is_that_of_the_cells_bits(bits):
    m = words_a_cell(bits)
    for length in range(50):
        cells = (length + m - 1) // m
        size = (cells * m * bits + 7) // 8
        assert packed_size(length, bits) == size == len(pack(random(length, bits), bits))


def test_the_layout_on_the_wire():
    """Three cells by hand: the widest plane first, with the top bits; halves of a byte lowest first."""
    shorts = np.array([0xA12, 0xB34, 0xC56, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], np.uint32)
    # The cells are 00a 007 004 001 a12, 00b 008 005 002 b34, 00c 009 006 003 c56.
    assert pack(shorts, 12).tobytes().hex(" ") == (
        "00 07 a0 00 00 08 b0 00 00 09 c0 00 01 40 02 50 03 60 a1 b3 c5 42 06"
    )
    shorts = np.array([0xA12, 0xB34, 0xC56, 1, 2, 3, 4, 5, 6, 7, 8, 9], np.uint32)
    assert pack(shorts, 16).tobytes().hex(" ") == (
        "12 0a 01 00 04 00 07 00 34 0b 02 00 05 00 08 00 56 0c 03 00 06 00 09 00"
    )
    # The cells are 00007 00004 a1234, 00008 00005 b5678, 00009 00006 c9abc: 32 bits of each, then 16, 8 and 4.
    words = np.array([0xA1234, 0xB5678, 0xC9ABC, 4, 5, 6, 7, 8, 9], np.uint32)
    assert pack(words, 20).tobytes().hex(" ") == (
        "00 70 00 00 00 80 00 00 00 90 00 00 a1 04 b5 05 c9 06 23 67 ab 84 0c"
    )
    words = np.array([0xA12345, 0xB6789A, 0xCBCDEF, 1, 2, 3], np.uint32)
    assert pack(words, 24).tobytes().hex(" ") == "a1 01 00 00 b6 02 00 00 cb 03 00 00 45 23 9a 78 ef cd"
    words = np.array([0xA123456, 0xB789ABC, 0xCDEF012, 1, 2, 3], np.uint32)
    assert pack(words, 28).tobytes().hex(" ") == "1a 00 00 00 2b 00 00 00 3c 00 00 00 34 12 9a 78 f0 de 56 bc 12"
    words = np.array([0xA1234567, 0xB89ABCDE, 0xCF012345, 1, 2, 3], np.uint32)
    assert pack(words, 32).tobytes().hex(" ") == (
        "67 45 23 a1 01 00 00 00 de bc 9a b8 02 00 00 00 45 23 01 cf 03 00 00 00"
    )


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("length", [PART - 1, PART, PART + 1, 4 * PART + 3])
def test_vectors_of_several_parts(bits, length):
    vectors = [random(length, bits, seed) for seed in range(3)]
    packed = [pack(words, bits) for words in vectors]
    for words, p in zip(vectors, packed, strict=True):
        assert np.array_equal(unpack(p, length, bits), words)
    total = PackedSum(length, bits)
    for p in packed:
        total.add(p)
    assert total.total().tolist() == summed_by_hand(vectors, bits)


@pytest.mark.parametrize("bits", ALL_BITS)
def test_a_long_sum_of_the_largest_words_loses_no_carry(bits):
    """Well past the capacity of every plane's lanes but one (17 and 257 vectors)."""
    length, count = 7, 9000
    words = np.full(length, 2**bits - 1, np.uint32)
    words[2] = 0x5A5A5A5A & (2**bits - 1)
    packed = pack(words, bits)
    total = PackedSum(length, bits)
    for done in range(1, count + 1):
        total.add(packed)
        if done in (1, 16, 17, 18, 19, 33, 34, 256, 257, 258, 513, 514, 515, 4369, 4370, count):
            cells = [done * cell % 2**64 for cell in cells_by_hand(words, bits)]
            assert total.total().tolist() == words_by_hand(cells, length, bits), done
    assert total.count == count


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("length", [1, 7, 16])
def test_carrying_changes_no_sum(bits, length):
    """Lanes of 16 bits are full after 65 537 vectors only."""
    vectors = [random(length, bits, seed) for seed in range(40)]
    total = PackedSum(length, bits)
    for place, words in enumerate(vectors, 1):
        total.add(pack(words, bits))
        for plane in range(len(total._lanes)):
            total._carry(plane)
        assert total.total().tolist() == summed_by_hand(vectors[:place], bits)


def test_a_total_can_be_read_between_two_vectors():
    total = PackedSum(3, 20)
    assert total.total().tolist() == [0, 0, 0] and total.count == 0
    total.add(pack(np.array([1, 2, 3], np.uint32), 20))
    assert total.total().tolist() == [1, 2, 3]
    total.add(pack(np.array([10, 2**20 - 1, 2**20 - 2], np.uint32), 20))
    assert total.total().tolist() == [11, 1, 2]  # 3 - 2, and a carry from the word before


@pytest.mark.parametrize("bits", ALL_BITS)
def test_bytes_may_begin_anywhere_in_a_message(bits):
    words = random(1001, bits)
    message = np.frombuffer(b"!" + pack(words, bits).tobytes() + b"!", np.uint8)[1:-1]
    total = PackedSum(1001, bits)
    total.add(message)
    assert np.array_equal(total.total(), words)
    assert np.array_equal(unpack(message, 1001, bits), total.total())


@pytest.mark.parametrize(("bits", "length"), [(12, 15), (20, 9)])
def test_the_spare_half_of_the_last_byte_is_ignored(bits, length):
    packed = pack(np.arange(length, dtype=np.uint32), bits)
    packed[-1] |= 0xF0
    total = PackedSum(length, bits)
    for _ in range(40):
        total.add(packed)
    assert unpack(packed, length, bits).tolist() == list(range(length))
    assert total.total().tolist() == [40 * word for word in range(length)]


@pytest.mark.parametrize(("bits", "share"), [(16, 1 / 2), (20, 11 / 12), (24, 1), (28, 5 / 4)])
def test_memory_is_about_that_of_the_words(bits, share):
    """Sums that carry in every plane."""
    length = 1 << 20
    packed = pack(random(length, bits), bits)
    tracemalloc.start()
    try:
        total = PackedSum(length, bits)
        for _ in range(260):
            total.add(packed)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held <= share * 4 * length + 2**19
    assert peak <= (share + 0.5) * 4 * length + 3_000_000


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("bits", ALL_BITS)
def test_another_length_is_refused(bits, change):
    packed = np.zeros(packed_size(7, bits) + change, np.uint8)
    total = PackedSum(7, bits)
    total.add(pack(np.arange(7, dtype=np.uint32), bits))
    for refused in (lambda: unpack(packed, 7, bits), lambda: total.add(packed)):
        with pytest.raises(PackingError, match=f"7 words of {bits} bits are {packed_size(7, bits)} contiguous bytes"):
            refused()
    assert total.total().tolist() == list(range(7)) and total.count == 1


@pytest.mark.parametrize(
    "packed",
    [np.zeros(40, np.uint8)[::2], np.zeros((2, 10), np.uint8), np.zeros(20, np.int8), np.zeros(20, np.uint32)],
    ids=["strided", "matrix", "signed", "wide"],
)
def test_other_arrays_are_refused(packed):
    with pytest.raises(PackingError, match="contiguous bytes"):
        unpack(packed, 8, 20)
    with pytest.raises(PackingError, match="contiguous bytes"):
        PackedSum(8, 20).add(packed)


@pytest.mark.parametrize("words", [np.zeros(3, np.int32), np.zeros(3, np.uint64), np.zeros((2, 2), np.uint32)])
def test_only_vectors_of_uint32_are_packed(words):
    with pytest.raises(PackingError, match="only a vector of uint32"):
        pack(words, 20)


@pytest.mark.parametrize("bits", [0, 4, 8, 13, 18, 36, 64, -4])
def test_other_widths_are_refused(bits):
    for refused in (lambda: packed_size(3, bits), lambda: pack(random(3), bits), lambda: PackedSum(3, bits)):
        with pytest.raises(PackingError, match="a multiple of 4 from 12 to 32"):
            refused()


def test_a_negative_length_is_refused():
    with pytest.raises(PackingError, match="length is -1"):
        packed_size(-1, 20)
