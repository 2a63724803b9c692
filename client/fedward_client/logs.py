"""The guard's own log lines, for people or as JSON."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Literal


class _Human(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).strftime("%H:%M:%S")
        return f"{moment} {record.levelname.lower():7} {record.getMessage()}"


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        return json.dumps({"time": moment, "level": record.levelname.lower(), "message": record.getMessage()})


def configure(style: Literal["human", "json"]) -> None:
    """Send the guard's log to stderr in this style; Flower's own logger is kept to warnings."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Json() if style == "json" else _Human())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("flwr").setLevel(logging.WARNING)
    logging.getLogger("httpx").setLevel(logging.WARNING)
