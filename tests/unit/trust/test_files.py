"""Atomic files, locks between processes, and the store's transactions."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fedward_common.files import Locked, lock_file, write_atomic
from fedward_server.store import (
    Node,
    NodeStatus,
    Store,
    Token,
    add_audit,
    audit_lines,
    consume_token,
    current_number,
    next_number,
    remember_nonce,
)
from sqlalchemy.exc import IntegrityError


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    write_atomic(path, b"old")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600

    def full(_: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def test_a_lock_says_who_holds_it_and_dies_with_him(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    program = (
        "import sys; from pathlib import Path; from fedward_common.files import lock_file\n"
        "with lock_file(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    holder = subprocess.Popen([sys.executable, "-c", program, str(path)], stdin=pipe, stdout=pipe)
    assert holder.stdout is not None and holder.stdin is not None
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(Locked, match=f"process {holder.pid} uses") as locked, lock_file(path):
        pass
    assert locked.value.pid == holder.pid
    holder.kill()
    holder.wait()
    holder.stdin.close()
    holder.stdout.close()
    with lock_file(path):
        assert path.read_text() == f"{os.getpid()}\n"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "x.db")


def node(name: str, number: int, status: str = NodeStatus.ACTIVE) -> Node:
    return Node(
        node_id=str(number), name=name, status=status, flower_id=None, identity=str(number),
        identity_id=str(number), flower_key=str(number), enrolled=0.0, changed=0.0,
    )  # fmt: skip


def test_the_store_is_for_the_owner_only(store: Store, tmp_path: Path) -> None:
    with store.transaction() as session:
        add_audit(session, "a", "b", c=1)
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_a_name_is_active_once(store: Store) -> None:
    with store.transaction() as session:
        session.add_all([node("a", 1, NodeStatus.REVOKED), node("a", 2, NodeStatus.LEFT), node("a", 3)])
    with pytest.raises(IntegrityError), store.transaction() as session:
        session.add(node("a", 4))


def test_a_token_is_consumed_by_one(store: Store) -> None:
    with store.transaction() as session:
        session.add(Token(id="t", secret_sha256="", name="a", created=0.0, expires=10.0))
    with store.transaction() as session:
        assert not consume_token(session, "t", 10.0)
    together = threading.Barrier(8)

    def consume(_: int) -> bool:
        together.wait()
        with store.transaction() as session:
            return consume_token(session, "t", 9.0)

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(consume, range(8))) == 1


def test_counters_and_nonces(store: Store) -> None:
    def count(_: int) -> int:
        with store.transaction() as session:
            return next_number(session, "n")

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(count, range(20))) == list(range(1, 21))
    with store.transaction() as session:
        assert (current_number(session, "n"), current_number(session, "other")) == (20, 0)
        assert remember_nonce(session, "k", "1", seconds=100.0, forget_before=0.0)
        assert not remember_nonce(session, "k", "1", seconds=101.0, forget_before=0.0)
        assert remember_nonce(session, "other", "1", seconds=101.0, forget_before=0.0)
        assert remember_nonce(session, "k", "1", seconds=200.0, forget_before=101.0)


def test_a_block_that_raises_leaves_nothing(store: Store) -> None:
    with pytest.raises(RuntimeError), store.transaction() as session:
        add_audit(session, "a", "b")
        session.flush()
        raise RuntimeError
    with store.transaction() as session:
        assert not audit_lines(session)
