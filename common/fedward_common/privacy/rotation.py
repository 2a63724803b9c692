"""A random rotation that all nodes of a round share: it spreads an update evenly over its coordinates.

x ↦ H D x/√N, with D random signs, H the Walsh–Hadamard matrix (Sylvester's, entries ±1) and N = 2^m coordinates, the
last of which are zeros that fill x up. The matrix is orthogonal: norms and distances stay, and the inverse D H/√N of
the sum gives back the sum. Whatever x was, each coordinate is then close to normal with mean 0 and variance ‖x‖²/N
(sub-Gaussian with that variance: Kairouz, Liu, Steinke 2021, lemma 29, ρ = 1), so that few exceed κ·‖x‖/√N.

The signs are public, and an honest update does not depend on them. One that is made to fit them is not spread: words of
the sum wrap around, which costs accuracy, as any vector of a node that lies can, and never privacy.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from fedward_common.secagg.masks import Keystream
from fedward_common.update import Vector

_RADIX_BITS = 4
"""H of N = 16^k is k products with H of 16: fewer multiplications with less, fewer passes over memory with more."""


def rotation_seed(run: str, number: int, attempt: int) -> bytes:
    """The 32 bytes from which the signs come in one attempt at round `number` of `run`, for nodes and server alike."""
    return hashlib.sha256(b"fedward rotation" + json.dumps([run, number, attempt]).encode()).digest()


def padded_length(length: int) -> int:
    """N: the power of two at or next above `length` ≥ 1."""
    return 1 << (length - 1).bit_length()


def rotate(vector: Vector, seed: bytes) -> Vector:
    """H D x/√N: shape (`padded_length`(d),), in the dtype of `vector` (float32 or float64, shape (d,)), a fresh array.

    seed: `rotation_seed`. Exact to within the roundings of log2(N) additions a coordinate. Raises `MaskError` for a
    seed of another length.
    """
    size = padded_length(vector.size)
    padded = np.zeros(size, vector.dtype)
    np.multiply(vector, _signs(seed, vector.size), out=padded[: vector.size])
    padded *= vector.dtype.type(1 / math.sqrt(size))  # first, so that no sum overflows
    return _hadamard(padded)


def rotate_back(rotated: Vector, seed: bytes, length: int) -> Vector:
    """The inverse: the first `length` coordinates of D H/√N·`rotated`, whose shape is (N,). Overwrites `rotated`."""
    rotated *= rotated.dtype.type(1 / math.sqrt(rotated.size))
    vector = _hadamard(rotated)[:length]
    vector *= _signs(seed, length)
    return vector


def _signs(seed: bytes, count: int) -> npt.NDArray[np.int8]:
    """±1 by the bits of the seed's keystream, the lowest of each byte first."""
    words = Keystream(seed).words(-(-count // 32))
    bits = np.unpackbits(words.view(np.uint8), count=count, bitorder="little").view(np.int8)
    bits *= -2
    bits += 1
    return bits


def _hadamard(vector: Vector) -> Vector:
    """H·`vector` for 2^m coordinates; overwrites `vector`, and returns it or a buffer of its size.

    The vector is seen as a tensor of axes of up to 16. A pass multiplies the last one by its own H and puts it first,
    which is one product of matrices; after all passes each axis is transformed and the order is what it was.
    """
    other = np.empty_like(vector)
    for radix in _radices(vector.size):
        np.matmul(_matrix(radix, vector.dtype), vector.reshape(-1, radix).T, out=other.reshape(radix, -1))
        vector, other = other, vector
    return vector


def _radices(size: int) -> Iterator[int]:
    """Powers of two up to 16 whose product is `size`."""
    bits = size.bit_length() - 1
    while bits:
        step = min(bits, _RADIX_BITS)
        yield 1 << step
        bits -= step


@cache
def _matrix(size: int, dtype: np.dtype[Any]) -> Vector:
    """H of `size` rows: H_2n = [[H_n, H_n], [H_n, −H_n]]."""
    matrix = np.ones((1, 1), dtype)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix
