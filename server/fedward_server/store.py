"""Fedward's own store (SQLite): what outlives the server process.

Every transaction takes the write lock at its start, so that the service, the supervisor and the command line,
each its own process, see each other's changes in one order. Transactions are short. Times are Unix seconds.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

from fedward_common.errors import FedwardError
from fedward_common.files import OWNER_FILE
from sqlalchemy import (
    JSON,
    Connection,
    CursorResult,
    Engine,
    ForeignKey,
    Index,
    create_engine,
    delete,
    event,
    select,
    text,
    update,
)
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker
from sqlalchemy.pool import ConnectionPoolEntry

SCHEMA = 1
BUSY_SECONDS = 30


class StoreError(FedwardError):
    """The store is missing, of another version, or does not hold what was asked for."""


class NodeStatus(StrEnum):
    """Where a node stands with the federation."""

    ACTIVE = "active"
    REVOKED = "revoked"
    LEFT = "left"


class RunStatus(StrEnum):
    """Where a run stands."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    FINISHED = "finished"
    EARLY_STOPPED = "early_stopped"
    BUDGET_SPENT = "budget_spent"
    STOPPED = "stopped"
    FAILED = "failed"


LIVE_RUNS = (RunStatus.QUEUED, RunStatus.STARTING, RunStatus.RUNNING)


class Base(DeclarativeBase):
    """Tables."""

    type_annotation_map = {list[str]: JSON, dict[str, Any]: JSON}  # noqa: RUF012  (SQLAlchemy reads it)


class Node(Base):
    """A site. flower_id: Flower's id of its present key; identity (base64url), flower_key (PEM): public."""

    __tablename__ = "nodes"
    __table_args__ = (
        Index("one_active_node_a_name", "name", unique=True, sqlite_where=text("status = 'active'")),
    )

    node_id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    status: Mapped[str] = mapped_column(default=NodeStatus.ACTIVE)
    flower_id: Mapped[str | None]
    identity: Mapped[str] = mapped_column(unique=True)
    identity_id: Mapped[str] = mapped_column(index=True)
    flower_key: Mapped[str] = mapped_column(unique=True)
    tags: Mapped[list[str]] = mapped_column(default=list)
    enrolled: Mapped[float]
    changed: Mapped[float]


class Token(Base):
    """An invitation. secret_sha256: hex; the secret itself is never stored."""

    __tablename__ = "tokens"

    id: Mapped[str] = mapped_column(primary_key=True)
    secret_sha256: Mapped[str]
    name: Mapped[str]
    tags: Mapped[list[str]] = mapped_column(default=list)
    created: Mapped[float]
    expires: Mapped[float]
    used_at: Mapped[float | None]


class Scientist(Base):
    """A data scientist: may start runs. key: Ed25519 public key, base64url."""

    __tablename__ = "scientists"

    name: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(unique=True)
    key_id: Mapped[str] = mapped_column(unique=True)
    created: Mapped[float]


class Run(Base):
    """A run. id: Fedward's run id; flower_run_id: of the present attempt; epoch: grows by one a start."""

    __tablename__ = "runs"

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    status: Mapped[str] = mapped_column(default=RunStatus.QUEUED, index=True)
    config: Mapped[dict[str, Any]]
    bundle: Mapped[str]
    scientist: Mapped[str] = mapped_column(ForeignKey("scientists.name"))
    flower_run_id: Mapped[str | None]
    epoch: Mapped[int] = mapped_column(default=0)
    created: Mapped[float]
    started: Mapped[float | None]
    ended: Mapped[float | None]
    reason: Mapped[str] = mapped_column(default="")


class AuditLine(Base):
    """Something that a person may have to answer for later."""

    __tablename__ = "audit"

    id: Mapped[int] = mapped_column(primary_key=True)
    time: Mapped[float]
    actor: Mapped[str]
    action: Mapped[str]
    detail: Mapped[dict[str, Any]] = mapped_column(default=dict)


class Nonce(Base):
    """A signed request that was accepted: it is not accepted again."""

    __tablename__ = "nonces"

    key: Mapped[str] = mapped_column(primary_key=True)
    nonce: Mapped[str] = mapped_column(primary_key=True)
    seconds: Mapped[float] = mapped_column(index=True)


class Counter(Base):
    """A number that only grows."""

    __tablename__ = "counters"

    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[int]


class Store:
    """Gives out transactions. One for a process; threads may share it."""

    def __init__(self, path: Path) -> None:
        """Open an existing store. Raises `StoreError`."""
        if not path.is_file():
            raise StoreError(f"{path}: there is no store. 'fedward server init' makes one.")
        self._engine = _engine(path)
        self._sessions = sessionmaker(self._engine, expire_on_commit=False)
        with self._engine.connect() as connection:
            version = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
        if version != SCHEMA:
            self.close()
            raise StoreError(
                f"{path}: the store has version {version}, this Fedward reads {SCHEMA}. "
                "Use the Fedward that wrote it, or restore a backup."
            )

    @classmethod
    def create(cls, path: Path) -> Store:
        """Make a new store, readable by its owner only. Raises `FileExistsError`."""
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, OWNER_FILE))
        engine = _engine(path)
        with engine.begin() as connection:
            Base.metadata.create_all(connection)
            connection.exec_driver_sql(f"PRAGMA user_version = {SCHEMA}")
        engine.dispose()
        return cls(path)

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        """One transaction: committed at the end of the block, undone if the block raises."""
        with self._sessions.begin() as session:
            yield session

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()


