"""Held calls over the tables that Flower makes, written to by another connection as a ServerApp does."""

from __future__ import annotations

import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from fedward_server import arrivals
from fedward_server.arrivals import Arrivals
from flwr.proto.fleet_pb2 import PullMessagesResponse
from flwr.proto.message_pb2 import Message
from flwr.supercore.state.schema.linkstate_tables import create_linkstate_metadata
from flwr.supercore.utils import uint64_to_int64
from sqlalchemy import create_engine

NODE = 2**64 - 5
NOTHING = PullMessagesResponse()
SOMETHING = PullMessagesResponse(messages_list=[Message()])


class Database:
    """Flower's file, and whoever writes to it from outside."""

    def __init__(self, path: Path) -> None:
        self.path = path
        create_linkstate_metadata().create_all(create_engine(f"sqlite:///{path}"))
        with self._connect() as connection:
            connection.execute("PRAGMA journal_mode = WAL")

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self.path)

    def message(self, node: int = NODE, ttl: float = 100.0, name: str = "m") -> None:
        with self._connect() as connection:
            connection.execute(
                "INSERT INTO message_ins (message_id, dst_node_id, delivered_at, created_at, ttl) VALUES (?,?,'',?,?)",
                (name, uint64_to_int64(node), time.time(), ttl),
            )

    def node(self, status: str) -> None:
        with self._connect() as connection:
            connection.execute("INSERT OR REPLACE INTO node (node_id, status) VALUES (7, ?)", (status,))

    def look(self) -> PullMessagesResponse:
        with self._connect() as connection:
            rows = connection.execute("SELECT message_id FROM message_ins WHERE delivered_at = ''").fetchall()
        return SOMETHING if rows else NOTHING


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return Database(tmp_path / "superlink.db")


@pytest.fixture
def found(database: Database) -> Arrivals:
    return Arrivals(database.path)


def later(seconds: float, what: Any, *arguments: Any) -> None:
    threading.Timer(seconds, what, arguments).start()


def timed(call: Any) -> tuple[Any, float]:
    start = time.monotonic()
    return call(), time.monotonic() - start


def test_a_message_ends_the_wait_soon(database: Database, found: Arrivals) -> None:
    later(0.3, database.message)
    answer, seconds = timed(lambda: found.hold(NODE, 20.0, database.look, lambda: True))
    assert answer == SOMETHING and 0.25 < seconds < 2.0


def test_a_message_that_is_there_is_not_waited_for(database: Database, found: Arrivals) -> None:
    database.message()
    answer, seconds = timed(lambda: found.hold(NODE, 20.0, database.look, lambda: True))
    assert answer == SOMETHING and seconds < 1.0


def test_nothing_after_the_time_that_was_asked_for(database: Database, found: Arrivals) -> None:
    answer, seconds = timed(lambda: found.hold(NODE, 0.4, database.look, lambda: True))
    assert answer == NOTHING and 0.4 <= seconds < 2.0


def test_messages_of_others_wake_nobody_else(database: Database, found: Arrivals) -> None:
    looks: list[float] = []

    def look() -> PullMessagesResponse:
        looks.append(time.monotonic())
        return NOTHING

    database.node("online")
    for i in range(5):
        later(0.1 * i, database.message, 99, 100.0, str(i))
    later(0.2, database.message, NODE, -1.0, "expired")
    found.hold(NODE, 0.8, look, lambda: True)
    # The first look, what the watch finds as it begins, and the last one.
    assert len(looks) <= 3


def test_nothing_is_handed_to_a_dead_line(database: Database, found: Arrivals) -> None:
    alive = threading.Event()
    alive.set()

    def die() -> None:
        alive.clear()
        database.message()

    later(0.2, die)
    assert found.hold(NODE, 20.0, database.look, alive.is_set) == NOTHING
    assert database.look() == SOMETHING


def test_a_revocation_ends_every_wait_with_nothing(database: Database, found: Arrivals) -> None:
    database.node("online")

    def revoke() -> None:
        database.node("unregistered")
        database.message()

    later(0.3, revoke)
    answer, seconds = timed(lambda: found.hold(NODE, 20.0, database.look, lambda: True))
    # Its messages are not for one who may be revoked: the next call is authenticated again.
    assert answer == NOTHING and 0.25 < seconds < 2.0


def test_no_more_calls_are_held_than_threads_allow(
    database: Database, found: Arrivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "MOST", 1)
    holding = threading.Thread(target=found.hold, args=(1, 2.0, database.look, lambda: True))
    holding.start()
    time.sleep(0.1)
    _, seconds = timed(lambda: found.hold(2, 20.0, database.look, lambda: True))
    assert seconds < 1.0
    holding.join()
    # A place that has become free is given again.
    _, seconds = timed(lambda: found.hold(2, 0.5, database.look, lambda: True))
    assert seconds >= 0.5


def test_a_node_that_calls_anew_gets_its_messages_there(database: Database, found: Arrivals) -> None:
    old: list[PullMessagesResponse] = []
    # Its line is cut, which the server does not know: still_there says yes.
    calling = threading.Thread(target=lambda: old.append(found.hold(NODE, 20.0, database.look, lambda: True)))
    calling.start()
    time.sleep(0.2)
    later(0.3, database.message)
    answer, seconds = timed(lambda: found.hold(NODE, 20.0, database.look, lambda: True))
    assert answer == SOMETHING and 0.25 < seconds < 2.0
    calling.join(2.0)
    assert old == [NOTHING]


def test_an_idle_call_looks_once(database: Database, found: Arrivals) -> None:
    looks: list[float] = []

    def look() -> PullMessagesResponse:
        looks.append(time.monotonic())
        return NOTHING

    found.hold(NODE, 6.5, look, lambda: True)
    assert len(looks) == 1


def test_a_watch_that_fails_wakes_who_waits(
    database: Database, found: Arrivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Arrivals, connection: sqlite3.Connection) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(Arrivals, "_wake", broken)
    later(0.3, database.message)
    answer, seconds = timed(lambda: found.hold(NODE, 20.0, database.look, lambda: True))
    assert answer == SOMETHING and seconds < 4.0
