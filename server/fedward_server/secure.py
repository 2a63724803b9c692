"""A cohort's sum under secure aggregation, over any transport: drives `secagg.server` through its four exchanges.

START (train or evaluate, then deal shares) → MASK → AGREE → UNMASK. Key advertisements ride on earlier replies; only a
node that has none outstanding is asked for one first. Whatever goes wrong ends in the exact sum of the survivors or
in `SumFailed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from fedward_common.config import RunConfig
from fedward_common.errors import FedwardError, UpdateError
from fedward_common.messages import Failure, Purpose, Reason, Reply, Request
from fedward_common.roster import Roster
from fedward_common.secagg.cells import Words
from fedward_common.secagg.graph import NoProtection, Parameters
from fedward_common.secagg.keys import Advertisement, AdvertisementError, Identities
from fedward_common.secagg.messages import (
    Dealt,
    Delivery,
    MessageError,
    Unmasking,
    advertisements_to_bytes,
    entries_to_bytes,
    revealed_from_bytes,
)
from fedward_common.secagg.packing import PackingError, packed_size
from fedward_common.secagg.server import Aborted, Rejected, Server
from fedward_common.secagg.spare import Spare
from fedward_common.secagg.terms import Terms
from fedward_common.secure import config_digest
from fedward_common.steps import (
    ADVERTISEMENT,
    ADVERTISEMENTS,
    DEALT,
    DROPPED,
    MASKED,
    REVEALED,
    ROSTER,
    SEALED_SHARES,
    SHARERS,
    SIGNATURES,
    SURVIVORS,
    TERMS,
    blob,
    digest,
)
from fedward_common.summand import Shape, ShapeError, WrongSum, decode
from fedward_common.update import Update, Vectors

from fedward_server.gathering import UPLOADS_AT_ONCE
from fedward_server.patience import Patience
from fedward_server.transport import Transport

_QUICK = 2.0
"""Least seconds that a stage without training waits for the last nodes."""
_TRAINING = 10.0
"""The same where nodes train."""

Note = Callable[[str, Reply], None]
Read = Callable[[Shape, Words, int], Update]
"""The mean of so many summands from the sum of their words. Raises `UpdateError` and `WrongSum`."""


class SumFailed(FedwardError):
    """No sum came about; nothing of any node was revealed. `failures`: nodes and why each did not contribute."""

    def __init__(self, reason: str, failures: Mapping[str, Failure]) -> None:
        super().__init__(reason)
        self.failures = failures


@dataclass(frozen=True)
class Summed:
    """A sum that came about. survivors: whose values are in it, sorted. mean: weighted means, sum of weights, and
    sums of the metrics. told: what the round's event says of it."""

    survivors: list[str]
    failures: Mapping[str, Failure]
    mean: Update
    shape: Shape
    told: Mapping[str, Any]


class Rules(Protocol):
    """Whom a run's secure sums are between, and what holds for them."""

    @property
    def config(self) -> str:
        """Digest of the run's configuration."""

    @property
    def roster(self) -> str:
        """Digest of the roster."""

    @property
    def envelope(self) -> bytes:
        """The signed roster, for nodes that know an older one; b"" where all know the same."""

    @property
    def identities(self) -> Identities | None:
        """The roster's keys; None where nodes have none."""

    def parameters(self, n: int) -> Parameters:
        """For a cohort of `n`. Raises `NoProtection`."""

    def check(self, name: str, advertisement: Advertisement) -> None:
        """Raises `AdvertisementError` unless it may be that of the node of this name."""


@dataclass(frozen=True)
class Enrolled:
    """The rules of a federation with a roster. Its identities are checked here too, so that a node with a wrong key
    is left out before others refuse the round for it."""

    run: str
    options: RunConfig
    members: Callable[[], Roster]
    signed: Callable[[], bytes] = lambda: b""

    @property
    def envelope(self) -> bytes:
        return self.signed()

    @property
    def config(self) -> str:
        return config_digest(self.options)

    @property
    def roster(self) -> str:
        return self.members().digest

    @property
    def identities(self) -> Identities:
        return self.members().identities.get

    def parameters(self, n: int) -> Parameters:
        return self.options.secure_sum.parameters(n)

    def check(self, name: str, advertisement: Advertisement) -> None:
        node = self.members().node(name)
        if node is None or node.id_bytes != advertisement.node:
            raise AdvertisementError(f"it is not that of {name}.")
        advertisement.verify(self.run, self.members().identities[node.id_bytes])


