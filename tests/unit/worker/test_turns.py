"""Who waits for whom: one training at a time, in order; other work never waits for another run's training."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from fedward_common.messages import Reason
from fedward_common.worker import parent
from fedward_common.worker.parent import WorkerFailed
from fedward_common.worker.turns import FairLock

from .conftest import EVALUATE, PREPARE, TRAIN

# A worker without torch: trains until a file named after its node appears, and writes down when it began.
STUB = """
import json, os, socket, struct, sys, time
sock = socket.socket(fileno=int(sys.argv[1]))
def take():
    head, tensors = struct.unpack("<IQ", sock.recv(12, socket.MSG_WAITALL))
    found = sock.recv(head, socket.MSG_WAITALL)
    if tensors: sock.recv(tensors, socket.MSG_WAITALL)
    return json.loads(found)
def give(head, body=b""):
    head = json.dumps(head).encode()
    sock.sendall(struct.pack("<IQ", len(head), len(body)) + head + body)
setup = take()
give({"ready": True, "device": "cpu", "landlock": 7})
entries = json.dumps({"numbers": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}}).encode()
folder, node = setup["data"]["folder"], setup["node"]
while True:
    op = take()["op"]
    if op != "prepare":
        with open(folder + "/began", "a") as file: file.write(node + "\\n")
        while not os.path.exists(folder + "/go-" + node): time.sleep(0.005)
    give({"metrics": [], "info": {}}, struct.pack("<Q", len(entries)) + entries + struct.pack("<d", 1.0))
"""


class Node:
    """Runs a, b, c … on one node, with stub workers."""

    def __init__(self, setup, workers, folder) -> None:
        self.setup, self.workers, self.folder = setup, workers, folder
        self.threads: list[threading.Thread] = []
        self.failed: list[WorkerFailed] = []

    def setup_of(self, run: str):
        return replace(
            self.setup, node=run, data={"folder": str(self.folder)}, scratch=self.setup.scratch.with_name(run)
        )

    def do(self, run: str, work, wait=None) -> None:
        self.workers.do(run, self.setup_of(run), work, 60, wait)

    def begin(self, run: str, work) -> None:
        def body() -> None:
            try:
                self.do(run, work)
            except WorkerFailed as failed:
                self.failed.append(failed)

        thread = threading.Thread(target=body, daemon=True)
        self.threads.append(thread)
        thread.start()

    def until(self, condition: Callable[[], bool]) -> None:
        pause = threading.Event()
        for _ in range(4000):
            if condition():
                return
            pause.wait(0.005)
        raise AssertionError("never came true")

    def waiting(self) -> int:
        return len(self.workers._training._waiting)

    def began(self) -> list[str]:
        file = self.folder / "began"
        return file.read_text().split() if file.exists() else []

    def go(self, run: str) -> None:
        (self.folder / f"go-{run}").touch()


@pytest.fixture
def node(setup, workers, tmp_path, monkeypatch) -> Node:
    (tmp_path / "stub.py").write_text(STUB)
    monkeypatch.setattr(parent, "COMMAND", (sys.executable, str(tmp_path / "stub.py")))
    return Node(setup, workers, tmp_path)


def test_trainings_come_one_by_one_in_the_order_of_asking(node) -> None:
    for run in "abcd":
        node.do(run, PREPARE)
    node.begin("a", TRAIN)
    node.until(lambda: node.began() == ["a"])
    for count, (run, work) in enumerate([("c", TRAIN), ("b", EVALUATE), ("d", TRAIN)], start=1):
        node.begin(run, work)
        node.until(lambda count=count: node.waiting() == count)
    assert node.began() == ["a"]
    for count, run in enumerate("acbd", start=1):
        node.until(lambda count=count: len(node.began()) == count)
        node.go(run)
    for thread in node.threads:
        thread.join(60)
    assert node.began() == ["a", "c", "b", "d"]
    assert not node.failed


def test_another_runs_prepare_does_not_wait_for_a_training(node) -> None:
    node.begin("a", TRAIN)
    node.until(lambda: node.began() == ["a"])
    node.do("b", PREPARE)
    with pytest.raises(WorkerFailed) as failed:
        node.do("b", TRAIN, wait=0.05)
    assert failed.value.reason is Reason.TIME_LIMIT
    # The wait was given up in order: b can work on.
    node.go("a")
    node.go("b")
    node.do("b", TRAIN)
    assert node.began() == ["a", "b"]


def test_a_release_ends_a_training_and_lets_the_next_one_in(node) -> None:
    node.begin("a", TRAIN)
    node.until(lambda: node.began() == ["a"])
    node.begin("a", PREPARE)
    node.until(lambda: len(node.workers._seats["a"].lock._waiting) == 1)
    node.workers.release("a")
    for thread in node.threads:
        thread.join(60)
    assert [str(failed.reason) for failed in node.failed] == ["worker_crashed"] * 2
    node.go("b")
    node.do("b", TRAIN)
    assert node.began() == ["a", "b"]


def test_fair_lock_hands_on_in_order() -> None:
    lock, order, threads = FairLock(), [], []
    assert lock.acquire()

    def body(number: int) -> None:
        lock.acquire()
        order.append(number)
        lock.release()

    for number in range(20):
        thread = threading.Thread(target=body, args=(number,))
        thread.start()
        threads.append(thread)
        while len(lock._waiting) <= number:
            threading.Event().wait(0.001)
    lock.release()
    for thread in threads:
        thread.join(10)
    assert order == list(range(20))
    assert lock.acquire(0)
    assert not lock.acquire(0)
