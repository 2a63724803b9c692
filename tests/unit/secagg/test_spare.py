"""A part of each vector that comes off the sum: of those alone whose part is not needed, and open for nobody else."""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from fedward_common.secagg import client as client_module
from fedward_common.secagg import shamir
from fedward_common.secagg.cells import Words
from fedward_common.secagg.client import Client, Guarantees
from fedward_common.secagg.masks import Keystream
from fedward_common.secagg.messages import Dealt, MessageError, entries_to_bytes, revealed_from_bytes, sealed_size
from fedward_common.secagg.packing import pack
from fedward_common.secagg.server import Aborted, Rejected

from .builds import Build, Patch, builds, named
from .cohort import BITS, LENGTH, Cohort
from .hostile import SEED, SPARE, HostileServer

FEWEST = {10: 8, 40: 32}


@dataclass(frozen=True)
class Numbers:
    """A spare part of numbers below 1000. Every signature beyond the fewest takes two of them off, from the last on."""

    fewest: int

    def unneeded(self, survivors: frozenset[int], signed: int) -> frozenset[int]:
        off = 2 * (signed - self.fewest)
        return frozenset(sorted(survivors)[len(survivors) - min(len(survivors), off) :])

    def take_off(self, total: Words, keys: Sequence[bytes]) -> None:
        for key in keys:
            total -= part(key)


def part(key: bytes) -> Words:
    words: Words = Keystream(key).words(LENGTH) % np.uint32(1000)
    return words


def cohort_of(n: int) -> Cohort:
    cohort = Cohort(n, spare=Numbers(FEWEST[n]))
    for site in cohort.sites:
        site.words //= 2  # room for the part
    return cohort


@dataclass
class Round:
    """A round of an honest server, up to any stage. silent: stage -> nodes that drop out there."""

    cohort: Cohort
    silent: dict[str, Collection[int]]

    def __post_init__(self) -> None:
        self.clients = {i: self.cohort.client(i) for i in range(1, self.cohort.n + 1)}
        self.parts = {i: part(client.spare_key) for i, client in self.clients.items()}
        self.server = self.cohort.server()

    def _asked(self, stage: str, nodes: Collection[int]) -> list[int]:
        return sorted(set(nodes) - set(self.silent.get(stage, ())))

    def next_process(self, i: int) -> None:
        """Nothing: nodes stay."""

    def vector(self, i: int) -> Words:
        words: Words = self.cohort.sites[i - 1].words + self.parts[i]
        return words

    def deal(self, change: dict[int, Any] | None = None) -> None:
        for i in self._asked("deal", self.clients):
            self.next_process(i)
            dealt = self.clients[i].deal()
            data = (change or {}).get(i, lambda same: same)(dealt).to_bytes()
            self.server.deal(i, Dealt.from_bytes(data, self.server.secrets))
            self.next_process(i)

    def agreed(self) -> Any:
        deliveries = self.server.close_dealing()
        for i in self._asked("mask", deliveries):
            words = self.vector(i)
            self.clients[i].mask(deliveries[i], words)
            self.server.masked(i, pack(words, BITS))
            self.next_process(i)
        survivors = self.server.close_masking()
        for i in self._asked("agree", self.server.survivors):
            self.server.signed(i, self.clients[i].agree(survivors))
            self.next_process(i)
        return self.server.close_agreement()

    def unmasked(self, request: Any) -> Words:
        for i in self._asked("unmask", self.server.signers):
            data = entries_to_bytes(self.clients[i].unmask(request))
            self.server.revealed(i, revealed_from_bytes(data, lambda dealer: len(self.server.due(dealer))))
        return self.server.unmask()

    def expected(self) -> Words:
        """The sum that must come out: all values, and the parts of those who keep theirs."""
        kept = sum((self.parts[i] for i in self.server.survivors - self.server.unneeded), np.zeros(LENGTH, np.uint32))
        words: Words = self.cohort.total(self.server.survivors) + kept
        return words


class RestartedRound(Round):
    """Every step has a process of its own."""

    def next_process(self, i: int) -> None:
        asked = Guarantees(self.cohort.parameters, 2, self.cohort.identities, self.cohort.spare)
        site = self.cohort.sites[i - 1]
        self.clients[i] = Client.restore(self.clients[i].export(), site.identity, asked)


@pytest.mark.parametrize("kind", [Round, RestartedRound])
@pytest.mark.parametrize(
    ("silent", "off"),
    [
        ({}, {7, 8, 9, 10}),
        ({"deal": [1]}, {9, 10}),
        ({"deal": [10]}, {8, 9}),
        ({"mask": [10]}, {8, 9}),
        ({"mask": [2, 9]}, set()),
        ({"deal": [3], "mask": [9]}, set()),
        # It is in the sum and did not sign: what its vector brings is not counted, and its own part may come off.
        ({"agree": [10]}, {9, 10}),
        ({"mask": [4], "agree": [10]}, set()),
        # Holders reveal what silent nodes would take off.
        ({"unmask": [9, 10]}, {7, 8, 9, 10}),
        ({"mask": [1], "unmask": [10]}, {9, 10}),
    ],
)
def test_the_sum_has_the_parts_that_are_needed_word_for_word(
    silent: dict[str, list[int]], off: set[int], kind: type[Round]
) -> None:
    played = kind(cohort_of(10), silent)
    played.deal()
    words = played.unmasked(played.agreed())
    assert played.server.unneeded == off
    assert np.array_equal(words, played.expected())


