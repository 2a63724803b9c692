"""A message's objects within the message itself: Flower moves each by a call of its own, which costs its server more
than the object where it is small.

A parcel is Flower's own record of bytes, with an object's content under its id, where a message of Flower's carries
nothing. `message` is a protobuf `flwr.proto.Message` everywhere here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from fedward_common.errors import FedwardError

HEADER = "fedward-parcel"
"""Header of PullMessages: a message in the answer may hold its objects. So Fedward's nodes and servers work with stock
ones."""
LIMIT = 8 * 2**20
"""Bytes of contents in a parcel: large vectors travel in chunks, one at a time."""
_NAME = "objects"


class ParcelError(FedwardError):
    """What a message holds is no parcel of it."""


def fill(message: Any, objects: Mapping[str, bytes]) -> None:
    """Put the objects, by id, into the message."""
    record = message.content.items.add(key=_NAME).config_record
    for object_id, content in objects.items():
        record.items.add(key=object_id).value.bytes = content


def take(message: Any) -> dict[str, bytes]:
    """Take the objects out of the message, which has none then; {} if it is none of ours."""
    objects = {
        entry.key: entry.value.bytes
        for item in message.content.items
        if item.key == _NAME
        for entry in item.config_record.items
    }
    if objects:
        message.content.Clear()
    return objects


def verify(message_id: str, objects: Mapping[str, bytes]) -> None:
    """Raises `ParcelError` unless each id is the SHA-256 of its content and one of them is the message's own."""
    for object_id, content in objects.items():
        if hashlib.sha256(content).hexdigest() != object_id:
            raise ParcelError(f"a parcel's content is not that of its id, {object_id[:80]!r}")
    if message_id not in objects:
        raise ParcelError(f"a parcel without the message itself, {message_id[:80]!r}")
