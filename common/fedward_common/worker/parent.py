"""The trusted side of a worker: starts it, hands it work, and ends it when it crashes, lies, grows or hangs."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

import psutil

from fedward_common.errors import FedwardError
from fedward_common.worker import sandbox
from fedward_common.worker.frames import (
    Channel,
    ChannelClosed,
    Frame,
    FrameError,
    Limits,
    done_from_frame,
    error_from_frame,
    work_to_frame,
)
from fedward_common.worker.setup import Setup
from fedward_common.worker.turns import FairLock

if TYPE_CHECKING:
    from fedward_common.messages import Reason
    from fedward_common.work import Done, Work

COMMAND = (sys.executable, "-P", "-m", "fedward_common.worker.child")
START_SECONDS = 120.0
"""For the sandbox and the import of torch; no task code runs in that time."""
_POLL = 0.05
_TREE_EVERY = 20
"""Child processes are counted every so many looks at the memory (finding them reads all of /proc)."""
_LOG_LIMIT = 16 << 20
TRAINING = frozenset({"train", "evaluate"})
"""Work that is done one at a time."""

# The kernel kills a worker when the *thread* that started it ends, so all are started by one that lives on.
_SPAWNER = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fedward-spawn")


class WorkerFailed(FedwardError):
    """No result. reason: what may leave the node. detail: for the node's own log, never for the network."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason.value}: {detail}")
        self.reason = reason
        self.detail = detail


def _fail(reason: str, detail: str) -> WorkerFailed:
    from fedward_common.messages import Reason

    return WorkerFailed(Reason(reason), detail)


class _Watch:
    """Looks at the clock and at the worker's memory while the parent waits for it."""

    def __init__(self, pid: int, max_memory: int | None) -> None:
        self._process = psutil.Process(pid)
        self._max_memory = max_memory
        self._looks = 0
        self._next_look = 0.0
        self._children: list[psutil.Process] = []
        self.deadline: float | None = None

    def __call__(self) -> None:
        now = time.monotonic()
        if self.deadline is not None and now > self.deadline:
            raise _fail("time_limit", "the worker was ended at its time limit.")
        if self._max_memory is not None and now >= self._next_look:
            self._next_look = now + _POLL
            used = self._memory()
            if used > self._max_memory:
                raise _fail(
                    "out_of_memory",
                    f"the worker used {used >> 20} MiB, more than the {self._max_memory >> 20} MiB that it may.",
                )

    def _memory(self) -> int:
        if self._looks % _TREE_EVERY == 0:
            self._children = descendants(self._process)
        self._looks += 1
        return sum(_resident(process) for process in (self._process, *self._children))


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def descendants(process: psutil.Process) -> list[psutil.Process]:
    """All processes below `process`; none if it is gone."""
    try:
        return list(process.children(recursive=True))
    except psutil.Error:
        return []


