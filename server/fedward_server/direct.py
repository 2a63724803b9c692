"""Flower's Runtime API without the HTTP: the same handlers over the same database, in the ServerApp's own process.

The SuperLink is one Python process, and each call over HTTPS costs it some 8 ms. A ServerApp runs on the same host
and may read the same SQLite file; so what it says does not queue behind the nodes' calls. Only our own code runs in
a ServerApp: task code has no access to the file.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from flwr.app import Message
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse
from flwr.proto.task_pb2 import Task
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.servicer.runtime import runtime_handlers

from fedward_server import database

_CHECK = 1.0
"""Seconds between two looks at requests that nobody has answered."""
_LOOK = 0.005
"""Seconds between two looks at the file's version, some microseconds each."""
_AT_ONCE = 4
"""Replies pulled by one call, so that few are in memory at one time."""


class DirectRuntime:
    """The calls of Flower's `RuntimeHttpClient` that a transport needs, for the run with Flower's id `run_id`."""

    def __init__(self, file: Path, run_id: int) -> None:
        database.use()
        factory = LinkStateFactory(str(file), NoOpFederationManager(), ObjectStoreFactory(str(file)))
        self._state = cast(database.LinkState, factory.state())
        self._task = Task(run_id=run_id)
        self._looked = float("-inf")
        # Of its own, since SQLite tells a connection of what others have written.
        self._watch = sqlite3.connect(file, check_same_thread=False)
        self._version = -1

    def wait(self, seconds: float) -> None:
        """For so long, or until something was written to the database since the wait before."""
        until = time.monotonic() + seconds
        while True:
            (version,) = self._watch.execute("PRAGMA data_version").fetchone()
            if version != self._version or time.monotonic() >= until:
                break
            time.sleep(min(_LOOK, seconds))
        self._version = version

    def GetNodes(self, request: Any) -> Any:
        """See `runtime_handlers.get_nodes`; so for all others."""
        return runtime_handlers.get_nodes(request, self._state, self._task)

    def PushMessages(self, request: Any) -> Any:
        """In one transaction: a message by itself takes several."""
        with self._state.session():
            return runtime_handlers.push_messages(request, self._state, self._task)

    def push_whole(self, messages: Sequence[tuple[Message, Mapping[str, bytes]]]) -> list[str]:
        """Send messages with all their objects; the id of each, or "" for a node that is gone."""
        with self._state.session():
            stored = [self._state.store_whole(message, parts) for message, parts in messages]
        ids = [message.metadata.message_id for message, _ in messages]
        return [message_id if done else "" for message_id, done in zip(ids, stored, strict=True)]

    def PushObject(self, request: Any) -> Any:
        return runtime_handlers.push_object(request, self._state, self._task)

    def PullMessages(self, request: Any) -> Any:
        """Flower's, which checks every request and its node: asked for the requests that have a reply, a few at a time,
        and once a second for those which have expired. Small replies hold their objects (`parcels.py`)."""
        with self._state.session():
            answered = self._state.answered(request.message_ids, _AT_ONCE)
            if answered:
                request = PullAppMessagesRequest(message_ids=answered)
            elif time.monotonic() - self._looked < _CHECK:
                return PullAppMessagesResponse()
            else:
                self._looked = time.monotonic()
            found = runtime_handlers.pull_messages(request, self._state, self._task)
            self._state.take_whole(found.messages_list)
        return found

    def PullObject(self, request: Any) -> Any:
        return runtime_handlers.pull_object(request, self._state, self._task)

    def ConfirmMessageReceived(self, request: Any) -> Any:
        return runtime_handlers.confirm_message_received(request, self._state, self._task)
