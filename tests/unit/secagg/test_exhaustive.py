"""All rounds of three and of four nodes: whoever falls silent at whichever stage, with each combination of one lie (or
none) at every stage. Nodes are alike, so that the lies are about the first and the last of them.

A round is a tree: what happened at a stage is played once, and every way to go on starts from a copy.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from fedward_common.errors import UpdateError
from fedward_common.secagg.client import Client, Refusal
from fedward_common.secagg.messages import Dealt, Delivery, Unmasking, members_from_bytes, members_to_bytes
from fedward_common.secagg.packing import pack
from fedward_common.secagg.server import Aborted, Rejected, Server
from fedward_common.summand import Group, Shape, WrongSum, decode

from .cohort import BITS, Cohort
from .oracle import Oracle

FIRST = 1
DEAL_LIES = ("", "commitments", "sealed", "replay")
MASK_LIES = ("", "conceal", "withhold", "mixed up", "twice")
AGREE_LIES = ("", "other set", "other set first", "halves")
UNMASK_LIES = ("", "overlap", "dropped after all", "too few signatures", "forged signature", "twice", "forged share",
               "replay")  # fmt: skip


class Remembering:
    """A public key that verifies each signature once: the same ones come up in thousands of rounds."""

    def __init__(self, key: Ed25519PublicKey) -> None:
        self._key = key
        self._found: dict[tuple[bytes, bytes], bool] = {}

    def verify(self, signature: bytes, data: bytes) -> None:
        if (signature, data) not in self._found:
            try:
                self._key.verify(signature, data)
                self._found[signature, data] = True
            except InvalidSignature:
                self._found[signature, data] = False
        if not self._found[signature, data]:
            raise InvalidSignature


@dataclass
class State:
    """A round up to some stage. signed: survivor set -> node -> its signature, as far as the server has it."""

    cohort: Cohort
    clients: dict[int, Client]
    server: Server
    masked: set[int] = field(default_factory=set)
    signed: dict[bytes, dict[int, bytes]] = field(default_factory=dict)

    def copy(self) -> State:
        """As it is, to go on from."""
        clients = {}
        for i, client in self.clients.items():
            clients[i] = copy.copy(client)
            for name in ("_held", "_seals", "_drew"):
                setattr(clients[i], name, dict(getattr(client, name)))
        server = copy.copy(self.server)
        server._sum = copy.deepcopy(server._sum)
        for name in ("_dealers", "_survivors", "_signatures", "_shares"):
            setattr(server, name, copy.copy(getattr(server, name)))
        signed = {data: dict(signatures) for data, signatures in self.signed.items()}
        return State(self.cohort, clients, server, set(self.masked), signed)

    def bitmap(self, members: Iterable[int]) -> bytes:
        return members_to_bytes(members, self.cohort.n)


def subsets(nodes: Iterable[int]) -> Iterator[frozenset[int]]:
    listed = sorted(nodes)
    return (frozenset(some) for size in range(len(listed) + 1) for some in itertools.combinations(listed, size))


class Exploration:
    """Every round of one cohort; `ends` counts how they ended."""

    def __init__(self, n: int) -> None:
        self.shape = Shape((Group("g", 2, 1.0),), (), BITS, n)
        self.cohort = Cohort(n, dropout=0.34, corrupt=0.0, length=self.shape.length)
        rng = np.random.default_rng(n)
        for site in self.cohort.sites:
            site.words = self.shape.blank({"weight": 1.0, "clipped.g": 0.0})
            site.words[-2:] = rng.integers(0, self.shape.levels, 2)
        self.ends: Counter[str] = Counter()
        self.last = n
        self.earlier = self._earlier()

    def _begin(self, round_: int) -> tuple[State, dict[int, Dealt]]:
        terms = self.cohort.new_terms(round_)
        clients = {i: self.cohort.client(i, terms) for i in range(1, self.cohort.n + 1)}
        for client in clients.values():
            client._public = {i: Remembering(key) for i, key in client._public.items()}  # type: ignore[misc]
        state = State(self.cohort, clients, self.cohort.server(terms))
        return state, {i: client.deal() for i, client in clients.items()}

    def _earlier(self) -> tuple[dict[int, Dealt], Unmasking]:
        """An earlier round in which the first node dropped out: what was dealt, and the request to unmask."""
        state, dealt = self._begin(1)
        for i in dealt:
            state.server.deal(i, dealt[i])
        for i, delivery in state.server.close_dealing().items():
            if i != FIRST:
                self._masks(state, i, delivery)
        survivors = state.server.close_masking()
        for i in sorted(state.server.survivors):
            state.server.signed(i, state.clients[i].agree(survivors))
        return dealt, state.server.close_agreement()

    def run(self) -> None:
        state, dealt = self._begin(2)
        for silent, lie in itertools.product(subsets(state.clients), DEAL_LIES):
            now = state.copy()
            for i in sorted(dealt.keys() - silent):
                try:
                    now.server.deal(i, self._dealt(i, dealt[i], lie))
                except Rejected:
                    continue
            try:
                deliveries = now.server.close_dealing()
            except Aborted:
                self.ends["aborted"] += 1
                continue
            self._masking(now, deliveries)

    def _dealt(self, i: int, dealt: Dealt, lie: str) -> Dealt:
        if i != FIRST:
            return dealt
        match lie:
            case "commitments":
                return replace(dealt, commitments={j: (bytes(16), bytes(16)) for j in dealt.commitments})
            case "sealed":
                return replace(dealt, sealed={**dealt.sealed, self.last: bytes(len(dealt.sealed[self.last]))})
            case "replay":
                return self.earlier[0][FIRST]
        return dealt

    def _masks(self, state: State, i: int, delivery: Delivery) -> bool:
        words = self.cohort.sites[i - 1].words.copy()
        try:
            state.clients[i].mask(delivery, words)
        except Refusal:
            return False
        assert i not in state.masked, "two vectors under the same masks"
        state.masked.add(i)
        state.server.masked(i, pack(words, BITS))
        return True

    def _masking(self, state: State, deliveries: dict[int, Delivery]) -> None:
        for silent, lie in itertools.product(subsets(deliveries), MASK_LIES):
            now = state.copy()
            for i in sorted(deliveries.keys() - silent):
                for delivery in self._delivered(now, i, deliveries[i], lie):
                    self._masks(now, i, delivery)
            try:
                survivors = now.server.close_masking()
            except Aborted:
                self._ended(now, "aborted")
                continue
            self._agreement(now, survivors)

    def _delivered(self, state: State, i: int, delivery: Delivery, lie: str) -> list[Delivery]:
        if i != FIRST:
            return [delivery]
        told = members_from_bytes(delivery.sharers, self.cohort.n)
        fewer = {j: sealed for j, sealed in delivery.sealed.items() if j != self.last}
        concealed = Delivery(state.bitmap(told - {self.last}), fewer)
        match lie:
            case "conceal":
                return [concealed]
            case "withhold":
                return [replace(delivery, sealed=fewer)]
            case "mixed up":
                names, sealed = list(delivery.sealed), list(delivery.sealed.values())
                return [replace(delivery, sealed=dict(zip(names, sealed[1:] + sealed[:1], strict=True)))]
            case "twice":
                return [delivery, concealed]
        return [delivery]

    def _agreement(self, state: State, survivors: bytes) -> None:
        for silent, lie in itertools.product(subsets(state.server.survivors), AGREE_LIES):
            now = state.copy()
            for i in sorted(state.server.survivors - silent):
                for data in self._to_sign(now, i, survivors, lie):
                    try:
                        signature = now.clients[i].agree(data)
                    except Refusal:
                        continue
                    now.signed.setdefault(data, {})[i] = signature
                    if data == survivors:
                        try:
                            now.server.signed(i, signature)
                        except Rejected:
                            continue
            try:
                request = now.server.close_agreement()
            except Aborted:
                self._dishonest(now)
                self._ended(now, "aborted")
                continue
            self._unmasking(now, request)

    def _to_sign(self, state: State, i: int, survivors: bytes, lie: str) -> list[bytes]:
        without = state.bitmap(state.server.survivors - {self.last if i == FIRST else FIRST})
        match lie:
            case "other set" if i == FIRST:
                return [without]
            case "other set first" if i == FIRST:
                return [without, survivors]
            case "halves" if i > self.cohort.n / 2:
                return [without]
        return [survivors]

    def _dishonest(self, state: State) -> None:
        """Where an honest server gives up, another asks each node about the set that it signed, by those signatures."""
        now = state.copy()
        oracle = Oracle(now.clients, (), self.cohort.parameters)
        oracle.masked |= now.masked
        for data, signatures in now.signed.items():
            dropped = state.bitmap(now.server._sharers - members_from_bytes(data, self.cohort.n))
            for i in signatures:
                self._asks(oracle, i, Unmasking(data, dropped, signatures))
        oracle.check()

    def _asks(self, oracle: Oracle, i: int, request: Unmasking) -> dict[int, bytes]:
        try:
            return oracle.unmask(i, request)
        except Refusal:
            return {}

    def _unmasking(self, state: State, request: Unmasking) -> None:
        for lie in UNMASK_LIES:
            now = state.copy()
            oracle = Oracle(now.clients, (), self.cohort.parameters)
            oracle.masked |= now.masked
            revealed = {}
            for i in sorted(now.server.signers):
                for asked in self._requests(now, i, request, lie):
                    found = self._asks(oracle, i, asked)
                    revealed[i] = revealed.get(i) or found
                if lie == "forged share" and i == FIRST:
                    revealed[i] = {dealer: bytes(33) for dealer in revealed[i]}
            oracle.check()
            for silent in subsets(revealed):
                self._end(now, {i: shares for i, shares in revealed.items() if i not in silent})

    def _requests(self, state: State, i: int, request: Unmasking, lie: str) -> list[Unmasking]:
        survivors, dropped = (members_from_bytes(x, self.cohort.n) for x in (request.survivors, request.dropped))
        without = Unmasking(
            state.bitmap(survivors - {FIRST}),
            state.bitmap(dropped | {FIRST}),
            {**request.signatures, **state.signed.get(state.bitmap(survivors - {FIRST}), {})},
        )
        match lie:
            case "overlap":
                return [replace(request, dropped=without.dropped)]
            case "dropped after all":
                return [without]
            case "too few signatures":
                fewer = sorted(request.signatures)[: self.cohort.parameters.survivors - 1]
                return [replace(request, signatures={j: request.signatures[j] for j in fewer})]
            case "forged signature":
                return [replace(request, signatures={**request.signatures, min(request.signatures): bytes(64)})]
            case "twice":
                return [request, without]
            case "replay":
                return [self.earlier[1], request]
        return [request]

    def _end(self, state: State, revealed: dict[int, dict[int, bytes]]) -> None:
        server = copy.copy(state.server)
        server._shares = {}
        for i, shares in revealed.items():
            try:
                server.revealed(i, shares)
            except Rejected:
                continue
        try:
            words = server.unmask()
        except Aborted:
            self.ends["aborted"] += 1
            return
        try:
            decode(self.shape, words, len(server.survivors))
        except (WrongSum, UpdateError):
            self.ends["wrong sum noticed"] += 1
            return
        assert np.array_equal(words, self.cohort.total(server.survivors))
        self.ends["sum"] += 1

    def _ended(self, state: State, how: str) -> None:
        oracle = Oracle(state.clients, (), self.cohort.parameters)
        oracle.masked |= state.masked
        oracle.check()
        self.ends[how] += 1


@pytest.mark.parametrize("n", [3, pytest.param(4, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_every_round(n: int) -> None:
    exploration = Exploration(n)
    assert exploration.cohort.parameters.drop_outs == 1
    exploration.run()
    print(exploration.ends)
    assert {"sum", "aborted"} <= set(exploration.ends)
