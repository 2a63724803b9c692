"""Calls of nodes that are held until there is a message, in place of one call after the other.

A node says in a header of its call for messages how long it is ready to wait. So a request reaches it some ten
milliseconds after it was written, and an idle node costs three calls a minute. Stock SuperNodes say nothing and are
answered at once.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from flwr.proto.fleet_pb2 import PullMessagesResponse
from flwr.supercore.utils import int64_to_uint64

log = logging.getLogger("fedward.arrivals")

LONGEST = 30.0
"""Seconds for which a call is held at most."""
MOST = 600
"""Calls held at one time: each keeps one of the server's 1000 threads, and uploads need some."""
_LOOK = 0.008
"""Seconds between two looks at the file's version: some microseconds each."""

_WAITING = "SELECT DISTINCT dst_node_id FROM message_ins WHERE delivered_at = '' AND created_at + ttl > ?"
_REVOKED = "SELECT COUNT(*) FROM node WHERE status = 'unregistered'"


class Arrivals:
    """Wakes who waits for a message in the SuperLink's database, whichever process wrote it."""

    def __init__(self, database: Path) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._held: dict[int, threading.Event] = {}
        self._anyone = threading.Event()
        self._revocations = 0
        threading.Thread(target=self._watch, name="arrivals", daemon=True).start()

    def hold(
        self,
        node: int,
        seconds: float,
        look: Callable[[], PullMessagesResponse],
        still_there: Callable[[], bool],
    ) -> PullMessagesResponse:
        """What `look` finds for the node, at once or within `seconds`. Nothing once a node was revoked meanwhile:
        the next call tells the one whom it concerns; and nothing where the caller has gone or the node has called
        anew, so that no message is handed to a dead line."""
        until = time.monotonic() + min(seconds, LONGEST)
        revocations = self._revocations
        with self._place(node) as woken:
            found = look()
            while woken is not None and not found.messages_list:
                # Nobody looks in vain: what was written wakes, and so does a watch that has failed.
                if not woken.wait(max(0.0, until - time.monotonic())):
                    break
                woken.clear()
                if self._revocations != revocations or self._held.get(node) is not woken or not still_there():
                    break
                found = look()
        return found

    @contextlib.contextmanager
    def _place(self, node: int) -> Iterator[threading.Event | None]:
        """What wakes the node's call, or None if too many are held. An older call of the node is ended: its line may
        have been cut, which the server hears of late or never."""
        woken = threading.Event()
        with self._lock:
            older = self._held.get(node)
            room = older is not None or len(self._held) < MOST
            if room:
                self._held[node] = woken
                self._anyone.set()
        if older is not None:
            older.set()
        try:
            yield woken if room else None
        finally:
            with self._lock:
                if self._held.get(node) is woken:
                    del self._held[node]
                    if not self._held:
                        self._anyone.clear()

    def _watch(self) -> None:
        while True:
            self._anyone.wait()
            try:
                with contextlib.closing(sqlite3.connect(self._database, timeout=60)) as connection:
                    self._follow(connection)
            except sqlite3.Error as error:
                log.warning("the database cannot be watched, held calls look themselves: %s", error)
                with self._lock:
                    for event in self._held.values():
                        event.set()
                time.sleep(1.0)

    def _follow(self, connection: sqlite3.Connection) -> None:
        """Wake calls at each change, while calls are held."""
        version = None
        while self._anyone.is_set():
            (now,) = connection.execute("PRAGMA data_version").fetchone()
            if now != version:
                version = now
                self._wake(connection)
            time.sleep(_LOOK)

    def _wake(self, connection: sqlite3.Connection) -> None:
        (revoked,) = connection.execute(_REVOKED).fetchone()
        nodes = [int64_to_uint64(node) for (node,) in connection.execute(_WAITING, (time.time(),))]
        with self._lock:
            all_of_them = revoked != self._revocations
            self._revocations = revoked
            for event in list(self._held.values()) if all_of_them else filter(None, map(self._held.get, nodes)):
                event.set()
