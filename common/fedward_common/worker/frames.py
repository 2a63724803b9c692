"""Length-limited frames between a trusted process and its worker: JSON and flat vectors, never pickle.

A frame is `<u4 JSON length><u8 tensors length><JSON><tensors>`; the tensors are one safetensors blob (empty if
there are none). The peer is not trusted: each length is checked before anything is allocated, memory is filled
only by bytes that came, and whatever does not fit is a `FrameError`.
"""

from __future__ import annotations

import json
import math
import re
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedward_common.errors import FedwardError

if TYPE_CHECKING:
    # At run time the import is done where needed: a guard that only passes frames on stays free of torch.
    from fedward_common.work import Done, Work

Vector = npt.NDArray[Any]
Tick = Callable[[], None]
"""Called while a channel waits and between chunks; raises to give up (deadline, memory)."""

_PREFIX = struct.Struct("<IQ")
_HEADER = struct.Struct("<Q")
_CHUNK = 1 << 20
_DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F64": np.dtype("<f8"), "I64": np.dtype("<i8")}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@%+-]*(/[A-Za-z0-9_][A-Za-z0-9_.@%+-]*)*")
_MAX_NAME = 128
_MAX_METRICS = 256
_MAX_INFO = 64
_NUMBERS = "numbers"
"""Name of the float64 vector [weight, metrics…]: JSON has no NaN, and a diverged loss is no broken frame."""

ERROR_KINDS = ("task_error", "no_data", "out_of_memory")
"""What a worker may say went wrong."""
MAX_DETAIL = 64 * 1024
"""Characters of a traceback that travel to the parent's log."""


class FrameError(FedwardError):
    """A frame broke the format or a limit."""


class ChannelClosed(FrameError):
    """The peer has closed its end."""


@dataclass(frozen=True)
class Limits:
    """What a frame may hold at most. json, tensors: bytes. count: vectors."""

    json: int = 1 << 20
    tensors: int = 4 << 30
    count: int = 256


@dataclass(frozen=True)
class Frame:
    """One message: a JSON object and named flat vectors (float32, float64, int64; writable)."""

    json: Mapping[str, Any]
    vectors: Mapping[str, Vector] = field(default_factory=dict)


def _no_tick() -> None:
    return None


class Channel:
    """Frames over a connected stream socket.

    tick: called at least every `poll` seconds while the channel waits, and once a chunk, so that neither a silent
    peer nor a trickling one can hold it past a deadline; what it raises goes through.
    """

    def __init__(
        self, sock: socket.socket, limits: Limits | None = None, tick: Tick | None = None, poll: float = 0.1
    ) -> None:
        self._socket = sock
        self._limits = limits if limits is not None else Limits()
        self._tick = tick if tick is not None else _no_tick
        sock.settimeout(poll if tick is not None else None)

    def send(self, frame: Frame) -> None:
        """Send one frame. Raises `FrameError` (over a limit, a JSON value or dtype that cannot travel)."""
        head, blobs, length = encode(frame, self._limits)
        self._send_all(memoryview(_PREFIX.pack(len(head), length) + head))
        for blob in blobs:
            self._send_all(blob)

    def receive(self) -> Frame:
        """The next frame. Raises `FrameError`, `ChannelClosed` if the peer is gone."""
        json_length, tensors_length = _PREFIX.unpack(self._read(_PREFIX.size, start=True))
        if json_length > self._limits.json:
            raise FrameError(f"a frame claims {json_length} bytes of JSON; the limit is {self._limits.json}.")
        if tensors_length > self._limits.tensors:
            raise FrameError(f"a frame claims {tensors_length} bytes of tensors; the limit is {self._limits.tensors}.")
        head = decode_json(bytes(self._read(json_length)))
        vectors = decode_vectors(self._read(tensors_length), self._limits) if tensors_length else {}
        return Frame(head, vectors)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _send_all(self, data: memoryview) -> None:
        sent = 0
        while sent < len(data):
            self._tick()
            try:
                sent += self._socket.send(data[sent : sent + _CHUNK])
            except TimeoutError:
                continue
            except (BrokenPipeError, ConnectionResetError) as error:
                raise ChannelClosed("the peer closed the channel while it was sent a frame.") from error

    def _read(self, length: int, start: bool = False) -> memoryview:
        # np.empty leaves pages untouched: a length that was claimed but never sent costs no memory.
        buffer = np.empty(length, dtype=np.uint8).data
        got = 0
        while got < length:
            self._tick()
            try:
                count = self._socket.recv_into(buffer[got : got + _CHUNK])
            except TimeoutError:
                continue
            except ConnectionResetError as error:
                raise ChannelClosed("the peer reset the channel.") from error
            if count == 0:
                where = "" if start and got == 0 else " in the middle of a frame"
                raise ChannelClosed(f"the peer closed the channel{where}.")
            got += count
        return buffer


