"""A node's steps in a secure round, between requests and replies, whatever it is that is summed."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedward_common.errors import FedwardError, UpdateError
from fedward_common.messages import Failure, Reason, Request
from fedward_common.node import Refused
from fedward_common.pipeline import Clip, Flat, Quantize, Road
from fedward_common.secagg.client import Client, Guarantees, Refusal
from fedward_common.secagg.graph import NoProtection, Parameters
from fedward_common.secagg.keys import AdvertisementError, Keyring
from fedward_common.secagg.masks import Keystream
from fedward_common.secagg.messages import (
    SIGNATURE,
    Delivery,
    MessageError,
    Unmasking,
    advertisements_from_bytes,
    delivered_size,
    entries_from_bytes,
    entries_to_bytes,
)
from fedward_common.secagg.packing import pack
from fedward_common.secagg.terms import Terms
from fedward_common.summand import Shape
from fedward_common.update import Update, Vectors

ADVERTISEMENT = "advertisement"
ADVERTISEMENTS = "advertisements"
DEALT = "dealt"
SHARERS = "sharers"
SEALED_SHARES = "sealed"
MASKED = "masked"
SURVIVORS = "survivors"
SIGNATURES = "signatures"
DROPPED = "dropped"
REVEALED = "revealed"
ROSTER = "roster"
"""The signed roster that the round's keys are checked against, in a TRAIN or EVALUATE request."""

TERMS = "secure_sum"
"""In a request's settings: {"shape": canonical text, "parameters": {…}}."""

T = TypeVar("T")
Blob = npt.NDArray[np.uint8]
Blobs = dict[str, Blob]
Words = npt.NDArray[np.uint32]


def blob(data: bytes) -> Blob:
    """Bytes as a vector that a message can carry."""
    return np.frombuffer(data, dtype=np.uint8)


def digest(vectors: Vectors) -> str:
    """SHA-256 of a broadcast, hex."""
    found = hashlib.sha256()
    for name in sorted(vectors):
        vector = np.ascontiguousarray(vectors[name])
        found.update(f"{name} {vector.dtype.str} {vector.size}\n".encode())
        found.update(vector.data)
    return found.hexdigest()


@dataclass
class _Round:
    """One secure round that is under way. words: this node's vector until it is masked. masked: what was sent, for
    a server that lost it."""

    client: Client
    words: Words | None
    since: float
    masked: tuple[Delivery, Blob] | None = None


class Steps:
    """The secure rounds of one node in one run, one at a time: what it answers to each stage's request.

    identity: None where nodes have none enrolled. Every step raises `Refused` if the request breaks a rule.
    """

    def __init__(self, run: str, node: bytes, identity: Ed25519PrivateKey | None) -> None:
        self._run = run
        self._node = node
        self._identity = identity
        self._keyring = Keyring(node, run, identity)
        self._round: _Round | None = None

    def fresh(self) -> Blobs:
        """A new key advertisement."""
        return {ADVERTISEMENT: blob(self._keyring.advertise().to_bytes())}

    def start(self, terms: Terms, guarantees: Guarantees, words: Callable[[bytes], Words]) -> Blobs:
        """Deal shares; `words` makes this node's vector, once the terms have passed all checks, with its spare part (if
        `guarantees` ask for one) from the key that it is given."""
        self.abandon()
        with refusing():
            client = Client(terms, self._node, self._keyring, self._identity, guarantees)
        made = words(client.spare_key)
        with refusing():
            dealt = client.deal()
        self._round = _Round(client, made, time.monotonic())
        return {DEALT: blob(dealt.to_bytes())}

    def mask(self, request: Request) -> Blobs:
        """The masked vector."""
        now = self._under_way(request)
        size = delivered_size(now.client.terms.parameters, now.client.secrets)
        delivery = Delivery(
            bytes_of(request, SHARERS), parsed(entries_from_bytes, bytes_of(request, SEALED_SHARES), size)
        )
        if now.masked is not None and now.masked[0] == delivery:
            # Lost on its way: the very same bytes once more, never another vector under the same masks.
            return {MASKED: now.masked[1]}
        words = now.words
        if words is None:
            raise Refused(Failure(Reason.SECURE_SUM, "a masked input was asked for twice, with other shares"))
        now.words = None
        with refusing():
            now.client.mask(delivery, words)
        packed = pack(words, now.client.terms.bits)
        now.masked = (delivery, packed)
        return {MASKED: packed}

    def agree(self, request: Request) -> Blobs:
        """The signature of the survivor set."""
        now = self._under_way(request)
        with refusing():
            signature = now.client.agree(bytes_of(request, SURVIVORS))
        now.masked = None
        return {SIGNATURES: blob(signature)}

    def unmask(self, request: Request) -> Blobs:
        """Shares of others' secrets. The round is over, whatever the outcome."""
        now = self._under_way(request)
        signatures = parsed(entries_from_bytes, bytes_of(request, SIGNATURES), SIGNATURE)
        self._round = None
        with refusing():
            shares = now.client.unmask(
                Unmasking(bytes_of(request, SURVIVORS), bytes_of(request, DROPPED), signatures)
            )
        return {REVEALED: blob(entries_to_bytes(shares))}

    def abandon(self) -> None:
        """Forget the round that is under way, if there is one."""
        if self._round is not None:
            self._round.client.wipe()
        self._round = None

    def expire(self, life: float) -> None:
        """Forget a round that began more than `life` seconds ago."""
        if self._round is not None and time.monotonic() - self._round.since > life:
            self.abandon()

    def _under_way(self, request: Request) -> _Round:
        if self._round is not None:
            terms = self._round.client.terms
            if (terms.round, terms.attempt) == (request.round, request.attempt):
                return self._round
        raise Refused(Failure(Reason.SECURE_SUM, f"round {request.round} is not under way on this node"))

    # --- between processes

    def export(self) -> dict[str, bytes]:
        """All of it, **secrets included**, for a node whose processes do not live from one request to the next."""
        told = {"keyring": self._keyring.to_bytes()}
        now = self._round
        if now is None:
            return told
        told["client"] = now.client.export()
        if now.words is not None:
            told["words"] = now.words.astype("<u4").tobytes()
        if now.masked is not None:
            delivery, packed = now.masked
            told[SHARERS], told[SEALED_SHARES] = delivery.sharers, entries_to_bytes(delivery.sealed)
            told[MASKED] = packed.tobytes()
        return told

    @classmethod
    def restore(
        cls,
        run: str,
        node: bytes,
        identity: Ed25519PrivateKey | None,
        guarantees: Callable[[int], Guarantees],
        told: dict[str, bytes],
    ) -> Steps:
        """The inverse. guarantees: what this node asks of a round of n nodes."""
        steps = cls(run, node, identity)
        steps._keyring = Keyring.from_bytes(node, run, identity, told["keyring"])
        if "client" in told:
            n = len(json.loads(json.loads(told["client"])["terms"])["advertisements"])
            with refusing():
                client = Client.restore(told["client"], identity, guarantees(n))
            words = np.frombuffer(told["words"], "<u4").astype(np.uint32) if "words" in told else None
            steps._round = _Round(client, words, time.monotonic())
            if MASKED in told:
                size = delivered_size(client.terms.parameters, client.secrets)
                delivery = Delivery(told[SHARERS], entries_from_bytes(told[SEALED_SHARES], size))
                steps._round.masked = (delivery, blob(told[MASKED]))
        return steps


