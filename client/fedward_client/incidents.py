"""Details of what went wrong, for this site's eyes only; outside only a short id is known."""

from __future__ import annotations

import os
import secrets
from datetime import UTC, datetime
from pathlib import Path

from fedward_common.files import owner_folder

KEPT = 1000
"""Older incidents are removed: a run that fails every round must not fill the disk."""


class Incidents:
    """Files `incident-<id>.txt` in the node's log folder, readable by their owner only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, incident: str) -> Path:
        """The file of an incident."""
        return self._folder / f"incident-{incident}.txt"

    def write(self, text: str) -> str:
        """Keep `text` (a traceback, say) and return its id: random, so that it says nothing about the text."""
        owner_folder(self._folder)
        incident = secrets.token_hex(4)
        stamp = datetime.now(UTC).isoformat(timespec="seconds")
        descriptor = os.open(self.path(incident), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"incident {incident} at {stamp}\n{text}\n")
        self._remove_old()
        return incident

    def _remove_old(self) -> None:
        files = list(self._folder.glob("incident-*.txt"))
        if len(files) > KEPT:
            files.sort(key=lambda path: path.stat().st_mtime)
            for path in files[: len(files) - KEPT]:
                path.unlink(missing_ok=True)
