"""Which nodes are ready for a run: asks them to prepare, and waits until enough have."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from fedward_common.errors import FedwardError
from fedward_common.messages import Failure, Purpose, Reason, Reply, Request

from fedward_server.events import EventLog
from fedward_server.selection import Members
from fedward_server.transport import Clock, Deadline, Transport

GRACE = 30.0
"""Seconds that a run waits for nodes that it knows of and that have not answered, once enough are ready. So a
resumed run has its old nodes back, not just the fastest."""

_ASK = 30.0
"""Seconds in which a node is to answer; later answers are lost, and the node is asked again with twice the time."""
_LONGEST_ASK = 120.0
_SLOWEST_POLL = 10.0

_REFUSALS = frozenset(
    {
        Reason.BUNDLE_NOT_APPROVED,
        Reason.BUNDLE_BROKEN,
        Reason.DEPENDENCIES_MISSING,
        Reason.MANIFEST_INVALID,
        Reason.POLICY,
        Reason.LAYOUT_DIFFERS,
        Reason.REVOKED,
    }
)
"""Failures that speak of the node's standing in the run, not of one round: it must prepare again."""

_SILENCE = frozenset({Reason.NO_REPLY, Reason.OFFLINE, Reason.UPLOAD_LOST})


class NotReady(FedwardError):
    """Too few nodes were ready in time."""


class StopRequested(Exception):
    """The run was told to stop."""


@dataclass
class Preparation:
    """What is known of each node: ready, or why not. `members` may be narrowed once the run's nodes are fixed."""

    transport: Transport
    members: Members
    request: Callable[[], Request]
    clock: Clock
    log: EventLog
    should_stop: Callable[[], bool]
    hear: Callable[[str, Reply], None] = lambda name, reply: None
    """Is told every reply of a node that is ready."""
    ready: set[str] = field(default_factory=set)
    _ask_seconds: float = _ASK
    _failures: dict[str, Failure] = field(default_factory=dict)
    _online: dict[str, bool] = field(default_factory=dict)
    """Wanted nodes that are online -> whether the run trains on them."""

    def look(self) -> None:
        """See who is online. A node that went away has to prepare again when it is back: it may have restarted."""
        peers = self.transport.online()
        self._online = {peer.name: self.members.trains(peer) for peer in peers if self.members.wants(peer)}
        self.ready &= set(self._online)
        self._failures = {name: failure for name, failure in self._failures.items() if name in self._online}

    def trainable(self) -> set[str]:
        """Nodes ready to be trained on."""
        return {name for name in self.ready if self._online[name]}

    def held_out(self) -> set[str]:
        """Nodes ready for evaluation that are never trained on."""
        return {name for name in self.ready if not self._online[name]}

    def online(self) -> set[str]:
        """Nodes that the run wants and that were there at the last look."""
        return set(self._online)

    def unavailable(self, enrolled: Iterable[str]) -> dict[str, Failure]:
        """The enrolled nodes that cannot be asked now, each with the reason."""
        available = self.trainable()
        return {name: self._why_not(name) for name in enrolled if name not in available}

    def requests(self) -> dict[str, Request]:
        """A request to each node that is online and not ready."""
        unready = sorted(name for name in self._online if name not in self.ready)
        return dict.fromkeys(unready, self.request()) if unready else {}

    def note(self, name: str, reply: Reply) -> None:
        """Take in what a node said to PREPARE, or a failure that it gave to another request."""
        if reply.failure is None and reply.purpose is Purpose.PREPARE:
            self.ready.add(name)
            self._failures.pop(name, None)
            self.hear(name, reply)
        elif reply.failure is not None and (reply.purpose is Purpose.PREPARE or reply.failure.reason in _REFUSALS):
            self.ready.discard(name)
            self._failures[name] = reply.failure

    def wait(self, needed: int, expected: Collection[str], seconds: float, grace: float) -> None:
        """Return when `needed` nodes can train and each node that is online or expected has answered, or `grace`
        seconds have passed. Raises `NotReady` after `seconds`, `StopRequested` when the run is to stop.
        """
        patience, courtesy = Deadline(self.clock, seconds), Deadline(self.clock, min(grace, seconds))
        told: tuple[list[str], dict[str, str]] | None = None
        poll = 1.0
        while True:
            self.look()
            self._ask(patience.left())
            enough = len(self.trainable()) >= needed
            silent = {name for name in {*expected, *self._online} if name not in self.ready | self._refused()}
            missing = {name: str(self._why_not(name)) for name in sorted({*expected, *self._online} - self.ready)}
            if (missing or not enough) and told != (sorted(self.ready), missing):
                told = (sorted(self.ready), missing)
                self.log.append("waiting", ready=told[0], missing=missing, needed=needed)
                poll = 1.0
            if enough and (not silent or courtesy.over):
                return
            if self.should_stop():
                raise StopRequested
            if patience.over:
                raise NotReady(
                    f"{len(self.trainable())} of {needed} needed nodes were ready after {seconds:g} s"
                    + "".join(f"; {name}: {text}" for name, text in missing.items())
                )
            self.clock.sleep(min(poll, courtesy.left() if enough else patience.left()))
            poll = min(2 * poll, _SLOWEST_POLL)

    def _ask(self, seconds: float) -> None:
        requests = self.requests()
        if not requests:
            return
        for name in requests:
            self._failures.setdefault(name, Failure(Reason.NO_REPLY))
        silent = set(requests)
        for name, reply in self.transport.exchange(requests, min(self._ask_seconds, seconds)):
            self.note(name, reply)
            silent.discard(name)
        if silent:
            # A machine that takes so long to load its data must not be asked for ever.
            self._ask_seconds = min(2 * self._ask_seconds, _LONGEST_ASK)

    def _refused(self) -> set[str]:
        return {name for name, failure in self._failures.items() if failure.reason not in _SILENCE}

    def _why_not(self, name: str) -> Failure:
        if name not in self._online:
            return Failure(Reason.OFFLINE)
        return self._failures.get(name, Failure(Reason.NO_REPLY))
