"""Every change of the roster that this node has seen, and what became of it: JSON lines, append-only."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from fedward_common.files import OWNER_FILE
from fedward_common.members import Change, Kind, Member, What

log = logging.getLogger("fedward.node")


class State(StrEnum):
    """What a change counts for on this node."""

    ACCEPTED = "accepted"
    """Counts at once: nobody has to say yes, or it only takes something away."""
    PENDING = "pending"
    APPROVED = "approved"
    REFUSED = "refused"


class RosterLog:
    """The file. Guard and command line both append to it, whole lines at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def changed(self, version: int, change: Change, state: State) -> None:
        """A member that came, went or changed with a version."""
        self._member(version, change.member, change.what.value, change.was, state)

    def approved(self, version: int, member: Member) -> None:
        """The site admin's yes, given from a version."""
        self._member(version, member, "approval", None, State.APPROVED)

    def refused(self, reason: str) -> None:
        """A roster that was not taken in."""
        log.warning("roster refused: %s", reason)
        self._append(change="roster", state=State.REFUSED.value, reason=reason)

    def entries(self) -> list[dict[str, Any]]:
        """All entries, oldest first; a line that a crash cut off is left out."""
        try:
            lines = self._path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        return [entry for entry in map(_parse, lines) if entry is not None]

    def _member(self, version: int, member: Member, change: str, was: Member | None, state: State) -> None:
        log.info("roster version %d: %s: %s, %s", version, member, change, state.value)
        self._append(
            version=version,
            member=member.kind.value,
            name=member.name,
            change=change,
            key=member.key_id,
            was=was.key_id if was is not None else "",
            state=state.value,
        )

    def _append(self, **fields: Any) -> None:
        fields = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **fields}
        line = json.dumps(fields, ensure_ascii=False).encode() + b"\n"
        descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, OWNER_FILE)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                # A crash cut the last line off: this one starts afresh.
                line = b"\n" + line
            while line:
                line = line[os.write(descriptor, line) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def gone(entries: Sequence[dict[str, Any]], present: Sequence[Member]) -> list[dict[str, Any]]:
    """The last word on each member that left and is not there under any key."""
    here = {(member.kind.value, member.name) for member in present}
    left = {
        (entry["member"], entry["name"]): entry
        for entry in entries
        if entry.get("change") == What.GONE.value and entry.get("member") in set(Kind)
    }
    return [entry for place, entry in sorted(left.items()) if place not in here]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None
