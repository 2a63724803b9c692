"""What a run tells those who watch it: JSON lines, one event a line, append-only.

Every event has "event" and "time" (UTC, ISO 8601). Kinds:

run_started   run, name, algorithm, rounds, nodes [names], resumed_from (round or null), epoch
waiting       ready [names], missing {name: failure text}, needed
round         round, of, cohort [names], available (how many the cohort was drawn from), replies [names],
              failures {name: failure text}, weight, train {loss, …}, evaluate {loss, accuracy, …, examples} or null,
              holdout {…} or null, central {…} or null, bytes_down, bytes_up, seconds;
              evaluate_failures {name: failure text} if any node failed to evaluate;
              secure_sum {…}, privacy {…}, aggregation {rule, …} in runs with these
round_failed  round, reason, failures {name: failure text}, seconds
ledger_mismatch  node, expected (the head of its privacy ledger that the server was told), told (the one that it tells
              now, NUMBER:HASH both), settled (whether the node's admin has accepted that)
run_finished  status (finished | stopped | early_stopped | budget_spent | failed), reason, round, best_round or null,
              seconds
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class EventLog:
    """Appends events to a file, each flushed to disk before `append` returns. One writer a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(path)

    def append(self, kind: str, **fields: Any) -> Event:
        """Write one event and return it."""
        event: Event = {"event": kind, "time": datetime.now(UTC).isoformat(timespec="milliseconds"), **fields}
        line = json.dumps(event, separators=(",", ":"), allow_nan=False) + "\n"
        with self._path.open("ab") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
        return event


def _cut_torn_line(path: Path) -> None:
    """Drop a last line without its end: its writer was killed, and the next event must not be glued to it."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        whole = 0
        for line in file:
            whole += len(line) if line.endswith(b"\n") else 0
        file.truncate(whole)


def read_events(path: Path, offset: int = 0) -> Iterator[tuple[Event, int]]:
    """The whole events after byte `offset`, each with the offset behind it. A torn last line is left for later."""
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            yield json.loads(line), offset
