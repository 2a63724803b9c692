"""How the round engine reaches nodes: one small protocol, so that Flower's grid, the in-memory simulator and the
tests drive the very same engine. Also the engine's clock, which tests and simulations replace.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from fedward_common.messages import Reply, Request


@dataclass(frozen=True)
class Peer:
    """A node that can be reached now."""

    name: str
    tags: tuple[str, ...] = ()


def never() -> bool:
    """False."""
    return False


class Transport(Protocol):
    """Carries requests to nodes and brings their replies."""

    def online(self) -> list[Peer]:
        """The nodes that can be reached now, each once."""

    def exchange(
        self, requests: Mapping[str, Request], seconds: float, over: Callable[[], bool] = never
    ) -> Iterator[tuple[str, Reply]]:
        """Send one request to each named node and yield each reply as it arrives, in any order.

        Ends when all have answered, `seconds` are over, or `over()` says that the rest is not waited for; a node that
        was not yielded gave no reply. A bad node never raises and never holds up another: it yields a `Reply` with a
        failure (also for a node known to be gone before its time is up). The caller may stop iterating early: replies
        that come later are dropped.
        A second exchange may run, from beginning to end, between two replies of a first one.
        """

    def bytes_moved(self) -> tuple[int, int]:
        """Bytes sent (down) and received (up) so far."""


@dataclass(frozen=True)
class Clock:
    """Seconds of a monotonic clock, and waiting on it."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


class Deadline:
    """So many seconds from now on."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self._end = clock.now() + seconds

    def left(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._end - self._clock.now())

    @property
    def over(self) -> bool:
        """True once no time is left."""
        return self.left() == 0.0
