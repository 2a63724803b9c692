"""A node's half of a secure round (Bell et al. 2020, Alg. 2 and 3; Bonawitz et al. 2017), without any I/O.

deal → mask → agree → unmask, each once and in this order; a step that is asked for out of order, or whose request
breaks a rule, raises `Refusal` and reveals nothing. What a node checks here holds against a server that lies.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedward_common.errors import FedwardError
from fedward_common.secagg import shamir
from fedward_common.secagg.cells import Words
from fedward_common.secagg.graph import Parameters, draw_holders, partners_of
from fedward_common.secagg.keys import (
    AdvertisementError,
    Identities,
    KeyPairs,
    Keyring,
    SealKey,
    mask_key,
    self_mask_key,
    spare_key,
)
from fedward_common.secagg.masks import add_keystreams
from fedward_common.secagg.messages import (
    SECRETS,
    SHARE,
    Dealt,
    Delivery,
    MessageError,
    Unmasking,
    indices_from_bytes,
    indices_to_bytes,
    members_from_bytes,
    pieces,
    sealed_size,
)
from fedward_common.secagg.spare import Spare
from fedward_common.secagg.terms import Terms, survivors_statement

SEED, MASK_KEY, SPARE_SEED = range(3)
"""The secrets that a node shares, in the order of their shares and commitments."""


class Refusal(FedwardError):
    """A node does not take this step: the text names the rule that the request breaks."""


class _Stage(IntEnum):
    NEW = 0
    DEALT = 1
    MASKED = 2
    AGREED = 3
    OVER = 4


@dataclass(frozen=True)
class Guarantees:
    """What this node asks of every secure round, from the run's signed configuration and its own policy.

    parameters: what the rules give for the cohort's size. least: fewest nodes in a sum, its own policy's.
    identities: the roster's keys; None where nodes have no enrolled identity (then nobody can tell who is who, and
    only an honest server is safe). spare: the part of each vector that can be taken off the sum, if there is one.
    """

    parameters: Parameters
    least: int
    identities: Identities | None
    spare: Spare | None = None


class Client:
    """One node in one secure round. Raises `Refusal` if the terms are not what this node asks for."""

    def __init__(
        self,
        terms: Terms,
        node: bytes,
        keyring: Keyring,
        identity: Ed25519PrivateKey | None,
        guarantees: Guarantees,
    ) -> None:
        self.terms = terms
        self._identity = identity
        self._guarantees = guarantees
        self._public: dict[int, Ed25519PublicKey] = {}
        self._verified: set[int] = set()
        self._check_parameters()
        self._check_advertisements()
        index = terms.index(node)
        if index is None:
            raise Refusal("this node is not among those that advertised.")
        self.index = index
        # Taken once: whatever happens from here on, these keys are never used in another round.
        keys = keyring.take(terms.advertisement(index))
        if keys is None:
            raise Refusal("this node's advertisement was used already, or is not its own.")
        self._keys: KeyPairs | None = keys
        self._seed = os.urandom(32)
        self._spare_seed = b"" if guarantees.spare is None else os.urandom(32)
        self._stage = _Stage.NEW
        self._holders: tuple[int, ...] = ()
        self._seals: dict[int, SealKey] = {}
        self._own_shares: tuple[bytes, ...] | None = None
        self._held: dict[int, tuple[bytes, ...]] = {}
        self._drew: dict[int, frozenset[int]] = {}
        self._sharers: frozenset[int] = frozenset()
        self._sharers_bytes = b""
        self._survivors_bytes = b""

    # --- what is checked before anything is done

    def _check_parameters(self) -> None:
        given, asked = self.terms.parameters, self._guarantees.parameters
        if given.n != self.terms.n:
            raise Refusal(f"the parameters are for {given.n} nodes, {self.terms.n} advertised.")
        if given.n < self._guarantees.least:
            raise Refusal(f"min_cohort = {self._guarantees.least}, the round is for {given.n}.")
        if given != asked:
            for name in ("threshold", "holders", "quorum", "survivors", "partners", "kept"):
                if getattr(given, name) != getattr(asked, name):
                    raise Refusal(f"{name} = {getattr(given, name)}, the rules give {getattr(asked, name)}.")
            raise Refusal("the parameters are not those that the rules give.")

    def _check_advertisements(self) -> None:
        nodes = [advertisement.node for advertisement in self.terms.advertisements]
        if nodes != sorted(set(nodes)):
            raise Refusal("the advertisements are not sorted by node, each once.")
        identities = self._guarantees.identities
        if identities is None:
            return
        for index, advertisement in enumerate(self.terms.advertisements, 1):
            public = identities(advertisement.node)
            if public is None:
                raise Refusal(f"node {advertisement.node.hex()} is not in the roster that this node accepts.")
            self._public[index] = public
            if self.terms.parameters.complete:
                # It has to do with all: seen before it trains, not after.
                self._verify(index)

    def _turn(self, wanted: _Stage, step: str) -> KeyPairs:
        if self._stage is not wanted or self._keys is None:
            raise Refusal(f"{step} out of turn: each step of a secure round is taken once, in order.")
        return self._keys

    # --- the four steps

    @property
    def secrets(self) -> int:
        """How many secrets each node of the round shares."""
        return SECRETS + (self._guarantees.spare is not None)

    @property
    def spare_key(self) -> bytes:
        """The key that this node's spare part is to be drawn from; b"" where vectors have none."""
        return spare_key(self._spare_seed, self.terms.digest) if self._spare_seed else b""

    def deal(self) -> Dealt:
        """Draw holders, and seal for each a share of every secret: the self-mask's seed, the mask key, the seed of the
        spare part if there is one."""
        keys = self._turn(_Stage.NEW, "dealing shares")
        self._stage = _Stage.DEALT
        parameters, context = self.terms.parameters, self.terms.digest
        self._holders = draw_holders(parameters, self.index)
        drew = listed_partners(parameters, self._holders)
        # On a complete graph a node holds a share of its own secrets too: the threshold counts it.
        places = (*self._holders, self.index) if parameters.complete else self._holders
        secrets = [self._seed, keys.mask.private_bytes_raw()]
        if self._spare_seed:
            secrets.append(self._spare_seed)
        split = [shamir.split(secret, places, parameters.threshold) for secret in secrets]
        shares = dict(zip(places, zip(*split, strict=True), strict=True))
        sealed = {
            holder: self._seal(keys, holder).seal(b"".join(shares[holder]), self.index, holder, drew)
            for holder in self._holders
        }
        self._own_shares = shares.get(self.index)
        commitments = {
            place: tuple(shamir.commitment(share, place, context) for share in of_place)
            for place, of_place in shares.items()
        }
        spare = spare_commitment(self._spare_seed, context) if self._spare_seed else b""
        return Dealt(sealed, commitments, seed_commitment(self._seed, context), spare)

    def mask(self, delivery: Delivery, words: Words) -> None:
        """Add all masks to `words` (uint32, below 2^bits), in place."""
        keys = self._turn(_Stage.DEALT, "a masked input")
        if len(words) != self.terms.length:
            raise Refusal(f"the vector has {len(words)} words, the terms say {self.terms.length}.")
        sharers = self._members(delivery.sharers)
        self._check_sharers(sharers)
        partners = set(partners_of(self.terms.parameters, self._holders)) & sharers
        for dealer, sealed in delivery.sealed.items():
            if dealer not in sharers or dealer == self.index:
                raise Refusal(f"shares from node {dealer}, which is not said to have dealt any.")
            self._held[dealer], drew = self._opened(keys, dealer, sealed)
            if self.terms.parameters.complete or self.index in drew:
                partners.add(dealer)
            self._drew[dealer] = drew
        if self._own_shares is not None:
            self._held[self.index] = self._own_shares
        # From here on this node's vector is in the open if its masks were used twice.
        self._stage = _Stage.MASKED
        self._sharers, self._sharers_bytes = sharers, delivery.sharers
        plus, minus = [self_mask_key(self._seed, self.terms.digest)], list[bytes]()
        for partner_index in sorted(partners):
            (plus if self.index < partner_index else minus).append(self._pair(keys, partner_index))
        add_keystreams(words, self.terms.bits, plus, minus)

    def agree(self, survivors: bytes) -> bytes:
        """The signature of the survivor set. One set a round: the same one may be signed again, no other."""
        if self._stage is _Stage.AGREED and survivors == self._survivors_bytes:
            return self._sign(survivors)
        self._turn(_Stage.MASKED, "agreeing on survivors")
        self._check_survivors(self._members(survivors))
        self._stage = _Stage.AGREED
        self._survivors_bytes = survivors
        return self._sign(survivors)

    def unmask(self, request: Unmasking) -> dict[int, bytes]:
        """Dealer -> this node's share: of the seed of a survivor, of the mask key of one that dropped out. Behind that
        of a survivor whose spare part comes off, the share of that part's seed.

        Whatever the outcome, this was the round's only chance: the secrets are gone afterwards.
        """
        self._turn(_Stage.AGREED, "unmasking")
        try:
            survivors, dropped = self._members(request.survivors), self._members(request.dropped)
            self._check_split(survivors, dropped)
            self._check_survivors(survivors)
            self._check_signed_set(request.survivors)
            self._check_kept(survivors)
            self._check_signatures(request, survivors)
            spare = self._guarantees.spare
            unneeded = frozenset[int]() if spare is None else spare.unneeded(survivors, len(request.signatures))
            return {
                dealer: b"".join(shares[which] for which in due(dealer, survivors, unneeded))
                for dealer, shares in sorted(self._held.items())
            }
        finally:
            self.wipe()

    def wipe(self) -> None:
        """Forget every secret of the round; no step can follow."""
        self._stage = _Stage.OVER
        self._keys = None
        self._seed = b""
        self._spare_seed = b""
        self._own_shares = None
        self._held = {}
        self._seals = {}

    # --- between processes

    def export(self) -> bytes:
        """This half of the round as it stands, **secrets included**, for a node whose processes do not live from one
        step to the next. It may be restored once: two that go on from the same bytes could use a mask twice.

        Raises `Refusal` if the round is over and there is nothing left.
        """
        if self._keys is None:
            raise Refusal("this round is over, its secrets are gone.")
        told = {
            "terms": self.terms.to_json(),
            "keys": self._keys.to_bytes().hex(),
            "seed": self._seed.hex(),
            "stage": int(self._stage),
            "holders": self._holders,
            "spare_seed": self._spare_seed.hex(),
            "own": _hex(self._own_shares) if self._own_shares is not None else None,
            "held": {str(dealer): _hex(shares) for dealer, shares in self._held.items()},
            "drew": {str(dealer): sorted(drawn) for dealer, drawn in self._drew.items()},
            "sharers": self._sharers_bytes.hex(),
            "survivors": self._survivors_bytes.hex(),
        }
        return json.dumps(told).encode()

    @classmethod
    def restore(cls, data: bytes, identity: Ed25519PrivateKey | None, guarantees: Guarantees) -> Client:
        """The inverse of `export`, after the same checks of the terms as at the start. Raises `Refusal`."""
        told = json.loads(data)
        keys = KeyPairs.from_bytes(bytes.fromhex(told["keys"]))
        terms, node = Terms.from_json(told["terms"]), keys.advertisement.node
        keyring = Keyring(node, terms.run, identity)
        keyring.put(keys)
        client = cls(terms, node, keyring, identity, guarantees)
        client._seed = bytes.fromhex(told["seed"])
        client._spare_seed = bytes.fromhex(told["spare_seed"])
        client._stage = _Stage(told["stage"])
        client._holders = tuple(told["holders"])
        client._own_shares = _from_hex(told["own"]) if told["own"] is not None else None
        client._held = {int(dealer): _from_hex(shares) for dealer, shares in told["held"].items()}
        client._drew = {int(dealer): frozenset(drawn) for dealer, drawn in told["drew"].items()}
        client._sharers_bytes = bytes.fromhex(told["sharers"])
        if client._sharers_bytes:
            client._sharers = client._members(client._sharers_bytes)
        client._survivors_bytes = bytes.fromhex(told["survivors"])
        return client

    # --- the rules, one each

    def _check_sharers(self, sharers: frozenset[int]) -> None:
        parameters = self.terms.parameters
        if self.index not in sharers:
            raise Refusal("this node dealt its shares, but is not among those who did.")
        if len(sharers) < self._fewest():
            raise Refusal(f"{len(sharers)} nodes dealt shares, a sum needs {self._fewest()}.")
        reachable = len(sharers.intersection(self._holders)) + parameters.complete
        if reachable < parameters.threshold:
            raise Refusal(f"{reachable} of this node's shares can be had, {parameters.threshold} are needed.")

    def _check_survivors(self, survivors: frozenset[int]) -> None:
        if self.index not in survivors:
            raise Refusal("this node sent its masked vector, but is not among the survivors.")
        if not survivors <= self._sharers:
            raise Refusal("the survivors hold a node that dealt no shares.")
        if len(survivors) < self._fewest():
            raise Refusal(f"{len(survivors)} survivors, a sum needs {self._fewest()}.")

    def _check_split(self, survivors: frozenset[int], dropped: frozenset[int]) -> None:
        both = survivors & dropped
        if both:
            raise Refusal(f"nodes {sorted(both)} are named as survivors and as dropped.")
        if survivors | dropped != self._sharers:
            raise Refusal("survivors and dropped nodes together are not those who dealt shares.")

    def _check_signed_set(self, survivors: bytes) -> None:
        if survivors != self._survivors_bytes:
            raise Refusal("the survivors are not those that this node signed.")

    def _check_kept(self, survivors: frozenset[int]) -> None:
        # A server that names just one node's partners as dropped out would have its vector in the open.
        for dealer in survivors.intersection(self._drew) if not self.terms.parameters.complete else ():
            kept = len(self._drew[dealer] & survivors)
            if kept < self.terms.parameters.kept:
                asked = self.terms.parameters.kept
                raise Refusal(f"{kept} of the mask partners of node {dealer} survived, {asked} must.")

    def _check_signatures(self, request: Unmasking, survivors: frozenset[int]) -> None:
        """As many survivors must have signed the set as it must have members. A quorum would make it the only set; but
        a member that did not sign may be one that the server made up from keys of an earlier round, whose secrets were
        revealed there, and then nobody's vector stands for it in the sum. Where spare parts come off by the number of
        signatures, all of them must be right."""
        if self._guarantees.identities is None:
            return
        statement = survivors_statement(self.terms, self._sharers_bytes, request.survivors)
        looked_at = self._looked_at(request)
        valid = 0
        for signer, signature in request.signatures.items():
            if signer not in survivors:
                raise Refusal(f"node {signer} signed, but is no survivor.")
            try:
                self._public[signer].verify(signature, statement)
            except InvalidSignature as error:
                raise Refusal(f"the survivors' signature of node {signer} is wrong.") from error
            valid += 1
            if valid == looked_at:
                break
        if valid < self._fewest():
            raise Refusal(f"{valid} survivors signed this set, {self._fewest()} must have.")

    def _looked_at(self, request: Unmasking) -> int:
        """How many of the signatures are verified, at most."""
        return self._fewest() if self._guarantees.spare is None else len(request.signatures)

    def _fewest(self) -> int:
        return max(self._guarantees.least, self.terms.parameters.survivors)

    # --- helpers

    def _members(self, data: bytes) -> frozenset[int]:
        with _refusing():
            return members_from_bytes(data, self.terms.n)

    def _seal(self, keys: KeyPairs, other: int) -> SealKey:
        if other not in self._seals:
            self._verify(other)
            with _refusing():
                self._seals[other] = SealKey(keys.seal, self.terms.advertisement(other).seal_key, self.terms.digest)
        return self._seals[other]

    def _pair(self, keys: KeyPairs, other: int) -> bytes:
        self._verify(other)
        pair = (min(self.index, other), max(self.index, other))
        with _refusing():
            return mask_key(keys.mask, self.terms.advertisement(other).mask_key, self.terms.digest, pair)

    def _verify(self, other: int) -> None:
        """The other's advertisement, before any of its keys is used. Of nodes that this one has nothing to do with, a
        signature over the survivors is asked for: by it they stand for these terms, and so for their own advertisement
        in them."""
        if self._guarantees.identities is None or other in self._verified:
            return
        with _refusing():
            self.terms.advertisement(other).verify(self.terms.run, self._public[other])
        self._verified.add(other)

    def _opened(self, keys: KeyPairs, dealer: int, data: bytes) -> tuple[tuple[bytes, ...], frozenset[int]]:
        """The dealer's shares for this node, and the mask partners that it drew (none on a complete graph)."""
        size = sealed_size(self.secrets)
        sealed, listed = data[:size], data[size:]
        with _refusing():
            plain = self._seal(keys, dealer).open(sealed, dealer, self.index, listed)
            return pieces(plain, SHARE), frozenset(indices_from_bytes(listed))

    def _sign(self, survivors: bytes) -> bytes:
        if self._identity is None:
            return bytes(64)
        return self._identity.sign(survivors_statement(self.terms, self._sharers_bytes, survivors))


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except (AdvertisementError, MessageError) as error:
        raise Refusal(str(error)) from error


def listed_partners(parameters: Parameters, holders: tuple[int, ...]) -> bytes:
    """The mask partners that a node names to its holders; on a complete graph there is nothing to say."""
    return b"" if parameters.complete else indices_to_bytes(partners_of(parameters, holders))


def seed_commitment(seed: bytes, context: bytes) -> bytes:
    """Commitment to a self-mask's seed: it is random, so its hash hides it."""
    return hashlib.sha256(b"fedward secagg seed" + context + seed).digest()[:16]


def spare_commitment(seed: bytes, context: bytes) -> bytes:
    """Commitment to a spare part's seed, in the same way."""
    return hashlib.sha256(b"fedward secagg spare seed" + context + seed).digest()[:16]


def due(dealer: int, survivors: Collection[int], unneeded: Collection[int]) -> tuple[int, ...]:
    """Which of a dealer's secrets are revealed, in their order."""
    if dealer not in survivors:
        return (MASK_KEY,)
    return (SEED, SPARE_SEED) if dealer in unneeded else (SEED,)


def _hex(shares: tuple[bytes, ...]) -> list[str]:
    return [share.hex() for share in shares]


def _from_hex(shares: list[str]) -> tuple[bytes, ...]:
    return tuple(map(bytes.fromhex, shares))
