"""What a line of the journal is, and reading the lines from either end.

A line is a JSON object; its hash is the SHA-256 of its bytes without the newline. Each holds `number` (1, 2, 3 …) and
`previous`, the hash of the line before. Bytes that are no such object are what a crash left of a line: a prefix of a
JSON object never is one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MESSAGE = "message"
"""A message that was about to leave."""
CONTROL = "control"
"""Nothing but the count of what else was sent."""
OPENED = "opened"
"""A guard started; the line names the node."""
CLOSED = "closed"
"""The guard stopped in order: everything that it sent is counted."""

_BLOCK = 1 << 16


@dataclass(frozen=True)
class Line:
    """One whole line. start, end: where its bytes begin and end in the file, without the newline."""

    entry: dict[str, Any]
    sha256: str
    start: int
    end: int

    @property
    def number(self) -> int:
        return int(self.entry["number"])

    @property
    def head(self) -> str:
        """The line as somebody may remember it: NUMBER:HASH."""
        return f"{self.number}:{self.sha256}"


@dataclass(frozen=True)
class Torn:
    """Bytes between two lines (or behind the last) that are no line, newlines included."""

    start: int
    size: int
    sha256: str


def genesis(node_id: str) -> str:
    """What the first line's `previous` is: the SHA-256 of this text."""
    return hashlib.sha256(f"fedward journal 1 of node {node_id}".encode()).hexdigest()


def forwards(path: Path) -> Iterator[Line | Torn]:
    """Everything in the journal from its beginning; nothing if there is no file."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        at, torn_at, torn = 0, 0, hashlib.sha256()
        for raw in file:
            line = _line(raw.removesuffix(b"\n"), at)
            if line is None:
                torn.update(raw)
            else:
                if torn_at < at:
                    yield Torn(torn_at, at - torn_at, torn.hexdigest())
                yield line
                torn_at, torn = at + len(raw), hashlib.sha256()
            at += len(raw)
        if torn_at < at:
            yield Torn(torn_at, at - torn_at, torn.hexdigest())


def backwards(descriptor: int) -> Iterator[Line]:
    """The whole lines from the last one on, without what is torn."""
    at = os.fstat(descriptor).st_size
    rest = b""
    while at > 0:
        start = max(0, at - _BLOCK)
        rest = os.pread(descriptor, at - start, start) + rest
        at = start
        cut = rest.find(b"\n") + 1 if at > 0 else 0
        if at > 0 and cut == 0:
            continue
        end = at + len(rest)
        for raw in reversed(rest[cut:].split(b"\n")):
            line = _line(raw, end - len(raw))
            if line is not None:
                yield line
            end -= len(raw) + 1
        # Without its newline: that one ends the line whose beginning comes with the next block.
        rest = rest[: cut - 1] if cut else b""


def tail(path: Path, count: int) -> list[dict[str, Any]]:
    """The entries of the last `count` messages, oldest first."""
    found: list[dict[str, Any]] = []
    try:
        with path.open("rb") as file:
            for line in backwards(file.fileno()):
                if len(found) >= count:
                    break
                if line.entry["kind"] == MESSAGE:
                    found.append(line.entry)
    except FileNotFoundError:
        return []
    return found[::-1]


def accounted(entry: dict[str, Any]) -> int:
    """Bytes that a line accounts for: those of its message, and what was sent besides since the line before, less
    what was announced and never left."""
    control = sum(int(calls["bytes"]) for calls in entry["control"].values())
    withheld = sum(int(size) for size in entry["withheld"].values())
    return int(entry.get("bytes", 0)) + control - withheld


def _line(raw: bytes, start: int) -> Line | None:
    try:
        entry = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or not _well_formed(entry):
        return None
    return Line(entry, hashlib.sha256(raw).hexdigest(), start, start + len(raw))


_EVERY = {"number": int, "previous": str, "time": str, "kind": str, "control": dict, "withheld": dict}
_BY_KIND: Mapping[str, Mapping[str, type]] = {
    OPENED: {"node": str},
    MESSAGE: {
        "run": str, "round": int, "attempt": int, "purpose": str, "outcome": str, "rule": str, "incident": str,
        "tensors": list, "metrics": list, "bytes": int, "sha256": str, "bundle": str, "config": str,
        "protections": list, "verdict": str,
    },
}  # fmt: skip
_CALLS = {"calls": int, "bytes": int}


def _well_formed(entry: dict[str, Any]) -> bool:
    return (
        _has(entry, _EVERY)
        and _has(entry, _BY_KIND.get(entry["kind"], {}))
        and all(type(size) is int for size in entry["withheld"].values())
        and all(isinstance(calls, dict) and _has(calls, _CALLS) for calls in entry["control"].values())
        and isinstance(entry.get("torn", {}), dict)
    )


def _has(entry: dict[str, Any], form: Mapping[str, type]) -> bool:
    return all(type(entry.get(name)) is kind for name, kind in form.items())
