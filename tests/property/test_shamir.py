"""What makes Shamir sharing a secret sharing, over many secrets, holders and thresholds."""

from __future__ import annotations

import math

from fedward_common.secagg.shamir import PRIME, ShamirError, check, commitment, recover, split
from hypothesis import assume, given, settings
from hypothesis import strategies as st

secrets_ = st.binary(min_size=32, max_size=32)


@st.composite
def shared(draw: st.DrawFn, fewest: int = 1) -> tuple[bytes, dict[int, bytes], int]:
    """A secret, its shares in any order of holders, and the threshold (at least `fewest`)."""
    secret = draw(secrets_)
    xs = draw(st.lists(st.integers(1, 65_535), min_size=fewest, max_size=12, unique=True))
    threshold = draw(st.integers(fewest, len(xs)))
    return secret, dict(zip(xs, split(secret, xs, threshold), strict=True)), threshold


def through(points: dict[int, int], x: int) -> int:
    """The value at x of the polynomial of least degree through `points`, by Lagrange's formula as it is written."""
    terms = [y * math.prod((x - b) * pow(a - b, -1, PRIME) for b in points if b != a) for a, y in points.items()]
    return sum(terms) % PRIME


def recover_or_none(shares: dict[int, bytes], threshold: int) -> bytes | None:
    """None where the shares are of no secret (once in 2^247 for shares that do not belong together)."""
    try:
        return recover(shares, threshold)
    except ShamirError:
        return None


@given(shared(), st.data())
def test_any_threshold_of_the_shares_recover(case: tuple[bytes, dict[int, bytes], int], data: st.DataObject) -> None:
    secret, shares, threshold = case
    some = data.draw(st.lists(st.sampled_from(sorted(shares)), min_size=threshold, unique=True))
    assert recover({x: shares[x] for x in some}, threshold) == secret


@given(shared(fewest=2), secrets_, st.data())
def test_fewer_shares_fit_every_secret(
    case: tuple[bytes, dict[int, bytes], int], other: bytes, data: st.DataObject
) -> None:
    """For threshold - 1 shares and any secret there is one polynomial: to their holders all secrets are alike."""
    _, shares, threshold = case
    order = data.draw(st.permutations(sorted(shares)))
    known, missing = order[: threshold - 1], order[threshold - 1]
    points = {0: int.from_bytes(other, "big")} | {x: int.from_bytes(shares[x], "big") for x in known}
    forged = {x: shares[x] for x in known} | {missing: through(points, missing).to_bytes(33, "big")}
    assert recover(forged, threshold) == other


@given(shared(), st.integers(1, PRIME - 1), st.binary(max_size=40), st.data())
def test_a_wrong_share_changes_the_secret_and_fails_its_commitment(
    case: tuple[bytes, dict[int, bytes], int], error: int, context: bytes, data: st.DataObject
) -> None:
    secret, shares, threshold = case
    commitments = {x: commitment(share, x, context) for x, share in shares.items()}
    used = sorted(shares)[:threshold]
    wrong = data.draw(st.sampled_from(used))
    changed = (int.from_bytes(shares[wrong], "big") + error) % PRIME
    received = shares | {wrong: changed.to_bytes(33, "big")}
    assert recover_or_none(received, threshold) != secret
    assert [x for x in shares if not check(commitments[x], received[x], x, context)] == [wrong]


@given(shared(fewest=2), secrets_)
def test_two_splits_are_independent(case: tuple[bytes, dict[int, bytes], int], second: bytes) -> None:
    """With one polynomial for two secrets the difference of two shares would be that of the secrets: to one holder."""
    secret, shares, threshold = case
    others = dict(zip(shares, split(second, list(shares), threshold), strict=True))
    apart = (int.from_bytes(secret, "big") - int.from_bytes(second, "big")) % PRIME
    for x in shares:
        assert (int.from_bytes(shares[x], "big") - int.from_bytes(others[x], "big")) % PRIME != apart


@settings(max_examples=50)
@given(shared(fewest=2), secrets_)
def test_shares_of_two_secrets_do_not_mix(case: tuple[bytes, dict[int, bytes], int], second: bytes) -> None:
    secret, shares, threshold = case
    assume(secret != second)
    xs = sorted(shares)
    mixed = shares | {xs[0]: split(second, xs, threshold)[0]}
    assert recover_or_none(mixed, threshold) not in (secret, second)
