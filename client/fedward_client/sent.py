"""The link's own total, beside the journal: what the journal's sum is compared with."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from fedward_common.errors import FedwardError
from fedward_common.files import write_atomic


@dataclass(frozen=True)
class Sent:
    """State of the link when the journal's line `number` was written.

    total: bytes handed to gRPC since the node joined. unsent: bytes of messages that were journalled, but had not
    gone out yet. sha256: of that line.
    """

    total: int
    unsent: int
    number: int
    sha256: str


def read_sent(path: Path) -> Sent | None:
    """What the guard wrote last; None if it never did. Raises `FedwardError` for a file of another form."""
    try:
        fields = json.loads(path.read_bytes())
        sent = Sent(**fields)
        numbers = (sent.total, sent.unsent, sent.number)
        if not all(type(number) is int for number in numbers) or type(sent.sha256) is not str:
            raise ValueError(fields)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise FedwardError(
            f"{path}: not the link's total as the guard writes it: the disk failed, or somebody changed the file. "
            "Restore it from a backup; without it the journal's sum has nothing to be compared with."
        ) from error
    return sent


def write_sent(path: Path, sent: Sent) -> None:
    """Replace the file."""
    write_atomic(path, json.dumps(asdict(sent)).encode())
