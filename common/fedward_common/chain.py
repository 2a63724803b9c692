"""Append-only logs of JSON lines in which each line holds the hash of the one before.

A line is a JSON object with `number` (1, 2, 3 …) and `previous`, the SHA-256 of the bytes of the line before without
its newline. Bytes that are no such object are what a crash left of a line (a proper prefix of a JSON object never is
one): the next line seals them, naming their number and hash in `torn`. The chain tells of lines that were changed,
removed, inserted or swapped; a log cut off at its end, or written anew from some line on, is told by a `Head` that
somebody remembered.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedward_common.errors import ConfigError, FedwardError
from fedward_common.files import OWNER_FILE, sync_folder

IsLine = Callable[[dict[str, Any]], bool]
"""Whether a JSON object is a line of this log; one that has `number` (int) and `previous` (text) at least."""

_BLOCK = 1 << 16
_HEAD = re.compile(r"(0|[1-9][0-9]{0,17}):([0-9a-f]{64})", re.ASCII)


class ChainError(FedwardError):
    """A log is not as its writer left it."""


@dataclass(frozen=True)
class Head:
    """A line as somebody may remember it. Number 0 is the log before its first line, `genesis` its hash."""

    number: int
    sha256: str

    def __str__(self) -> str:
        return f"{self.number}:{self.sha256}"

    @classmethod
    def parse(cls, text: str) -> Head:
        """The inverse of `str`. Raises `ConfigError`."""
        match = _HEAD.fullmatch(text.strip())
        if match is None:
            raise ConfigError(
                f"head = {text!r:.100}: not NUMBER:HASH with a line's number and its 64 hex digits. Copy it as it was "
                "printed."
            )
        return cls(int(match[1]), match[2])


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
    def head(self) -> Head:
        return Head(self.number, self.sha256)


@dataclass(frozen=True)
class Torn:
    """Bytes between two lines (or behind the last) that are no line, newlines included."""

    start: int
    size: int
    sha256: str


@dataclass(frozen=True)
class End:
    """Where a log of `size` bytes ends. torn: what lies behind the last whole line; gap: what ends it."""

    head: Head
    size: int
    torn: Mapping[str, Any] = field(default_factory=dict)
    gap: bytes = b""


def genesis(text: str) -> str:
    """What the first line's `previous` is. text: which log it is, of whom."""
    return hashlib.sha256(text.encode()).hexdigest()


def numbered(entry: Mapping[str, Any]) -> bool:
    """It has what the chain needs: the least that an `IsLine` asks for."""
    return type(entry.get("number")) is int and type(entry.get("previous")) is str


def forwards(path: Path, is_line: IsLine = numbered) -> Iterator[Line | Torn]:
    """Everything in the log from its beginning; nothing if there is no file."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        at, torn_at, torn = 0, 0, hashlib.sha256()
        for raw in file:
            line = _line(raw.removesuffix(b"\n"), at, is_line)
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


def backwards(descriptor: int, is_line: IsLine = numbered) -> Iterator[Line]:
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
            line = _line(raw, end - len(raw), is_line)
            if line is not None:
                yield line
            end -= len(raw) + 1
        # Without its newline: that one ends the line whose beginning comes with the next block.
        rest = rest[: cut - 1] if cut else b""


def find_end(path: Path, first: str, is_line: IsLine = numbered) -> End:
    """Where the log ends; its name, too, is on the disk then. first: its `genesis`. Raises `OSError`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return End(Head(0, first), 0)
    try:
        sync_folder(path.parent)
        line = next(backwards(descriptor, is_line), None)
        at = line.end if line else 0
        size = os.fstat(descriptor).st_size
        rest = os.pread(descriptor, size - at, at)
    finally:
        os.close(descriptor)
    gap = b"" if rest.endswith(b"\n") or size == 0 else b"\n"
    # A crash cut a line off: what is left of it stays as it is, and the next line seals it.
    left = rest.removeprefix(b"\n") if line else rest
    torn = {"bytes": len(left + gap), "sha256": hashlib.sha256(left + gap).hexdigest()} if left else {}
    return End(line.head if line else Head(0, first), size, torn, gap)


