"""The objects of messages in Flower's store, a message's at a time: a few statements, where Flower's own methods make
some for each object, each by way of an ORM.

Every function takes a session and is part of its transaction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from flwr.app import ArrayRecord
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import get_object_head_values_from_object_content
from flwr.supercore.utils import uint64_to_int64
from sqlalchemy.orm import Session

_FAMILY = (
    "WITH RECURSIVE family(id) AS (SELECT ? UNION"
    " SELECT child_id FROM object_children JOIN family ON parent_id = family.id) "
)


def _run(session: Session, statement: str, *values: Any) -> Any:
    return session.connection().exec_driver_sql(statement, values)


def put(session: Session, run_id: int, objects: Mapping[str, bytes]) -> None:
    """Store the objects of a message, by id, children before their parents; what is there stays.

    Raises `sqlalchemy.exc.IntegrityError` if a child is neither there nor among them.
    """
    run = uint64_to_int64(run_id)
    for object_id, content in objects.items():
        new = "INSERT OR IGNORE INTO objects (object_id, content, is_available, ref_count) VALUES (?, ?, 1, 0)"
        if _run(session, new, object_id, content).rowcount:
            _, children, _ = get_object_head_values_from_object_content(content)
            for child in children:
                _run(session, "INSERT INTO object_children (parent_id, child_id) VALUES (?, ?)", object_id, child)
                _run(session, "UPDATE objects SET ref_count = ref_count + 1 WHERE object_id = ?", child)
        else:
            late = "UPDATE objects SET content = ?, is_available = 1 WHERE object_id = ? AND is_available = 0"
            _run(session, late, content, object_id)
        _run(session, "INSERT OR IGNORE INTO run_objects (run_id, object_id) VALUES (?, ?)", run, object_id)


def family(session: Session, root: str, limit: int) -> dict[str, bytes] | None:
    """An object and all below it, by id; None if they are not all there, are more than `limit` bytes, or hold an array,
    which is read chunk by chunk."""
    size, there = _run(
        session,
        _FAMILY + "SELECT sum(length(content)), min(is_available) FROM objects JOIN family ON object_id = family.id",
        root,
    ).one()
    if not there or size > limit:
        return None
    rows = _run(session, _FAMILY + "SELECT object_id, content FROM objects JOIN family ON object_id = family.id", root)
    objects = {object_id: bytes(content) for object_id, content in rows}
    arrays = ArrayRecord.__qualname__.encode()
    return None if any(content.startswith(arrays) for content in objects.values()) else objects


def delete(session: Session, roots: Iterable[str]) -> None:
    """Delete objects that nothing refers to, and what below them nothing else refers to."""
    below = list(roots)
    while below:
        object_id = below.pop()
        children = [
            child for (child,) in _run(session, "SELECT child_id FROM object_children WHERE parent_id = ?", object_id)
        ]
        if not _run(session, "DELETE FROM objects WHERE object_id = ? AND ref_count = 0", object_id).rowcount:
            continue
        for child in children:
            _run(session, "UPDATE objects SET ref_count = ref_count - 1 WHERE object_id = ? AND ref_count > 0", child)
        below += children


def tree(session: Session, root: str) -> ObjectTree | None:
    """Flower's tree of an object's descendants; None if there is no such object."""
    if _run(session, "SELECT 1 FROM objects WHERE object_id = ?", root).first() is None:
        return None
    children: dict[str, list[str]] = defaultdict(list)
    edges = "SELECT parent_id, child_id FROM object_children JOIN family ON parent_id = family.id"
    for parent, child in _run(session, _FAMILY + edges, root):
        children[parent].append(child)

    def grow(object_id: str) -> ObjectTree:
        return ObjectTree(object_id=object_id, children=[grow(child) for child in children[object_id]])

    return grow(root)
