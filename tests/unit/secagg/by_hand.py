"""Cells in Python's integers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def cells_by_hand(words: np.ndarray, bits: int) -> list[int]:
    """Every cell as one number, below 2^64."""
    m = 64 // bits
    count = -(-len(words) // m)
    padded = [*map(int, words), *[0] * (m * count - len(words))]
    return [sum(padded[i + j * count] << (j * bits) for j in range(m)) % 2**64 for i in range(count)]


def words_by_hand(cells: Sequence[int], length: int, bits: int) -> list[int]:
    """The words of those cells."""
    m = 64 // bits
    return [(cells[i] >> (j * bits)) % 2**bits for j in range(m) for i in range(len(cells))][:length]


def summed_by_hand(cohort: Sequence[np.ndarray], bits: int) -> list[int]:
    """The words of the sum of the cohort's cells."""
    cells = [sum(column) % 2**64 for column in zip(*(cells_by_hand(words, bits) for words in cohort), strict=True)]
    return words_by_hand(cells, len(cohort[0]), bits)
