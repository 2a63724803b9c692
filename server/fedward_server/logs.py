"""How the server's parts log: one line an entry, for people or as JSON, the same fields in both."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

Style = Literal["human", "json"]

STYLE_VARIABLE = "FEDWARD_LOG"
"""Environment variable by which the supervisor hands its children the style."""

FIELDS = ("run", "round", "node")
"""What an entry may be about: pass it as `extra={"run": ...}`."""

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_LEVEL = re.compile(r"^\W*(?:[0-9T:.-]+Z\s+)?(DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL)\b\s*:?\s*")

SUPERLINK_ROUTINE = re.compile(
    r'\[uvicorn\.access\].*" 2\d\d$|ControlServicer\.List(Runs|Nodes)$|\[Fleet\.(?!ActivateNode|DeactivateNode)'
)
"""Lines that Flower's SuperLink prints for every poll and every message: thousands an hour that tell nothing."""


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class JsonFormatter(logging.Formatter):
    """An entry as one JSON object: time, level, logger, message, and the fields that it has."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry.update({name: getattr(record, name) for name in FIELDS if hasattr(record, name)})
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


class HumanFormatter(logging.Formatter):
    """An entry as `LEVEL message  run=… round=… node=…`; the supervisor puts time and part before it."""

    def format(self, record: logging.LogRecord) -> str:
        fields = [f"{name}={getattr(record, name)}" for name in FIELDS if hasattr(record, name)]
        text = "  ".join([f"{record.levelname} {record.getMessage()}", *fields])
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text


def style() -> Style:
    """The style that the supervisor asked for; "human" without one."""
    return "json" if os.environ.get(STYLE_VARIABLE) == "json" else "human"


def configure(level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Send this process's log to `stream` (standard error) in the style of `style()`."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if style() == "json" else HumanFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # Both log every request at INFO.
    for name in ("httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.WARNING)


def part_line(part: str, line: str, chosen: Style) -> str:
    """A line that `part` printed, as the supervisor prints it. Lines that are JSON entries keep their fields."""
    text = _ANSI.sub("", line.rstrip("\r\n"))
    if chosen == "human":
        return f"{datetime.now().strftime('%H:%M:%S')} {part:<10} {text}"
    if text.startswith("{"):
        try:
            entry = json.loads(text)
        except json.JSONDecodeError:
            entry = None
        if isinstance(entry, dict) and "message" in entry:
            return json.dumps({"part": part, **entry}, ensure_ascii=False)
    level = "info"
    found = _LEVEL.match(text)
    if found:
        level = {"WARN": "warning"}.get(found[1], found[1].lower())
        text = text[found.end() :]
    return json.dumps({"part": part, "time": _now(), "level": level, "message": text}, ensure_ascii=False)
