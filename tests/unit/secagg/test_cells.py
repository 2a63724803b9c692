"""Words side by side in cells, by hand."""

from __future__ import annotations

import numpy as np
import pytest
from fedward_common.secagg.cells import cells_of, gather, scatter, words_a_cell

from .by_hand import cells_by_hand, words_by_hand

ALL_BITS = range(12, 33, 4)


def test_how_many_words_a_cell_holds():
    assert {bits: words_a_cell(bits) for bits in ALL_BITS} == {12: 5, 16: 4, 20: 3, 24: 2, 28: 2, 32: 2}
    assert [cells_of(length, 20) for length in (0, 1, 3, 4, 1_000_000)] == [0, 1, 1, 2, 333_334]


def test_a_cell_by_hand():
    """Five words in two cells of three: 1 and 3 and 5, 2 and 4 and none."""
    words = np.array([1, 2, 3, 4, 5], np.uint32)
    assert gather(words, 20, 0, 2).tolist() == [1 + (3 << 20) + (5 << 40), 2 + (4 << 20)]


def test_what_is_beyond_a_words_bits_is_carried_into_the_next_and_out_of_the_last():
    words = np.array([2**20 + 1, 2**21 + 2, 7 * 2**20 + 3], np.uint32)
    back = np.zeros(3, np.uint32)
    scatter(gather(words, 20, 0, 1), back, 20, 0)
    assert back.tolist() == [1, 3, 5]


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 5, 6, 7, 11, 1000])
def test_words_come_back_from_any_parts_of_their_cells(bits, length):
    words = np.random.default_rng(length).integers(0, 1 << bits, length, np.uint32)
    count = cells_of(length, bits)
    assert gather(words, bits, 0, count).tolist() == cells_by_hand(words, bits)
    for step in (1, 2, 3, max(count, 1)):
        back = np.full(length, 7, np.uint32)
        for start in range(0, count, step):
            stop = min(start + step, count)
            cells = gather(words, bits, start, stop)
            assert cells.tolist() == cells_by_hand(words, bits)[start:stop]
            scatter(cells, back, bits, start)
        assert np.array_equal(back, words)
    assert words_by_hand(cells_by_hand(words, bits), length, bits) == words.tolist()


@pytest.mark.parametrize("bits", ALL_BITS)
def test_the_sum_of_cells_holds_the_sums_of_words_that_do_not_overflow(bits):
    length, nodes = 23, 9
    rng = np.random.default_rng(0)
    cohort = [rng.integers(0, (2**bits - 1) // nodes + 1, length, np.uint32) for _ in range(nodes)]
    cohort[0][:] = cohort[1][:] = (2**bits - 1) // nodes
    total = np.zeros(length, np.uint32)
    scatter(sum(gather(words, bits, 0, cells_of(length, bits)) for words in cohort), total, bits, 0)
    assert total.tolist() == [sum(map(int, column)) for column in zip(*cohort, strict=True)]
