"""What left this node: JSON lines, append-only and hash-chained, on disk before a message is sent.

Every line also counts what else the link has sent since the line before, so that the journal accounts for all its
bytes (`traffic.py`). The chain tells of lines that were changed, removed, inserted or swapped; a journal cut off at
its end, or written anew from some line on, is told by a head that somebody remembered, and by the link's own total.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedward_common.errors import FedwardError
from fedward_common.files import sync_folder

from fedward_client.journal_lines import CLOSED, CONTROL, MESSAGE, OPENED, accounted, backwards, genesis
from fedward_client.sent import Sent, read_sent, write_sent
from fedward_client.traffic import Count, Traffic

log = logging.getLogger("fedward.node")

ALLOWED = "allowed"
"""The policy's verdict on what breaks none of its rules."""


class JournalError(FedwardError):
    """The journal cannot be written: nothing may leave."""


@dataclass(frozen=True)
class Note:
    """What the journal says of a message, beyond its bytes and its hash.

    outcome: "answered" or the reason of a failure; rule, incident: of that failure. tensors, metrics: names of what
    the message holds. bundle: SHA-256 of the bundle; config: SHA-256 of the run's configuration in canonical JSON
    (`signing.canonical`), as the manifest holds it; both empty where the run was not admitted. protections: what was
    done to the vectors and metrics before. verdict: `ALLOWED` or the rule that refused the request.
    """

    run: str
    round: int
    attempt: int
    purpose: str
    outcome: str
    rule: str = ""
    incident: str = ""
    tensors: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    bundle: str = ""
    config: str = ""
    protections: tuple[str, ...] = ()
    verdict: str = ALLOWED


@dataclass(frozen=True)
class _End:
    """Where the journal ends. torn: what lies behind the last whole line; gap: what ends it."""

    number: int
    sha256: str
    torn: Mapping[str, Any] = field(default_factory=dict)
    gap: bytes = b""


class Journal:
    """The one writer of a node's journal. Safe for several threads; every method raises `JournalError`.

    path, sent: the journal and the link's total (`sent.py`). node_id: Fedward's id of the node. traffic: what its
    link counts.
    """

    def __init__(self, path: Path, sent: Path, node_id: str, traffic: Traffic) -> None:
        self._path = path
        self._sent = sent
        self._node_id = node_id
        self._traffic = traffic
        self._lock = threading.Lock()
        self._end: _End | None = None
        self._sent_before = 0

    def opened(self) -> None:
        """A guard starts. Comes first, before the link sends a byte."""
        with self._lock:
            self._sent_before = self._recall()
            self._keep_total(self._write(OPENED, {"node": self._node_id}))

    def message(self, note: Note, size: int, sha256: str) -> None:
        """A message is about to leave in calls of `size` bytes; `sha256` is the id of its root object, a hash over
        all of it."""
        with self._lock:
            self._write(MESSAGE, {**asdict(note), "bytes": size, "sha256": sha256}, size)

    def control(self) -> None:
        """Write down what else was sent since the last line, if anything was, and the link's total."""
        with self._lock:
            if not self._traffic.idle:
                self._keep_total(self._write(CONTROL, {}))

    def closed(self) -> None:
        """The guard stops, and its link is closed."""
        with self._lock:
            self._keep_total(self._write(CLOSED, {}))

    def _recall(self) -> int:
        """Bytes sent by earlier guards: as the last of them wrote down, and what the lines behind that account for
        (it was killed then)."""
        try:
            known = read_sent(self._sent) or Sent(0, 0, 0, "")
            total, last = known.total + known.unsent, 0
            with self._path.open("rb") as file:
                for line in backwards(file.fileno()):
                    last = max(last, line.number)
                    if line.number <= known.number:
                        break
                    total += accounted(line.entry)
        except FileNotFoundError:
            last = 0
        except (FedwardError, OSError) as error:
            raise JournalError(str(error)) from error
        if last < known.number:
            log.error(
                "%s ends at line %d, but line %d was written: see 'fedward node journal verify'",
                self._path, last, known.number,
            )  # fmt: skip
        return total

    def _write(self, kind: str, fields: Mapping[str, Any], announced: int = 0) -> Count:
        count = self._traffic.take(announced)
        try:
            self._append(kind, fields, count)
        except OSError as error:
            self._end = None
            self._traffic.give_back(count, announced)
            raise self._cannot(self._path, error) from error
        return count

    def _append(self, kind: str, fields: Mapping[str, Any], count: Count) -> None:
        descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            end = self._end or _find_end(descriptor, self._node_id)
            entry = {
                "number": end.number + 1,
                "previous": end.sha256,
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "kind": kind,
                **fields,
                "control": {method: asdict(calls) for method, calls in count.control.items()},
                "withheld": dict(count.withheld),
            }
            if end.torn:
                entry["torn"] = end.torn
            # In ASCII: what a server put into a name does nothing to the terminal of one who reads the file.
            line = json.dumps(entry).encode()
            rest = end.gap + line + b"\n"
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if end.number == 0:
            sync_folder(self._path.parent)
        self._end = _End(end.number + 1, hashlib.sha256(line).hexdigest())

    def _keep_total(self, count: Count) -> None:
        assert self._end is not None
        total = self._sent_before + count.total
        try:
            write_sent(self._sent, Sent(total, count.unsent, self._end.number, self._end.sha256))
        except OSError as error:
            raise self._cannot(self._sent, error) from error

    @staticmethod
    def _cannot(path: Path, error: OSError) -> JournalError:
        return JournalError(
            f"{path}: cannot be written ({error}). No message leaves that is not in the journal: make room on the "
            "disk or repair it."
        )


def _find_end(descriptor: int, node_id: str) -> _End:
    line = next(backwards(descriptor), None)
    at = line.end if line else 0
    size = os.fstat(descriptor).st_size
    rest = os.pread(descriptor, size - at, at)
    gap = b"" if rest.endswith(b"\n") or size == 0 else b"\n"
    # A crash cut a line off, or a version without the chain wrote here: it stays as it is, and the next line seals it.
    left = rest.removeprefix(b"\n") if line else rest
    torn = {"bytes": len(left + gap), "sha256": hashlib.sha256(left + gap).hexdigest()} if left else {}
    if line is None:
        return _End(0, genesis(node_id), torn, gap)
    return _End(line.number, line.sha256, torn, gap)