@dataclass
class SecureSum:
    """Secure sums of one run. longest: seconds after which a stage without training ends, whoever has answered."""

    transport: Transport
    run: str
    rules: Rules
    patience: Patience
    longest: float = 120.0
    _advertised: dict[str, Advertisement] = field(default_factory=dict)

    def hear(self, name: str, reply: Reply) -> None:
        """Keep the advertisement that rides on a reply, if there is a good one."""
        found = reply.vectors.get(ADVERTISEMENT)
        if found is None:
            return
        try:
            advertisement = Advertisement.from_bytes(found.tobytes())
            self.rules.check(name, advertisement)
        except AdvertisementError:
            # The node counts as one that has not advertised, and is named so when the round starts.
            self._advertised.pop(name, None)
            return
        self._advertised[name] = advertisement

    def sum(
        self,
        requests: Mapping[str, Request],
        shape_for: Callable[[int], Shape],
        seconds: float,
        needed: int,
        others: Mapping[str, Request] | None = None,
        note: Note = lambda name, reply: None,
        read: Read = decode,
        before: Callable[[int], None] = lambda cohort: None,
        spare_for: Callable[[int], Spare | None] = lambda cohort: None,
    ) -> Summed:
        """Have the named nodes answer `requests` (TRAIN or EVALUATE), and sum what they hold.

        shape_for: the form of their vectors for a cohort of that size. seconds: for the work itself. needed: fewest
        survivors that will do. others, note: as in `Gathering.run`. read: the sum. before: called with the cohort's
        size when all is there to unmask the sum, and nothing has been revealed. spare_for: what comes off the sum of a
        cohort of that size. Raises `SumFailed`, and what `before` raises.
        """
        return _Sum(self, requests, seconds, needed, others or {}, note).run(shape_for, read, before, spare_for)


