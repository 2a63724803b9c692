"""A lock that is handed on in the order of arrival."""

from __future__ import annotations

import threading
from collections import deque


class FairLock:
    """First come, first served: `threading.Lock` promises no order, and a run must not starve another one."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._waiting: deque[threading.Event] = deque()
        self._held = False

    def acquire(self, timeout: float | None = None) -> bool:
        """Wait for the turn, at most `timeout` seconds. True if it is ours now."""
        with self._mutex:
            if not self._held:
                self._held = True
                return True
            turn = threading.Event()
            self._waiting.append(turn)
        if turn.wait(timeout):
            return True
        with self._mutex:
            if turn.is_set():
                return True
            self._waiting.remove(turn)
            return False

    def release(self) -> None:
        """Hand on to the one who waits longest."""
        with self._mutex:
            if self._waiting:
                # Stays held: the turn passes over directly, nobody can slip in between.
                self._waiting.popleft().set()
            else:
                self._held = False
