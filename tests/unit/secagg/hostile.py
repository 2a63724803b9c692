"""A server that lies: it keeps all that a server of a secure round gets to see, and makes the most of it.

It has the advertisements, what nodes dealt (sealed), the masked vectors, signatures and revealed shares, and the memory
of nodes that side with it. It asks each node what it likes; a refusal is noted and the attack goes on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from fedward_common.secagg import shamir
from fedward_common.secagg.client import Client, Refusal, listed_partners
from fedward_common.secagg.graph import partners_of
from fedward_common.secagg.keys import SealKey, mask_key, self_mask_key
from fedward_common.secagg.masks import Words, add_keystreams
from fedward_common.secagg.messages import SHARE, Dealt, Delivery, Unmasking, members_to_bytes, pieces
from fedward_common.secagg.terms import Terms

SEED, KEY, SPARE = 0, 1, 2
"""The secrets that a node shares, in the order of its commitments; the last only where vectors have a spare part."""

T = TypeVar("T")


class HostileServer:
    """One round. clients: the nodes' ends of it, reached by messages only; `corrupt` ones are the server's own."""

    def __init__(self, terms: Terms, clients: Mapping[int, Client], corrupt: Collection[int] = ()) -> None:
        self.terms = terms
        self.clients = clients
        self.corrupt = frozenset(corrupt)
        self.dealt: dict[int, Dealt] = {}
        self.masked: dict[int, Words] = {}
        self.signatures: dict[bytes, dict[int, bytes]] = defaultdict(dict)
        self.mask_keys: dict[int, bytes] = {}
        """Private mask keys that it has from elsewhere: of its own making, or from an earlier round."""
        self.refusals: list[str] = []
        self._told: dict[int, frozenset[int]] = {}
        self._delivered: dict[int, frozenset[int]] = {}
        self._shares: dict[int, dict[int, set[bytes]]] = defaultdict(lambda: defaultdict(set))

    @property
    def everyone(self) -> frozenset[int]:
        return frozenset(range(1, self.terms.n + 1))

    def bitmap(self, members: Iterable[int]) -> bytes:
        return members_to_bytes(members, self.terms.n)

    def ask(self, step: Callable[..., T], *arguments: Any) -> T | None:
        """A node's answer, None if it refuses."""
        try:
            return step(*arguments)
        except Refusal as refusal:
            self.refusals.append(str(refusal))
            return None

    # --- what it asks for

    def deal(self, indices: Iterable[int] | None = None) -> None:
        for i in indices or sorted(self.clients):
            if (dealt := self.ask(self.clients[i].deal)) is not None:
                self.dealt[i] = dealt

    def mask(
        self, i: int, words: Words, sharers: Collection[int] | None = None, withheld: Collection[int] = ()
    ) -> None:
        """Tell node i that `sharers` dealt (by default who did), without what the `withheld` ones dealt to it."""
        told = frozenset(self.dealt if sharers is None else sharers)
        sealed = {
            dealer: dealt.sealed[i] + listed_partners(self.terms.parameters, tuple(dealt.sealed))
            for dealer, dealt in self.dealt.items()
            if i in dealt.sealed and dealer in told and dealer not in withheld
        }
        masked = words.copy()
        client = self.clients[i]
        if self.ask(lambda: client.mask(Delivery(self.bitmap(told), sealed), masked) or True):
            self.masked[i] = masked
            self._told[i], self._delivered[i] = told, frozenset(sealed)
        if i in self.corrupt:
            self._read(i, client)

    def agree(self, i: int, survivors: Collection[int]) -> None:
        """Have node i sign a set."""
        data = self.bitmap(survivors)
        if (signature := self.ask(self.clients[i].agree, data)) is not None:
            self.signatures[data][i] = signature

    def unmask(
        self,
        i: int,
        survivors: Collection[int],
        dropped: Collection[int],
        signatures: Mapping[int, bytes] | None = None,
    ) -> None:
        """Have node i reveal its shares; by default with all signatures there are of that set."""
        data = self.bitmap(survivors)
        shown = dict(self.signatures[data]) if signatures is None else signatures
        revealed = self.ask(self.clients[i].unmask, Unmasking(data, self.bitmap(dropped), shown))
        for dealer, shares in (revealed or {}).items():
            self._shares[dealer][i].update(pieces(shares, SHARE))

    def open_shares(self, dealer: int, seal_keys: Mapping[int, X25519PrivateKey]) -> None:
        """Open what was sealed for holders whose private seal keys it has."""
        terms = self.clients[dealer].terms
        for holder, key in seal_keys.items():
            seal = SealKey(key, terms.advertisement(dealer).seal_key, terms.digest)
            plain = seal.open(self.dealt[dealer].sealed[holder], dealer, holder)
            self._shares[dealer][holder].update((plain[:SHARE], plain[SHARE : 2 * SHARE]))

    def _read(self, i: int, client: Client) -> None:
        """The memory of a node of its own: both shares of whoever dealt to it."""
        for dealer, pair in client._held.items():
            self._shares[dealer][i].update(pair)

    # --- what it makes of it

    def secret(self, dealer: int, which: int) -> bytes | None:
        """A node's seed or mask key, if enough shares of it are known."""
        if which == KEY and dealer in self.mask_keys:
            return self.mask_keys[dealer]
        if dealer not in self.dealt:
            return None
        commitments, terms = self.dealt[dealer].commitments, self.clients[dealer].terms
        good = {
            holder: share
            for holder, shares in self._shares[dealer].items()
            for share in shares
            if shamir.check(commitments[holder][which], share, holder, terms.digest)
        }
        threshold = terms.parameters.threshold
        return shamir.recover(good, threshold) if len(good) >= threshold else None

    def sum_of(self, members: Iterable[int]) -> Words | None:
        """The sum of the vectors of `members` mod 2^bits; None if a mask of one of them cannot be taken off."""
        members = frozenset(members)
        plus, minus = list[bytes](), list[bytes]()
        if not members <= self.masked.keys():
            return None
        for i in sorted(members):
            if (seed := self.secret(i, SEED)) is None:
                return None
            minus.append(self_mask_key(seed, self._context(i)))
            for other in sorted(self._edges(i)):
                if other in members and i in self._edges(other) and self._context(i) == self._context(other):
                    continue  # the two masks cancel
                if (pair := self._pair(i, other)) is None:
                    return None
                (minus if i < other else plus).append(pair)
        words = np.sum([self.masked[i] for i in members], axis=0, dtype=np.uint32)
        add_keystreams(words, self.terms.bits, plus, minus)
        return words

    def vector_of(self, victim: int) -> Words | None:
        """One node's vector."""
        return self.sum_of([victim])

    def partners(self, i: int) -> tuple[int, ...]:
        """The mask partners that node i drew: what it dealt shows them."""
        return partners_of(self.clients[i].terms.parameters, tuple(self.dealt[i].sealed))

    def _edges(self, i: int) -> frozenset[int]:
        """With whom node i has masked, by what it was told."""
        drawn = self._told[i].intersection(self.partners(i)) - {i}
        return drawn | {dealer for dealer in self._delivered[i] if i in self.partners(dealer)}

    def _pair(self, i: int, other: int) -> bytes | None:
        pair = (min(i, other), max(i, other))
        for one, two in ((i, other), (other, i)):
            if (key := self.secret(one, KEY)) is not None:
                public = self.clients[i].terms.advertisement(two).mask_key
                return mask_key(X25519PrivateKey.from_private_bytes(key), public, self._context(i), pair)
        return None

    def _context(self, i: int) -> bytes:
        """What node i binds its keys to: it was told so by this server."""
        return self.clients[i].terms.digest