def add(path: Path, end: End, fields: Mapping[str, Any]) -> End:
    """Write a line with `fields` behind `end`, sync it to the disk, and say where the log ends now.

    Raises `ChainError` if the log does not end there, with nothing written; and `OSError`: what was written until then
    may be a whole line, a part of one, or nothing.
    """
    entry = {"number": end.head.number + 1, "previous": end.head.sha256, **fields}
    if end.torn:
        entry["torn"] = end.torn
    # In ASCII: what others put into a name does nothing to the terminal of one who reads the file.
    line = json.dumps(entry).encode()
    rest = written = end.gap + line + b"\n"
    new = os.O_CREAT if end.size == 0 else 0
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | new, OWNER_FILE)
    try:
        size = os.fstat(descriptor).st_size
        if size != end.size:
            raise ChainError(f"{path}: has {size} bytes where {end.size} were written: somebody else changed it.")
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if new:
        sync_folder(path.parent)
    return End(Head(end.head.number + 1, hashlib.sha256(line).hexdigest()), end.size + len(written))


class Check:
    """Goes through a log once. A break of the chain is reported where it shows; the check goes on behind it.

    name: of the log, for the texts. first: the `genesis` that a log with this first line must have. expected: lines
    that the log must have, by who remembers them.
    """

    def __init__(self, name: str, first: Callable[[Mapping[str, Any]], str], expected: Mapping[str, Head]) -> None:
        self._name = name
        self._first = first
        self._torn: Torn | None = None
        self.missing = dict(expected)
        """What of `expected` was not there yet."""
        self.problems: list[str] = []
        self.last: Line | None = None
        self.sealed = 0
        """Pieces of lines that a crash left and the next line sealed."""

    @property
    def torn_end(self) -> int:
        """Bytes at the very end that the next line will seal."""
        return self._torn.size if self._torn else 0

    def take(self, part: Line | Torn) -> None:
        """What comes next in the file."""
        if isinstance(part, Torn):
            self._torn = part
            return
        self._seal(part)
        self._fit(part)
        here = {part.head} if self.last else {part.head, Head(0, part.entry["previous"])}
        if self.missing:
            self.missing = {what: head for what, head in self.missing.items() if head not in here}
        self.last, self._torn = part, None

    def end(self) -> None:
        """That was all."""
        if self.last is None:
            self.missing = {what: head for what, head in self.missing.items() if head.number > 0}
        at = self.last.number if self.last else 0
        for what, head in self.missing.items():
            if at < head.number:
                problem = (
                    f"the {self._name} ends at line {at}, but {what} is of line {head.number}: lines are missing at "
                    "the end"
                )
            else:
                problem = f"line {head.number} is not the line of {what}: the {self._name} was written anew or changed"
            self.problems.append(problem)

    def _seal(self, line: Line) -> None:
        """Bytes that are no line must be those that the line behind them names."""
        told = line.entry.get("torn")
        found = None if self._torn is None else {"bytes": self._torn.size, "sha256": self._torn.sha256}
        where = f"before line {line.number} (byte {self._torn.start if self._torn else line.start})"
        if found is not None and told is None:
            self.problems.append(
                f"{where}: {found['bytes']} bytes that are no line of the {self._name}: changed or inserted"
            )
        elif found != told:
            self.problems.append(f"{where}: not the torn bytes that line {line.number} names: changed or removed")
        elif found is not None:
            self.sealed += 1

    def _fit(self, line: Line) -> None:
        before = self.last
        where = f"line {line.number} (byte {line.start})"
        if before is None:
            if line.number != 1:
                self.problems.append(
                    f"{where}: the {self._name} does not begin here: lines are missing before it"
                )
            elif line.entry["previous"] != self._first(line.entry):
                self.problems.append(
                    f"{where}: does not begin the {self._name} of the one it names: it was changed"
                )
            return
        if line.number != before.number + 1:
            self.problems.append(
                f"{where}: comes right behind line {before.number}: lines were removed, inserted or swapped"
            )
        if line.entry["previous"] != before.sha256:
            self.problems.append(
                f"{where}: does not fit line {before.number} before it: one of the two was changed or replaced"
            )


def _line(raw: bytes, start: int, is_line: IsLine) -> Line | None:
    try:
        entry = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or not is_line(entry):
        return None
    return Line(entry, hashlib.sha256(raw).hexdigest(), start, start + len(raw))
