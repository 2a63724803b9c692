"""Members of the roster that this site's admin said yes to: one file each, so that a running guard sees it at once and
two processes never overwrite each other's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from fedward_common.errors import FedwardError
from fedward_common.files import owner_folder, sync_folder, write_atomic
from fedward_common.members import Kind, Member
from fedward_common.signing import canonical


class MemberError(FedwardError):
    """What was typed names no member that waits, or more than one."""


class MemberApprovals:
    """The approvals in a folder. A file's name binds kind, name, node id and key: the same name with another key has
    no approval."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def approved(self, members: Iterable[Member]) -> frozenset[Member]:
        """Those of `members` that were approved."""
        present = self._present()
        return frozenset(member for member in members if _file_name(member) in present)

    def approve(self, member: Member) -> None:
        """Let a member count here; on disk when this returns."""
        owner_folder(self._folder)
        stamp = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **asdict(member)}
        write_atomic(self._folder / _file_name(member), json.dumps(stamp).encode())

    def keep_only(self, members: Collection[Member]) -> None:
        """Take back the approvals of everybody else: who comes back later is new."""
        kept = {_file_name(member) for member in members}
        stale = self._present() - kept
        for name in stale:
            (self._folder / name).unlink(missing_ok=True)
        if stale:
            sync_folder(self._folder)

    def _present(self) -> set[str]:
        return {path.name for path in self._folder.glob("*.json")}


def choose(waiting: Collection[Member], words: Collection[str]) -> list[Member]:
    """The members among `waiting` that the words name: NAME, or KIND:NAME. Raises `MemberError`."""
    chosen = []
    for word in words:
        kind, _, name = word.rpartition(":")
        found = [member for member in waiting if member.name == name and kind in ("", member.kind.value)]
        if not found:
            here = ", ".join(f"{member.kind.value}:{member.name}" for member in waiting) or "nobody"
            raise MemberError(f"{word!r}: no member of the roster of that name waits for approval. Waiting: {here}.")
        if len(found) > 1:
            kinds = " or ".join(f"{each.value}:{name}" for each in Kind)
            raise MemberError(f"{word!r}: a node and a data scientist have that name. Write {kinds}.")
        chosen += found
    return chosen


def _file_name(member: Member) -> str:
    kind, name = member.kind.value, member.name
    digest = hashlib.sha256(canonical([kind, name, member.node_id, member.key]).encode()).hexdigest()
    return f"{kind}-{name}-{digest}.json"
