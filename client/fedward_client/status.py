"""What a running guard says of itself, for `fedward node status`."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedward_common.files import write_atomic


class StatusFile:
    """A small JSON file: pid, time, state and what else is known. Later writes keep earlier fields."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fields: dict[str, Any] = {"runs": []}

    def write(self, **fields: Any) -> None:
        """Change some fields."""
        self._fields.pop("reason", None)
        self._fields.update(fields, pid=os.getpid(), time=datetime.now(UTC).isoformat(timespec="seconds"))
        write_atomic(self._path, json.dumps(self._fields).encode())

    def read(self) -> dict[str, Any] | None:
        """The last status, None if no guard ever ran here."""
        if not self._path.exists():
            return None
        found: dict[str, Any] = json.loads(self._path.read_text(encoding="utf-8"))
        return found
