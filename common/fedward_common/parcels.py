"""Several objects of a message in one: Flower moves each by a call of its own, which costs its server more than the
object itself where it is small.

A parcel is MAGIC, then for each object its id (64 hexadecimal digits), its length (8 bytes, big-endian) and its
content. Who asks for one says so in a header, so that Fedward's nodes and servers work with stock ones.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from fedward_common.errors import FedwardError

HEADER = "fedward-parcel"
"""Header of PullObject: an answer may be a parcel of the whole message. Of PushObject: the content is one."""
LIMIT = 8 * 2**20
"""Bytes of contents in a parcel: large vectors travel in chunks, one at a time."""
MAGIC = b"FWPARCEL1\n"
_HEAD = struct.Struct(">64sQ")


class ParcelError(FedwardError):
    """Bytes that are no parcel."""


def wrap(objects: Mapping[str, bytes]) -> bytes:
    """The objects, by id, as one."""
    parts = [MAGIC]
    for object_id, content in objects.items():
        parts += (_HEAD.pack(object_id.encode(), len(content)), content)
    return b"".join(parts)


def unwrap(parcel: bytes) -> dict[str, bytes]:
    """The inverse of `wrap`, in its order. Raises `ParcelError`."""
    if not parcel.startswith(MAGIC):
        raise ParcelError("not a parcel")
    objects: dict[str, bytes] = {}
    at = len(MAGIC)
    while at < len(parcel):
        if at + _HEAD.size > len(parcel):
            raise ParcelError(f"a parcel of {len(parcel)} bytes ends in the middle of an object's head")
        object_id, length = _HEAD.unpack_from(parcel, at)
        at += _HEAD.size
        if length > len(parcel) - at:
            raise ParcelError(f"a parcel of {len(parcel)} bytes ends in the middle of an object of {length}")
        try:
            objects[object_id.decode("ascii")] = parcel[at : at + length]
        except UnicodeDecodeError as error:
            raise ParcelError("an object's id is not hexadecimal") from error
        at += length
    return objects
