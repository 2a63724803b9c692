"""Keystreams: what masks a vector of words, and where rounding gets its randomness from."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes

from fedward_common.errors import FedwardError

Words = npt.NDArray[np.uint32]

KEY_BYTES = 32

_PART = 1 << 15
"""Words made at a time: zeros, keystream and sum of one part (3 · 128 KiB) fit a second-level cache together."""
_ZEROS = bytes(4 * _PART)


class MaskError(FedwardError):
    """A key has the wrong length, or words are not what a keystream can be added to."""


class Keystream:
    """PRG(key) in order, as uint32 words. Without a key: from a fresh one that the operating system made."""

    def __init__(self, key: bytes | None = None) -> None:
        """key: `KEY_BYTES` bytes, for this stream only. Raises `MaskError`."""
        self._cipher = _encryptor(os.urandom(KEY_BYTES) if key is None else key)
        self._words = np.empty(0, "<u4")

    def words(self, count: int) -> Words:
        """The next `count` words, shape (count,): a view of a buffer that the next call overwrites."""
        if count > len(self._words):
            self._words = np.empty(count, "<u4")
        for start in range(0, count, _PART):
            part = self._words[start : min(start + _PART, count)]
            self._cipher.update_into(_ZEROS[: part.nbytes], part.data.cast("B"))
        return self._words[:count]


def add_keystreams(words: Words, plus: Sequence[bytes], minus: Sequence[bytes]) -> None:
    """words += Σ PRG(k) over `plus` − Σ PRG(k) over `minus`, mod 2^32, in place.

    words: uint32, shape (d,), contiguous. A smaller modulus 2^b is taken when the words are packed. Keys have
    `KEY_BYTES` bytes, and none may mask two vectors. Raises `MaskError`, with `words` as they were.

    PRG(k) is AES-256 in counter mode under k, counted from 0, read as little-endian words.
    """
    if words.ndim != 1 or words.dtype != np.uint32 or not (words.flags.c_contiguous and words.flags.writeable):
        raise MaskError(
            f"words are {words.dtype} of shape {words.shape}: keystreams are added in place to a contiguous, writable "
            "vector of uint32."
        )
    added, taken = [_encryptor(key) for key in plus], [_encryptor(key) for key in minus]
    stream = np.empty(min(_PART, len(words)), "<u4")
    # All keys of a part before the next part, so that the part is summed in the cache.
    for start in range(0, len(words), _PART):
        part = words[start : start + _PART]
        made = stream[: len(part)]
        target, zeros = made.data.cast("B"), _ZEROS[: part.nbytes]
        for cipher in added:
            cipher.update_into(zeros, target)
            np.add(part, made, out=part)
        for cipher in taken:
            cipher.update_into(zeros, target)
            np.subtract(part, made, out=part)


def _encryptor(key: bytes) -> CipherContext:
    if len(key) != KEY_BYTES:
        raise MaskError(f"a mask key has {KEY_BYTES} bytes, this has {len(key)}.")
    return Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
