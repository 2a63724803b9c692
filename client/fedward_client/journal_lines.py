"""What a line of the journal is; how lines hang together is `fedward_common.chain`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedward_common import chain
from fedward_common.chain import Line, Torn

MESSAGE = "message"
"""A message that was about to leave."""
CONTROL = "control"
"""Nothing but the count of what else was sent."""
OPENED = "opened"
"""A guard started; the line names the node."""
CLOSED = "closed"
"""The guard stopped in order: everything that it sent is counted."""

def genesis(node_id: str) -> str:
    """What the first line's `previous` is: the SHA-256 of this text."""
    return chain.genesis(f"fedward journal 1 of node {node_id}")


def forwards(path: Path) -> Iterator[Line | Torn]:
    """Everything in the journal from its beginning; nothing if there is no file."""
    return chain.forwards(path, _well_formed)


def backwards(descriptor: int) -> Iterator[Line]:
    """The whole lines from the last one on, without what is torn."""
    return chain.backwards(descriptor, _well_formed)


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
