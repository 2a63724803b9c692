"""The server's half of a secure round, without any I/O.

It routes sealed shares that it cannot open, adds up masked vectors, and takes off what masks are left: the self-masks
of the survivors and the pairwise masks of those that dropped out after dealing. It learns the sum of the survivors'
vectors and nothing else.

deal (one a node) → close_dealing → masked (one a survivor) → close_masking → signed → close_agreement → revealed →
unmask. A node that stays silent at any stage dropped out there; too few left raises `Aborted`, and then nothing that
would unmask anybody is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedward_common.errors import FedwardError
from fedward_common.secagg import shamir
from fedward_common.secagg.cells import Words
from fedward_common.secagg.client import (
    MASK_KEY,
    SEED,
    SPARE_SEED,
    due,
    listed_partners,
    seed_commitment,
    spare_commitment,
)
from fedward_common.secagg.graph import partners_of
from fedward_common.secagg.keys import AdvertisementError, Identities, mask_key, self_mask_key, spare_key
from fedward_common.secagg.masks import add_keystreams
from fedward_common.secagg.messages import SECRETS, SHARE, Dealt, Delivery, Unmasking, members_to_bytes
from fedward_common.secagg.packing import Packed, PackedSum
from fedward_common.secagg.spare import Spare
from fedward_common.secagg.terms import Terms, survivors_statement


class Aborted(FedwardError):
    """The round cannot end with a sum."""


class Rejected(FedwardError):
    """One node's message is not what it must be: that node counts as dropped out."""


@dataclass(frozen=True)
class _Dealer:
    dealt: Dealt
    partners: frozenset[int]


