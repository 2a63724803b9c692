"""Flower's Runtime API without the HTTP: the same handlers over the same database, in the ServerApp's own process.

The SuperLink is one Python process, and each call over HTTPS costs it some 8 ms. A ServerApp runs on the same host
and may read the same SQLite file; so what it says does not queue behind the nodes' calls. Only our own code runs in
a ServerApp: task code has no access to the file.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, cast

from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.proto.task_pb2 import Task
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.servicer.runtime import runtime_handlers

from fedward_server import database

_CHECK = 1.0
"""Seconds between two looks at requests that nobody has answered."""


class DirectRuntime:
    """The calls of Flower's `RuntimeHttpClient` that a transport needs, for the run with Flower's id `run_id`."""

    def __init__(self, file: Path, run_id: int) -> None:
        database.use()
        factory = LinkStateFactory(str(file), NoOpFederationManager(), ObjectStoreFactory(str(file)))
        self._state = cast(database.LinkState, factory.state())
        self._task = Task(run_id=run_id)
        self._looked = float("-inf")

    def GetNodes(self, request: Any) -> Any:
        """See `runtime_handlers.get_nodes`; so for all others."""
        return runtime_handlers.get_nodes(request, self._state, self._task)

    def PushMessages(self, request: Any) -> Any:
        """In one transaction: a message by itself takes several."""
        with self._state.session():
            return runtime_handlers.push_messages(request, self._state, self._task)

    def PushObject(self, request: Any) -> Any:
        return runtime_handlers.push_object(request, self._state, self._task)

    def PullMessages(self, request: Any) -> Any:
        """Flower's, which checks every request and its node and takes 20 ms for ten. Where no reply is there it is
        asked only once a second, for requests that have expired."""
        if time.monotonic() - self._looked < _CHECK and not self._state.has_reply(request.message_ids):
            return PullAppMessagesResponse()
        self._looked = time.monotonic()
        return runtime_handlers.pull_messages(request, self._state, self._task)

    def PullObject(self, request: Any) -> Any:
        return runtime_handlers.pull_object(request, self._state, self._task)

    def ConfirmMessageReceived(self, request: Any) -> Any:
        return runtime_handlers.confirm_message_received(request, self._state, self._task)
