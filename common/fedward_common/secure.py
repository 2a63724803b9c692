"""A node in a run with secure aggregation: nothing that depends on its data leaves it unmasked.

A TRAIN request (or EVALUATE, for a round of metrics alone) does the work, keeps the result back and answers with
dealt shares; MASK, AGREE and UNMASK then take the steps of `secagg.client`. Metrics and weight are in the masked
vector too; what else a reply says depends on no data.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedward_common import scalar_groups
from fedward_common.chain import Head
from fedward_common.config import RunConfig
from fedward_common.errors import ConfigError, UpdateError
from fedward_common.messages import LEDGER_HEAD, Failure, Purpose, Reason, Reply, Request, Stamp
from fedward_common.node import Participant, Refused, StateStore
from fedward_common.norm_bound import SCALED
from fedward_common.privacy import site
from fedward_common.privacy.clip import check_clip
from fedward_common.privacy.cost import check_layout, round_cost
from fedward_common.privacy.events import to_json
from fedward_common.privacy.ledger import Release
from fedward_common.roster import Roster
from fedward_common.secagg.client import Guarantees
from fedward_common.secagg.graph import NoProtection
from fedward_common.secagg.terms import Terms
from fedward_common.signing import canonical
from fedward_common.steps import (
    ADVERTISEMENTS,
    MASKED,
    ROSTER,
    Blobs,
    Steps,
    Words,
    digest,
    laid_out,
    refusing,
    told_terms,
)
from fedward_common.summand import Shape
from fedward_common.update import Extent, Kind, Update, Vectors
from fedward_common.work import Done, Work

log = logging.getLogger("fedward.node")

TRAIN = "train."
EVALUATE = "evaluate."
"""What stands before a metric's name in a secure sum."""

WEIGHING = (f"{TRAIN}examples",)
"""The metrics of a sum that only asks how many examples there are, before the first round of a weighted mean."""

_LIFE = 3600.0
"""Seconds after which a node forgets a round that the server never ended."""


def config_digest(config: RunConfig) -> str:
    """SHA-256 of a run's configuration, hex."""
    return hashlib.sha256(canonical(config.model_dump(mode="json")).encode()).hexdigest()


def schema(trains: bool, evaluates: bool, metric_names: tuple[str, ...], bounded: bool = False) -> tuple[str, ...]:
    """The metrics of a secure sum: sums over the examples trained on, and over the test data for the model that was
    broadcast. bounded: with the count of updates that were over a norm bound."""
    trained = (f"{TRAIN}examples", f"{TRAIN}loss") if trains else ()
    scaled = (TRAIN + SCALED,) if trains and bounded else ()
    evaluated = tuple(EVALUATE + name for name in ("examples", "loss", *metric_names)) if evaluates else ()
    return trained + scaled + evaluated


@dataclass(frozen=True)
class Standing:
    """Who this node is to its peers. newest: the roster that it knows, as it was signed. roster: who of it counts on
    this node. least: fewest nodes in a sum, by its own policy."""

    node: bytes
    identity: Ed25519PrivateKey
    newest: Callable[[], Roster]
    roster: Callable[[], Roster]
    least: int


class Accounts(Protocol):
    """A node's account of what was released of its data. All but `head` raise `Refused`."""

    def head(self) -> Head | None:
        """Where the account ends, for the server to remember; None if there is none."""

    def confirm(self, named: object) -> None:
        """Whether the account still holds the head that the server remembers; None if it names none."""

    def check(self, release: Release) -> None:
        """Whether `release` may be made."""

    def write(self, release: Release) -> None:
        """Account for `release`, which is about to be made: on disk when this returns."""


class NoAccounts:
    """Of a node that keeps none: simulated ones, which have no policy either."""

    def head(self) -> None:
        return

    def confirm(self, named: object) -> None:
        return

    def check(self, release: Release) -> None:
        return

    def write(self, release: Release) -> None:
        return


CLIP = "clip"
"""The setting of a request that says C, where it adapts."""
_HERE = "here"
"""The data set and the server of a release, for `Accounts` to name."""
_TOLD = (ADVERTISEMENTS, ROSTER)
"""Vectors in a request that are no part of the broadcast."""