class Server:
    """One secure round at the server. identities: the roster's keys (None: signatures are not checked). spare: the part
    of each vector that can be taken off the sum, if there is one."""

    def __init__(self, terms: Terms, identities: Identities | None, spare: Spare | None = None) -> None:
        self.terms = terms
        self._identities = identities
        self._spare = spare
        self._dealers: dict[int, _Dealer] = {}
        self._sharers: frozenset[int] = frozenset()
        self._sum = PackedSum(terms.length, terms.bits)
        self._survivors: set[int] = set()
        self._signatures: dict[int, bytes] = {}
        self._unneeded: frozenset[int] = frozenset()
        self._shares: dict[tuple[int, int], dict[int, bytes]] = {}
        """(dealer, which of its secrets) -> holder -> the share that the holder revealed."""

    # --- stage 1: dealing

    @property
    def secrets(self) -> int:
        """How many secrets each node shares."""
        return SECRETS + (self._spare is not None)

    def deal(self, index: int, dealt: Dealt) -> None:
        """Take what a node dealt. Raises `Rejected`."""
        parameters = self.terms.parameters
        holders = tuple(dealt.sealed)
        places = {*holders, index} if parameters.complete else set(holders)
        if index in holders or not all(1 <= holder <= self.terms.n for holder in holders):
            raise Rejected("it dealt a share to a node that is not in the cohort.")
        if len(places) != parameters.holders or set(dealt.commitments) != places:
            raise Rejected(f"it dealt {len(places)} shares, the rules give {parameters.holders}.")
        self._dealers.setdefault(index, _Dealer(dealt, frozenset(partners_of(parameters, holders))))

    @property
    def dealers(self) -> frozenset[int]:
        """Nodes that dealt so far."""
        return frozenset(self._dealers)

    def close_dealing(self) -> dict[int, Delivery]:
        """What each dealer is to get. Raises `Aborted`."""
        parameters = self.terms.parameters
        self._sharers = self.dealers
        self._enough(len(self._sharers), "dealt shares")
        for index, dealer in self._dealers.items():
            reachable = len(self._sharers.intersection(dealer.dealt.sealed)) + parameters.complete
            if reachable < parameters.threshold:
                raise Aborted(f"{reachable} of the shares of node {index} can be had, not {parameters.threshold}.")
        sharers = members_to_bytes(self._sharers, self.terms.n)
        sealed: dict[int, dict[int, bytes]] = {holder: {} for holder in sorted(self._sharers)}
        for index, dealer in self._dealers.items():
            listed = listed_partners(parameters, tuple(dealer.dealt.sealed))
            for holder in self._sharers.intersection(dealer.dealt.sealed):
                sealed[holder][index] = dealer.dealt.sealed[holder] + listed
        return {holder: Delivery(sharers, shares) for holder, shares in sealed.items()}

    # --- stage 2: masked vectors

    def masked(self, index: int, packed: Packed) -> None:
        """Add a node's masked vector to the sum; a second one of the same node is not. Raises `Rejected`."""
        if index not in self._sharers:
            raise Rejected("it dealt no shares.")
        if index in self._survivors:
            return
        self._sum.add(packed)
        self._survivors.add(index)

    @property
    def survivors(self) -> frozenset[int]:
        """Nodes whose masked vector is in the sum."""
        return frozenset(self._survivors)

    def close_masking(self) -> bytes:
        """The survivor set, to be signed by every survivor. Raises `Aborted`."""
        self._enough(len(self._survivors), "sent a masked vector")
        return members_to_bytes(self._survivors, self.terms.n)

    # --- stage 3: agreement

    def signed(self, index: int, signature: bytes) -> None:
        """Take a survivor's signature of the set. Raises `Rejected`."""
        if index not in self._survivors:
            raise Rejected("it is no survivor.")
        if self._identities is not None:
            public = self._identities(self.terms.advertisement(index).node)
            if public is None:
                raise Rejected("it is not in the roster.")
            try:
                public.verify(signature, self._statement())
            except InvalidSignature as error:
                raise Rejected("its signature of the survivor set is wrong.") from error
        self._signatures[index] = signature

    def _statement(self) -> bytes:
        sharers = members_to_bytes(self._sharers, self.terms.n)
        return survivors_statement(self.terms, sharers, members_to_bytes(self._survivors, self.terms.n))

    @property
    def signers(self) -> frozenset[int]:
        """Survivors that signed so far."""
        return frozenset(self._signatures)

    def close_agreement(self) -> Unmasking:
        """The request to each signer. Raises `Aborted`."""
        self._enough(len(self._signatures), "signed the survivor set")
        if self._spare is not None:
            self._unneeded = self._spare.unneeded(self.survivors, len(self._signatures))
        # All signatures: a node verifies no more than it asks for, and its policy may ask for more than the rules do.
        dropped = self._sharers - self._survivors
        n = self.terms.n
        return Unmasking(
            members_to_bytes(self._survivors, n), members_to_bytes(dropped, n), dict(sorted(self._signatures.items()))
        )

    @property
    def unneeded(self) -> frozenset[int]:
        """Survivors whose spare part comes off, once the agreement is closed."""
        return self._unneeded

    # --- stage 4: unmasking

    def due(self, dealer: int) -> tuple[int, ...]:
        """Which secrets of a dealer are to be revealed."""
        return due(dealer, self._survivors, self._unneeded)

    def revealed(self, index: int, shares: Mapping[int, bytes]) -> None:
        """Take the shares that a holder reveals, of each dealer those that are `due`, one after another; a share that
        its dealer did not commit to is no share.

        Raises `Rejected`; then none of the message was taken.
        """
        if index not in self._signatures:
            raise Rejected("it did not sign the survivor set.")
        good: dict[tuple[int, int], bytes] = {}
        threshold, context = self.terms.parameters.threshold, self.terms.digest
        for dealer, revealed in shares.items():
            commitments = self._dealers[dealer].dealt.commitments.get(index) if dealer in self._sharers else None
            if commitments is None:
                raise Rejected(f"it reveals a share of node {dealer} that it does not hold.")
            which = self.due(dealer)
            if len(revealed) != len(which) * SHARE:
                raise Rejected(f"it does not reveal the {len(which)} shares of node {dealer} that are due.")
            for place, secret in enumerate(which):
                if len(self._shares.get((dealer, secret), ())) >= threshold:
                    continue  # enough of them were checked
                share = revealed[place * SHARE : (place + 1) * SHARE]
                if not shamir.check(commitments[secret], share, index, context):
                    raise Rejected(f"its share of node {dealer} is not the one that was dealt.")
                good[dealer, secret] = share
        for of_secret, share in good.items():
            self._shares.setdefault(of_secret, {})[index] = share

    @property
    def complete(self) -> bool:
        """Whether everything that is needed has been revealed."""
        threshold = self.terms.parameters.threshold
        return all(
            len(self._shares.get((dealer, secret), {})) >= threshold
            for dealer in self._sharers
            for secret in self.due(dealer)
        )

    def unmask(self) -> Words:
        """The sum of the survivors' vectors, without the spare parts that are not needed; each word below 2^bits.
        Raises `Aborted`."""
        plus: list[bytes] = []
        minus: list[bytes] = []
        for dealer in sorted(self._sharers):
            if dealer in self._survivors:
                seed = self._seed(dealer, self._recovered(dealer, SEED))
                minus.append(self_mask_key(seed, self.terms.digest))
            else:
                self._take_off(dealer, self._mask_key(dealer, self._recovered(dealer, MASK_KEY)), plus, minus)
        spare_keys = [
            spare_key(self._spare_seed(dealer, self._recovered(dealer, SPARE_SEED)), self.terms.digest)
            for dealer in sorted(self._unneeded)
        ]
        words = self._sum.total()
        add_keystreams(words, self.terms.bits, plus, minus)
        if self._spare is not None:
            self._spare.take_off(words, spare_keys)
        return words

    def _take_off(self, dropped: int, key: X25519PrivateKey, plus: list[bytes], minus: list[bytes]) -> None:
        """Undo what the survivors added for their masks with a node that dropped out."""
        for survivor in sorted(self._survivors):
            if not self._edge(dropped, survivor):
                continue
            pair = (min(dropped, survivor), max(dropped, survivor))
            try:
                shared = mask_key(key, self.terms.advertisement(survivor).mask_key, self.terms.digest, pair)
            except AdvertisementError as error:
                raise Aborted(f"the masks of node {dropped} cannot be taken off node {survivor}: {error}") from error
            (minus if survivor < dropped else plus).append(shared)

    def _edge(self, one: int, other: int) -> bool:
        return other in self._dealers[one].partners or one in self._dealers[other].partners

    def _recovered(self, dealer: int, secret: int) -> bytes:
        threshold = self.terms.parameters.threshold
        shares = self._shares.get((dealer, secret), {})
        if len(shares) < threshold:
            raise Aborted(f"{len(shares)} shares of node {dealer} were revealed, {threshold} are needed.")
        try:
            return shamir.recover(shares, threshold)
        except shamir.ShamirError as error:
            raise Aborted(f"the shares that node {dealer} dealt make no secret: {error}") from error

    def _seed(self, dealer: int, seed: bytes) -> bytes:
        if seed_commitment(seed, self.terms.digest) != self._dealers[dealer].dealt.seed_commitment:
            raise Aborted(f"the shares that node {dealer} dealt are not of the seed that it committed to.")
        return seed

    def _spare_seed(self, dealer: int, seed: bytes) -> bytes:
        if spare_commitment(seed, self.terms.digest) != self._dealers[dealer].dealt.spare_commitment:
            raise Aborted(f"the shares that node {dealer} dealt are not of the spare seed that it committed to.")
        return seed

    def _mask_key(self, dealer: int, secret: bytes) -> X25519PrivateKey:
        key = X25519PrivateKey.from_private_bytes(secret)
        if key.public_key().public_bytes_raw() != self.terms.advertisement(dealer).mask_key:
            raise Aborted(f"the shares that node {dealer} dealt are not of the mask key that it advertised.")
        return key

    def _enough(self, count: int, what: str) -> None:
        fewest = self.terms.parameters.survivors
        if count < fewest:
            raise Aborted(f"{count} of {self.terms.n} nodes {what}, a sum needs {fewest}.")
