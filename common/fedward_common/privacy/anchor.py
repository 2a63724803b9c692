"""Memory of a node's ledger in other places: its head, after each release.

One anchor lies on the node in a place that its admin chooses, best outside the state directory (another disk, a share
that the node's user may write). The other is kept by the server: the head travels with replies, the newest one that the
server was told comes back with its questions, and the node keeps what its server named last. Order of writing: ledger,
local anchor, release. A crash in between leaves the ledger ahead of its anchors, which is right; a ledger behind one,
or without its line, was deleted, edited, or rolled back (a restored backup, an old snapshot), and its node answers no
run with [privacy] until the admin decides.

**What remains undetected:** all places rolled back together, such as a snapshot of the whole machine whose server has
lost its record, too, or colludes and names no head, or an old one; the last lines, if ledger and local anchor lose them
before the reply that tells of them has reached the server; and whoever may write as the node's user (root too) can
write an `accepted` line as the admin does: it stays in the ledger for all to see, but nothing proves who wrote it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from fedward_common import chain
from fedward_common.chain import ChainError, Head
from fedward_common.errors import FedwardError
from fedward_common.files import write_atomic
from fedward_common.privacy.ledger import ACCEPTED, LedgerError, Report, beginning, covering, told, verify


@dataclass(frozen=True)
class Anchor:
    """A ledger's head, and when it was that."""

    head: Head
    time: datetime = field(default_factory=lambda: datetime.now(UTC))

    def to_json(self) -> str:
        """As it lies in a file and travels."""
        return json.dumps({"head": str(self.head), "time": self.time.isoformat()})

    @classmethod
    def from_json(cls, text: str | bytes) -> Anchor:
        """The inverse of `to_json`. Raises `LedgerError`."""
        try:
            fields = json.loads(text)
            return cls(Head.parse(fields["head"]), datetime.fromisoformat(fields["time"]))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, FedwardError) as error:
            raise LedgerError(f"{text!r:.100}: not an anchor, which has a head and a time.") from error


def default_place(ledger: Path) -> Path:
    """Where the local anchor lies unless the admin says otherwise: next to the ledger."""
    return ledger.with_name(f"{ledger.stem}-anchor.json")


def read_anchor(place: Path) -> Anchor | None:
    """What was anchored in a file; None if there is none. Raises `LedgerError`."""
    try:
        return Anchor.from_json(place.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, LedgerError) as error:
        raise LedgerError(
            f"{place}: cannot be read as the anchor of a ledger ({error}). Restore it from a backup; without it, the "
            "site admin can go on with the ledger as it is: fedward node ledger accept --why '…'"
        ) from error


def server_place(ledger: Path) -> Path:
    """Where a node keeps the head that its server named last."""
    return ledger.with_name(f"{ledger.stem}-server.json")


def write_anchor(place: Path, head: Head) -> None:
    """Replace an anchor; the local one before what `head` is about is released. A guard that finds no ledger and no
    anchor begins with this, too. Raises `LedgerError`: then nothing may leave."""
    try:
        write_atomic(place, Anchor(head).to_json().encode())
    except OSError as error:
        raise LedgerError(
            f"{place}: cannot be written ({error}). Nothing leaves whose ledger is not anchored: repair it, or "
            "configure another place for the anchor."
        ) from error


def forget_broken(place: Path) -> None:
    """Remove an anchor that cannot be read, once the admin has accepted that."""
    try:
        read_anchor(place)
    except LedgerError:
        place.unlink()


def local(place: Path) -> dict[str, Anchor | None]:
    """The local anchor, named as `compare` wants it. Raises `LedgerError`."""
    anchor = read_anchor(place)
    return {f"the anchor in {place}" + (f" of {anchor.time:%Y-%m-%d %H:%M:%S}" if anchor else ""): anchor}


def named(ledger: Path) -> dict[str, Anchor]:
    """What the server named last, as `compare` wants it; nothing if it never did. Raises `LedgerError`."""
    anchor = read_anchor(server_place(ledger))
    return {f"the head that the server named on {anchor.time:%Y-%m-%d %H:%M:%S}": anchor} if anchor else {}


def check(ledger: Path, anchors: Mapping[str, Anchor | None]) -> Report:
    """`verify` a ledger and that it holds every anchor.

    anchors: what is known of its head, by who remembers it; None for a place that should hold an anchor and does not
    (right only for a ledger without a line). Raises `LedgerError` if the file cannot be read.
    """
    report = verify(ledger, {what: anchor.head for what, anchor in anchors.items() if anchor is not None})
    if report.lines:
        report.problems += [
            f"{what} is not there, but the ledger has {report.lines} lines: it was deleted, or its place is a new one"
            for what, anchor in anchors.items()
            if anchor is None
        ]
    return report


def compare(ledger: Path, anchors: Mapping[str, Anchor | None]) -> str | None:
    """What is wrong with a node's ledger, with the way out; None if it is intact and holds every anchor.

    Reads the whole ledger; `Ledger.holds` is the quick question for one head. Raises `LedgerError` as `check`.
    """
    report = check(ledger, anchors)
    if not report.problems:
        return None
    expected = "".join(f" --expected {head}" for head in lost(report))
    return (
        f"{ledger}: {told(report.problems)} This node answers nothing until that is settled. Restore the ledger from a "
        "backup that has all its lines; if they are lost, the site admin can go on without them: "
        f"fedward node ledger accept --why '…'{expected} (and --config, if node.toml says where the anchor lies)."
    )


def lost(report: Report) -> list[Head]:
    """Heads that were expected and are not in the ledger, lowest first."""
    return sorted(set(report.missing.values()), key=lambda head: (head.number, head.sha256))


def accept(ledger: Path, owner_id: str, who: str, why: str, expected: Iterable[Head] = ()) -> Head:
    """Go on with a ledger as it is, or with a new one if there is none: an `accepted` line, and its head.

    who, why: of the admin's decision. expected: the heads that it should have had. Nobody else may be writing the
    ledger, and the caller anchors the head anew. Raises `LedgerError`.
    """
    try:
        end = chain.find_end(ledger, beginning(owner_id))
        before = ledger.read_bytes() if end.size else b""
        fields = {
            "owner": owner_id, "time": datetime.now(UTC).isoformat(timespec="microseconds"), "kind": ACCEPTED,
            "who": who, "why": why, "expected": [str(head) for head in expected], "covers": covering(before + end.gap),
        }  # fmt: skip
        return chain.add(ledger, end, fields).head
    except (OSError, ChainError) as error:
        raise LedgerError(f"{ledger}: cannot be written ({error}). Make room on the disk or repair it.") from error
