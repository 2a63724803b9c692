"""Words side by side: what is masked, packed and summed are cells of 64 bits that hold as many words of b bits as fit.

Each word of a sum stays below 2^b (`summand` proves it), so that no carry passes from one word of a cell to the next:
the sum of cells holds the sums of their words. A mask of as many bits as the cell's words hides all of them at once.
Keystreams are then no longer than what goes over the wire, where one of 32 bits for each word is 1.6 times as long at
20 bits.

A vector of d words of b bits is N = ⌈d/m⌉ cells of m = ⌊64/b⌋ words: cell i holds word i in its lowest b bits, above it
word i + N, then i + 2N …, and arithmetic is modulo 2^(mb). Where the last cells have places for words beyond d, these
are the cells' top ones: nothing is carried out of them, so that they may be left out anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]
Cells = npt.NDArray[np.uint64]
_Numbers = npt.NDArray[np.integer[Any]]

CELL_BITS = 64


def words_a_cell(bits: int) -> int:
    """m, for words of b = `bits` bits."""
    return CELL_BITS // bits


def cells_of(length: int, bits: int) -> int:
    """N, for `length` words of `bits` bits."""
    return -(-length // words_a_cell(bits))


def gather(words: _Numbers, bits: int, start: int, stop: int) -> Cells:
    """Cells `start` to `stop` of `words`. What a word has beyond `bits` bits is carried into the next of its cell, and
    borrowed from it for a negative one."""
    cells = np.zeros(stop - start, np.uint64)
    for shift, part in _columns(words, bits, start, stop):
        column = part.astype(np.uint64)
        column <<= shift
        cells[: len(part)] += column
    return cells


def scatter(cells: Cells, words: Words, bits: int, start: int) -> None:
    """The inverse of `gather`: write the words, below 2^bits, of cells of which the first is cell `start`."""
    rest = np.uint64((1 << bits) - 1)
    for shift, part in _columns(words, bits, start, start + len(cells)):
        column = cells[: len(part)] >> shift
        column &= rest
        part[:] = column


def _columns(words: _Numbers, bits: int, start: int, stop: int) -> Iterator[tuple[np.uint64, _Numbers]]:
    """Of each word of a cell: how far up it stands, and the part of `words` from which these cells take it."""
    count = cells_of(len(words), bits)
    for place in range(words_a_cell(bits)):
        first = place * count
        yield np.uint64(place * bits), words[first + start : min(first + min(stop, count), len(words))]
