"""Flower's messages <-> our requests and replies. The only module of the common package that imports flwr's
record types.

A message holds one ArrayRecord ("vectors": one array a vector) and one ConfigRecord ("fedward": one JSON text).
What a node does is decided by the JSON text, never by Flower's message type.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from fedward_common.errors import FedwardError
from fedward_common.messages import Failure, Purpose, Reason, Reply, Request, Stamp
from fedward_common.update import Vector, Vectors

_ARRAYS = "vectors"
_HEAD = "fedward"
_JSON = "json"
_TYPES = {
    Purpose.PREPARE: "query.prepare",
    Purpose.TRAIN: "train",
    Purpose.EVALUATE: "evaluate",
    Purpose.COLLECT: "query.collect",
    Purpose.FINISH: "query.finish",
}


class RecordError(FedwardError):
    """A message does not hold what it must."""


def array_record(vectors: Vectors) -> ArrayRecord:
    """The vectors as Flower arrays; build it once and share it between the messages of a cohort, so that it is
    hashed, sent and stored once."""
    return ArrayRecord({name: Array(np.ascontiguousarray(vector)) for name, vector in vectors.items()})


def request_to_message(
    request: Request, destination: int, ttl: float, arrays: ArrayRecord | None = None
) -> Message:
    """A Flower message for the node with Flower id `destination`; `arrays` is `array_record(request.vectors)` if
    the caller has it already."""
    head = {
        "purpose": request.purpose.value,
        "run": request.run,
        "round": request.round,
        "attempt": request.attempt,
        "included": asdict(request.included) if request.included else None,
        "settings": dict(request.settings),
    }
    content = _content(head, arrays if arrays is not None else array_record(request.vectors))
    return Message(content, destination, _TYPES[request.purpose], ttl=ttl, group_id=str(request.round))


def message_to_request(message: Message) -> Request:
    """The request in a message. Raises `RecordError`."""
    head = _head(message)
    try:
        included = head["included"]
        return Request(
            purpose=Purpose(head["purpose"]),
            run=str(head["run"]),
            round=int(head["round"]),
            attempt=int(head["attempt"]),
            vectors=_vectors(message),
            included=Stamp(int(included["round"]), int(included["attempt"])) if included else None,
            settings=dict(head["settings"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"not a Fedward request: {error!r}") from error


def reply_to_message(reply: Reply, to: Message) -> Message:
    """The Flower message that answers `to`."""
    failure = reply.failure
    head = {
        "purpose": reply.purpose.value,
        "run": reply.run,
        "round": reply.round,
        "attempt": reply.attempt,
        "weight": reply.weight,
        "metrics": dict(reply.metrics),
        "held": reply.held,
        "failure": asdict(failure) if failure else None,
        "info": dict(reply.info),
    }
    return Message(_content(head, array_record(reply.vectors)), reply_to=to)


def message_to_reply(message: Message) -> Reply:
    """The reply in a message. Raises `RecordError` (a message that carries Flower's own error included)."""
    if message.has_error():
        raise RecordError(f"Flower error {message.error.code}: {message.error.reason}")
    head = _head(message)
    try:
        failure = head["failure"]
        return Reply(
            purpose=Purpose(head["purpose"]),
            run=str(head["run"]),
            round=int(head["round"]),
            attempt=int(head["attempt"]),
            vectors=_vectors(message),
            weight=float(head["weight"]),
            metrics={str(name): float(value) for name, value in head["metrics"].items()},
            held=bool(head["held"]),
            failure=Failure(Reason(failure["reason"]), str(failure["rule"]), str(failure["incident"]))
            if failure
            else None,
            info=dict(head["info"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"not a Fedward reply: {error!r}") from error


def _content(head: Mapping[str, Any], arrays: ArrayRecord) -> RecordDict:
    # JSON writes doubles so that they come back bit for bit; NaN is refused here rather than sent.
    text = json.dumps(head, separators=(",", ":"), allow_nan=False)
    records: dict[str, Any] = {_HEAD: ConfigRecord({_JSON: text})}
    if arrays:
        records[_ARRAYS] = arrays
    return RecordDict(records)


def _head(message: Message) -> dict[str, Any]:
    try:
        head = json.loads(str(message.content.config_records[_HEAD][_JSON]))
    except (KeyError, ValueError) as error:
        raise RecordError(f"not a Fedward message: {error!r}") from error
    if not isinstance(head, dict):
        raise RecordError("not a Fedward message: its head is no table")
    return head


def _vectors(message: Message) -> dict[str, Vector]:
    arrays = message.content.array_records.get(_ARRAYS)
    return {} if arrays is None else {name: _vector(name, array) for name, array in arrays.items()}


def _vector(name: str, array: Array) -> Vector:
    """A 1-D view into the array's bytes: `Array.numpy()` would copy twice."""
    data = array.data
    head = io.BytesIO(data[:256])
    try:
        version = np.lib.format.read_magic(head)
        if version != (1, 0):
            raise ValueError(f"npy version {version}")
        shape, _, dtype = np.lib.format.read_array_header_1_0(head, max_header_size=256)
        if len(shape) != 1 or dtype.kind not in "fiu" or str(dtype) != array.dtype:
            raise ValueError(f"shape {shape}, dtype {dtype}")
        return np.frombuffer(data, dtype=dtype, count=shape[0], offset=head.tell())
    except ValueError as error:
        raise RecordError(f"vector {name!r} is not a flat number array: {error}") from error