def told_terms(request: Request, run: str, model: str, config: str, roster: str) -> tuple[Shape, Terms]:
    """The terms in a TRAIN or EVALUATE request, with this side's own digests. Raises `Refused`."""
    told = request.settings.get(TERMS)
    if not isinstance(told, Mapping) or ADVERTISEMENTS not in request.vectors:
        raise Refused(Failure(Reason.SECURE_SUM, "the request carries no terms of a secure sum"))
    advertisements = parsed(advertisements_from_bytes, bytes_of(request, ADVERTISEMENTS))
    try:
        shape = Shape.from_json(str(told["shape"]))
        parameters = Parameters(**told["parameters"])
    except (FedwardError, KeyError, TypeError, ValueError) as error:
        raise Refused(Failure(Reason.SECURE_SUM, "the terms of the secure sum cannot be read")) from error
    if told.get("roster", roster) != roster:
        rule = f"the round is for the roster {_short(str(told['roster']))}, this node knows {_short(roster)}"
        raise Refused(Failure(Reason.SECURE_SUM, rule))
    terms = Terms(
        run=run,
        round=request.round,
        attempt=request.attempt,
        purpose=request.purpose.value,
        model=model,
        config=config,
        roster=roster,
        shape=shape.to_json(),
        length=shape.length,
        bits=shape.bits,
        parameters=parameters,
        advertisements=advertisements,
    )
    return shape, terms


def _short(roster: str) -> str:
    version, _, sha256 = roster.partition(":")
    return f"version {version} ({sha256[:12]})"


def laid_out(shape: Shape, update: Update) -> Words:
    """The summand of an update, past clipping and rounding. Raises `Refused`."""
    road = Road.of(Clip(shape)).then(Quantize(shape, Keystream()))
    try:
        return road(Flat(update))
    except UpdateError as error:
        raise Refused(Failure(Reason.BAD_UPDATE, str(error))) from error


@contextmanager
def refusing() -> Iterator[None]:
    """Rules of the protocol that were broken, as a refusal of the request."""
    try:
        yield
    except (Refusal, NoProtection) as error:
        raise Refused(Failure(Reason.SECURE_SUM, str(error))) from error


def parsed(parse: Callable[..., T], *arguments: Any) -> T:
    """parse(*arguments). Raises `Refused` for what is no message of the protocol."""
    try:
        return parse(*arguments)
    except (MessageError, AdvertisementError) as error:
        raise Refused(Failure(Reason.SECURE_SUM, str(error))) from error


def bytes_of(request: Request, name: str) -> bytes:
    """The bytes of a vector in a request. Raises `Refused`."""
    vector = request.vectors.get(name)
    if vector is None or vector.dtype != np.uint8:
        raise Refused(Failure(Reason.SECURE_SUM, f"the request has no bytes {name!r}"))
    data: bytes = vector.tobytes()
    return data
