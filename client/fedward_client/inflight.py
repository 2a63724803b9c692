"""Requests taken from the server and not answered yet, on disk: a guard that was killed can still say so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from fedward_common.files import write_atomic

from fedward_client.link import Ticket


class Inflight:
    """A folder with one small file a request."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._before = sorted(folder.glob("*.json"))

    def add(self, ticket: Ticket) -> None:
        """Remember a request before any work is done for it."""
        write_atomic(self._path(ticket), json.dumps(asdict(ticket)).encode())

    def remove(self, ticket: Ticket) -> None:
        """The request was answered."""
        self._path(ticket).unlink(missing_ok=True)

    def left_over(self) -> Iterator[Ticket]:
        """The requests that an earlier process left unanswered."""
        for path in list(self._before):
            if path.exists():
                yield Ticket(**json.loads(path.read_text(encoding="utf-8")))
            self._before.remove(path)

    def _path(self, ticket: Ticket) -> Path:
        return self._folder / f"{ticket.message_id}.json"