class _Sum:
    """One secure sum."""

    def __init__(
        self,
        secure: SecureSum,
        requests: Mapping[str, Request],
        seconds: float,
        needed: int,
        others: Mapping[str, Request],
        note: Note,
    ) -> None:
        self._secure = secure
        self._transport = secure.transport
        self._requests = dict(requests)
        self._first = next(iter(requests.values()))
        self._seconds = seconds
        self._needed = needed
        self._others = others
        self._note = note
        self._failures: dict[str, Failure] = {}
        self._stages: set[str] = set()
        self._names: list[str] = []
        """The cohort in the order of its indices; index i is self._names[i - 1]."""

    def run(
        self,
        shape_for: Callable[[int], Shape],
        read: Read,
        before: Callable[[int], None],
        spare_for: Callable[[int], Spare | None],
    ) -> Summed:
        try:
            server, shape = self._start(shape_for, spare_for)
            self._deal(server)
            self._mask(server, server.close_dealing())
            self._agree(server, server.close_masking())
            request = server.close_agreement()
            before(server.terms.n)
            self._unmask(server, request)
            mean = read(shape, server.unmask(), len(server.survivors))
        except (Aborted, NoProtection, ShapeError, UpdateError, WrongSum) as error:
            raise SumFailed(str(error), self._failures) from error
        parameters = server.terms.parameters
        told: dict[str, Any] = {
            "cohort": parameters.n,
            "survivors": len(server.survivors),
            "neighbours": parameters.holders,
            "threshold": parameters.threshold,
            "drop_outs_survived": parameters.n - parameters.survivors,
            "colluders_survived": parameters.colluders,
            "exchanges": len(self._stages),
            "spare_parts_off": len(server.unneeded),
        }
        survivors = sorted(map(self._name, server.survivors))
        late = {name: str(failure) for name, failure in sorted(self._failures.items()) if name in survivors}
        if late:
            told["late"] = late  # in the sum, but silent when it was unmasked
        failures = {name: failure for name, failure in self._failures.items() if name not in survivors}
        return Summed(survivors, failures, mean, shape, told)

    # --- the stages

    def _start(
        self, shape_for: Callable[[int], Shape], spare_for: Callable[[int], Spare | None]
    ) -> tuple[Server, Shape]:
        self._collect_advertisements()
        taken = {name: self._secure._advertised.pop(name) for name in self._requests if name not in self._failures}
        self._names = sorted(taken, key=lambda name: taken[name].node)
        n = len(taken)
        if n < self._needed:
            raise SumFailed(f"{n} nodes advertised keys, {self._needed} are needed", self._failures)
        rules = self._secure.rules
        parameters, shape = rules.parameters(n), shape_for(n)
        self._needed = max(self._needed, parameters.survivors)
        terms = Terms(
            run=self._secure.run,
            round=self._first.round,
            attempt=self._first.attempt,
            purpose=self._first.purpose.value,
            model=digest(self._first.vectors),
            config=rules.config,
            roster=rules.roster,
            shape=shape.to_json(),
            length=shape.length,
            bits=shape.bits,
            parameters=parameters,
            advertisements=tuple(taken[name] for name in self._names),
        )
        return Server(terms, rules.identities, spare_for(n)), shape

    def _collect_advertisements(self) -> None:
        missing = [name for name in self._requests if name not in self._secure._advertised]
        if not missing:
            return
        ask = replace(self._first, purpose=Purpose.ADVERTISE, vectors={}, included=None, settings={})
        # Where the others will do, a node that was killed is not waited for until its lease runs out.
        needed = min(len(missing), self._needed - (len(self._requests) - len(missing)))
        for name, _ in self._exchange("advertise", dict.fromkeys(missing, ask), needed):
            if name not in self._secure._advertised:
                self._failures[name] = Failure(Reason.SECURE_SUM, "its advertisement is not that of a member")
        for name in missing:
            if name not in self._secure._advertised:
                self._failures.setdefault(name, Failure(Reason.NO_REPLY, "asked for a key advertisement"))

    def _deal(self, server: Server) -> None:
        terms = server.terms
        told = {"shape": terms.shape, "parameters": asdict(terms.parameters), "roster": terms.roster}
        # One vector object for all, so that it is sent and stored once.
        vectors = {**self._first.vectors, ADVERTISEMENTS: blob(advertisements_to_bytes(terms.advertisements))}
        envelope = self._secure.rules.envelope
        if envelope:
            vectors[ROSTER] = blob(envelope)
        requests = {}
        for name in self._names:
            request = self._requests[name]
            settings = {**request.settings, TERMS: told, "cohort": terms.n, "seconds": self._seconds}
            requests[name] = replace(request, vectors=vectors, settings=settings)
        training = self._first.purpose is Purpose.TRAIN
        floor = _TRAINING if training else _QUICK
        for name, reply in self._exchange("start", requests, self._needed, floor, self._seconds, self._others):
            with self._taking(name):
                server.deal(self._index(name), Dealt.from_bytes(_bytes(reply, DEALT), server.secrets))
        self._silent(requests, server.dealers, "start")

    def _mask(self, server: Server, deliveries: Mapping[int, Delivery]) -> None:
        shared: dict[bytes, Any] = {}
        requests = {
            self._name(index): self._request(
                Purpose.MASK,
                {
                    SHARERS: shared.setdefault(delivery.sharers, blob(delivery.sharers)),
                    SEALED_SHARES: blob(entries_to_bytes(delivery.sealed)),
                },
            )
            for index, delivery in deliveries.items()
        }
        waves = self._waves(list(requests), packed_size(server.terms.length, server.terms.bits))
        for again in (False, True):
            for number, wave in enumerate(waves):
                asked = {name: requests[name] for name in wave if self._index(name) not in server.survivors}
                if not asked:
                    continue
                if again:
                    # Its upload was lost, or its wave's time short: the very same bytes once more.
                    for name in asked:
                        self._failures.pop(name, None)
                later = sum(len(w) for w in waves[number + 1 :])
                needed = min(len(asked), max(1, self._needed - len(server.survivors) - later))
                for name, reply in self._exchange("mask", asked, needed):
                    with self._taking(name):
                        server.masked(self._index(name), _vector(reply, MASKED))
                self._silent(asked, server.survivors, "mask")
            lost = {name for name, failure in self._failures.items() if failure.reason is Reason.UPLOAD_LOST}
            waves = [[name for name in wave if name in lost] for wave in waves]

    def _agree(self, server: Server, survivors: bytes) -> None:
        ask = self._request(Purpose.AGREE, {SURVIVORS: blob(survivors)})
        requests = {self._name(index): ask for index in sorted(server.survivors)}
        for name, reply in self._exchange("agree", requests, server.terms.parameters.survivors):
            with self._taking(name):
                server.signed(self._index(name), _bytes(reply, SIGNATURES))

    def _unmask(self, server: Server, request: Unmasking) -> None:
        ask = self._request(
            Purpose.UNMASK,
            {
                SURVIVORS: blob(request.survivors),
                DROPPED: blob(request.dropped),
                SIGNATURES: blob(entries_to_bytes(request.signatures)),
            },
        )
        requests = {self._name(index): ask for index in sorted(server.signers)}
        for name, reply in self._exchange("unmask", requests, len(requests)):
            with self._taking(name):
                shares = revealed_from_bytes(_bytes(reply, REVEALED), lambda dealer: len(server.due(dealer)))
                server.revealed(self._index(name), shares)

    # --- helpers

    def _exchange(
        self,
        name: str,
        requests: Mapping[str, Request],
        needed: int,
        floor: float = _QUICK,
        seconds: float | None = None,
        others: Mapping[str, Request] | None = None,
    ) -> Any:
        """Yield the good replies of a stage; failures are noted."""
        self._stages.add(name)
        seconds = self._secure.longest if seconds is None else seconds
        stage = self._secure.patience.stage(name, needed, floor)
        for node, reply in self._transport.exchange({**(others or {}), **requests}, seconds, stage.over):
            self._secure.hear(node, reply)
            if node not in requests:
                self._note(node, reply)
            elif reply.failure is not None:
                self._failures[node] = reply.failure
                self._note(node, reply)
            else:
                stage.answered()
                yield node, reply
            del reply

    @contextmanager
    def _taking(self, name: str) -> Iterator[None]:
        """A node whose message is not what it must be counts as dropped out."""
        try:
            yield
        except (Rejected, MessageError, PackingError) as error:
            self._failures[name] = Failure(Reason.BAD_UPDATE, str(error))

    def _silent(self, requests: Mapping[str, Request], answered: frozenset[int], stage: str) -> None:
        for name in requests:
            if self._index(name) not in answered:
                self._failures.setdefault(name, Failure(Reason.NO_REPLY, f"dropped out at stage {stage}"))

    def _request(self, purpose: Purpose, vectors: Vectors) -> Request:
        first = self._first
        return Request(purpose, first.run, first.round, first.attempt, vectors)

    def _name(self, index: int) -> str:
        return self._names[index - 1]

    def _index(self, name: str) -> int:
        return self._names.index(name) + 1

    def _waves(self, names: list[str], size: int) -> list[list[str]]:
        """Names in groups whose uploads may be on their way at one time."""
        wave = max(1, UPLOADS_AT_ONCE // max(1, size))
        return [names[i : i + wave] for i in range(0, len(names), wave)]


def _vector(reply: Reply, name: str) -> Any:
    if name not in reply.vectors:
        raise MessageError(f"the reply has no {name!r}.")
    return reply.vectors[name]


def _bytes(reply: Reply, name: str) -> bytes:
    data: bytes = _vector(reply, name).tobytes()
    return data
