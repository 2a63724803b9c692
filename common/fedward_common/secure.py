"""A node in a run with secure aggregation: nothing that depends on its data leaves it unmasked.

A TRAIN request (or EVALUATE, for a round of metrics alone) does the work, keeps the result back and answers with
dealt shares; MASK, AGREE and UNMASK then take the steps of `secagg.client`. Metrics and weight are in the masked
vector too; what else a reply says depends on no data.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedward_common.algorithms.registry import build_sum
from fedward_common.config import RunConfig
from fedward_common.errors import FedwardError, UpdateError
from fedward_common.local import Done, Work
from fedward_common.messages import Failure, Purpose, Reason, Reply, Request, Stamp
from fedward_common.node import Participant, Refused, StateStore
from fedward_common.pipeline import Clip, Flat, Quantize, Road
from fedward_common.roster import Roster
from fedward_common.secagg.client import Client, Guarantees, Refusal
from fedward_common.secagg.graph import NoProtection, Parameters
from fedward_common.secagg.keys import AdvertisementError, Keyring
from fedward_common.secagg.masks import Keystream
from fedward_common.secagg.messages import (
    SEALED,
    SIGNATURE,
    Delivery,
    MessageError,
    Unmasking,
    advertisements_from_bytes,
    entries_from_bytes,
    entries_to_bytes,
)
from fedward_common.secagg.packing import pack
from fedward_common.secagg.terms import Terms
from fedward_common.signing import canonical
from fedward_common.summand import Shape
from fedward_common.update import Update, Vectors

log = logging.getLogger("fedward.node")

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

TRAIN = "train."
EVALUATE = "evaluate."
"""What stands before a metric's name in a secure sum."""

WEIGHING = (f"{TRAIN}examples",)
"""The metrics of a sum that only asks how many examples there are, before the first round of a weighted mean."""

TERMS = "secure_sum"
"""In a request's settings: {"shape": canonical text, "parameters": {…}}."""

_LIFE = 3600.0
"""Seconds after which a node forgets a round that the server never ended."""

T = TypeVar("T")
Blob = npt.NDArray[np.uint8]


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


def config_digest(config: RunConfig) -> str:
    """SHA-256 of a run's configuration, hex."""
    return hashlib.sha256(canonical(config.model_dump(mode="json")).encode()).hexdigest()


def schema(trains: bool, evaluates: bool, metric_names: tuple[str, ...]) -> tuple[str, ...]:
    """The metrics of a secure sum: sums over the examples trained on, and over the test data for the model that was
    broadcast."""
    trained = (f"{TRAIN}examples", f"{TRAIN}loss") if trains else ()
    evaluated = tuple(EVALUATE + name for name in ("examples", "loss", *metric_names)) if evaluates else ()
    return trained + evaluated


@dataclass(frozen=True)
class Standing:
    """Who this node is to its peers. roster: the newest that it accepts. least: fewest nodes in a sum, by its own
    policy."""

    node: bytes
    identity: Ed25519PrivateKey
    roster: Callable[[], Roster]
    least: int


@dataclass
class _Round:
    """One secure round that is under way. words: this node's vector until it is masked. masked: what was sent, for
    a server that lost it."""

    client: Client
    words: npt.NDArray[np.uint32] | None
    since: float
    masked: tuple[Delivery, Blob] | None = None


