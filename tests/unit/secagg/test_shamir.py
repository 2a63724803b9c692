"""Shamir sharing: the field, the polynomial against its closed form, every refusal, commitments."""

from __future__ import annotations

import os

import pytest
import sympy
from fedward_common.secagg import shamir
from fedward_common.secagg.shamir import PRIME, ShamirError, check, commitment, recover, split

SECRET = bytes(range(32))


def shares_of(secret: bytes, xs: range | list[int], threshold: int) -> dict[int, bytes]:
    return dict(zip(xs, split(secret, xs, threshold), strict=True))


def test_the_modulus_is_the_least_prime_above_all_secrets() -> None:
    assert sympy.nextprime(2**256) == PRIME


@pytest.mark.parametrize("threshold", [1, 2, 24, 25, 61])
def test_shares_are_values_of_the_polynomial(threshold: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against sum of c_i x^i, with coefficients as large as they get; 24 is where Horner first reduces."""
    drawn = [PRIME - 1 - i for i in range(threshold - 1)]
    source = iter(drawn)
    monkeypatch.setattr(shamir.secrets, "randbelow", lambda limit: next(source) if limit == PRIME else None)
    xs = [1, 2, 77, 65_534, 65_535, *range(100, 160)]
    shares = split(SECRET, xs, threshold)
    for x, share in zip(xs, shares, strict=True):
        powers = [c * x**i for i, c in enumerate([int.from_bytes(SECRET, "big"), *reversed(drawn)])]
        assert share == (sum(powers) % PRIME).to_bytes(33, "big")


def test_every_coefficient_is_drawn_from_the_whole_field(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zero too, at the top: a draw that avoids it tells something to threshold - 1 holders."""
    limits = []
    monkeypatch.setattr(shamir.secrets, "randbelow", lambda limit: limits.append(limit) or 0)
    assert split(SECRET, [3, 9, 4], 3) == [b"\0" + SECRET] * 3
    assert limits == [PRIME, PRIME]


@pytest.mark.parametrize("secret", [bytes(32), b"\xff" * 32, b"\0" * 31 + b"\1", SECRET], ids=bytes.hex)
@pytest.mark.parametrize(("n", "threshold"), [(1, 1), (3, 1), (3, 2), (10, 10), (100, 51)])
def test_the_secret_comes_back(secret: bytes, n: int, threshold: int) -> None:
    shares = shares_of(secret, range(1, n + 1), threshold)
    assert all(len(share) == 33 for share in shares.values())
    assert recover(shares, threshold) == secret
    last = {x: shares[x] for x in reversed(range(n - threshold + 1, n + 1))}
    assert recover(last, threshold) == secret


def test_the_largest_graph_of_the_table() -> None:
    xs = sorted(int.from_bytes(os.urandom(2), "big") % 20 + 20 * i + 1 for i in range(482))
    shares = shares_of(SECRET, xs, 328)
    assert recover({x: shares[x] for x in xs[100:]}, 328) == SECRET


def test_fewer_than_the_threshold_give_something_else() -> None:
    shares = shares_of(SECRET, range(1, 6), 3)
    assert recover_or_none(shares, 2) != SECRET
    assert recover_or_none(shares, 1) != SECRET


def recover_or_none(shares: dict[int, bytes], threshold: int) -> bytes | None:
    try:
        return recover(shares, threshold)
    except ShamirError:
        return None


def test_shares_beyond_the_threshold_are_not_read() -> None:
    shares = shares_of(SECRET, range(1, 6), 3)
    assert recover(shares | {4: b"", 5: b"\xff" * 33}, 3) == SECRET


@pytest.mark.parametrize(
    ("secret", "xs", "threshold", "reason"),
    [
        (bytes(31), [1, 2, 3], 2, "31 bytes"),
        (bytes(33), [1, 2, 3], 2, "33 bytes"),
        (SECRET, [0, 1, 2], 2, "x = 0"),
        (SECRET, [-1, 1, 2], 2, "x = -1"),
        (SECRET, [1, 2, 65_536], 2, "x = 65536"),
        (SECRET, [1, 2, 1], 2, "same x"),
        (SECRET, [1, 2, 3], 0, "threshold is 0"),
        (SECRET, [1, 2, 3], 4, "threshold is 4"),
        (SECRET, [], 1, "threshold is 1"),
    ],
)
def test_split_refuses(secret: bytes, xs: list[int], threshold: int, reason: str) -> None:
    with pytest.raises(ShamirError, match=reason):
        split(secret, xs, threshold)


GOOD = shares_of(SECRET, range(1, 6), 3)


@pytest.mark.parametrize(
    ("shares", "threshold", "reason"),
    [
        ({1: GOOD[1], 2: GOOD[2]}, 3, "2 shares are there; 3 are needed"),
        ({}, 1, "0 shares"),
        (GOOD, 0, "threshold is 0"),
        (GOOD | {0: GOOD[1]}, 3, "x = 0"),
        (GOOD | {70_000: GOOD[1]}, 3, "x = 70000"),
        (GOOD | {2: GOOD[2][1:]}, 3, "32 bytes"),
        (GOOD | {2: b"\0" + GOOD[2]}, 3, "34 bytes"),
        (GOOD | {2: PRIME.to_bytes(33, "big")}, 3, "at least p"),
        (GOOD | {2: b"\xff" * 33}, 3, "at least p"),
    ],
)
def test_recover_refuses(shares: dict[int, bytes], threshold: int, reason: str) -> None:
    with pytest.raises(ShamirError, match=reason):
        recover(shares, threshold)


@pytest.mark.parametrize("value", [2**256, PRIME - 1])
def test_a_value_that_is_no_secret_is_refused(value: int) -> None:
    """Shares on a line whose value at 0 is an element of the field, but of no 32 bytes."""
    shares = {x: ((value + 12345 * x) % PRIME).to_bytes(33, "big") for x in (1, 2)}
    with pytest.raises(ShamirError, match="not all of one secret"):
        recover(shares, 2)


def test_weights_are_made_once_for_one_set_of_holders() -> None:
    shamir._weights.cache_clear()
    for _ in range(5):
        secret = os.urandom(32)
        assert recover(shares_of(secret, range(1, 8), 4), 4) == secret
    assert shamir._weights.cache_info().misses == 1
    secret = os.urandom(32)
    assert recover(shares_of(secret, range(2, 9), 4), 4) == secret


def test_a_share_is_uniform() -> None:
    """χ² over the bytes of one share of a constant secret; 255 degrees of freedom, above 400 once in 10^8."""
    counts = [0] * 256
    for _ in range(800):
        for byte in split(SECRET, [1, 2], 2)[0][1:]:
            counts[byte] += 1
    expected = 800 * 32 / 256
    assert sum((count - expected) ** 2 / expected for count in counts) < 400


def test_commitments_bind_share_holder_and_context() -> None:
    made = commitment(GOOD[1], 1, b"round 7")
    assert len(made) == 16
    assert check(made, GOOD[1], 1, b"round 7")
    assert not check(made, GOOD[2], 1, b"round 7")
    assert not check(made, GOOD[1], 2, b"round 7")
    assert not check(made, GOOD[1], 1, b"round 8")
    assert not check(made, GOOD[1][:-1], 1, GOOD[1][-1:] + b"round 7")
    assert not check(made, GOOD[1], 65_537, b"round 7")
    assert not check(made[:-1], GOOD[1], 1, b"round 7")
    assert not check(b"", GOOD[1], 1, b"round 7")


def test_the_commitment_has_its_written_form() -> None:
    """The value is sha256sum's, so that two versions of Fedward cannot come to differ in silence."""
    made = commitment(bytes(32) + b"\1", 258, b"c")
    assert made.hex() == "a7634aeea6c4ef4b6f13e97d71d2df2c"


@pytest.mark.parametrize(("share", "x", "reason"), [(bytes(32), 1, "32 bytes"), (bytes(33), 0, "x = 0")])
def test_commitment_refuses(share: bytes, x: int, reason: str) -> None:
    with pytest.raises(ShamirError, match=reason):
        commitment(share, x, b"")
