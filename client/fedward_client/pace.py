"""How often an idle node asks the server for messages.

Our server holds a call until there is a message (`WAIT`), so that a node asks seldom and hears at once. A stock one, or
one that holds many calls already, answers at once: then the node slows down by itself.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

WAIT = 20.0
"""Seconds for which a node asks the server to hold its call."""
_FASTEST = 0.05
_IN_RUN = 1.0
_IDLE = 6.0


class Pace:
    """Seconds to the next poll: a tenth of the time since something last happened, between 50 ms and 1 s while a
    run is open here, up to 6 s when none is (500 idle nodes then ask about 80 times a second in all).

    The jitter keeps nodes that were started together from asking together.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._busy_at = clock()

    def busy(self) -> None:
        """Something happened just now."""
        self._busy_at = self._clock()

    def seconds(self, in_run: bool, waited: float = 0.0) -> float:
        """Time to wait before the next poll, after one that took `waited` seconds to find nothing."""
        quiet = self._clock() - self._busy_at
        wait = min(max(0.1 * quiet, _FASTEST), _IN_RUN if in_run else _IDLE)
        return max(0.0, wait * random.uniform(0.8, 1.2) - waited)


class Backoff:
    """Seconds between attempts to reach a server that is down: 0.5, 1, 2, 4, 5, 5 … with jitter."""

    def __init__(self) -> None:
        self._next = 0.5

    def reset(self) -> None:
        """The server was reached."""
        self._next = 0.5

    def seconds(self) -> float:
        """Time to wait before the next attempt."""
        wait, self._next = self._next, min(2 * self._next, 5.0)
        return wait * random.uniform(0.8, 1.2)
