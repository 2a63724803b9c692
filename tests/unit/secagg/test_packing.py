"""Words of b bits: their place in the bytes, long sums, and refusals."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from fedward_common.secagg import packing
from fedward_common.secagg.packing import PackedSum, PackingError, pack, packed_size, unpack

ALL_BITS = range(12, 33, 4)
PART = packing._PART


def random(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, length, np.uint32)


@pytest.mark.parametrize(
    ("bits", "size"),
    [(12, 1_500_000), (16, 2_000_000), (20, 2_500_000), (24, 3_000_000), (28, 3_500_000), (32, 4_000_000)],
)
def test_a_million_words(bits, size):
    assert packed_size(1_000_000, bits) == size


@pytest.mark.parametrize("bits", ALL_BITS)
def test_the_size_is_that_of_the_bits(bits):
    for length in range(50):
        assert packed_size(length, bits) == -(-length * bits // 8) == len(pack(random(length), bits))


def test_the_layout_on_the_wire():
    """Three words by hand: the widest plane first, with the top bits; halves of a byte lowest first."""
    words = np.array([0xA1234567, 0xB89ABCDE, 0xCF012345], np.uint32)
    assert pack(words, 12).tobytes().hex(" ") == "56 cd 34 e7 05"
    assert pack(words, 16).tobytes().hex(" ") == "67 45 de bc 45 23"
    assert pack(words, 20).tobytes().hex(" ") == "56 34 cd ab 34 12 e7 05"
    assert pack(words, 24).tobytes().hex(" ") == "45 23 bc 9a 23 01 67 de 45"
    assert pack(words, 28).tobytes().hex(" ") == "34 12 ab 89 12 f0 56 cd 34 e7 05"
    assert pack(words, 32).tobytes().hex(" ") == "67 45 23 a1 de bc 9a b8 45 23 01 cf"


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("length", [PART - 1, PART, PART + 1, 4 * PART + 3])
def test_vectors_of_several_parts(bits, length):
    vectors = [random(length, seed) for seed in range(3)]
    packed = [pack(words, bits) for words in vectors]
    mask = np.uint32(2**bits - 1)
    for words, p in zip(vectors, packed, strict=True):
        assert np.array_equal(unpack(p, length, bits), words & mask)
    total = PackedSum(length, bits)
    for p in packed:
        total.add(p)
    assert np.array_equal(total.total(), (vectors[0] + vectors[1] + vectors[2]) & mask)


@pytest.mark.parametrize("bits", ALL_BITS)
def test_a_long_sum_of_the_largest_words_never_overflows(bits):
    """Well past every lane's capacity (17 and 257 vectors)."""
    length, count = 5, 9000
    words = np.full(length, 2**bits - 1, np.uint32)
    words[2] = 0x5A5A5A5A & (2**bits - 1)
    packed = pack(words, bits)
    total = PackedSum(length, bits)
    for done in range(1, count + 1):
        total.add(packed)
        if done in (1, 16, 17, 18, 19, 33, 34, 256, 257, 258, 513, 514, 515, 4369, 4370, count):
            assert total.total().tolist() == [done * int(word) % 2**bits for word in words], done
    assert total.count == count


def test_a_total_can_be_read_between_two_vectors():
    total = PackedSum(3, 20)
    assert total.total().tolist() == [0, 0, 0] and total.count == 0
    total.add(pack(np.array([1, 2, 3], np.uint32), 20))
    assert total.total().tolist() == [1, 2, 3]
    total.add(pack(np.array([10, 20, 2**20 - 1], np.uint32), 20))
    assert total.total().tolist() == [11, 22, 2]


@pytest.mark.parametrize("bits", ALL_BITS)
def test_bytes_may_begin_anywhere_in_a_message(bits):
    words = random(1001)
    message = np.frombuffer(b"!" + pack(words, bits).tobytes() + b"!", np.uint8)[1:-1]
    total = PackedSum(1001, bits)
    total.add(message)
    assert np.array_equal(total.total(), words & np.uint32(2**bits - 1))
    assert np.array_equal(unpack(message, 1001, bits), total.total())


@pytest.mark.parametrize("bits", [12, 20, 28])
def test_the_spare_half_of_the_last_byte_is_ignored(bits):
    packed = pack(np.arange(7, dtype=np.uint32), bits)
    packed[-1] |= 0xF0
    total = PackedSum(7, bits)
    for _ in range(40):
        total.add(packed)
    assert unpack(packed, 7, bits).tolist() == list(range(7))
    assert total.total().tolist() == [40 * word for word in range(7)]


@pytest.mark.parametrize(("bits", "share"), [(20, 3 / 4), (24, 1), (28, 5 / 4)])
def test_memory_is_about_that_of_the_words(bits, share):
    """Sums that carry in every plane."""
    length = 1 << 20
    packed = pack(random(length), bits)
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
