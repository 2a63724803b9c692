"""Frames: what goes in comes out; what a hostile peer writes is a FrameError and nothing else."""

from __future__ import annotations

import contextlib
import json
import math
import pickle
import socket
import struct
import threading
import tracemalloc

import numpy as np
import pytest
import safetensors.numpy
from fedward_common.work import Done, Work
from fedward_common.worker.frames import (
    Channel,
    ChannelClosed,
    Frame,
    FrameError,
    Limits,
    decode_json,
    decode_vectors,
    done_from_frame,
    done_to_frame,
    encode,
    error_from_frame,
    error_to_frame,
    work_from_frame,
    work_to_frame,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

NAMES = st.from_regex(r"\A[a-z_]{1,12}\Z")
VECTORS = st.dictionaries(
    NAMES,
    st.sampled_from(["<f4", "<f8", "<i8"]).flatmap(lambda code: arrays(np.dtype(code), st.integers(0, 40))),
    max_size=5,
)
LIMITS = Limits()


def through(frame: Frame, limits: Limits = LIMITS) -> Frame:
    left, right = socket.socketpair()
    with left, right:
        sender = threading.Thread(target=Channel(left).send, args=(frame,))
        sender.start()
        found = Channel(right, limits).receive()
        sender.join()
        return found


def raw(data: bytes, limits: Limits = LIMITS) -> Frame:
    left, right = socket.socketpair()
    with left, right:
        # Small enough for the socket's buffer, so no thread is needed.
        left.sendall(data)
        left.close()
        return Channel(right, limits).receive()


def prefix(json_length: int, tensors_length: int) -> bytes:
    return struct.pack("<IQ", json_length, tensors_length)


def same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and left[name].tobytes() == right[name].tobytes() for name in left
    )


@given(VECTORS, st.dictionaries(NAMES, st.none() | st.booleans() | st.integers() | st.text(), max_size=4))
def test_round_trip(vectors, head) -> None:
    found = through(Frame(head, vectors))
    assert found.json == head
    assert same(dict(found.vectors), vectors)
    assert all(vector.flags.writeable and vector.flags.aligned for vector in found.vectors.values() if vector.size)


@given(VECTORS.filter(bool))
def test_the_blob_is_what_safetensors_reads(vectors) -> None:
    _, parts, length = encode(Frame({}, vectors), LIMITS)
    blob = b"".join(parts)
    assert len(blob) == length
    assert same(safetensors.numpy.load(blob), vectors)


@given(VECTORS.filter(bool))
def test_reads_what_safetensors_writes(vectors) -> None:
    blob = np.frombuffer(safetensors.numpy.save(vectors), np.uint8)
    assert same(decode_vectors(memoryview(blob), LIMITS), vectors)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_frame_or_a_frame_error(data) -> None:
    with contextlib.suppress(FrameError):
        raw(data)


@settings(max_examples=300)
@given(VECTORS.filter(bool), st.data())
def test_a_changed_blob_never_escapes_the_frame_error(vectors, data) -> None:
    blob = bytearray(safetensors.numpy.save(vectors))
    for _ in range(data.draw(st.integers(1, 4))):
        blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(FrameError):
        decode_vectors(memoryview(blob), LIMITS)


@given(
    st.builds(
        Work,
        op=st.sampled_from(["prepare", "count", "train", "evaluate", "initial"]),
        round=st.integers(0, 10**6),
        vectors=VECTORS,
        state=VECTORS,
        split=st.sampled_from(["test", "train"]),
        seconds=st.none() | st.floats(0.1, 1e6),
    )
)
def test_work_round_trip(work) -> None:
    found = work_from_frame(through(work_to_frame(work)))
    assert (found.op, found.round, found.split, found.seconds) == (work.op, work.round, work.split, work.seconds)
    assert same(dict(found.vectors), work.vectors) and same(dict(found.state), work.state)


@given(VECTORS, VECTORS, st.floats(), st.dictionaries(NAMES, st.floats(), max_size=4))
def test_done_round_trip_with_values_that_json_lacks(vectors, state, weight, metrics) -> None:
    done = Done(vectors, state, weight, metrics, {"steps": 3, "complete": True})
    found = done_from_frame(through(done_to_frame(done)), "train")
    assert same(dict(found.vectors), vectors) and same(dict(found.state), state)
    assert struct.pack("d", found.weight) == struct.pack("d", weight) or math.isnan(weight)
    assert list(found.metrics) == list(metrics)
    assert np.array_equal(list(found.metrics.values()), list(metrics.values()), equal_nan=True)
    assert found.info == {"steps": 3, "complete": True}


@pytest.mark.parametrize(
    "text",
    [
        b"", b"[]", b"nul", b'{"a": NaN}', b'{"a": -Infinity}', b'{"a": 1e999}', b'{"a": 1, "a": 2}', b"\xff\xfe",
        b'{"a": ' + b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}", pickle.dumps({"a": 1}),
    ],
    ids=lambda text: repr(text[:20]),
)  # fmt: skip
def test_bad_json(text) -> None:
    with pytest.raises(FrameError):
        decode_json(text)