def test_where_nodes_draw_their_holders() -> None:
    played = Round(cohort_of(40), {"deal": [1], "mask": [40], "agree": [39], "unmask": [38]})
    assert not played.cohort.parameters.complete
    played.deal()
    words = played.unmasked(played.agreed())
    assert len(played.server.unneeded) == 2 * (37 - FEWEST[40])
    assert np.array_equal(words, played.expected())


def test_shares_and_commitments_of_a_third_secret_on_the_wire() -> None:
    with_part, plain = cohort_of(10), Cohort(10)
    dealt, before = with_part.client(1).deal(), plain.client(1).deal()
    assert {len(sealed) for sealed in dealt.sealed.values()} == {sealed_size(3)} == {33 + sealed_size(2)}
    assert len(dealt.to_bytes()) - len(before.to_bytes()) == 9 * 33 + 10 * 16 + 16
    assert Dealt.from_bytes(dealt.to_bytes(), 3) == dealt
    assert Dealt.from_bytes(before.to_bytes()) == before and before.spare_commitment == b""
    for data, secrets in ((dealt.to_bytes(), 2), (before.to_bytes(), 3)):
        with pytest.raises(MessageError):
            Dealt.from_bytes(data, secrets)


def test_revealed_shares_on_the_wire() -> None:
    due = {3: 1, 300: 2}
    data = struct.pack("<H", 300) + bytes(66) + struct.pack("<H", 3) + b"x" * 33
    found = revealed_from_bytes(data, due.__getitem__)
    assert found == {300: bytes(66), 3: b"x" * 33} and entries_to_bytes(found) == data
    for cut in (1, 20, 67, len(data) - 1):
        with pytest.raises(MessageError, match="end within"):
            revealed_from_bytes(data[:cut], due.__getitem__)
    with pytest.raises(MessageError, match="twice"):
        revealed_from_bytes(2 * data, due.__getitem__)


def test_nothing_is_left_of_the_seed_when_the_round_is_over() -> None:
    client = cohort_of(10).client(1)
    assert client.spare_key
    client.wipe()
    assert not client._spare_seed and not client.spare_key
    assert not Cohort(10).client(1).spare_key


# --- shares that are false


def test_a_false_share_of_the_seed_is_no_share() -> None:
    played = Round(cohort_of(10), {})
    played.deal()
    request = played.agreed()
    revealed = played.clients[1].unmask(request)
    last = revealed[10]
    assert len(last) == 66 and len(revealed[1]) == 33
    for wrong in (last[:65] + bytes([last[65] ^ 1]), last[:33], last[33:] + last[:33]):
        with pytest.raises(Rejected, match="node 10"):
            played.server.revealed(1, {**revealed, 10: wrong})
    with pytest.raises(Rejected, match="1 shares of node 1 that are due"):
        played.server.revealed(1, {**revealed, 1: revealed[1] + last[33:]})
    played.server.revealed(1, revealed)
    played.silent = {"unmask": [1]}
    assert np.array_equal(played.unmasked(request), played.expected())


@pytest.mark.parametrize("makes", ["another seed", "no secret"])
def test_shares_of_another_seed_than_was_committed_to_end_the_round(makes: str) -> None:
    """Node 10 deals, and commits to, shares that are good by themselves."""
    played = Round(cohort_of(10), {})
    cheat = played.clients[10]
    threshold = played.cohort.parameters.threshold

    def deal(dealt: Dealt) -> Dealt:
        places = sorted(dealt.commitments)
        other = shamir.split(bytes(32), places, threshold if makes == "another seed" else threshold + 1)
        shares = dict(zip(places, other, strict=True))
        context = cheat.terms.digest
        sealed = {}
        for holder in dealt.sealed:
            seal = cheat._seals[holder]
            plain = seal.open(dealt.sealed[holder], 10, holder)
            sealed[holder] = seal.seal(plain[:66] + shares[holder] + plain[99:], 10, holder)
        commitments = {
            place: (*dealt.commitments[place][:2], shamir.commitment(shares[place], place, context)) for place in places
        }
        cheat._own_shares = (*(cheat._own_shares or ())[:2], shares[10])
        return replace(dealt, sealed=sealed, commitments=commitments)

    played.deal({10: deal})
    with pytest.raises(Aborted, match="node 10 dealt"):
        played.unmasked(played.agreed())


def test_without_enough_shares_of_the_seed_there_is_no_sum() -> None:
    played = Round(cohort_of(10), {})
    played.deal()
    played.unmasked(played.agreed())
    played.server._shares[10, SPARE].popitem()
    assert not played.server.complete
    with pytest.raises(Aborted, match="shares of node 10 were revealed"):
        played.server.unmask()


