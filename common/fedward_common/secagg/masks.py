"""Keystreams: what masks a vector of words, and where rounding gets its randomness from.

PRG(k) is AES-128 in counter mode, read as little-endian words: the first 16 bytes of k are the AES key, the
other 16 the first counter block. AES-256 takes 12 % more time (measured, with the additions) and would not make a round
stronger, since the X25519 agreement behind the pairwise keys is made for 128 bits. What AES-128 would lose to an
attacker who works on the keys of many streams at once, a secret first counter gives back: a guess can then be checked
against one stream only, and nothing can be computed in advance (RFC 3711, section 7.2, salts its counters for this
reason).
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes

from fedward_common.errors import FedwardError
from fedward_common.secagg.cells import Words, cells_of, gather, scatter

KEY_BYTES = 32

_PART = 1 << 16
"""Words made at a time (256 KiB): few calls for a vector, and the part's sum stays in the cache from key to key."""
_ZEROS = memoryview(bytes(4 * _PART))


class MaskError(FedwardError):
    """A key has the wrong length, or words are not what a keystream can be added to."""


class Keystream:
    """The words of PRG(key), in order. Without a key: of a fresh one from the operating system."""

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


def add_keystreams(words: Words, bits: int, plus: Sequence[bytes], minus: Sequence[bytes]) -> None:
    """words += Σ PRG(k) over `plus` − Σ PRG(k) over `minus`, in place, as `cells` of words of `bits` bits.

    words: uint32, shape (d,), contiguous; below 2^bits afterwards. Cell i is masked with the 64-bit word i of PRG(k),
    little-endian. Keys have `KEY_BYTES` bytes, and none may mask two vectors. Raises `MaskError`, with `words` as they
    were.
    """
    if words.ndim != 1 or words.dtype != np.uint32 or not (words.flags.c_contiguous and words.flags.writeable):
        raise MaskError(
            f"words are {words.dtype} of shape {words.shape}: keystreams are added in place to a contiguous, writable "
            "vector of uint32."
        )
    added, taken = [_encryptor(key) for key in plus], [_encryptor(key) for key in minus]
    count, most = cells_of(len(words), bits), _PART // 2
    stream = np.empty(min(most, count), "<u8")
    # All keys of a part before the next part, so that the part is summed in the cache.
    for start in range(0, count, most):
        part = gather(words, bits, start, min(start + most, count))
        made = stream[: len(part)]
        target, zeros = made.data.cast("B"), _ZEROS[: part.nbytes]
        for cipher in added:
            cipher.update_into(zeros, target)
            part += made
        for cipher in taken:
            cipher.update_into(zeros, target)
            part -= made
        scatter(part, words, bits, start)


def _encryptor(key: bytes) -> CipherContext:
    if len(key) != KEY_BYTES:
        raise MaskError(f"a mask key has {KEY_BYTES} bytes, this has {len(key)}.")
    return Cipher(algorithms.AES(key[:16]), modes.CTR(key[16:])).encryptor()