class SecureParticipant(Participant):
    """One node in one secure run."""

    _kind = "with secure aggregation"

    def __init__(
        self,
        run: str,
        config: RunConfig,
        store: StateStore,
        execute: Callable[[Work], Done],
        standing: Standing,
        accounts: Accounts | None = None,
    ) -> None:
        super().__init__(config, store, execute)
        self._accounts = accounts or NoAccounts()
        self._due: Release | None = None
        self._run = run
        self._standing = standing
        self._steps = Steps(run, standing.node, standing.identity)
        self._answered: dict[Purpose, set[Stamp | None]] = {}

    def handle(self, request: Request) -> Reply:
        reply = super().handle(request)
        head = self._accounts.head()
        return reply if head is None else replace(reply, info={**reply.info, LEDGER_HEAD: str(head)})

    def protections(self, reply: Reply) -> tuple[str, ...]:
        if MASKED not in reply.vectors:
            return ()
        options = self.config.privacy
        if options is None:
            norm = () if self._bound is None else ("clip-norm",)
            return ("update-gate", *norm, "clip", "quantize", "secure-sum")
        if options.unit != "site":
            return (f"dp-sgd-by-{options.unit}", "update-gate", "clip", "quantize", "secure-sum")
        noise = (f"{options.noise}-noise",) if options.mechanism == "distributed" else ()
        return ("update-gate", "clip-norm", "quantize", *noise, "secure-sum")

    def expire(self) -> None:
        self._steps.expire(_LIFE)

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
        return Reply(request.purpose, request.run, failure=failure, vectors=self._steps.fresh())

    def _prepare(self, request: Request) -> Reply:
        reply = super()._prepare(request)
        if self.config.privacy is not None:
            # One that may not answer is no part of a cohort.
            self._accounts.confirm(request.settings.get(LEDGER_HEAD))
            self._accounts.check(self._release(request, site.planned(self.config)))
        return Reply(Purpose.PREPARE, request.run, vectors=self._steps.fresh(), info=reply.info)

    def _advertise(self, request: Request) -> Reply:
        return Reply(Purpose.ADVERTISE, request.run, vectors=self._steps.fresh())

    # --- the steps of a round

    def _start(self, request: Request) -> Reply:
        self._steps.abandon()
        self._due = None
        # Here too: a guard that was restarted answers without having prepared.
        self._accounts.confirm(request.settings.get(LEDGER_HEAD))
        broadcast = {name: vector for name, vector in request.vectors.items() if name not in _TOLD}
        shape, terms = self._terms(request, broadcast)
        dealt = self._steps.start(
            terms, self._guarantees(terms.n, request), lambda key: self._made(request, shape, broadcast, key)
        )
        return self._answer(request, dealt)

    def _mask(self, request: Request) -> Reply:
        if self._due is not None:
            # Before anything leaves: what crashes from here on has spent its budget. Due until it is written: if that
            # fails, it is not let through when the server asks again.
            self._accounts.write(self._due)
            self._due = None
        return self._answer(request, self._steps.mask(request))

    def _agree(self, request: Request) -> Reply:
        return self._answer(request, self._steps.agree(request))

    def _unmask(self, request: Request) -> Reply:
        return self._answer(request, {**self._steps.unmask(request), **self._steps.fresh()})

    def _finish(self, request: Request) -> Reply:
        self._steps.abandon()
        return super()._finish(request)

    def _answer(self, request: Request, vectors: Blobs) -> Reply:
        return Reply(request.purpose, request.run, vectors=vectors)

    def _made(self, request: Request, shape: Shape, broadcast: Vectors, spare_key: bytes) -> Words:
        """This node's vector, once for each purpose of an attempt at a round."""
        self._check_new(request)
        try:
            if self.config.privacy is None:
                return self._words(request, shape, broadcast)
            release = self._release(request, shape.capacity)
            self._accounts.check(release)
            if self.config.privacy.unit == "site":
                words = self._words_by_site(request, shape, broadcast, spare_key)
            else:
                words = self._words(request, shape, broadcast)
            self._due = release
            return words
        except Refused as refused:
            if refused.failure.reason is not Reason.BAD_UPDATE:
                raise
            # Values and names that came from the worker are in the text: for this site's log alone.
            log.warning("run %s round %d: %s", request.run[:8], request.round, refused)
            rule = "this site's log says why; the metrics must be those in the task's metric_names"
            raise Refused(Failure(Reason.BAD_UPDATE, rule)) from refused

    def _words(self, request: Request, shape: Shape, broadcast: Vectors) -> Words:
        if shape.metrics == WEIGHING:
            return laid_out(shape, Update({}, 1.0, {WEIGHING[0]: self._execute(Work("count")).metrics["examples"]}))
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
            summed = self._summed()
            if len(summed) < len(update.groups) and not info["complete"]:
                raise Refused(Failure(Reason.TIME_LIMIT, "some steps were left out, which this sum cannot hold"))
            groups = {group.name: update.groups[group.name] for group in shape.groups}
            weight = update.weight
            metrics |= {TRAIN + name: value for name, value in update.metrics.items()}
            try:
                metrics |= scalar_groups.weighted(summed, update.groups, weight)
            except UpdateError as error:
                raise Refused(Failure(Reason.BAD_UPDATE, str(error))) from error
        return laid_out(shape, Update(groups, weight, metrics))

    def _words_by_site(self, request: Request, shape: Shape, broadcast: Vectors, spare_key: bytes) -> Words:
        made = self._mechanism(shape.capacity, request)
        update, _ = self._trained(request, broadcast)
        try:
            of = site.Stamped(self._run, request.round, request.attempt)
            return made.words(site.flat(update), of, spare_key)
        except UpdateError as error:
            raise Refused(Failure(Reason.BAD_UPDATE, str(error))) from error

    def _release(self, request: Request, n: int) -> Release:
        layout = self._known().layout
        with self._refusing():
            check_layout(layout)
            cost = round_cost(self.config, layout.size(Kind.TRAINABLE), n)
        return Release(
            self._run, request.round, request.attempt, request.purpose.value, _HERE, cost.unit, _HERE,
            to_json(cost.event), cost.count,
        )  # fmt: skip

    def _mechanism(self, n: int, request: Request) -> site.SiteMechanism:
        with self._refusing():
            bound = request.settings.get(CLIP)
            if bound is not None:
                check_clip(bound)
            return site.mechanism(self.config, self._known().layout.size(Kind.TRAINABLE), n, bound)

    @staticmethod
    @contextmanager
    def _refusing() -> Iterator[None]:
        try:
            yield
        except (ConfigError, NoProtection) as error:
            raise Refused(Failure(Reason.BAD_REQUEST, str(error))) from error

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
        shape, terms = told_terms(
            request, self._run, digest(broadcast), config_digest(self.config), self._standing.newest().digest
        )
        self._check_shape(shape, request, terms.n)
        return shape, terms

    def _check_shape(self, shape: Shape, request: Request, n: int) -> None:
        """The vector must be the one that run and task ask for; only ranges and weight scale are the server's."""
        layout = self._known().layout
        trains = request.purpose is Purpose.TRAIN
        options = self.config.privacy
        if options is not None and not trains:
            raise Refused(Failure(Reason.POLICY, "a run with [privacy] asks for nothing but updates"))
        if options is not None and options.unit == "site":
            asked_shape = self._mechanism(n, request).shape
            if shape != asked_shape:
                rule = f"the sum is {shape.to_json()}, this node's is {asked_shape.to_json()}"
                raise Refused(Failure(Reason.SECURE_SUM, rule))
            return
        lengths = scalar_groups.lengths(layout, self._summed()) if trains else {}
        weighs = trains and not self.config.uniform
        rules = (
            ("groups", {g.name: g.length for g in shape.groups}, lengths),
            ("metrics", shape.metrics, self._metrics(shape, trains)),
            ("bits", shape.bits, self.config.secure_sum.bits),
            ("capacity", shape.capacity, n),
            ("weight scale", shape.weight_scale, shape.weight_scale if weighs else 1.0),
        )
        for name, given, asked in rules:
            if given != asked:
                raise Refused(Failure(Reason.SECURE_SUM, f"{name} of the sum: {given}, this node's are {asked}"))

    def _summed(self) -> Mapping[str, Extent]:
        return self._algorithm.summed(self._known().layout, self.config.local)

    def _metrics(self, shape: Shape, trains: bool) -> tuple[str, ...]:
        numbers = scalar_groups.names(self._summed()) if trains else ()
        if self.config.privacy is not None:
            return numbers
        if not trains and shape.metrics == WEIGHING:
            return WEIGHING
        trained = schema(trains, _evaluates(shape) or not trains, self._known().metric_names, self._bound is not None)
        return trained + numbers

    def _guarantees(self, n: int, request: Request) -> Guarantees:
        with refusing():
            parameters = self.config.secure_sum.parameters(n)
        options = self.config.privacy
        spare = self._mechanism(n, request).spare if options is not None and options.unit == "site" else None
        return Guarantees(parameters, self._standing.least, self._standing.roster().identities.get, spare)


def _evaluates(shape: Shape) -> bool:
    return any(name.startswith(EVALUATE) for name in shape.metrics)