# --- a server that lies


def by_members(monkeypatch: Patch) -> None:
    """A build that counts the members of the set, not the signatures."""
    rule = Numbers.unneeded
    monkeypatch.setattr(Numbers, "unneeded", lambda self, survivors, signed: rule(self, survivors, len(survivors)))


def unverified(monkeypatch: Patch) -> None:
    """A build that verifies no more signatures than it must."""
    monkeypatch.setattr(Client, "_looked_at", lambda self, request: self._fewest())


def last_shares(monkeypatch: Patch) -> None:
    """A build that reveals each share that it holds."""
    monkeypatch.setattr(client_module, "due", lambda dealer, survivors, unneeded: range(3))


def attacked(n: int = 10, masks: Collection[int] | None = None, corrupt: Collection[int] = ()) -> HostileServer:
    """All deal; `masks` send their vectors."""
    cohort = cohort_of(n)
    hostile = HostileServer(cohort.terms, {i: cohort.client(i) for i in range(1, n + 1)}, corrupt)
    hostile.deal()
    for i in masks or hostile.everyone:
        hostile.mask(i, cohort.sites[i - 1].words)
    return hostile


def opened(hostile: HostileServer) -> set[int]:
    """Whose spare part the server can make."""
    return {i for i in hostile.everyone if hostile.secret(i, SPARE) is not None}


def judge(rule: str | None, hostile: HostileServer, allowed: set[int]) -> None:
    if rule is None:
        assert opened(hostile) - allowed
    else:
        assert opened(hostile) <= allowed
        assert not rule or any(rule in refusal for refusal in hostile.refusals), hostile.refusals


@builds("signature of node 9 is wrong", named("unverified", unverified))
def test_forged_signatures_take_nothing_off(build: Build, rule: str | None, monkeypatch: Patch) -> None:
    build(monkeypatch)
    hostile = attacked(masks=range(1, 9))
    for i in range(1, 9):
        hostile.agree(i, hostile.everyone)
    signatures = hostile.signatures[hostile.bitmap(hostile.everyone)]
    for i in range(1, 9):
        hostile.unmask(i, hostile.everyone, (), {**signatures, 9: bytes(64), 10: signatures[8]})
    judge(rule, hostile, set())


@builds("", named("by members", by_members))
def test_members_that_did_not_sign_take_nothing_off(build: Build, rule: str | None, monkeypatch: Patch) -> None:
    """Nodes 9 and 10 fell silent before they masked. The server calls them survivors: it lacks their vectors, and so a
    sum; but where it made them up itself, it would not."""
    build(monkeypatch)
    hostile = attacked(masks=range(1, 9))
    for i in range(1, 9):
        hostile.agree(i, hostile.everyone)
    for i in range(1, 9):
        hostile.unmask(i, hostile.everyone, ())
    assert not hostile.refusals
    assert all(hostile.secret(i, SEED) for i in hostile.everyone)
    judge(rule, hostile, set())


@pytest.mark.parametrize("corrupt", [(), (1, 2), (9, 10)])
def test_showing_nodes_different_signatures_opens_what_all_of_them_together_do(corrupt: tuple[int, ...]) -> None:
    hostile = attacked(corrupt=corrupt)
    for i in hostile.everyone:
        hostile.agree(i, hostile.everyone)
    signatures = list(hostile.signatures[hostile.bitmap(hostile.everyone)].items())
    for i in hostile.everyone:
        first = i % 10
        turned = signatures[first:] + signatures[:first]
        hostile.unmask(i, hostile.everyone, (), dict(turned[: 8 + i % 2]))
    assert not hostile.refusals
    # Half of the nodes saw nine signatures, and reveal two parts; none of the others reveals more.
    judge("", hostile, {9, 10})


@builds("", named("all that it holds", last_shares))
def test_nothing_of_a_node_that_dropped_out_or_is_needed(build: Build, rule: str | None, monkeypatch: Patch) -> None:
    build(monkeypatch)
    hostile = attacked(masks=range(1, 10), corrupt=(1, 2))
    survivors = range(1, 10)
    for i in survivors:
        hostile.agree(i, survivors)
    for i in survivors:
        hostile.unmask(i, survivors, [10])
    judge(rule, hostile, {8, 9})


@pytest.mark.parametrize("again", [8, 10])
def test_the_second_request_gets_nothing(again: int) -> None:
    hostile = attacked()
    for i in hostile.everyone:
        hostile.agree(i, hostile.everyone)
    signatures = hostile.signatures[hostile.bitmap(hostile.everyone)]
    for i in hostile.everyone:
        hostile.unmask(i, hostile.everyone, (), dict(list(signatures.items())[:8]))
    for i in hostile.everyone:
        hostile.unmask(i, hostile.everyone, (), dict(list(signatures.items())[:again]))
    judge("out of turn", hostile, set())
