"""Shamir's secret sharing of 32-byte secrets, and commitments to the shares.

Shamir, "How to share a secret", CACM 22(11), 1979. The field is that of the integers modulo p = 2^256 + 297, the least
prime above 2^256: every 32-byte string is an element, and there are more points than any cohort needs. A secret is
the value at 0 of a polynomial of degree threshold - 1 whose other coefficients are uniform; the share of holder x is
its value at x. Any `threshold` shares give the secret, fewer are independent of it.

A wrong share changes what is recovered and nothing in the arithmetic shows it: hence the commitments.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache

from fedward_common.errors import FedwardError

PRIME = 2**256 + 297
SECRET_BYTES = 32
SHARE_BYTES = 33
COMMITMENT_BYTES = 16
MAX_X = 65_535

_DOMAIN = b"fedward:share-commitment:1\n"
_LAZY = 24
"""Horner steps between two reductions: with 16-bit points a value stays under 256 + 24 * 17 bits."""


class ShamirError(FedwardError):
    """A secret cannot be shared as asked, or the shares cannot give it back."""


def split(secret: bytes, xs: Sequence[int], threshold: int) -> list[bytes]:
    """Shares of a 32-byte secret by a fresh polynomial: 33 bytes (big-endian) each, share i for the holder at xs[i].

    xs: distinct, 1 to 65535 (the value at 0 is the secret). Raises `ShamirError`.
    """
    if len(secret) != SECRET_BYTES:
        raise ShamirError(f"the secret has {len(secret)} bytes; it must have {SECRET_BYTES}: share a seed or a key.")
    if not 1 <= threshold <= len(xs):
        raise ShamirError(
            f"the threshold is {threshold}; with {len(xs)} holders it must be from 1 to {len(xs)}: "
            "lower it or name more holders."
        )
    if len(set(xs)) != len(xs):
        raise ShamirError("two holders have the same x; each needs its own, else one share counts twice.")
    _check_points(min(xs), max(xs))
    # Highest power first. A top coefficient of zero must be possible: without it fewer shares would tell something.
    coefficients = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    coefficients.append(int.from_bytes(secret, "big"))
    blocks = [coefficients[at : at + _LAZY] for at in range(0, threshold, _LAZY)]
    return [_value(blocks, x).to_bytes(SHARE_BYTES, "big") for x in xs]


def recover(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """The secret, from the shares (x -> 33 bytes) of the `threshold` lowest x; those of the others are not read.

    Raises `ShamirError` for too few shares, an x outside 1 to 65535, a malformed share, and for shares that together
    are of no 32-byte secret. Shares of another secret are noticed so with a probability of 2^-247 only: check each
    against its commitment first.
    """
    if threshold < 1:
        raise ShamirError(f"the threshold is {threshold}; it must be at least 1.")
    if len(shares) < threshold:
        raise ShamirError(f"{len(shares)} shares are there; {threshold} are needed: more holders must answer.")
    xs = sorted(shares)
    _check_points(xs[0], xs[-1])
    used = tuple(xs[:threshold])
    total = sum(weight * _element(shares[x], x) for weight, x in zip(_weights(used), used, strict=True)) % PRIME
    if total >> (8 * SECRET_BYTES):
        raise ShamirError("the shares are not all of one secret; check each against its commitment.")
    return total.to_bytes(SECRET_BYTES, "big")


def commitment(share: bytes, x: int, context: bytes) -> bytes:
    """16 bytes that bind the holder at x to this share; `context` says of which secret of which round it is.

    A plain hash hides a share, which is uniform among 2^256 to all who hold fewer than `threshold`.
    Raises `ShamirError` for a share of another length or an x outside 1 to 65535.
    """
    if len(share) != SHARE_BYTES:
        raise ShamirError(f"the share for x = {x} has {len(share)} bytes; it must have {SHARE_BYTES}.")
    _check_points(x, x)
    # All but the context have a fixed length, so no two triples give the same bytes.
    return hashlib.sha256(_DOMAIN + x.to_bytes(2, "big") + share + context).digest()[:COMMITMENT_BYTES]


def check(committed: bytes, share: bytes, x: int, context: bytes) -> bool:
    """Whether `share` is what `committed` was made of; False for a malformed share or x, which nobody committed to."""
    try:
        return hmac.compare_digest(committed, commitment(share, x, context))
    except ShamirError:
        return False


def _check_points(lowest: int, highest: int) -> None:
    if lowest < 1 or highest > MAX_X:
        x = lowest if lowest < 1 else highest
        raise ShamirError(f"x = {x} is no holder's number; it must be from 1 to {MAX_X} (at 0 lies the secret itself).")


def _value(blocks: Sequence[Sequence[int]], x: int) -> int:
    """The polynomial at x by Horner's rule, reduced once a block."""
    value = 0
    for block in blocks:
        for coefficient in block:
            value = value * x + coefficient
        value %= PRIME
    return value


def _element(share: bytes, x: int) -> int:
    if len(share) != SHARE_BYTES:
        raise ShamirError(f"the share of x = {x} has {len(share)} bytes; it must have {SHARE_BYTES}: leave it out.")
    value = int.from_bytes(share, "big")
    if value >= PRIME:
        raise ShamirError(f"the share of x = {x} is no element of the field (at least p): leave it out.")
    return value


@lru_cache(maxsize=64)
def _weights(xs: tuple[int, ...]) -> tuple[int, ...]:
    """Lagrange's weights at 0: prod over j != i of x_j / (x_j - x_i), mod p.

    Kept, because on a complete graph all secrets of a round have the same holders.
    """
    product = math.prod(xs)
    divisors = [xi * math.prod([xj - xi for xj in xs if xj != xi]) % PRIME for xi in xs]
    # One inversion for all (Montgomery): an inverse costs as much as a hundred products.
    before = [1]
    for divisor in divisors:
        before.append(before[-1] * divisor % PRIME)
    inverse = pow(before[-1], -1, PRIME)
    weights = []
    for divisor, prefix in zip(reversed(divisors), reversed(before[:-1]), strict=True):
        weights.append(product * (inverse * prefix % PRIME) % PRIME)
        inverse = inverse * divisor % PRIME
    return tuple(reversed(weights))