def blob_of(entries: object, body: bytes = b"") -> memoryview:
    header = json.dumps(entries).encode()
    return memoryview(struct.pack("<Q", len(header)) + header + body)


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("entries", "body"),
    [
        ({"x": {**GOOD, "dtype": "BF16"}}, b"\0" * 8),
        ({"x": {**GOOD, "dtype": "BOOL", "shape": [8]}}, b"\0" * 8),
        ({"x": {**GOOD, "dtype": ["F32"]}}, b"\0" * 8),
        ({"x": {**GOOD, "shape": [2, 1]}}, b"\0" * 8),
        ({"x": {**GOOD, "shape": [3]}}, b"\0" * 8),
        ({"x": {**GOOD, "shape": [-2]}}, b"\0" * 8),
        ({"x": {**GOOD, "shape": [True, ]}}, b"\0" * 8),
        ({"x": {**GOOD, "data_offsets": [8, 0]}}, b"\0" * 8),
        ({"x": GOOD}, b"\0" * 4),
        ({"x": GOOD}, b"\0" * 12),
        ({"x": GOOD, "y": GOOD}, b"\0" * 8),
        ({"x": {**GOOD, "data_offsets": [4, 12]}}, b"\0" * 12),
        ({"../x": GOOD}, b"\0" * 8),
        ({"x" * 500: GOOD}, b"\0" * 8),
        ({"x": [1, 2]}, b"\0" * 8),
        ({"__metadata__": {"a": "b"}}, b""),
        ([], b""),
    ],
)  # fmt: skip
def test_bad_vectors(entries, body) -> None:
    with pytest.raises(FrameError):
        decode_vectors(blob_of(entries, body), LIMITS)


def test_the_good_blob_of_that_table_is_read() -> None:
    assert decode_vectors(blob_of({"x": GOOD}, b"\0" * 8), LIMITS)["x"].tolist() == [0, 0]


def test_too_many_vectors() -> None:
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    with pytest.raises(FrameError, match="limit is 3"):
        decode_vectors(blob_of({f"x{i}": empty for i in range(4)}), Limits(count=3))


@pytest.mark.parametrize(("json_length", "tensors_length"), [(1 << 31, 0), (2, 1 << 63), (2, (4 << 30) + 1)])
def test_a_length_over_the_limit_is_refused_before_anything_is_read(json_length, tensors_length) -> None:
    with pytest.raises(FrameError, match="limit"):
        raw(prefix(json_length, tensors_length) + b"{}")


def test_a_length_that_is_claimed_but_not_sent_takes_no_memory() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    before = resident()
    with pytest.raises(ChannelClosed, match="middle"):
        raw(prefix(2, 1 << 30) + b"{}" + b"x" * 1000)
    assert resident() - before < 64 << 20


def test_a_truncated_frame() -> None:
    with pytest.raises(ChannelClosed, match="middle"):
        raw(prefix(10, 0) + b"{}")
    with pytest.raises(ChannelClosed):
        raw(b"")


@pytest.mark.parametrize(
    "head",
    [
        {"metrics": [], "info": {}, "more": 1},
        {"metrics": "x", "info": {}},
        {"metrics": ["patient Jane Doe"], "info": {}},
        {"metrics": ["a", "a"], "info": {}},
        {"metrics": [], "info": {"note": "patient Jane Doe"}},
        {"metrics": [], "info": {"steps": [1]}},
        {"metrics": [], "info": {"layout": "text in a training"}},
        {"metrics": [], "info": []},
    ],
)
def test_a_result_carries_no_free_text(head) -> None:
    count = len(head["metrics"]) if isinstance(head["metrics"], list) else 0
    with pytest.raises(FrameError):
        done_from_frame(Frame(head, {"numbers": np.zeros(1 + count)}), "train")


def test_a_result_without_its_numbers() -> None:
    with pytest.raises(FrameError, match="vector"):
        done_from_frame(Frame({"metrics": ["loss"], "info": {}}, {"numbers": np.zeros(1)}), "train")
    with pytest.raises(FrameError, match="group"):
        done_from_frame(Frame({"metrics": [], "info": {}}, {"numbers": np.zeros(1), "other": np.zeros(1)}), "train")


def test_what_cannot_be_sent() -> None:
    for frame in (
        Frame({"a": math.nan}),
        Frame({"a": object()}),
        Frame({}, {"x": np.zeros((2, 2), np.float32)}),
        Frame({}, {"x": np.array([object()])}),
        Frame({}, {"x y": np.zeros(1)}),
    ):
        with pytest.raises(FrameError):
            encode(frame, LIMITS)
    with pytest.raises(FrameError, match="limit"):
        encode(Frame({}, {"x": np.zeros(100)}), Limits(tensors=100))


def test_errors_come_from_a_fixed_list() -> None:
    assert error_from_frame(error_to_frame("no_data", "trace")) == ("no_data", "trace")
    assert error_from_frame(Frame({"metrics": [], "info": {}})) is None
    with pytest.raises(FrameError):
        error_from_frame(Frame({"error": "patient Jane Doe", "detail": ""}))


def test_sending_copies_nothing() -> None:
    vectors = {"x": np.zeros(1_000_000, np.float32)}
    tracemalloc.start()
    try:
        encode(Frame({}, vectors), LIMITS)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
