"""Files that survive a crash, and a lock that tells who holds it."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedward_common.errors import FedwardError

OWNER_FILE = 0o600
OWNER_FOLDER = 0o700


class Locked(FedwardError):
    """Another process holds the lock. `pid` is its process id, if it could be read."""

    def __init__(self, path: Path, pid: int | None) -> None:
        holder = f"process {pid}" if pid is not None else "another process"
        super().__init__(f"{path}: {holder} uses this directory. Stop it first, or choose another directory.")
        self.path = path
        self.pid = pid


def owner_folder(path: Path) -> Path:
    """Make a folder (parents too) that only its owner may enter; a folder that exists keeps its mode."""
    path.mkdir(mode=OWNER_FOLDER, parents=True, exist_ok=True)
    return path


def write_atomic(path: Path, data: bytes, mode: int = OWNER_FILE) -> None:
    """Replace `path` by `data`: after a crash the file holds the old bytes or the new ones, never a part."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make names in a folder (created, renamed, removed) durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def lock_file(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path` (made if missing; never removed). Raises `Locked` if it is held.

    The kernel frees the lock when the process ends, however it ends.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, OWNER_FILE)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Locked(path, _holder(descriptor)) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def short_lock(path: Path) -> Iterator[None]:
    """Wait for an exclusive lock on `path` (made if missing; never removed) and hold it: for a read and a write."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, OWNER_FILE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _holder(descriptor: int) -> int | None:
    text = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
    return int(text) if text.isdecimal() else None
