"""Audit of refused requests: anyone can send those, so they must not be able to fill the disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from fedward_server.store import Store, add_audit

WINDOW_SECONDS = 60.0
LINES_PER_WINDOW = 100


class Refusals:
    """Writes audit lines for refusals, at most `LINES_PER_WINDOW` a minute; the rest are counted in one line."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()
        self._window = clock()
        self._written = 0
        self._dropped = 0

    def add(self, actor: str, action: str, code: str, **detail: Any) -> None:
        """Note a refusal. actor: a claim, not proven; it is cut to 100 characters."""
        with self._lock:
            now = self._clock()
            dropped = 0
            if now - self._window >= WINDOW_SECONDS:
                self._window, self._written, dropped, self._dropped = now, 0, self._dropped, 0
            if self._written >= LINES_PER_WINDOW:
                self._dropped += 1
                return
            self._written += 1
        with self._store.transaction() as session:
            if dropped:
                add_audit(session, "server", "refusals_not_shown", count=dropped)
            add_audit(session, actor[:100], action, code=code, **detail)
