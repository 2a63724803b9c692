"""A cohort that goes through a secure round in memory, for tests that lose, repeat and forge what is said."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from fedward_common.secagg.client import Client, Guarantees
from fedward_common.secagg.graph import Parameters, choose
from fedward_common.secagg.keys import Advertisement, Keyring
from fedward_common.secagg.messages import Dealt, entries_to_bytes, revealed_from_bytes
from fedward_common.secagg.packing import pack
from fedward_common.secagg.server import Server
from fedward_common.secagg.spare import Spare
from fedward_common.secagg.terms import Terms

RUN = "00112233445566778899aabbccddeeff"
BITS = 20
LENGTH = 7


@dataclass
class Site:
    """One node: its identity, its outstanding keys, its vector."""

    node: bytes
    identity: Ed25519PrivateKey
    keyring: Keyring
    words: Any


@dataclass
class Cohort:
    """n enrolled nodes and the terms of their next round. spare: what comes off the sum, if something does; the sites'
    words do not have it yet."""

    n: int
    dropout: float = 0.2
    corrupt: float = 0.2
    length: int = LENGTH
    seed: int = 0
    spare: Spare | None = None
    sites: list[Site] = field(default_factory=list)
    terms: Terms = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        for i in range(self.n):
            node = hashlib.sha256(f"node {i}".encode()).digest()[:16]
            identity = Ed25519PrivateKey.generate()
            words = rng.integers(0, (1 << BITS) // self.n, self.length, dtype=np.uint32)
            self.sites.append(Site(node, identity, Keyring(node, RUN, identity), words))
        self.sites.sort(key=lambda site: site.node)
        self.terms = self.new_terms()

    @property
    def parameters(self) -> Parameters:
        return choose(self.n, self.dropout, self.corrupt)

    def new_terms(self, round_: int = 1, **changes: Any) -> Terms:
        """Terms of a round with fresh advertisements of all."""
        told: dict[str, Any] = {
            "run": RUN, "round": round_, "attempt": 1, "purpose": "train", "model": "m", "config": "c", "roster": "1:r",
            "shape": "[]", "length": self.length, "bits": BITS, "parameters": self.parameters,
            "advertisements": tuple(site.keyring.advertise() for site in self.sites),
        }  # fmt: skip
        return Terms(**{**told, **changes})

    def identities(self, node: bytes) -> Ed25519PublicKey | None:
        return next((site.identity.public_key() for site in self.sites if site.node == node), None)

    def client(self, index: int, terms: Terms | None = None, least: int = 2) -> Client:
        """The client half of the node with that index (1 … n)."""
        site = self.sites[index - 1]
        asked = Guarantees(self.parameters, least, self.identities, self.spare)
        return Client(terms or self.terms, site.node, site.keyring, site.identity, asked)

    def server(self, terms: Terms | None = None) -> Server:
        return Server(terms or self.terms, self.identities, self.spare)

    def total(self, survivors: Iterable[int]) -> Any:
        """The sum that must come out."""
        return sum((self.sites[i - 1].words.astype(np.uint64) for i in survivors), np.uint64(0)).astype(np.uint32)


Silent = Callable[[str, int], bool]
"""(stage, index) -> whether the node drops out there. Stages: advertise is not among them, a node without an
advertisement is not in the cohort."""


def nobody(stage: str, index: int) -> bool:
    return False


def run(cohort: Cohort, silent: Silent = nobody) -> tuple[Any, frozenset[int]]:
    """A whole round over the wire forms of all messages: the words of the sum, and who is in it."""
    clients = {i: cohort.client(i) for i in range(1, cohort.n + 1)}
    server = cohort.server()
    for i, client in clients.items():
        if not silent("deal", i):
            server.deal(i, Dealt.from_bytes(client.deal().to_bytes()))
    for i, delivery in server.close_dealing().items():
        if not silent("mask", i):
            words = cohort.sites[i - 1].words.copy()
            clients[i].mask(delivery, words)
            server.masked(i, pack(words, BITS))
    survivors = server.close_masking()
    for i in sorted(server.survivors):
        if not silent("agree", i):
            server.signed(i, clients[i].agree(survivors))
    request = server.close_agreement()
    for i in sorted(server.signers):
        if not silent("unmask", i):
            data = entries_to_bytes(clients[i].unmask(request))
            server.revealed(i, revealed_from_bytes(data, lambda dealer: len(server.due(dealer))))
    return server.unmask(), server.survivors


def forged(advertisement: Advertisement, **changes: Any) -> Advertisement:
    """The advertisement with other fields, its signature as it was."""
    return replace(advertisement, **changes)
