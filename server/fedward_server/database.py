"""Flower's SQLite file under many nodes: opened with our settings, written seldom, and waited for in turn.

Stock, each call of a node writes up to four times (its traffic, tasks that may have expired, messages that may have
come), and a thread that finds the file locked sleeps for up to a tenth of a second before it looks again. Ten nodes
that share ten small messages then wait for a second, most of it asleep.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fedward_common import parcels
from flwr.app import Message
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import ObjectTree
from flwr.server.superlink.linkstate import linkstate_factory
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore import sql_mixin
from flwr.supercore.constant import SQLITE_PRAGMAS
from flwr.supercore.date import now
from flwr.supercore.object_store import NoObjectInStoreError, object_store_factory
from flwr.supercore.object_store.sql_object_store import SqlObjectStore
from flwr.supercore.sql_mixin import SqlMixin
from flwr.supercore.state.schema.linkstate_models import MessageIns, MessageRes
from flwr.supercore.utils import uint64_to_int64
from sqlalchemy import select
from sqlalchemy.orm import Session

from fedward_server import objects

_BEFORE = (
    # Before the first table: a tensor's chunk fills a quarter of the pages that it would by default.
    ("page_size", "16384"),
)
_AFTER = (
    # Ten uploads at once otherwise end in "database is locked" after Flower's 5 s.
    ("busy_timeout", "60000"),
    # 64 MiB. By default each chunk of tensors would bring a checkpoint and a wait for the disk.
    ("wal_autocheckpoint", "4096"),
    ("journal_size_limit", "67108864"),
    # Tensors are read once: keep 4 MiB of pages a connection, not 64, and map nothing into memory.
    ("cache_size", "-4096"),
    ("mmap_size", "0"),
    # Debian's SQLite overwrites what is deleted, which for tensors is as long as writing them.
    ("secure_delete", "OFF"),
)
_TASKS_EXPIRE = 1.0
"""Seconds between two looks for tasks whose process has gone; it is gone when it was silent for a minute or more."""

_turn = threading.RLock()


class InTurn(SqlMixin):
    """One transaction at a time in this process, so that the next begins when the one before ends."""

    @contextmanager
    def session(self) -> Iterator[Session]:
        with _turn, super().session() as session:
            yield session


class ObjectStore(InTurn, SqlObjectStore):
    """Flower's, in turn, with the tree of a message read and deleted in few statements."""

    def get_object_tree(self, object_id: str) -> ObjectTree:
        with self.session() as session:
            found = objects.tree(session, object_id)
        if found is None:
            raise NoObjectInStoreError(f"Object {object_id} was not pre-registered.")
        return found

    def delete(self, object_id: str) -> None:
        with self.session() as session:
            objects.delete(session, [object_id])


class LinkState(InTurn, SqlLinkState):
    """Flower's, in turn, and writing only where something has changed."""

    _looked = float("-inf")

    def _cleanup_expired_task_tokens(self) -> None:
        # Stock, two UPDATEs before each call of a node.
        with _turn:
            if time.monotonic() - self._looked < _TASKS_EXPIRE:
                return
            self._looked = time.monotonic()
        super()._cleanup_expired_task_tokens()

    def _claim_message_ins_rows(
        self, node_id: int, limit: int | None, run_id: int | None = None
    ) -> list[dict[str, Any]]:
        # Most polls find nothing, for which a look is enough; one who is asked twice claims in turn.
        waiting = select(MessageIns.message_id).where(
            MessageIns.dst_node_id == uint64_to_int64(node_id),
            MessageIns.delivered_at == "",
            MessageIns.created_at + MessageIns.ttl > now().timestamp(),
        )
        with self.session() as session:
            if session.scalar(waiting.limit(1)) is None:
                return []
        return super()._claim_message_ins_rows(node_id, limit, run_id)

    def answered(self, requests: Sequence[str], limit: int) -> list[str]:
        """Which of the messages with these ids have a reply that waits to be pulled, `limit` of them at most."""
        waiting = select(MessageRes.reply_to_message_id).where(
            MessageRes.reply_to_message_id.in_(requests), MessageRes.delivered_at == ""
        )
        with self.session() as session:
            return [str(request) for request in session.scalars(waiting.limit(limit))]

    def store_whole(self, message: Message, parts: Mapping[str, bytes]) -> bool:
        """Store a message, without its content, and all of its objects, or nothing; whether it is stored."""
        with self.session() as session:
            store = self.store_message_res if message.metadata.reply_to_message_id else self.store_message_ins
            if store(message) is None:
                return False
            objects.put(session, message.metadata.run_id, parts)
        return True

    def take_whole(self, messages: Iterable[ProtoMessage]) -> bool:
        """Put into each message its objects, which the store has no more then, if they fit into a parcel; whether that
        was so for all."""
        whole = True
        with self.session() as session:
            for message in messages:
                parts = objects.family(session, message.metadata.message_id, parcels.LIMIT)
                if parts is None:
                    whole = False
                else:
                    parcels.fill(message, parts)
                    objects.delete(session, [message.metadata.message_id])
        return whole

    def store_traffic(self, run_id: int, *, bytes_sent: int, bytes_recv: int) -> None:
        """Nothing: Fedward counts a run's bytes itself, and shows its own count."""


def use() -> None:
    """Have Flower open its database in this process so, before it is opened."""
    # Where Flower reads them; a listener of ours would run before its own and lose. The last value counts.
    vars(sql_mixin)["SQLITE_PRAGMAS"] = (*_BEFORE, *SQLITE_PRAGMAS, *_AFTER)
    vars(linkstate_factory)["SqlLinkState"] = LinkState
    vars(object_store_factory)["SqlObjectStore"] = ObjectStore