class SecureParticipant(Participant):
    """One node in one secure run."""

    _kind = "with secure aggregation"

    def __init__(
        self, run: str, config: RunConfig, store: StateStore, execute: Callable[[Work], Done], standing: Standing
    ) -> None:
        super().__init__(config, store, execute)
        self._run = run
        self._standing = standing
        self._keyring = Keyring(standing.node, run, standing.identity)
        self._round: _Round | None = None
        self._answered: dict[Purpose, set[Stamp | None]] = {}

    def protections(self, reply: Reply) -> tuple[str, ...]:
        return ("update-gate", "clip", "quantize", "secure-sum") if MASKED in reply.vectors else ()

    def expire(self) -> None:
        if self._round is not None and time.monotonic() - self._round.since > _LIFE:
            self._abandon()

    def _handlers(self) -> Mapping[Purpose, Callable[[Request], Reply]]:
        return {
            Purpose.PREPARE: self._prepare,
            Purpose.ADVERTISE: self._advertise,
            Purpose.TRAIN: self._start,
            Purpose.EVALUATE: self._start,
            Purpose.MASK: self._mask,
            Purpose.AGREE: self._agree,
            Purpose.UNMASK: self._unmask,
            Purpose.FINISH: self._finish,
        }

    def _refuse(self, request: Request, failure: Failure) -> Reply:
        # Whatever it was, its advertisement is used up: the next round can start with this one.
        return Reply(request.purpose, request.run, failure=failure, vectors=self._fresh())

    def _fresh(self) -> dict[str, Blob]:
        return {ADVERTISEMENT: blob(self._keyring.advertise().to_bytes())}

    def _prepare(self, request: Request) -> Reply:
        reply = super()._prepare(request)
        return Reply(Purpose.PREPARE, request.run, vectors=self._fresh(), info=reply.info)

    def _advertise(self, request: Request) -> Reply:
        return Reply(Purpose.ADVERTISE, request.run, vectors=self._fresh())

    # --- the steps of a round

    def _start(self, request: Request) -> Reply:
        self._abandon()
        broadcast = {name: vector for name, vector in request.vectors.items() if name != ADVERTISEMENTS}
        shape, terms = self._terms(request, broadcast)
        with _refusing():
            client = Client(
                terms, self._standing.node, self._keyring, self._standing.identity, self._guarantees(terms.n)
            )
        self._check_new(request)
        try:
            words = self._words(request, shape, broadcast)
        except Refused as refused:
            if refused.failure.reason is not Reason.BAD_UPDATE:
                raise
            # Values and names that came from the worker are in the text: for this site's log alone.
            log.warning("run %s round %d: %s", request.run[:8], request.round, refused)
            raise Refused(Failure(Reason.BAD_UPDATE, "the node's log says why")) from refused
        with _refusing():
            dealt = client.deal()
        self._round = _Round(client, words, time.monotonic())
        return Reply(request.purpose, request.run, vectors={DEALT: blob(dealt.to_bytes())})

    def _words(self, request: Request, shape: Shape, broadcast: Vectors) -> npt.NDArray[np.uint32]:
        if shape.metrics == WEIGHING:
            return _laid_out(shape, Update({}, 1.0, {WEIGHING[0]: self._execute(Work("count")).metrics["examples"]}))
        metrics: dict[str, float] = {}
        if _evaluates(shape):
            found = self._evaluated(request, broadcast)
            names = [name for name in shape.metrics if name.startswith(EVALUATE)]
            # A site without test data adds nothing to any of them.
            metrics |= {EVALUATE + k: v for k, v in found.items()} if found["examples"] else dict.fromkeys(names, 0.0)
        groups: Vectors = {}
        weight = 1.0
        if request.purpose is Purpose.TRAIN:
            update, info = self._trained(request, broadcast)
            if len(shape.groups) < len(update.groups) and not info["complete"]:
                raise Refused(Failure(Reason.TIME_LIMIT, "some steps were left out, which this sum cannot hold"))
            groups = {group.name: update.groups[group.name] for group in shape.groups}
            weight = update.weight
            metrics |= {TRAIN + name: value for name, value in update.metrics.items()}
        return _laid_out(shape, Update(groups, weight, metrics))

    def _mask(self, request: Request) -> Reply:
        now = self._under_way(request)
        parameters = now.client.terms.parameters
        size = SEALED if parameters.complete else SEALED + 2 * parameters.partners
        delivery = Delivery(
            _bytes(request, SHARERS), _parsed(entries_from_bytes, _bytes(request, SEALED_SHARES), size)
        )
        if now.masked is not None and now.masked[0] == delivery:
            # Lost on its way: the very same bytes once more, never another vector under the same masks.
            return Reply(Purpose.MASK, request.run, vectors={MASKED: now.masked[1]})
        words = now.words
        if words is None:
            raise Refused(Failure(Reason.SECURE_SUM, "a masked input was asked for twice, with other shares"))
        now.words = None
        with _refusing():
            now.client.mask(delivery, words)
        packed = pack(words, now.client.terms.bits)
        now.masked = (delivery, packed)
        return Reply(Purpose.MASK, request.run, vectors={MASKED: packed})

    def _agree(self, request: Request) -> Reply:
        now = self._under_way(request)
        with _refusing():
            signature = now.client.agree(_bytes(request, SURVIVORS))
        now.masked = None
        return Reply(Purpose.AGREE, request.run, vectors={SIGNATURES: blob(signature)})

    def _unmask(self, request: Request) -> Reply:
        now = self._under_way(request)
        signatures = _parsed(entries_from_bytes, _bytes(request, SIGNATURES), SIGNATURE)
        self._round = None
        with _refusing():
            shares = now.client.unmask(Unmasking(_bytes(request, SURVIVORS), _bytes(request, DROPPED), signatures))
        return Reply(
            Purpose.UNMASK, request.run, vectors={REVEALED: blob(entries_to_bytes(shares)), **self._fresh()}
        )

    def _finish(self, request: Request) -> Reply:
        self._abandon()
        return super()._finish(request)

    def _under_way(self, request: Request) -> _Round:
        if self._round is not None:
            terms = self._round.client.terms
            if (terms.round, terms.attempt) == (request.round, request.attempt):
                return self._round
        raise Refused(Failure(Reason.SECURE_SUM, f"round {request.round} is not under way on this node"))

    def _abandon(self) -> None:
        if self._round is not None:
            self._round.client.wipe()
        self._round = None

    # --- what the round is held against

    def _check_new(self, request: Request) -> None:
        """One sum for each purpose of an attempt at a round: two, one of them without this node, would differ by what
        is its own."""
        stamp = Stamp(request.round, request.attempt)
        if request.purpose not in self._answered:
            # This process may have followed another one, which left its last trainings on disk.
            trained = (self._store.committed()[0], *(self._store.pending() or ())[:1])
            self._answered[request.purpose] = set(trained if request.purpose is Purpose.TRAIN else ())
        if stamp in self._answered[request.purpose]:
            rule = f"{request.purpose.value} of round {stamp.round}, attempt {stamp.attempt}, was answered already"
            raise Refused(Failure(Reason.SECURE_SUM, rule))
        self._answered[request.purpose].add(stamp)

    def _terms(self, request: Request, broadcast: Vectors) -> tuple[Shape, Terms]:
        told = request.settings.get(TERMS)
        if not isinstance(told, Mapping) or ADVERTISEMENTS not in request.vectors:
            raise Refused(Failure(Reason.SECURE_SUM, "the request carries no terms of a secure sum"))
        advertisements = _parsed(advertisements_from_bytes, _bytes(request, ADVERTISEMENTS))
        try:
            shape = Shape.from_json(str(told["shape"]))
            parameters = Parameters(**told["parameters"])
        except (FedwardError, KeyError, TypeError, ValueError) as error:
            raise Refused(Failure(Reason.SECURE_SUM, "the terms of the secure sum cannot be read")) from error
        self._check_shape(shape, request.purpose, len(advertisements))
        terms = Terms(
            run=self._run,
            round=request.round,
            attempt=request.attempt,
            purpose=request.purpose.value,
            model=digest(broadcast),
            config=config_digest(self.config),
            roster=self._standing.roster().digest,
            shape=shape.to_json(),
            length=shape.length,
            bits=shape.bits,
            parameters=parameters,
            advertisements=advertisements,
        )
        return shape, terms

    def _check_shape(self, shape: Shape, purpose: Purpose, n: int) -> None:
        """The vector must be the one that run and task ask for; only ranges and weight scale are the server's."""
        layout = self._known().layout
        trains = purpose is Purpose.TRAIN
        algorithm = build_sum(self.config.algorithm)
        summed = algorithm.summed(layout, self.config.local) if trains else {}
        weighs = trains and not algorithm.uniform
        rules = (
            ("groups", {g.name: g.length for g in shape.groups}, {g: layout.size(kind) for g, kind in summed.items()}),
            ("metrics", shape.metrics, self._metrics(shape, trains)),
            ("bits", shape.bits, self.config.secure_sum.bits),
            ("capacity", shape.capacity, n),
            ("weight scale", shape.weight_scale, shape.weight_scale if weighs else 1.0),
        )
        for name, given, asked in rules:
            if given != asked:
                raise Refused(Failure(Reason.SECURE_SUM, f"{name} of the sum: {given}, this node's are {asked}"))

    def _metrics(self, shape: Shape, trains: bool) -> tuple[str, ...]:
        if not trains and shape.metrics == WEIGHING:
            return WEIGHING
        return schema(trains, _evaluates(shape) or not trains, self._known().metric_names)

    def _guarantees(self, n: int) -> Guarantees:
        with _refusing():
            parameters = self.config.secure_sum.parameters(n)
        return Guarantees(parameters, self._standing.least, self._standing.roster().identities.get)


def _laid_out(shape: Shape, update: Update) -> npt.NDArray[np.uint32]:
    road = Road.of(Clip(shape)).then(Quantize(shape, Keystream()))
    try:
        return road(Flat(update))
    except UpdateError as error:
        raise Refused(Failure(Reason.BAD_UPDATE, str(error))) from error


def _evaluates(shape: Shape) -> bool:
    return any(name.startswith(EVALUATE) for name in shape.metrics)


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except (Refusal, NoProtection) as error:
        raise Refused(Failure(Reason.SECURE_SUM, str(error))) from error


def _parsed(parse: Callable[..., T], *arguments: Any) -> T:
    try:
        return parse(*arguments)
    except (MessageError, AdvertisementError) as error:
        raise Refused(Failure(Reason.SECURE_SUM, str(error))) from error


def _bytes(request: Request, name: str) -> bytes:
    vector = request.vectors.get(name)
    if vector is None or vector.dtype != np.uint8:
        raise Refused(Failure(Reason.SECURE_SUM, f"the request has no bytes {name!r}"))
    data: bytes = vector.tobytes()
    return data
