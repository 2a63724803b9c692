"""A worker that lies: its side of the protocol written by hand, without Fedward's code."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from fedward_common.errors import UpdateError
from fedward_common.messages import Reason
from fedward_common.update import Update, check_update
from fedward_common.worker import parent
from fedward_common.worker.frames import Limits
from fedward_common.worker.parent import Worker, WorkerFailed

from .conftest import PREPARE, TRAIN, running

LIAR = """
import json, os, pickle, socket, struct, sys, time
sock = socket.socket(fileno=int(sys.argv[1]))
def take():
    head, tensors = struct.unpack("<IQ", sock.recv(12, socket.MSG_WAITALL))
    for length in (head, tensors):
        while length:
            length -= len(sock.recv(min(length, 65536)))
def give(head, tensors=b"", prefix=None):
    head = head if isinstance(head, bytes) else json.dumps(head).encode()
    sock.sendall((prefix or struct.pack("<IQ", len(head), len(tensors))) + head + tensors)
def blob(body, **entries):
    header = json.dumps(entries).encode()
    return struct.pack("<Q", len(header)) + header + body
take()
READY = {"ready": True, "device": "cpu", "landlock": 7}
"""

NUMBERS = '"numbers": {"dtype": "F64", "shape": [1], "data_offsets": [8, 16]}'


def liar(monkeypatch, tmp_path, text: str) -> None:
    (tmp_path / "liar.py").write_text(LIAR + text)
    monkeypatch.setattr(parent, "COMMAND", (sys.executable, str(tmp_path / "liar.py")))


@pytest.mark.parametrize(
    "text",
    [
        "sock.sendall(os.urandom(1 << 16))",
        "give(b'{}', prefix=struct.pack('<IQ', 2, 1 << 62))",
        "give(b'{}', prefix=struct.pack('<IQ', (1 << 32) - 1, 0))",
        "give(b'{\"metrics\": [], \"info\": {\"steps\": NaN}}')",
        "give(pickle.dumps({'metrics': [], 'info': {}}))",
        "give({'metrics': [], 'info': {}}, pickle.dumps([1.0]))",
        "give({'metrics': [], 'info': {'note': 'patient Jane Doe'}}, blob(b'\\0' * 8, "
        "numbers={'dtype': 'F64', 'shape': [1], 'data_offsets': [0, 8]}))",
        "give({'metrics': ['patient Jane Doe'], 'info': {}}, blob(b'\\0' * 16, "
        "numbers={'dtype': 'F64', 'shape': [2], 'data_offsets': [0, 16]}))",
        "give({'error': 'patient Jane Doe', 'detail': ''})",
        "give({'metrics': [], 'info': {}}, blob(b'\\0' * 8, "
        "numbers={'dtype': 'F64', 'shape': [1 << 40], 'data_offsets': [0, 1 << 43]}))",
    ],
)
def test_a_broken_answer(setup, monkeypatch, tmp_path, text) -> None:
    liar(monkeypatch, tmp_path, f"give(READY)\ntake()\n{text}\ntime.sleep(600)")
    with Worker(setup) as worker:
        worker.start()
        pid = worker.pid
        with pytest.raises(WorkerFailed, match="protocol") as failed:
            worker.do(TRAIN, 60)
        assert failed.value.reason is Reason.WORKER_CRASHED
        assert pid is not None and not running(pid)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("sock.sendall(b'\\1')\ntime.sleep(600)", Reason.TIME_LIMIT),
        ("while True: sock.sendall(b'\\1'); time.sleep(0.01)", Reason.WORKER_CRASHED),
        ("sock.sendall(struct.pack('<IQ', 2, 1 << 31))\nwhile True: sock.sendall(b'{}' * 10); time.sleep(0.01)",
         Reason.TIME_LIMIT),
        ("sock.close()\ntime.sleep(0.2)", Reason.WORKER_CRASHED),
    ],
    ids=["one byte", "garbage byte by byte", "trickle", "hang up"],
)  # fmt: skip
def test_a_slow_answer_does_not_outlast_the_limit(setup, monkeypatch, tmp_path, text, reason) -> None:
    liar(monkeypatch, tmp_path, f"give(READY)\ntake()\n{text}")
    with Worker(setup) as worker:
        worker.start()
        with pytest.raises(WorkerFailed) as failed:
            worker.do(TRAIN, 1 if reason is Reason.TIME_LIMIT else 60)
        assert failed.value.reason is reason


def test_a_worker_that_reads_nothing_does_not_outlast_the_limit(setup, monkeypatch, tmp_path) -> None:
    from dataclasses import replace

    liar(monkeypatch, tmp_path, "give(READY)\ntime.sleep(600)")
    big = replace(TRAIN, vectors={"model": np.zeros(4_000_000, np.float32)})
    with Worker(setup) as worker:
        worker.start()
        with pytest.raises(WorkerFailed) as failed:
            worker.do(big, 0.3)
        assert failed.value.reason is Reason.TIME_LIMIT


def test_an_answer_before_the_question(setup, monkeypatch, tmp_path) -> None:
    answer = "give({'metrics': [], 'info': {}})"
    liar(monkeypatch, tmp_path, f"give(READY)\n{answer}\ntake()\ntime.sleep(600)")
    with Worker(setup) as worker:
        worker.start()
        import select

        select.select([worker._socket], [], [], 30)
        with pytest.raises(WorkerFailed, match="without having been asked"):
            worker.do(PREPARE, 60)


@pytest.mark.parametrize("ready", ["{'ready': True}", "{**READY, 'landlock': 0}", "{**READY, 'device': 5}", "{}"])
def test_a_worker_that_is_not_ready_or_not_sandboxed(setup, monkeypatch, tmp_path, ready) -> None:
    liar(monkeypatch, tmp_path, f"give({ready})\ntime.sleep(600)")
    with Worker(setup) as worker, pytest.raises(WorkerFailed, match="protocol"):
        worker.start()


def test_values_that_are_not_finite_pass_the_frames_and_fail_the_gate(setup, monkeypatch, tmp_path) -> None:
    liar(
        monkeypatch, tmp_path,
        "give(READY)\ntake()\ngive({'metrics': [], 'info': {}}, blob(struct.pack('<dff', 1.0, float('nan'), 0.0),"
        "numbers={'dtype': 'F64', 'shape': [1], 'data_offsets': [0, 8]},"
        "**{'vectors/delta': {'dtype': 'F32', 'shape': [2], 'data_offsets': [8, 16]}}))\ntime.sleep(600)",
    )  # fmt: skip
    with Worker(setup) as worker:
        done = worker.do(TRAIN, 60)
    assert np.isnan(done.vectors["delta"][0])
    with pytest.raises(UpdateError, match="finite"):
        check_update(Update(done.vectors, done.weight), {"delta": (2, np.dtype(np.float32))}, 1e7)


def test_the_callers_limit_on_an_answer_holds(setup, monkeypatch, tmp_path) -> None:
    liar(monkeypatch, tmp_path, "give(READY)\ntake()\ngive(b'{}', prefix=struct.pack('<IQ', 2, 2000))\ntime.sleep(600)")
    with Worker(setup, Limits(tensors=1000)) as worker, pytest.raises(WorkerFailed, match="limit is 1000"):
        worker.do(PREPARE, 60)
