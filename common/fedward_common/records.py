"""Flower's messages <-> our requests and replies. The only module of the common package that imports flwr's
record types.

A message holds one ConfigRecord ("fedward": one JSON text) and its vectors: small ones as bytes (each record, array
and chunk of a message costs a call of its own on its way), large ones as an ArrayRecord, which travels in chunks.
What a node does is decided by the JSON text, never by Flower's message type.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.proto.recorddict_pb2 import ConfigRecord as ProtoConfigRecord
from flwr.supercore.constant import HEAD_BODY_DIVIDER, HEAD_VALUE_DIVIDER
from flwr.supercore.inflatable.inflatable_object import (
    _get_computed_object_ids,
    get_object_head_values_from_object_content,
    get_object_id,
)
from flwr.supercore.inflatable.inflatable_utils import inflatable_class_registry
from google.protobuf.message import DecodeError

from fedward_common import parcels
from fedward_common.errors import FedwardError
from fedward_common.messages import Failure, Purpose, Reason, Reply, Request, Stamp
from fedward_common.update import Vector, Vectors

_VECTORS = "vectors"
HEAD = "fedward"
"""The name of the record that says what a message is."""
_JSON = "json"
"""No vector may have this name."""
_INLINE = 5 * 2**20
"""Bytes of vectors up to which they travel as bytes: as much as a chunk of Flower's holds."""
_DEEPEST = 3
"""Levels below a message at which an array may stand: RecordDict, ArrayRecord, Array."""
_TYPES = {
    Purpose.PREPARE: "query.prepare",
    Purpose.TRAIN: "train",
    Purpose.EVALUATE: "evaluate",
    Purpose.ADVERTISE: "query.advertise",
    Purpose.MASK: "query.mask",
    Purpose.AGREE: "query.agree",
    Purpose.UNMASK: "query.unmask",
    Purpose.COLLECT: "query.collect",
    Purpose.FINISH: "query.finish",
}


class RecordError(FedwardError):
    """A message does not hold what it must."""


VectorRecord = ArrayRecord | ConfigRecord
Record = ArrayRecord | ConfigRecord | MetricRecord


def array_record(vectors: Vectors) -> ArrayRecord:
    """The vectors as Flower arrays."""
    return ArrayRecord({name: Array(np.ascontiguousarray(vector)) for name, vector in vectors.items()})


def vector_record(vectors: Vectors) -> VectorRecord:
    """The vectors as a message holds them; build it once and share it between the messages of a cohort, so that it
    is hashed, sent and stored once."""
    arrays = array_record(vectors)
    if sum(vector.nbytes for vector in vectors.values()) > _INLINE:
        return arrays
    return ConfigRecord({name: array.data for name, array in arrays.items()})


def request_to_message(
    request: Request, destination: int, ttl: float, vectors: VectorRecord | None = None
) -> Message:
    """A Flower message for the node with Flower id `destination`; `vectors` is `vector_record(request.vectors)` if
    the caller has it already."""
    content = _content(_told(request), vectors if vectors is not None else vector_record(request.vectors))
    return Message(content, destination, _TYPES[request.purpose], ttl=ttl, group_id=str(request.round))


def request_record(request: Request) -> ConfigRecord:
    """The request as one record, for a message that holds others too. Its vectors are short."""
    vectors = {name: array.data for name, array in array_record(request.vectors).items()}
    return ConfigRecord({**vectors, _JSON: _text(_told(request))})


def message_to_request(message: Message) -> Request:
    """The request in a message. Raises `RecordError`."""
    return content_to_request(message.content)


