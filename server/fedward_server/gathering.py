"""One round's updates: asks a cohort to train, takes each reply in as it comes, admits large uploads in waves."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from fedward_common.errors import UpdateError
from fedward_common.messages import Failure, Purpose, Reason, Reply, Request
from fedward_common.update import Update, check_update

from fedward_server.combining import Combiner
from fedward_server.transport import Deadline, Transport

UPLOADS_AT_ONCE = 64 * 2**20
"""Bytes of updates that may be on their way to the server at one time."""

_UPLOAD_SHARE = 0.25
"""Part of a round's deadline kept for the last wave of uploads, when uploads are held back."""

Shapes = Mapping[str, tuple[int, "np.dtype[Any]"]]


def wave_size(shapes: Shapes, cohort: int) -> int | None:
    """How many nodes may upload at once; None if the whole cohort may."""
    bytes_each = max(1, sum(length * dtype.itemsize for length, dtype in shapes.values()))
    if bytes_each * cohort <= UPLOADS_AT_ONCE:
        return None
    return max(1, UPLOADS_AT_ONCE // bytes_each)


@dataclass
class Gathering:
    """The updates of one round. requests: one TRAIN request a node of the cohort.

    Each reply passes the update gate before `combiner` takes it; a node that fails it is left out and stands in
    `failures`, as does one that did not answer.
    """

    requests: Mapping[str, Request]
    shapes: Shapes
    max_weight: float
    combiner: Combiner
    replies: list[str] = field(default_factory=list)
    failures: dict[str, Failure] = field(default_factory=dict)
    _announced: deque[str] = field(default_factory=deque)
    _asked_again: dict[str, float] = field(default_factory=dict)
    """Nodes whose upload was lost once -> seconds that it had."""

    def run(
        self,
        transport: Transport,
        deadline: Deadline,
        others: Mapping[str, Request],
        note: Callable[[str, Reply], None],
    ) -> None:
        """Ask the cohort, and with it `others` (requests that the round does not wait for); `note` hears every reply
        of `others` and every failure. Returns when the cohort has answered or the deadline is over.
        """
        wave = wave_size(self.shapes, len(self.requests))
        seconds = deadline.left() * (1.0 if wave is None else 1.0 - _UPLOAD_SHARE)
        settings = {"seconds": seconds, "hold": wave is not None, "cohort": len(self.requests)}
        asked = {name: replace(r, settings={**r.settings, **settings}) for name, r in self.requests.items()}
        for name, reply in transport.exchange({**others, **asked}, seconds):
            if name not in self.requests:
                note(name, reply)
                continue
            self._take(name, reply, note)
            if wave is not None and len(self._announced) >= wave:
                # The nodes that are still training go on meanwhile.
                self._collect(transport, deadline, wave, note)
            del reply  # a mean has its vectors in the sum: free them before the next reply arrives
            if not self._open():
                break
        while wave is not None and self._announced and not deadline.over:
            self._collect(transport, deadline, wave, note)
        for name in self._announced:
            self.failures[name] = Failure(Reason.UPLOAD_LOST, "announced, but not uploaded by the deadline")
        for name in self._open():
            self.failures.setdefault(name, Failure(Reason.NO_REPLY))

    def _open(self) -> set[str]:
        """Nodes that have not answered at all."""
        return set(self.requests) - set(self.replies) - set(self.failures) - set(self._announced)

    def _collect(self, transport: Transport, deadline: Deadline, wave: int, note: Callable[[str, Reply], None]) -> None:
        """Have the next wave upload, within its fair share of the time left: a node that dies in the middle of its
        upload holds the others up no longer than that."""
        names = [self._announced.popleft() for _ in range(min(wave, len(self._announced)))]
        waves_to_come = math.ceil((len(self._announced) + len(self._open())) / wave)
        seconds = deadline.left() / (1 + waves_to_come)
        if all(name in self._asked_again for name in names):
            # The others are done: a dead node is not to keep the round open to its deadline.
            seconds = min(seconds, 2 * max(self._asked_again[name] for name in names))
        requests = {
            name: replace(self.requests[name], purpose=Purpose.COLLECT, vectors={}, settings={"seconds": seconds})
            for name in names
        }
        for name, reply in transport.exchange(requests, seconds):
            self._take(name, reply, note)
            del reply
        for name in names:
            if name in self.replies:
                continue
            lost = self.failures.setdefault(name, Failure(Reason.UPLOAD_LOST))
            if lost.reason is Reason.UPLOAD_LOST and name not in self._asked_again and not deadline.over:
                # Its share of the time may have been short, or the server's disk busy. Once more, after the others.
                self._asked_again[name] = seconds
                del self.failures[name]
                self._announced.append(name)

    def _take(self, name: str, reply: Reply, note: Callable[[str, Reply], None]) -> None:
        if name in self.replies or name in self.failures:
            return  # a second answer: the first one counts
        request = self.requests[name]
        if reply.failure is not None:
            self.failures[name] = reply.failure
            note(name, reply)
        elif (reply.run, reply.round, reply.attempt) != (request.run, request.round, request.attempt):
            self.failures[name] = Failure(Reason.BAD_UPDATE, "the reply answers another request")
        elif reply.held:
            if name not in self._announced:
                self._announced.append(name)
        else:
            self._add(name, Update(reply.vectors, reply.weight, reply.metrics))

    def _add(self, name: str, update: Update) -> None:
        try:
            check_update(update, self.shapes, self.max_weight)
            self.combiner.add(name, update)
        except UpdateError as error:
            self.failures[name] = Failure(Reason.BAD_UPDATE, str(error))
        else:
            self.replies.append(name)
