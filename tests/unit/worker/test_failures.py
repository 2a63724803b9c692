"""Each way in which task code can end a worker has its reason, and the next work is done by a fresh worker."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import psutil
import pytest
from fedward_common.messages import Reason
from fedward_common.worker import parent
from fedward_common.worker.parent import Worker, WorkerFailed, Workers

from .conftest import EVALUATE, MODEL, PREPARE, TRAIN, environment, layout_size, make_setup, running, tell

MEMORY = 500 << 20


def test_work_is_done(worker) -> None:
    prepared = worker.do(PREPARE, 60)
    assert layout_size(prepared.info["layout"]) == 10
    trained = worker.do(TRAIN, 60)
    assert trained.vectors["delta"].dtype == np.float32 and trained.vectors["delta"].any()
    assert trained.weight == 12 and trained.info["steps"] == 2
    evaluated = worker.do(EVALUATE, 60)
    # ln 2: the all-zero model knows nothing about two classes.
    assert evaluated.metrics["loss"] / evaluated.metrics["examples"] == pytest.approx(np.log(2))
    assert worker.device == "cpu" and worker.landlock >= 1


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """One node for all failures: each case fails the warm worker and leaves a fresh one to the next."""
    setup = replace(make_setup(tmp_path_factory.mktemp("site")), max_memory=MEMORY)
    workers = Workers()
    yield setup, workers
    workers.close()


@pytest.mark.parametrize(
    ("what", "reason", "detail"),
    [
        ("raise", Reason.TASK_ERROR, "patient Jane Doe"),
        ("leave", Reason.TASK_ERROR, "SystemExit"),
        ("exit", Reason.WORKER_CRASHED, "exit status 3"),
        ("segfault", Reason.WORKER_CRASHED, "Segmentation fault"),
        ("memory", Reason.OUT_OF_MEMORY, "MiB"),
        ("child memory", Reason.OUT_OF_MEMORY, "MiB"),
        ("torch memory", Reason.OUT_OF_MEMORY, "DefaultCPUAllocator"),
        ("loop", Reason.TIME_LIMIT, "time limit"),
        ("deaf", Reason.TIME_LIMIT, "time limit"),
    ],
)
def test_failure(site, what, reason, detail) -> None:
    setup, workers = site
    workers.do("run", setup, PREPARE, 60)
    tell(setup, what)
    with pytest.raises(WorkerFailed) as failed:
        workers.do("run", setup, TRAIN, 0.2 if reason is Reason.TIME_LIMIT else 60)
    assert failed.value.reason is reason
    assert detail in failed.value.detail
    assert workers.pids() == {}
    tell(setup, "")
    assert workers.do("run", setup, TRAIN, 60).weight == 12


def test_no_data(setup, worker) -> None:
    tell(setup, "no data")
    with pytest.raises(WorkerFailed, match="no example") as failed:
        worker.do(PREPARE, 60)
    assert failed.value.reason is Reason.NO_DATA


def test_a_worker_that_died_while_idle_is_replaced_without_a_failure(setup, workers) -> None:
    workers.do("run", setup, PREPARE, 60)
    pid = workers.pids()["run"]
    os.kill(pid, 9)
    psutil.Process(pid).wait(10)
    assert workers.do("run", setup, TRAIN, 60).weight == 12
    assert workers.pids()["run"] != pid


def test_one_warm_worker_a_run(setup, workers) -> None:
    workers.do("a", setup, PREPARE, 60)
    assert setup.log.stat().st_mode & 0o777 == 0o600
    first = workers.pids()
    workers.do("a", setup, TRAIN, 60)
    assert workers.pids() == first
    workers.release("a")
    workers.release("never heard of")
    assert not running(first["a"]) and workers.pids() == {}
    assert not setup.scratch.exists()


def test_a_large_log_is_put_aside(setup, monkeypatch) -> None:
    monkeypatch.setattr(parent, "_LOG_LIMIT", 100)
    setup.log.parent.mkdir(parents=True)
    setup.log.write_text("x" * 101)
    os.close(parent._open_log(setup.log))
    assert setup.log.read_text() == "" and setup.log.with_name("worker.log.1").stat().st_size == 101


PARENT = """
import pickle, sys
from fedward_common.worker.parent import Worker
setup, work = pickle.load(open(sys.argv[1], "rb"))
worker = Worker(setup)
worker.start()
print(worker.pid, flush=True)
worker.do(work, 600)
"""


def until(condition) -> bool:
    for _ in range(400):
        if condition():
            return True
        time.sleep(0.05)
    return False


def test_a_busy_worker_dies_with_its_guard(setup, tmp_path) -> None:
    # In an endless loop it would not notice by itself that nobody listens any more.
    tell(setup, "loop")
    (tmp_path / "guard.py").write_text(PARENT)
    (tmp_path / "setup").write_bytes(pickle.dumps((setup, TRAIN)))
    guard = subprocess.Popen(
        [sys.executable, tmp_path / "guard.py", tmp_path / "setup"], stdout=subprocess.PIPE, env=environment()
    )
    try:
        assert guard.stdout is not None
        pid = int(guard.stdout.readline())
        assert until((setup.scratch / "began").exists) and running(pid)
    finally:
        guard.kill()
        guard.wait()
        guard.stdout.close()
    try:
        assert until(lambda: not running(pid))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_thread_that_started_a_worker_may_end(setup) -> None:
    import threading

    with Worker(setup) as worker:
        starter = threading.Thread(target=worker.start)
        starter.start()
        starter.join()
        assert worker.do(PREPARE, 60).info["layout"]
        assert worker.alive


def test_a_task_that_cannot_be_imported(setup, workers) -> None:
    (setup.bundle / "toy_task.py").write_text("import no_such_module\n")
    with pytest.raises(WorkerFailed, match="no_such_module") as failed:
        workers.do("run", setup, PREPARE, 60)
    assert failed.value.reason is Reason.TASK_ERROR


def test_a_metric_that_is_not_finite_is_for_the_gate_to_judge(setup, worker) -> None:
    done = worker.do(replace(EVALUATE, vectors={"model": np.full(10, np.inf, np.float32)}), 60)
    assert not np.isfinite(done.metrics["loss"])
    assert MODEL["model"].sum() == 0
