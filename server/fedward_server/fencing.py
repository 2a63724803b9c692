"""Only one ServerApp writes to a run: the one with the highest epoch.

Flower may declare a run finished while its ServerApp lives on (seen: up to 20 s after the SuperLink was killed).
Every start of a run has an epoch, one higher than the last. A ServerApp first takes the run over, which ends the
process of a lower epoch, and checks that it still owns the run before it announces a checkpoint.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from fedward_common.errors import FedwardError
from fedward_common.files import short_lock, write_atomic

from fedward_server.paths import RunPaths

_PROGRAM = 2
"""Interpreter and script: Flower overwrites the rest of a ServerApp's command line, which holds its token."""


class Fenced(FedwardError):
    """This process may not write to the run: another one with the same or a higher epoch owns it."""


@dataclass(frozen=True)
class Owner:
    """The process that may write to a run. created: see `start_mark`, so that a reused pid is told apart;
    command: SHA-256 of its program's name, for the same reason."""

    epoch: int
    pid: int
    created: str
    command: str

    def process(self) -> psutil.Process | None:
        """The owner's process if it is alive and really is the one that took the run over."""
        try:
            process = psutil.Process(self.pid)
            same = start_mark(self.pid) == self.created and _digest(process) == self.command
            alive = process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.Error, OSError):
            return None
        return process if same and alive else None


class Ownership:
    """A held run. Its lock lasts as long as the process, or until `release`."""

    def __init__(self, paths: RunPaths, epoch: int, descriptor: int) -> None:
        self._paths = paths
        self._descriptor: int | None = descriptor
        self.epoch = epoch

    def check(self) -> None:
        """Raises `Fenced` if a higher epoch has taken the run over."""
        check(self._paths, self.epoch)

    def release(self) -> None:
        """Give up the lock (a process that ends does so by itself)."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def start_mark(pid: int) -> str:
    """Which process of that number this is: the boot's id and the clock ticks from boot to its start. Raises
    `OSError` if it is gone.

    Not psutil's create_time: that is a time of day, and moves when the clock is set.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    # The command's name, in brackets, may hold anything; field 22 is counted from behind it.
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return f"{boot}:{fields[19]}"


def read_owner(paths: RunPaths) -> Owner | None:
    """Who last took the run over, if anyone."""
    try:
        content = json.loads(paths.owner.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return Owner(**content)


def take_over(paths: RunPaths, epoch: int, patience: float = 10.0) -> Ownership:
    """Make this process the run's owner and end the process that owned it before.

    patience: seconds to wait for the former owner to be gone.
    Raises `Fenced` if a higher epoch owns the run, or if the former owner cannot be ended.
    """
    paths.root.mkdir(parents=True, exist_ok=True, mode=0o700)
    me = psutil.Process()
    with short_lock(paths.root / "owner.change"):
        former = read_owner(paths)
        if former is not None and former.epoch > epoch:
            raise Fenced(f"run {paths.root.name}: epoch {epoch} is older than epoch {former.epoch}, which owns it.")
        owner = Owner(epoch, me.pid, start_mark(me.pid), _digest(me))
        # Written before the former owner is ended: from here on its own checks fail.
        write_atomic(paths.owner, json.dumps(asdict(owner)).encode())
        if former is not None and former.pid != me.pid:
            _end(former)
    descriptor = os.open(paths.root / "owner.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _wait_for_lock(descriptor, paths, patience)
        check(paths, epoch)
        if read_owner(paths) != owner:
            raise Fenced(f"run {paths.root.name}: another process took epoch {epoch} over.")
    except BaseException:
        os.close(descriptor)
        raise
    return Ownership(paths, epoch, descriptor)


def check(paths: RunPaths, epoch: int) -> None:
    """Raises `Fenced` unless `epoch` owns the run."""
    owner = read_owner(paths)
    if owner is None or owner.epoch != epoch:
        holder = "nobody" if owner is None else f"epoch {owner.epoch}"
        raise Fenced(f"run {paths.root.name}: epoch {epoch} does not own it, {holder} does.")


def end_owner(paths: RunPaths) -> bool:
    """End the process that owns the run, with its children. Says whether there was one."""
    owner = read_owner(paths)
    return owner is not None and _end(owner)


def _digest(process: psutil.Process) -> str:
    return hashlib.sha256("\0".join(process.cmdline()[:_PROGRAM]).encode(errors="surrogateescape")).hexdigest()


def _end(owner: Owner) -> bool:
    process = owner.process()
    if process is None:
        return False
    with contextlib.suppress(psutil.NoSuchProcess):
        doomed = [*process.children(recursive=True), process]
        for one in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                # psutil compares the start time again before it sends the signal.
                one.kill()
        psutil.wait_procs(doomed, timeout=5)
    return True


def _wait_for_lock(descriptor: int, paths: RunPaths, patience: float) -> None:
    until = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() > until:
                raise Fenced(
                    f"run {paths.root.name}: its lock is still held after {patience:g} s by a process that is not "
                    "the recorded owner. Find it with 'fuser owner.lock' in the run's directory and end it."
                ) from error
        time.sleep(0.05)
