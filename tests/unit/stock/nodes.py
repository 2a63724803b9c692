"""Stock SuperNodes in this process: a Flower `Grid` over ClientApps.

As under `flower-supernode`, each message goes over the wire form of Flower's objects, and between two messages a node
has nothing but its context, in the form in which Flower stores it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fedward_common.records import HEAD, RecordError, assemble, content_to_request
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.common.serde import context_from_proto, context_to_proto
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

EXAMPLE = Path(__file__).parents[3] / "examples" / "stock_flower_secure"

Lost = Callable[[str, int], bool]
"""(purpose of the request, number of the node) -> whether the node is gone before it answers."""


def never(purpose: str, number: int) -> bool:
    return False


def over_the_wire(message: Message) -> Message:
    """The message as it arrives."""
    objects = {key: item.deflate() for key, item in get_all_nested_objects(message).items()}
    arrived = assemble(message.object_id, objects.__getitem__)
    arrived.metadata.__dict__["_message_id"] = message.metadata.message_id
    return arrived


def purpose_of(message: Message) -> str:
    """What a message asks for, "plain" if it is none of ours."""
    try:
        return content_to_request(RecordDict({HEAD: message.content[HEAD]})).purpose.value
    except (KeyError, RecordError):
        return "plain"


class Nodes(Grid):
    """n nodes with ids 11, 12 …, each with a copy of `app`."""

    def __init__(self, app: ClientApp, n: int, lost: Lost = never) -> None:
        self.lost = lost
        self.app = app
        self.contexts = {
            11 + i: context_to_proto(
                Context(1, 11 + i, {"partition-id": i, "num-partitions": n}, RecordDict(), {})
            )
            for i in range(n)
        }
        self.seen: list[tuple[str, int]] = []
        """(purpose, number of the node) of every message that came."""
        self.sent: list[Message] = []
        """All replies."""
        self._replies: dict[str, Message] = {}
        self._ids = itertools.count(1)

    def state(self, number: int) -> RecordDict:
        """What the node has in its context now."""
        return context_from_proto(self.contexts[11 + number]).state

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        return SimpleNamespace(run_id=1)

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> list[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = f"message-{next(self._ids)}"
            ids.append(message.metadata.message_id)
            self._replies[ids[-1]] = self._answer(over_the_wire(message))
        return ids

    def _answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        purpose = purpose_of(message)
        self.seen.append((purpose, node - 11))
        if self.lost(purpose, node - 11):
            return Message(Error(ErrorCode.NODE_UNAVAILABLE, "gone"), reply_to=message)
        context = context_from_proto(self.contexts[node])
        try:
            reply = self.app(message, context)
        except Exception as error:  # noqa: BLE001 - as Flower does
            reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, str(error)), reply_to=message)
        self.contexts[node] = context_to_proto(context)
        self.sent.append(reply)
        return over_the_wire(reply)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        found = [self._replies.pop(one, None) for one in message_ids]
        return [reply for reply in found if reply is not None]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return self.pull_messages(self.push_messages(messages))
