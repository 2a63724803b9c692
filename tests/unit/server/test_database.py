"""Flower's own state classes with our savings: the same answers, without waiting where nothing has changed."""

from __future__ import annotations

import sqlite3
import threading
import time
from pathlib import Path

import pytest
from fedward_server import database
from fedward_server.database import LinkState, ObjectStore
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.superlink.federation import NoOpFederationManager


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "superlink.db"


def opened(path: Path) -> LinkState:
    store = ObjectStore(str(path))
    store.initialize()
    state = LinkState(str(path), NoOpFederationManager(), store)
    state.initialize()
    return state


def test_a_poll_that_finds_nothing_waits_for_no_writer(path: Path) -> None:
    state = opened(path)
    writer = sqlite3.connect(path, isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    start = time.monotonic()
    assert state.get_message_ins(7, limit=1) == []
    assert time.monotonic() - start < 1.0
    # What it is compared with does wait.
    stock = threading.Thread(target=SqlLinkState._claim_message_ins_rows, args=(state, 7, 1))
    stock.start()
    stock.join(0.5)
    assert stock.is_alive()
    writer.execute("ROLLBACK")
    stock.join()


def test_a_message_is_claimed_once(path: Path) -> None:
    state = opened(path)
    with sqlite3.connect(path) as connection:
        connection.execute(
            "INSERT INTO message_ins (message_id, run_id, src_node_id, dst_node_id, group_id, reply_to_message_id,"
            " message_type, delivered_at, created_at, ttl) VALUES ('m', NULL, 1, 7, '', '', 'train', '', ?, 100)",
            (time.time(),),
        )
    claimed: list[int] = []

    def claim() -> None:
        claimed.append(len(state._claim_message_ins_rows(7, 1)))

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claimed) == [0] * 7 + [1]
    assert state._claim_message_ins_rows(8, 1) == []


def test_expired_tasks_are_looked_for_once_in_a_while(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[float] = []
    monkeypatch.setattr(SqlLinkState, "_cleanup_expired_task_tokens", lambda self: looked.append(time.monotonic()))
    state = opened(path)
    # An hour, not a second: a machine may be slow.
    monkeypatch.setattr(database, "_TASKS_EXPIRE", 3600.0)
    for _ in range(50):
        state.get_run_status({1})
    assert len(looked) == 1
    monkeypatch.setattr(database, "_TASKS_EXPIRE", 0.0)
    state.get_run_status({1})
    assert len(looked) == 2


def test_writers_queue_and_none_gives_up(path: Path) -> None:
    state = opened(path)
    errors: list[Exception] = []
    counted = 0

    def write() -> None:
        nonlocal counted
        try:
            for _ in range(20):
                with state.session() as outer, state.session() as inner:
                    assert inner is outer
                    before = counted
                    time.sleep(0.0005)
                    counted = before + 1
        except Exception as error:  # noqa: BLE001 - reported below
            errors.append(error)

    threads = [threading.Thread(target=write) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Without turns, updates of the counter would be lost.
    assert not errors and counted == 160