def encode(frame: Frame, limits: Limits) -> tuple[bytes, list[memoryview], int]:
    """JSON bytes, the safetensors blob in parts (views of the vectors, not copies) and the blob's length."""
    try:
        head = json.dumps(frame.json, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise FrameError(f"the frame's JSON cannot be written: {error}") from error
    if len(head) > limits.json:
        raise FrameError(f"the frame has {len(head)} bytes of JSON; the limit is {limits.json}.")
    if not frame.vectors:
        return head, [], 0
    parts = _blob(frame.vectors, limits)
    length = sum(len(part) for part in parts)
    if length > limits.tensors:
        raise FrameError(f"the frame has {length} bytes of tensors; the limit is {limits.tensors}.")
    return head, parts, length


def _blob(vectors: Mapping[str, Vector], limits: Limits) -> list[memoryview]:
    if len(vectors) > limits.count:
        raise FrameError(f"the frame has {len(vectors)} vectors; the limit is {limits.count}.")
    entries: dict[str, Any] = {}
    parts = []
    at = 0
    # Widest first, as safetensors does: every vector then starts aligned.
    for name, vector in sorted(vectors.items(), key=lambda item: (-np.asarray(item[1]).itemsize, item[0])):
        _check_name(name)
        array: Vector = np.asarray(vector)
        code = _CODES.get(array.dtype.newbyteorder("<"))
        if code is None or array.ndim != 1:
            raise FrameError(f"vector {name!r} has dtype {array.dtype} and {array.ndim} axes; frames carry flat "
                             "float32, float64 and int64.")
        array = np.ascontiguousarray(array, dtype=_DTYPES[code])
        entries[name] = {"dtype": code, "shape": [array.size], "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
        if array.size:
            parts.append(array.data.cast("B"))
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return [memoryview(_HEADER.pack(len(header)) + header), *parts]


def _check_name(name: object) -> str:
    if not isinstance(name, str) or len(name) > _MAX_NAME or not _NAME.fullmatch(name):
        raise FrameError(
            f"{name!r:.80} is not a name that may travel: at most {_MAX_NAME} letters, digits and . _ @ % + - /."
        )
    return name


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is too large")
    return value


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return found


def decode_json(data: bytes) -> dict[str, Any]:
    """A JSON object, strictly: UTF-8, no NaN, no infinities, no repeated keys. Raises `FrameError`."""
    try:
        found = json.loads(
            data.decode("utf-8"),
            parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_no_repeats,
        )
    except (ValueError, RecursionError) as error:
        raise FrameError(f"a frame's JSON is not valid: {str(error)[:200]}") from error
    if not isinstance(found, dict):
        raise FrameError("a frame's JSON is not an object.")
    return found


def decode_vectors(blob: memoryview, limits: Limits) -> dict[str, Vector]:
    """The flat vectors of a safetensors blob, as views into it. Raises `FrameError`."""
    if len(blob) < _HEADER.size:
        raise FrameError("a frame's tensors are shorter than a safetensors header.")
    (header_length,) = _HEADER.unpack(blob[: _HEADER.size])
    body_at = _HEADER.size + header_length
    if header_length > limits.json or body_at > len(blob):
        raise FrameError(f"a frame's tensors claim a header of {header_length} bytes.")
    entries = decode_json(bytes(blob[_HEADER.size : body_at]))
    if len(entries) > limits.count:
        raise FrameError(f"a frame has {len(entries)} vectors; the limit is {limits.count}.")
    body = blob[body_at:]
    spans = sorted((_span(name, entry, len(body)) for name, entry in entries.items()), key=lambda s: s.start)
    at = 0
    for span in spans:
        if span.start != at:
            raise FrameError(f"vector {span.name!r} overlaps another one or leaves a hole before it.")
        at = span.end
    if at != len(body):
        raise FrameError(f"a frame's vectors end at byte {at} of {len(body)}.")
    return {span.name: span.read(body) for span in spans}


@dataclass(frozen=True)
class _Span:
    name: str
    dtype: np.dtype[Any]
    start: int
    end: int

    def read(self, body: memoryview) -> Vector:
        array: Vector = np.frombuffer(body[self.start : self.end], dtype=self.dtype)
        return array if array.flags.aligned else array.copy()


def _span(name: str, entry: object, size: int) -> _Span:
    _check_name(name)
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise FrameError(f"vector {name!r} lacks dtype, shape or data_offsets.")
    code = entry["dtype"]
    dtype = _DTYPES.get(code) if isinstance(code, str) else None
    if dtype is None:
        raise FrameError(f"vector {name!r} has dtype {code!r:.40}; frames carry {', '.join(_DTYPES)}.")
    shape, offsets = _integers(name, entry["shape"], 1), _integers(name, entry["data_offsets"], 2)
    start, end = offsets
    if end > size or end - start != shape[0] * dtype.itemsize:
        raise FrameError(f"vector {name!r} has {shape[0]} elements of {code} at bytes {start} to {end} of {size}.")
    return _Span(name, dtype, start, end)


def _integers(name: str, value: object, count: int) -> list[int]:
    if (
        not isinstance(value, list)
        or len(value) != count
        or not all(type(item) is int and 0 <= item < 1 << 62 for item in value)
    ):
        raise FrameError(f"vector {name!r}: expected {count} non-negative whole numbers, got {value!r:.80}.")
    return value


def _prefixed(prefix: str, vectors: Mapping[str, Vector]) -> dict[str, Vector]:
    return {f"{prefix}/{name}": vector for name, vector in vectors.items()}


def _without(prefix: str, vectors: Mapping[str, Vector]) -> dict[str, Vector]:
    start = prefix + "/"
    return {name[len(start) :]: vector for name, vector in vectors.items() if name.startswith(start)}


def _check_prefixes(vectors: Mapping[str, Vector], others: tuple[str, ...] = ()) -> None:
    unknown = [name for name in vectors if name not in others and not name.startswith(("vectors/", "state/"))]
    if unknown:
        raise FrameError(f"a frame has vectors of no known group: {sorted(unknown)[:5]}.")


def _check_keys(head: Mapping[str, Any], keys: set[str]) -> None:
    if set(head) != keys:
        raise FrameError(f"a frame has keys {sorted(head)!r:.200}, expected {sorted(keys)}.")


def work_to_frame(work: Work) -> Frame:
    """The frame that asks for `work`."""
    head = {"op": work.op, "round": work.round, "split": work.split, "seconds": work.seconds}
    return Frame(head, {**_prefixed("vectors", work.vectors), **_prefixed("state", work.state)})


def work_from_frame(frame: Frame) -> Work:
    """The inverse of `work_to_frame`. Raises `FrameError`."""
    from fedward_common.work import Work

    head = frame.json
    _check_keys(head, {"op", "round", "split", "seconds"})
    _check_prefixes(frame.vectors)
    seconds = head["seconds"]
    if not (isinstance(head["op"], str) and isinstance(head["split"], str) and type(head["round"]) is int):
        raise FrameError("a work frame has op, split or round of the wrong type.")
    if seconds is not None and type(seconds) not in (int, float):
        raise FrameError(f"a work frame has seconds = {seconds!r:.40}.")
    return Work(
        head["op"], head["round"], _without("vectors", frame.vectors), _without("state", frame.vectors),
        head["split"], seconds,
    )


def done_to_frame(done: Done) -> Frame:
    """The frame that carries a result. Raises `FrameError` if a metric or an info value cannot travel."""
    metrics = {_check_name(name): _number(name, value) for name, value in done.metrics.items()}
    numbers = np.array([_number("weight", done.weight), *metrics.values()], dtype=np.float64)
    head = {"metrics": list(metrics), "info": dict(done.info)}
    vectors = {**_prefixed("vectors", done.vectors), **_prefixed("state", done.state), _NUMBERS: numbers}
    return Frame(head, vectors)


def _number(name: object, value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise FrameError(f"{name!r} is {type(value).__name__}, not a number.") from error


def done_from_frame(frame: Frame, op: str) -> Done:
    """The result of a work with this `op`. Raises `FrameError`.

    Metric names are short plain names and info holds numbers and truth values only (and for "prepare" and
    "initial" the text "layout" and the list of names "metric_names"): task code must not send free text off the node.
    Values may be NaN: the update gate, which knows what the algorithm asks for, is the next step. Raises `FrameError`.
    """
    from fedward_common.work import Done

    _check_keys(frame.json, {"metrics", "info"})
    _check_prefixes(frame.vectors, (_NUMBERS,))
    names = frame.json["metrics"]
    if not isinstance(names, list) or len(names) > _MAX_METRICS or len({_check_name(n) for n in names}) != len(names):
        raise FrameError(f"a result names its metrics wrongly (at most {_MAX_METRICS}, none twice).")
    numbers = frame.vectors.get(_NUMBERS)
    if numbers is None or numbers.dtype != np.float64 or numbers.shape != (1 + len(names),):
        raise FrameError("a result's weight and metrics are not one float64 vector.")
    values = [float(value) for value in numbers]
    return Done(
        _without("vectors", frame.vectors), _without("state", frame.vectors),
        values[0], dict(zip(names, values[1:], strict=True)), _check_info(frame.json["info"], op),
    )


def _check_info(info: object, op: str) -> dict[str, Any]:
    if not isinstance(info, dict) or len(info) > _MAX_INFO:
        raise FrameError(f"a result's info is not an object with at most {_MAX_INFO} keys.")
    for name, value in info.items():
        _check_name(name)
        if op in ("prepare", "initial") and name == "layout":
            if not isinstance(value, str):
                raise FrameError("a result's info.layout is not text.")
        elif op in ("prepare", "initial") and name == "metric_names":
            if not isinstance(value, list) or len(value) > _MAX_METRICS:
                raise FrameError(f"a result's info.metric_names is not a list of at most {_MAX_METRICS} names.")
            for metric in value:
                _check_name(metric)
        elif type(value) not in (bool, int, float):
            raise FrameError(f"a result's info.{name} is {type(value).__name__}; only numbers and true/false travel.")
    return dict(info)


def error_to_frame(kind: str, detail: str) -> Frame:
    """The frame that says what went wrong; `detail` is for the node's own log."""
    assert kind in ERROR_KINDS
    return Frame({"error": kind, "detail": detail[-MAX_DETAIL:]})


def error_from_frame(frame: Frame) -> tuple[str, str] | None:
    """(kind, detail) if the frame is an error, else None. Raises `FrameError` for a malformed one."""
    if "error" not in frame.json:
        return None
    _check_keys(frame.json, {"error", "detail"})
    kind, detail = frame.json["error"], frame.json["detail"]
    if kind not in ERROR_KINDS or not isinstance(detail, str) or frame.vectors:
        raise FrameError("an error frame has a kind that is not on the list, or no text.")
    return kind, detail[-MAX_DETAIL:]
