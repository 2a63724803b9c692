"""Words of b bits on the wire, and their sum straight from it.

b is a multiple of 4 from 12 to 32; what travels are the words' `cells`, of c = b · ⌊64/b⌋ bits (60 where b = 20). They
are laid out in planes, one for each binary digit of c (60 = 32 + 16 + 8 + 4), the widest first: the widest plane holds
the top bits of every cell, the narrowest the lowest. Planes of 8 to 64 bits are plain little-endian arrays; in a plane
of 4 bits cell 2i is the low half of byte i and cell 2i + 1 the high half (the spare half of an odd number is written as
0 and ignored). So each plane of a sum is made by whole-array additions, and what overflows the top plane is what the
modulus takes anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedward_common.errors import FedwardError
from fedward_common.secagg.cells import Cells, Words, cells_of, gather, scatter, words_a_cell

Packed = npt.NDArray[np.uint8]
Lanes = npt.NDArray[Any]

MIN_BITS, MAX_BITS = 12, 32

_PART = 1 << 15
"""Cells or lanes handled at a time: what is computed on the way stays in the cache. Even, so that no byte of a 4-bit
plane is torn."""


class PackingError(FedwardError):
    """Words cannot be packed as asked, or packed bytes have the wrong length or type."""


@dataclass(frozen=True)
class _Plane:
    """`width` bits of every cell from bit `shift` up, in bytes `start` to `stop` of the packed vector."""

    width: int
    shift: int
    start: int
    stop: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """An element of the plane on the wire: of one cell, or 4 bits each of two."""
        return np.dtype(f"<u{max(self.width // 8, 1)}")

    def of(self, packed: Packed, start: int, stop: int) -> Lanes:
        """The elements of cells `start` (even) to `stop`: a view of `packed`."""
        first, last = self.start + start * self.width // 8, self.start + (stop * self.width + 7) // 8
        return packed[first:last].view(self.dtype)


def packed_size(length: int, bits: int) -> int:
    """Bytes of `length` words of `bits` bits: bits · length / 8, rounded up to whole cells. Raises `PackingError`."""
    return _planes(length, bits)[-1].stop


def pack(words: Words, bits: int) -> Packed:
    """`words` (uint32, shape (d,), below 2^bits) as uint8 of shape (`packed_size`(d, bits),). Raises `PackingError`."""
    if words.ndim != 1 or words.dtype != np.uint32:
        raise PackingError(f"words are {words.dtype} of shape {words.shape}: only a vector of uint32 can be packed.")
    planes = _planes(len(words), bits)
    packed = np.empty(planes[-1].stop, np.uint8)
    for start, stop in _parts(cells_of(len(words), bits)):
        cells = gather(words, bits, start, stop)
        for plane in planes:
            # A cast to fewer bits is a modulus.
            plane.of(packed, start, stop)[:] = _halved(cells) if plane.width == 4 else cells >> np.uint64(plane.shift)
    return packed


def unpack(packed: Packed, length: int, bits: int) -> Words:
    """The `length` words below 2^bits that `pack` was given, uint32. Raises `PackingError`."""
    planes = _checked(packed, length, bits)
    words = np.empty(length, np.uint32)
    for start, stop in _parts(cells_of(length, bits)):
        cells = np.zeros(stop - start, np.uint64)
        for plane in planes:
            values = plane.of(packed, start, stop)
            if plane.width == 4:
                values = _interleaved(values & np.uint8(15), values >> np.uint8(4))[: len(cells)]
            cells |= values.astype(np.uint64) << np.uint64(plane.shift)
        scatter(cells, words, bits, start)
    return words


class PackedSum:
    """The sum of packed vectors of `length` words, without unpacking them. It is that of their cells: what the sum of a
    word has beyond `bits` bits is carried into the next word of its cell.

    The top plane is added at its own width, since its overflow is the modulus. A lower plane of width w must keep its
    carries: see `_Lanes`. Holds at most as much memory as `length` uint32, half as much again while it carries, and
    buffers of at most 1 MB.
    """

    def __init__(self, length: int, bits: int) -> None:
        """Raises `PackingError`."""
        self.length, self.bits, self.count = length, bits, 0
        self._top, *self._lower = _planes(length, bits)
        self._high = np.zeros(cells_of(length, bits), self._top.dtype)
        self._lanes = [_Lanes(plane) for plane in self._lower]

    def add(self, packed: Packed) -> None:
        """Add a vector that `pack` made. Raises `PackingError`, with the sum as it was."""
        _checked(packed, self.length, self.bits)
        self._high += packed[: self._top.stop].view(self._top.dtype)
        for place, lanes in enumerate(self._lanes):
            if lanes.full:
                self._carry(place)
            lanes.add(packed[lanes.plane.start : lanes.plane.stop])
        self.count += 1

    def total(self) -> Words:
        """The words of the summed cells, uint32 of shape (length,)."""
        words = np.empty(self.length, np.uint32)
        for start, stop in _parts(len(self._high)):
            cells = self._high[start:stop].astype(np.uint64) << np.uint64(self._top.shift)
            for lanes in self._lanes:
                sums = lanes.sums(start // 2, (stop + 1) // 2)[: len(cells)]
                cells += sums.astype(np.uint64) << np.uint64(lanes.plane.shift)
            scatter(cells, words, self.bits, start)
        return words

    def _carry(self, place: int) -> None:
        carries = self._lanes[place].take_carries()[: len(self._high)]
        if place == 0:
            self._high += carries
            return
        above = self._lanes[place - 1]
        if above.full:
            self._carry(place - 1)
        above.add(carries.view(np.uint8))


class _Lanes:
    """The sums of a plane of w bits in lanes of 2w bits, each of two cells, v_0 (lowest) and v_1. Kept are

        S_0 = Σ lane = Σ v_0 + 2^w · Σ v_1   and   S_1 = Σ (lane >> w) = Σ v_1   (mod 2^2w),

    so that Σ v_0 = S_0 − 2^w · S_1 and Σ v_1 are exact up to 2^w + 1 vectors; then their upper halves must be carried
    to the plane above.
    """

    def __init__(self, plane: _Plane) -> None:
        self.plane = plane
        self._dtype = np.dtype(f"<u{plane.width // 4}")
        lanes = -(-(plane.stop - plane.start) // self._dtype.itemsize)
        self._whole, self._upper = np.zeros(lanes, self._dtype), np.zeros(lanes, self._dtype)
        self._shifted = np.empty(min(lanes, _PART), self._dtype)
        self._shift = self._dtype.type(plane.width)
        self._added = 0
        """Vectors added, where the rest after a carry counts as one."""

    @property
    def full(self) -> bool:
        """Whether one more vector could overflow a lane."""
        return self._added == (1 << self.plane.width) + 1

    def add(self, values: Packed) -> None:
        """Add a vector of the plane, in its wire form."""
        spare = -len(values) % self._dtype.itemsize
        if spare:
            values = np.append(values, np.zeros(spare, np.uint8))
        lanes = values.view(self._dtype)
        for start, stop in _parts(len(lanes)):
            part, shifted = lanes[start:stop], self._shifted[: stop - start]
            self._whole[start:stop] += part
            np.right_shift(part, self._shift, out=shifted)
            self._upper[start:stop] += shifted
        self._added += 1

    def sums(self, start: int, stop: int) -> Lanes:
        """Σ v since the last carry, of both cells of lanes `start` to `stop`."""
        return _interleaved(*self._halves(start, stop))

    def take_carries(self) -> Lanes:
        """What of Σ v is beyond w bits, divided by 2^w, of all cells; it is no longer part of Σ v afterwards."""
        rest = self._dtype.type((1 << self.plane.width) - 1)
        carries = np.empty(2 * len(self._whole), self._dtype)
        for start, stop in _parts(len(self._whole)):
            even, odd = self._halves(start, stop)
            carries[2 * start : 2 * stop] = _interleaved(even >> self._shift, odd >> self._shift)
            odd &= rest
            self._whole[start:stop] = (even & rest) + (odd << self._shift)
        self._added = 1
        return carries

    def _halves(self, start: int, stop: int) -> tuple[Lanes, Lanes]:
        """(Σ v_0, Σ v_1), the latter a view of what is kept."""
        upper = self._upper[start:stop]
        return self._whole[start:stop] - (upper << self._shift), upper


def _planes(length: int, bits: int) -> tuple[_Plane, ...]:
    """The planes of a packed vector, in the order of the wire: widest, and of the highest bits, first."""
    if length < 0:
        raise PackingError(f"length is {length}: a vector cannot have fewer than 0 words.")
    if bits % 4 or not MIN_BITS <= bits <= MAX_BITS:
        raise PackingError(f"bits is {bits}, but must be a multiple of 4 from {MIN_BITS} to {MAX_BITS}.")
    planes = []
    count, width_of_cell = cells_of(length, bits), bits * words_a_cell(bits)
    start, shift = 0, width_of_cell
    for width in (64, 32, 16, 8, 4):
        if width_of_cell & width:
            stop = start + (count * width + 7) // 8
            shift -= width
            planes.append(_Plane(width, shift, start, stop))
            start = stop
    return tuple(planes)


def _checked(packed: Packed, length: int, bits: int) -> tuple[_Plane, ...]:
    planes = _planes(length, bits)
    if packed.dtype != np.uint8 or packed.shape != (planes[-1].stop,) or not packed.flags.c_contiguous:
        raise PackingError(
            f"packed words are {packed.dtype} of shape {packed.shape}, but {length} words of {bits} bits are "
            f"{planes[-1].stop} contiguous bytes. Both sides must agree on the length and the bits."
        )
    return planes


def _parts(length: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + _PART, length)) for start in range(0, length, _PART))


def _halved(cells: Cells) -> Packed:
    """The lowest 4 bits of each cell, two to a byte (a plane of 4 bits is always the lowest)."""
    low = cells.astype(np.uint8)
    pairs = (np.append(low, np.uint8(0)) if len(low) % 2 else low).view("<u2")
    halves: Packed = ((pairs & np.uint16(0xF)) | (pairs >> np.uint16(4) & np.uint16(0xF0))).astype(np.uint8)
    return halves


def _interleaved(even: Lanes, odd: Lanes) -> Lanes:
    """even[0], odd[0], even[1] … by arithmetic on words twice as wide: faster than writing every second element."""
    wide = np.dtype(f"<u{2 * even.itemsize}")
    joined: Lanes = even.astype(wide) | odd.astype(wide) << wide.type(8 * even.itemsize)
    return joined.view(even.dtype)