def content_to_request(content: RecordDict) -> Request:
    """The request in a message's records. Raises `RecordError`."""
    head = _head(content)
    try:
        included = head["included"]
        return Request(
            purpose=Purpose(head["purpose"]),
            run=str(head["run"]),
            round=int(head["round"]),
            attempt=int(head["attempt"]),
            vectors=_vectors(content),
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
    vectors = vector_record(reply.vectors)
    if isinstance(vectors, ConfigRecord):
        # Nobody shares them: one record the less.
        return Message(RecordDict({HEAD: ConfigRecord({**vectors, _JSON: _text(head)})}), reply_to=to)
    return Message(_content(head, vectors), reply_to=to)


def message_to_reply(message: Message) -> Reply:
    """The reply in a message. Raises `RecordError` (a message that carries Flower's own error included)."""
    if message.has_error():
        raise RecordError(f"Flower error {message.error.code}: {message.error.reason}")
    head = _head(message.content)
    try:
        failure = head["failure"]
        return Reply(
            purpose=Purpose(head["purpose"]),
            run=str(head["run"]),
            round=int(head["round"]),
            attempt=int(head["attempt"]),
            vectors=_vectors(message.content),
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


def assemble(message_id: str, pull: Callable[[str], bytes]) -> Message:
    """The message whose objects `pull` fetches by id, root first and each once for every place that it has.

    The chunks of an array are joined as they come, so that memory grows by the message and one chunk (Flower's own
    function holds it three times). Raises `RecordError` for objects that make no message; what `pull` raises goes
    through.
    """
    try:
        message = _object(message_id, pull, 0)
    except (DecodeError, LookupError, TypeError, ValueError) as error:
        raise RecordError(f"not a message: {error!r}") from error
    if not isinstance(message, Message):
        raise RecordError(f"not a message: {type(message).__name__}")
    message.metadata.__dict__["_message_id"] = message_id
    return message


def deflate_once(records: Iterable[Record]) -> dict[str, bytes]:
    """Content by object id of each `ConfigRecord` among the records, for use within `no_object_id_recompute`: there
    Flower knows its id from now on. Flower itself deflates a record for its id and once more to send it, copying it
    six times on the way, which for 4 MB is as long as all else that it takes to send them."""
    contents: dict[str, bytes] = {}
    for record in {id(record): record for record in records if isinstance(record, ConfigRecord)}.values():
        content = _deflated(record)
        object_id = get_object_id(content)
        vars(record)["_object_id"] = object_id
        _get_computed_object_ids().add(object_id)
        contents[object_id] = content
    return contents


def is_small(message: Message, contents: Mapping[str, bytes]) -> bool:
    """Whether a message can travel with its objects (`parcels`): it holds no arrays, and the `contents` of its records
    are few bytes. For use within `no_object_id_recompute`."""
    records = list(message.content.values())
    arrays = any(isinstance(record, ArrayRecord) for record in records)
    return not arrays and sum(len(contents[record.object_id]) for record in records) <= parcels.LIMIT


def _deflated(record: ConfigRecord) -> bytes:
    """`record.deflate()` of bytes and texts, in half as many copies."""
    proto = ProtoConfigRecord()
    for name, value in record.items():
        item = proto.items.add(key=name)
        if isinstance(value, bytes):
            item.value.bytes = value
        elif isinstance(value, str):
            item.value.string = value
        else:
            return record.deflate()
    body = proto.SerializeToString()
    head = HEAD_VALUE_DIVIDER.join((ConfigRecord.__qualname__, "", str(len(body))))
    return b"".join((head.encode(), HEAD_BODY_DIVIDER, body))


def release(message: Message) -> None:
    """Empty a message that is not needed any more. Flower's records are parts of reference cycles: what they hold
    would else stay until the garbage collector comes by, one whole update too many."""
    for record in message.content.values():
        record.clear()
    message.content.clear()


def _object(object_id: str, pull: Callable[[str], bytes], depth: int) -> Any:
    content = pull(object_id)
    kind, children, _ = get_object_head_values_from_object_content(content)
    if depth > _DEEPEST:
        raise ValueError(f"a {kind} on level {depth}")
    if kind == Array.__qualname__:
        return _array(content, children, pull)
    made = {child: _object(child, pull, depth + 1) for child in children}
    return inflatable_class_registry[kind].inflate(content, made)


def _array(content: bytes, chunks: list[str], pull: Callable[[str], bytes]) -> Array:
    told = json.loads(bytes(_body(content)))
    # Its value is its own buffer: no copy at the end.
    data = io.BytesIO()
    places: dict[str, slice] = {}
    for index in told["arraychunk_ids"]:
        chunk = chunks[index]
        if chunk in places:
            data.write(bytes(data.getbuffer()[places[chunk]]))
        else:
            start = data.tell()
            data.write(_body(pull(chunk)))
            places[chunk] = slice(start, data.tell())
    return Array(told["dtype"], tuple(told["shape"]), told["stype"], data.getvalue())


def _body(content: bytes) -> memoryview:
    return memoryview(content)[content.index(HEAD_BODY_DIVIDER) + len(HEAD_BODY_DIVIDER) :]


def _told(request: Request) -> dict[str, Any]:
    return {
        "purpose": request.purpose.value,
        "run": request.run,
        "round": request.round,
        "attempt": request.attempt,
        "included": asdict(request.included) if request.included else None,
        "settings": dict(request.settings),
    }


def _content(head: Mapping[str, Any], vectors: VectorRecord) -> RecordDict:
    records: dict[str, Any] = {HEAD: ConfigRecord({_JSON: _text(head)})}
    if vectors:
        records[_VECTORS] = vectors
    return RecordDict(records)


def _text(head: Mapping[str, Any]) -> str:
    # JSON writes doubles so that they come back bit for bit; NaN is refused here rather than sent.
    return json.dumps(head, separators=(",", ":"), allow_nan=False)


def _head(content: RecordDict) -> dict[str, Any]:
    try:
        head = json.loads(str(content.config_records[HEAD][_JSON]))
    except (KeyError, ValueError) as error:
        raise RecordError(f"not a Fedward message: {error!r}") from error
    if not isinstance(head, dict):
        raise RecordError("not a Fedward message: its head is no table")
    return head


def _vectors(content: RecordDict) -> dict[str, Vector]:
    record = content.get(_VECTORS, content.get(HEAD))
    if isinstance(record, ArrayRecord):
        return {name: _vector(name, array.data) for name, array in record.items()}
    if isinstance(record, ConfigRecord):
        return {name: _vector(name, data) for name, data in record.items() if name != _JSON}
    raise RecordError(f"the vectors are a {type(record).__name__}")


def _vector(name: str, data: object) -> Vector:
    """A 1-D view into the bytes of a npy file: `Array.numpy()` would copy twice."""
    if not isinstance(data, bytes):
        raise RecordError(f"vector {name!r} is no bytes")
    head = io.BytesIO(data[:256])
    try:
        version = np.lib.format.read_magic(head)
        if version != (1, 0):
            raise ValueError(f"npy version {version}")
        shape, _, dtype = np.lib.format.read_array_header_1_0(head, max_header_size=256)
        if len(shape) != 1 or dtype.kind not in "fiu":
            raise ValueError(f"shape {shape}, dtype {dtype}")
        return np.frombuffer(data, dtype=dtype, count=shape[0], offset=head.tell())
    except ValueError as error:
        raise RecordError(f"vector {name!r} is not a flat number array: {error}") from error