def _kernel_kills() -> int:
    """Processes that the kernel has killed for memory since boot."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


class Worker:
    """One worker process for one run. Not for several threads at once, except `kill` and `alive`."""

    def __init__(self, setup: Setup, limits: Limits | None = None) -> None:
        self.setup = setup
        self.device = ""
        """Where it computes, known once it has started."""
        self.landlock = 0
        """The Landlock ABI that holds it, 0 if it runs without."""
        self._limits = limits if limits is not None else Limits()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._socket: socket.socket | None = None
        self._watch: _Watch | None = None
        self._kernel_kills = 0
        self._ended = False

    @property
    def alive(self) -> bool:
        """The process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """Its process id, once started."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process and wait until it is sandboxed and has torch. Raises `WorkerFailed`."""
        self._spawn()
        with self._failures(START_SECONDS) as channel:
            channel.send(self.setup.to_frame())
            answer = channel.receive()
            if "refused" in answer.json:
                raise _fail("internal", str(answer.json["refused"]))
            self._ready(answer)

    def _ready(self, answer: Frame) -> None:
        device, landlock = answer.json.get("device"), answer.json.get("landlock")
        if not isinstance(device, str) or type(landlock) is not int:
            raise FrameError("the worker's first frame does not say that it is ready.")
        if self.setup.sandboxed and landlock < 1:
            raise FrameError("the worker says that it runs without a sandbox.")
        self.device, self.landlock = device, landlock

    def _spawn(self) -> None:
        setup = self.setup
        for folder in (setup.scratch, setup.log.parent):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        log = _open_log(setup.log)
        try:
            self._process = _SPAWNER.submit(
                subprocess.Popen,
                [*COMMAND, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(theirs.fileno(),),
                cwd=setup.scratch, env=sandbox.clean_environment(setup.scratch, setup.threads),
                start_new_session=True,
            ).result()  # fmt: skip
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(log)
        if self._ended:
            # `kill` came while there was no process yet.
            self.kill()
        self._kernel_kills = _kernel_kills()
        self._watch = _Watch(self._process.pid, setup.max_memory)
        self._socket = ours
        self._channel = Channel(ours, self._limits, self._watch, poll=_POLL)

    def do(self, work: Work, seconds: float | None) -> Done:
        """Have `work` done within `seconds` (None: no limit); starts the process if it has not been.

        Raises `WorkerFailed`; the process is gone then, and a fresh worker is needed.
        """
        if self._process is None:
            self.start()
        with self._failures(seconds) as channel:
            assert self._socket is not None
            if select.select([self._socket], [], [], 0)[0] and self.alive:
                raise FrameError("the worker spoke without having been asked.")
            channel.send(work_to_frame(work))
            answer = channel.receive()
            error = error_from_frame(answer)
            if error is not None:
                raise _fail(*error)
            return done_from_frame(answer, work.op)

    @contextlib.contextmanager
    def _failures(self, seconds: float | None) -> Iterator[Channel]:
        """Every way to fail becomes a `WorkerFailed`, and ends the process."""
        assert self._channel is not None and self._watch is not None
        self._watch.deadline = None if seconds is None else time.monotonic() + seconds
        try:
            yield self._channel
        except ChannelClosed as error:
            self._died(error)
        except FrameError as error:
            self.close()
            raise _fail("worker_crashed", f"the worker broke the protocol: {error}") from error
        except BaseException:
            self.close()
            raise
        finally:
            self._watch.deadline = None

    def _died(self, error: ChannelClosed) -> NoReturn:
        assert self._process is not None
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.close()
            raise _fail("worker_crashed", "the worker closed its channel but went on running.") from error
        self.close()
        if code == -signal.SIGKILL and _kernel_kills() > self._kernel_kills:
            raise _fail("out_of_memory", "the kernel killed the worker for memory.") from error
        how = f"signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit status {code}"
        raise _fail("worker_crashed", f"the worker ended with {how}; see {self.setup.log}.") from error

    def kill(self) -> None:
        """End the process and all that it has started; from any thread, and more than once."""
        self._ended = True
        process = self._process
        if process is None or process.poll() is not None:
            return
        below = descendants(psutil.Process(process.pid)) if psutil.pid_exists(process.pid) else []
        # The group first, so that no new child is born while the others are ended.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for child in below:
            with contextlib.suppress(psutil.Error):
                child.kill()
        process.wait()

    def close(self) -> None:
        """End the process and empty its scratch folder."""
        self.kill()
        if self._channel is not None:
            self._channel.close()
        shutil.rmtree(self.setup.scratch, ignore_errors=True)

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _open_log(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size > _LOG_LIMIT:
            os.replace(path, path.with_name(path.name + ".1"))
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


class _Seat:
    """One run's place: its worker, and the order of those who want it."""

    def __init__(self) -> None:
        self.lock = FairLock()
        self.worker: Worker | None = None
        self.released = False


class Workers:
    """One warm worker a run; one training or evaluation at a time on this node, in the order of asking.

    Other work (prepare) waits for its own run's worker only. Safe for many threads.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits
        self._mutex = threading.Lock()
        self._seats: dict[str, _Seat] = {}
        self._training = FairLock()

    def do(self, run: str, setup: Setup, work: Work, seconds: float | None, wait: float | None = None) -> Done:
        """Have `work` done by the run's worker, which is started (or replaced after a failure) if need be.

        seconds: limit of the work itself. wait: limit of the wait for other work on this node. Raises `WorkerFailed`.
        """
        until = None if wait is None else time.monotonic() + wait
        with self._mutex:
            seat = self._seats.setdefault(run, _Seat())
        with _turn(seat.lock, until):
            worker = self._worker(seat, setup)
            if work.op not in TRAINING:
                return worker.do(work, seconds)
            with _turn(self._training, until):
                return worker.do(work, seconds)

    def _worker(self, seat: _Seat, setup: Setup) -> Worker:
        old = seat.worker
        if old is not None and (not old.alive or old.setup != setup):
            old.close()
            old = None
        worker = old if old is not None else Worker(setup, self._limits)
        # Under the mutex, so that a release sees either the worker or the mark that none may come.
        with self._mutex:
            if seat.released:
                raise _fail("worker_crashed", "the run's worker was released.")
            seat.worker = worker
        if old is None:
            worker.start()
        return worker

    def pids(self) -> dict[str, int]:
        """Run -> process id of its live worker."""
        with self._mutex:
            found = {run: seat.worker for run, seat in self._seats.items()}
        return {run: w.pid for run, w in found.items() if w is not None and w.alive and w.pid is not None}

    def release(self, run: str) -> None:
        """The run is over: end its worker, even in the middle of work (which then fails). Unknown runs are fine."""
        with self._mutex:
            seat = self._seats.pop(run, None)
            if seat is None:
                return
            seat.released = True
            worker = seat.worker
        if worker is None:
            return
        worker.kill()
        with _turn(seat.lock, None):
            worker.close()

    def close(self) -> None:
        """End all workers."""
        with self._mutex:
            runs = list(self._seats)
        for run in runs:
            self.release(run)


@contextlib.contextmanager
def _turn(lock: FairLock, until: float | None) -> Iterator[None]:
    if not lock.acquire(None if until is None else max(0.0, until - time.monotonic())):
        raise _fail("time_limit", "other work on this node took the time that there was.")
    try:
        yield
    finally:
        lock.release()
