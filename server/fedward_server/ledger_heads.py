"""The heads of nodes' privacy ledgers, as they told them: the second place in which a ledger is anchored.

One JSON file for all runs: a run's process reads and replaces it under a lock, so that none loses what another one was
told. The server cannot check a head; it gives the newest one back (`anchoring.py`), and the node holds its ledger
against it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from fedward_common.chain import Head
from fedward_common.errors import FedwardError
from fedward_common.files import short_lock, write_atomic
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

_KEPT = 20
"""Mismatches of one node that are kept, the newest ones."""
_HEAD = Field(pattern=r"^(0|[1-9][0-9]{0,17}):[0-9a-f]{64}$")


class LedgerHeadsError(FedwardError):
    """The file cannot be read."""


@dataclass(frozen=True)
class Told:
    """A head that a node (its enrolled id) told with a reply. before: the one on record when the request was sent.
    confirmed: the request named that one, and the node went on."""

    node: str
    head: Head
    before: Head | None
    confirmed: bool


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Mismatch(_Frozen):
    """A ledger that is behind what its node had told, or beside it. settled: the node holds nevertheless that all is
    right, which it does once its admin has accepted the loss; only then does `told` replace what was on record."""

    expected: str = _HEAD
    told: str = _HEAD
    settled: bool
    run: str
    time: datetime


class _Record(_Frozen):
    """What is known of one node. head: the newest; run: with whose reply it came."""

    head: str = _HEAD
    run: str
    time: datetime
    mismatches: tuple[Mismatch, ...] = ()


_RECORDS = TypeAdapter(dict[str, _Record])


class LedgerHeads:
    """The file at `path`; several processes may use it. Both methods raise `LedgerHeadsError` if it cannot be read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def newest(self) -> dict[str, Head]:
        """The head on record of each node."""
        return {node: Head.parse(record.head) for node, record in self._read().items()}

    def note(self, told: Iterable[Told], run: str) -> list[tuple[str, Mismatch]]:
        """Take in what nodes told in a run, in order; the mismatches that were not known before, each with its node.
        What is new is on the disk when this returns."""
        found: list[tuple[str, Mismatch]] = []
        with short_lock(self._path.with_name(f".{self._path.name}.lock")):
            records = before = self._read()
            for one in told:
                record, mismatch = _following(records.get(one.node), one, run, datetime.now(UTC))
                records = {**records, one.node: record}
                if mismatch is not None:
                    found.append((one.node, mismatch))
            if records != before:
                write_atomic(self._path, _RECORDS.dump_json(records))
        return found

    def _read(self) -> dict[str, _Record]:
        try:
            return _RECORDS.validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValidationError) as error:
            why = " ".join(str(error).split())
            raise LedgerHeadsError(
                f"{self._path}: cannot be read as the heads of nodes' ledgers ({why:.200}). Restore it from a backup, "
                "or move it away: then each node's ledger is anchored anew from what it tells next."
            ) from error


def _following(known: _Record | None, told: Told, run: str, now: datetime) -> tuple[_Record, Mismatch | None]:
    """What is on record after a node told a head, and what is wrong with it, if that is new."""
    if known is None:
        return _Record(head=str(told.head), run=run, time=now), None
    newest = Head.parse(known.head)
    renewed = known.model_copy(update={"head": str(told.head), "run": run, "time": now})
    if told.head.number > newest.number:
        return renewed, None
    settled = told.confirmed and told.before == newest
    if told.head == newest or not (settled or _behind(told, newest)):
        return known, None
    following = renewed if settled else known
    found = Mismatch(expected=known.head, told=str(told.head), settled=settled, run=run, time=now)
    if any((one.expected, one.told, one.settled) == (found.expected, found.told, settled) for one in known.mismatches):
        return following, None
    return following.model_copy(update={"mismatches": (*known.mismatches, found)[-_KEPT:]}), found


def _behind(told: Told, newest: Head) -> bool:
    """Whether no ledger that only grew can have told a head. One that is merely lower than the newest can: its reply
    was overtaken by another run's. But what was on record when the request was sent is in the ledger that answers."""
    if told.head.number == newest.number:
        return True  # and is another
    before = told.before
    if before is None or before.number > newest.number:
        return False  # the record itself went back meanwhile: settled
    return told.head.number < before.number or (told.head.number == before.number and told.head != before)