def _engine(path: Path) -> Engine:
    engine = create_engine(f"sqlite:///{path}", connect_args={"timeout": BUSY_SECONDS})

    @event.listens_for(engine, "connect")
    def configure(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
        # The driver must not begin transactions by itself: `begin` below does.
        connection.isolation_level = None
        cursor = connection.cursor()
        cursor.execute("PRAGMA journal_mode = WAL")
        cursor.execute("PRAGMA synchronous = FULL")
        cursor.execute("PRAGMA foreign_keys = ON")
        cursor.close()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A transaction that reads first and writes later would fail at once if another wrote in between.
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


def active_nodes(session: Session) -> Sequence[Node]:
    """Enrolled nodes, by name."""
    return session.scalars(select(Node).where(Node.status == NodeStatus.ACTIVE).order_by(Node.name)).all()


def all_nodes(session: Session) -> Sequence[Node]:
    """Every node that ever enrolled, by name and time."""
    return session.scalars(select(Node).order_by(Node.name, Node.enrolled)).all()


def active_node(session: Session, name: str) -> Node | None:
    """The enrolled node of that name."""
    query = select(Node).where(Node.name == name, Node.status == NodeStatus.ACTIVE)
    return session.scalars(query).one_or_none()


def consume_token(session: Session, token_id: str, now: float) -> bool:
    """Use a token up, if it is unused and not expired: true for exactly one caller."""
    result = session.execute(
        update(Token)
        .where(Token.id == token_id, Token.used_at.is_(None), Token.expires > now)
        .values(used_at=now)
        .execution_options(synchronize_session=False)
    )
    assert isinstance(result, CursorResult)
    return result.rowcount == 1


def scientists(session: Session) -> Sequence[Scientist]:
    """Data scientists, by name."""
    return session.scalars(select(Scientist).order_by(Scientist.name)).all()


def scientist_by_key(session: Session, key_id: str) -> Scientist | None:
    """The data scientist whose key has that id."""
    return session.scalars(select(Scientist).where(Scientist.key_id == key_id)).one_or_none()


def node_by_identity(session: Session, key_id: str) -> Node | None:
    """The node (enrolled or not any more) whose identity key has that id; an enrolled one first."""
    found = session.scalars(select(Node).where(Node.identity_id == key_id)).all()
    return next((node for node in found if node.status == NodeStatus.ACTIVE), found[0] if found else None)


def get_run(session: Session, run_id: str) -> Run:
    """The run of that id. Raises `StoreError`."""
    run = session.get(Run, run_id)
    if run is None:
        raise StoreError(f"run {run_id!r}: there is no such run. 'fedward run list' shows all.")
    return run


def list_runs(session: Session, statuses: Sequence[str] = ()) -> Sequence[Run]:
    """Runs in order of submission; only those with one of `statuses`, if any are given."""
    query = select(Run).order_by(Run.created, Run.id)
    return session.scalars(query.where(Run.status.in_(statuses)) if statuses else query).all()


def add_audit(session: Session, actor: str, action: str, **detail: Any) -> None:
    """Add an audit line. detail: JSON values, never a secret."""
    json.dumps(detail, allow_nan=False)
    session.add(AuditLine(time=time.time(), actor=actor, action=action, detail=detail))


def audit_lines(session: Session, limit: int = 1000) -> Sequence[AuditLine]:
    """The newest `limit` audit lines, oldest first."""
    newest = session.scalars(select(AuditLine).order_by(AuditLine.id.desc()).limit(limit)).all()
    return newest[::-1]


def remember_nonce(session: Session, key: str, nonce: str, seconds: float, forget_before: float) -> bool:
    """False if this key has used this nonce before. Forgets nonces older than `forget_before`."""
    session.execute(delete(Nonce).where(Nonce.seconds < forget_before))
    statement = insert(Nonce).values(key=key, nonce=nonce, seconds=seconds)
    result = session.execute(statement.on_conflict_do_nothing())
    assert isinstance(result, CursorResult)
    return result.rowcount == 1


def next_number(session: Session, name: str) -> int:
    """Add one to a counter and return it; the first number is 1."""
    statement = insert(Counter).values(name=name, value=1)
    session.execute(
        statement.on_conflict_do_update(index_elements=[Counter.name], set_={"value": Counter.value + 1})
    )
    return current_number(session, name)


def current_number(session: Session, name: str) -> int:
    """A counter's value; 0 before the first `next_number`."""
    value = session.scalars(select(Counter.value).where(Counter.name == name)).one_or_none()
    return value or 0
