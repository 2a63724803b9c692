"""What this node was asked and what left it: JSON lines, append-only, on disk before anything is sent."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_BLOCK = 1 << 16


class Journal:
    """The node's journal. Safe for several threads; reading needs no guard."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()

    def write(
        self,
        *,
        run: str,
        round: int,
        attempt: int,
        purpose: str,
        outcome: str,
        bytes: int = 0,
        rule: str = "",
        incident: str = "",
        tensors: Sequence[str] = (),
        metrics: Sequence[str] = (),
    ) -> None:
        """Add one line; on disk when this returns.

        outcome: "answered" or the reason of a failure. bytes, tensors, metrics: what leaves the node.
        """
        entry = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "run": run, "round": round, "attempt": attempt, "purpose": purpose, "outcome": outcome,
            "bytes": bytes, "rule": rule, "incident": incident, "tensors": list(tensors), "metrics": list(metrics),
        }  # fmt: skip
        line = json.dumps(entry, ensure_ascii=False).encode() + b"\n"
        with self._lock:
            descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                if _torn(descriptor):
                    # A crash cut the last line off: it stays as it is, and the next one starts afresh.
                    line = b"\n" + line
                while line:
                    line = line[os.write(descriptor, line) :]
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def tail(self, count: int) -> list[dict[str, Any]]:
        """The last `count` entries, oldest first. Lines that a crash cut off are left out: what they announced was
        never sent."""
        try:
            with self._path.open("rb") as file:
                lines = _last_lines(file.fileno(), count)
        except FileNotFoundError:
            return []
        entries = [entry for entry in map(_parse, lines) if entry is not None]
        return entries[-count:] if count > 0 else []


def _torn(descriptor: int) -> bool:
    size = os.fstat(descriptor).st_size
    return size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"


def _last_lines(descriptor: int, count: int) -> list[bytes]:
    """At least the last `count` whole lines (more if some are torn), read from the end."""
    at = os.fstat(descriptor).st_size
    found = b""
    # Twice as many lines as asked for leave room for torn ones.
    while at > 0 and found.count(b"\n") <= 2 * count:
        start = max(0, at - _BLOCK)
        found = os.pread(descriptor, at - start, start) + found
        at = start
    lines = found.split(b"\n")
    return lines if at == 0 else lines[1:]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None
