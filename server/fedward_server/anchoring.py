"""A transport that remembers the heads of nodes' ledgers from their replies, and names them in requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from fedward_common.chain import Head
from fedward_common.errors import ConfigError
from fedward_common.messages import LEDGER_HEAD, Purpose, Reply, Request
from fedward_common.roster import Roster

from fedward_server.events import EventLog
from fedward_server.ledger_heads import LedgerHeads, Told
from fedward_server.transport import Peer, Transport, never

_NAMED = (Purpose.PREPARE, Purpose.TRAIN)
"""Requests to which a node answers only if its ledger holds the head that is named."""


class AnchoringTransport:
    """`inner`, for a run with [privacy]. What nodes told is on the disk when an exchange ends."""

    def __init__(self, inner: Transport, roster: Callable[[], Roster], heads: LedgerHeads, log: EventLog) -> None:
        self._inner = inner
        self._roster = roster
        self._heads = heads
        self._log = log

    def online(self) -> list[Peer]:
        """See `Transport`."""
        return self._inner.online()

    def bytes_moved(self) -> tuple[int, int]:
        """See `Transport`."""
        return self._inner.bytes_moved()

    def exchange(
        self, requests: Mapping[str, Request], seconds: float, over: Callable[[], bool] = never
    ) -> Iterator[tuple[str, Reply]]:
        """See `Transport`."""
        if not requests:
            return
        newest, ids = self._heads.newest(), {node.name: node.node_id for node in self._roster().nodes}
        before = {name: newest[ids[name]] for name in requests if ids.get(name) in newest}
        asked = {name: _naming(request, before.get(name)) for name, request in requests.items()}
        told: list[Told] = []
        try:
            for name, reply in self._inner.exchange(asked, seconds, over):
                head = _head(reply)
                if head is not None and name in ids:
                    confirmed = LEDGER_HEAD in asked[name].settings and reply.failure is None
                    told.append(Told(ids[name], head, before.get(name), confirmed))
                yield name, reply
                # The caller's copy is to be the only one.
                del reply
        finally:
            self._note(told, next(iter(requests.values())).run)

    def _note(self, told: list[Told], run: str) -> None:
        names = {node.node_id: node.name for node in self._roster().nodes}
        for node, mismatch in self._heads.note(told, run) if told else ():
            self._log.append(
                "ledger_mismatch",
                node=names.get(node, node),
                expected=mismatch.expected,
                told=mismatch.told,
                settled=mismatch.settled,
            )


def _naming(request: Request, head: Head | None) -> Request:
    if head is None or request.purpose not in _NAMED:
        return request
    return replace(request, settings={**request.settings, LEDGER_HEAD: str(head)})


def _head(reply: Reply) -> Head | None:
    """The head that a node tells; None if it tells none, or something else: that harms nobody but itself."""
    try:
        return Head.parse(str(reply.info.get(LEDGER_HEAD, "")))
    except ConfigError:
        return None
