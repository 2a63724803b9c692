"""The privacy ledger: every release of data, on disk before it is made; one format on nodes and on the server.

JSON lines in a hash chain (`chain.py`). A `release` line is synced to the disk before anything leaves, so a crash in
between spends the budget and never the other way round. An `accepted` line is an admin's decision (`anchor.accept`) to
go on with a ledger that was damaged, cut off or lost. It holds the hash of all bytes before it, so that what was
accepted cannot be changed once more. Releases in lines that are gone count no more: that is what the admin decides.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedward_common import chain
from fedward_common.chain import ChainError, End, Head, Line, Torn
from fedward_common.errors import FedwardError
from fedward_common.signing import canonical

RELEASE, ACCEPTED = "release", "accepted"
"""Kinds of lines."""
_HEX = frozenset("0123456789abcdef")


class LedgerError(FedwardError):
    """The ledger cannot be read or written, or somebody changed it: nothing may leave."""


class ReleaseRefused(LedgerError):
    """The ledger is well, but this release may not be made; the text is the rule that it breaks."""


class Unit(StrEnum):
    """Whose contribution an event hides, from the finest to the coarsest."""

    RECORD = "record"
    PATIENT = "patient"
    SITE = "site"


@dataclass(frozen=True, slots=True)
class Release:
    """Something derived from a data set that leaves. Raises `LedgerError` for a field of another form.

    run, round, attempt, purpose: what it answers. dataset: stable id of the data set on this node; on the server the
    run's name, for the cohort. server: who asked (CA hash or name). event: what it costs, the canonical JSON of an
    object with a `kind`, composed `count` times. model: SHA-256 of the model that was asked about, "" for none.
    """

    run: str
    round: int
    attempt: int
    purpose: str
    dataset: str
    unit: Unit
    server: str
    event: str
    count: int = 1
    model: str = ""
    time: datetime = field(default_factory=lambda: datetime.now(UTC))

    def __post_init__(self) -> None:
        for name in ("run", "purpose", "dataset", "server"):
            if type(getattr(self, name)) is not str or not getattr(self, name):
                raise LedgerError(f"{name} = {getattr(self, name)!r:.100}: must be text that is not empty.")
        for name, least in (("round", 0), ("attempt", 0), ("count", 1)):
            if type(getattr(self, name)) is not int or getattr(self, name) < least:
                raise LedgerError(f"{name} = {getattr(self, name)!r:.100}: must be a whole number from {least} on.")
        if type(self.unit) is not Unit:
            raise LedgerError(f"unit = {self.unit!r:.100}: must be one of {', '.join(Unit)}.")
        if type(self.model) is not str or (self.model and not (len(self.model) == 64 and _HEX.issuperset(self.model))):
            raise LedgerError(f"model = {self.model!r:.100}: must be a SHA-256 (64 digits 0-9 and a-f), or empty.")
        if type(self.time) is not datetime or self.time.utcoffset() is None:
            raise LedgerError(f"time = {self.time!r:.100}: must be a time with its zone.")
        _check_event(self.event)

    @property
    def question(self) -> tuple[str, int, int, str, str]:
        """What a data set answers once."""
        return self.run, self.round, self.attempt, self.purpose, self.dataset

    @property
    def asked_about(self) -> tuple[str, str, str]:
        """The same, for a model in whatever run."""
        return self.model, self.purpose, self.dataset

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any]) -> Release:
        """From a line of the ledger. Raises `LedgerError`."""
        try:
            # Of 100 000 lines most hold the same few texts: each is kept once.
            run, purpose, dataset, server = (
                sys.intern(entry[name]) for name in ("run", "purpose", "dataset", "server")
            )
            return cls(
                run, entry["round"], entry["attempt"], purpose, dataset, Unit(entry["unit"]), server,
                sys.intern(canonical(entry["event"])), entry["count"], entry["model"],
                datetime.fromisoformat(entry["time"]),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise LedgerError(f"not in the form of a release ({error!r:.100})") from error

    def fields(self) -> dict[str, Any]:
        """What a line of the ledger says of it."""
        return {
            "time": self.time.astimezone(UTC).isoformat(timespec="microseconds"), "kind": RELEASE, "run": self.run,
            "round": self.round, "attempt": self.attempt, "purpose": self.purpose, "dataset": self.dataset,
            "unit": self.unit.value, "server": self.server, "event": json.loads(self.event), "count": self.count,
            "model": self.model,
        }  # fmt: skip


@dataclass(frozen=True)
class Accepted:
    """An admin's decision. expected: heads that the ledger should have had, and no longer has. covers: size and
    SHA-256 of all bytes before it."""

    time: str
    who: str
    why: str
    expected: tuple[Head, ...]
    covers: Mapping[str, Any]

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any]) -> Accepted:
        """From a line of the ledger. Raises `LedgerError`."""
        try:
            expected = tuple(Head.parse(text) for text in entry["expected"])
            return cls(str(entry["time"]), str(entry["who"]), str(entry["why"]), expected, entry["covers"])
        except (KeyError, TypeError, AttributeError, FedwardError) as error:
            raise LedgerError(f"not in the form of an admin's decision ({error!r:.100})") from error


@dataclass
class Report:
    """What a ledger holds, and what is wrong with it.

    torn: pieces of lines that a crash left and the next line sealed; torn_end: bytes of one at the very end that the
    next line will seal. settled: problems that an admin accepted. missing: expected heads that are not in it.
    """

    owner: str = ""
    lines: int = 0
    last: Line | None = None
    torn: int = 0
    torn_end: int = 0
    releases: list[Release] = field(default_factory=list)
    accepted: list[Accepted] = field(default_factory=list)
    settled: list[str] = field(default_factory=list)
    missing: Mapping[str, Head] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def verify(path: Path, expected: Mapping[str, Head] | None = None) -> Report:
    """Read the ledger at `path`; a process may be writing it. expected: heads that it must have, by who remembers them
    (read them first: the ledger may grow). Raises `LedgerError` if the file cannot be read."""
    check = _Check(path, expected or {})
    try:
        for part in chain.forwards(path):
            check.take(part)
    except OSError as error:
        raise LedgerError(f"{path}: cannot be read ({error}). Repair the disk, or restore the file.") from error
    return check.end()


class _Check:
    """Goes through the lines once, and sees what each means."""

    def __init__(self, path: Path, expected: Mapping[str, Head]) -> None:
        self._path = path
        self._chain = chain.Check("ledger", lambda entry: beginning(str(entry.get("owner"))), expected)
        self._report = Report(problems=self._chain.problems)

    def take(self, part: Line | Torn) -> None:
        if isinstance(part, Line) and part.entry.get("kind") == ACCEPTED:
            self._try(self._settle, part)
        self._chain.take(part)
        if isinstance(part, Line):
            self._try(self._read, part)
            self._report.owner = str(part.entry.get("owner"))
            self._report.lines += 1

    def end(self) -> Report:
        check, report = self._chain, self._report
        check.end()
        report.last, report.torn, report.torn_end = check.last, check.sealed, check.torn_end
        report.missing = check.missing
        return report

    def _try(self, look: Callable[[Line], None], line: Line) -> None:
        try:
            look(line)
        except LedgerError as error:
            self._report.problems.append(f"line {line.number} (byte {line.start}): {error}")

    def _settle(self, line: Line) -> None:
        """What is wrong before this line was accepted, if all before it is as it was then."""
        report, accepted = self._report, Accepted.from_entry(line.entry)
        with self._path.open("rb") as file:
            if covering(file.read(line.start)) != accepted.covers:
                raise LedgerError("what is before it is not what was accepted: changed since")
        report.accepted.append(accepted)
        report.settled += report.problems
        report.problems.clear()
        report.owner = str(line.entry.get("owner"))
        missing = self._chain.missing
        self._chain.missing = {what: head for what, head in missing.items() if head not in accepted.expected}

    def _read(self, line: Line) -> None:
        report, entry = self._report, line.entry
        if entry.get("kind") == RELEASE:
            report.releases.append(Release.from_entry(entry))
        elif entry.get("kind") != ACCEPTED:
            raise LedgerError(f"kind = {entry.get('kind')!r:.100}: neither {RELEASE!r} nor {ACCEPTED!r}")
        if report.lines and entry.get("owner") != report.owner:
            raise LedgerError(f"owner = {entry.get('owner')!r:.100}, but {report.owner!r:.100} before it")


class Ledger:
    """The one writer of a ledger. Safe for several threads.

    Reads the whole file when it is opened, never again. Raises `LedgerError` if its chain is broken or it belongs to
    somebody else.
    """

    def __init__(self, path: Path, owner_id: str) -> None:
        self._path = path
        self._owner_id = owner_id
        self._lock = threading.Lock()
        self._known: Head | None = None
        self._end: End | None = self._load()

    def append(self, release: Release, rule: Callable[[Sequence[Release]], str | None] | None = None) -> Head:
        """Write `release` down; when this returns, it is on the disk and may leave.

        rule: is given all releases so far and returns what forbids this one (`budget.would_exceed`), if anything;
        nothing else is appended meanwhile. Raises `ReleaseRefused` for what it forbids and for a second answer to the
        same question: the same (run, round, attempt, purpose) of a data set, or the same model for the same purpose,
        in whatever run. Raises `LedgerError` if it cannot be written; it may be counted nevertheless.
        """
        with self._lock:
            end = self._end or self._load()
            self._refuse_repeated(release)
            forbidden = rule(self._releases) if rule is not None else None
            if forbidden is not None:
                raise ReleaseRefused(forbidden)
            # If this fails half-way, the next one reads the file again.
            self._end = None
            try:
                self._end = chain.add(self._path, end, {"owner": self._owner_id, **release.fields()})
            except (OSError, ChainError) as error:
                raise self._cannot(error) from error
            self._known = self._end.head
            self._remember(release)
            return self._known

    def releases(self) -> Iterator[Release]:
        """All releases so far, oldest first."""
        with self._lock:
            return iter(self._releases[:])

    def head(self) -> Head:
        """The last line that this process knows."""
        with self._lock:
            return self._known or Head(0, beginning(self._owner_id))

    def holds(self, head: Head) -> bool:
        """A line with this head is in the ledger, or an admin accepted that it is not. As quick as the line is near
        the end; the chain is not checked again. Raises `LedgerError`."""
        if head in self._accepted or head == Head(0, beginning(self._owner_id)):
            return True
        try:
            with self._path.open("rb") as file:
                older = (line for line in chain.backwards(file.fileno()) if line.number <= head.number)
                return next((line.head == head for line in older), False)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise self._cannot(error) from error

    def _load(self) -> End:
        report = verify(self._path, {"the last one written": self._known} if self._known else None)
        if report.problems:
            raise LedgerError(
                f"{self._path}: {told(report.problems)} Restore it from a backup that has all its lines; on a node the "
                "site admin can go on with it as it is: 'fedward node ledger accept'."
            )
        if report.last is not None and report.owner != self._owner_id:
            raise LedgerError(
                f"{self._path}: is the ledger of {report.owner!r:.100}, not of {self._owner_id!r}. Restore its own."
            )
        self._releases: list[Release] = []
        self._answers: dict[tuple[str, int, int, str, str], Release] = {}
        self._models: dict[tuple[str, str, str], Release] = {}
        self._accepted = {head for accepted in report.accepted for head in accepted.expected}
        for release in report.releases:
            self._remember(release)
        try:
            end = chain.find_end(self._path, beginning(self._owner_id))
        except OSError as error:
            raise self._cannot(error) from error
        self._known = end.head
        return end

    def _remember(self, release: Release) -> None:
        self._releases.append(release)
        self._answers[release.question] = release
        if release.model:
            self._models[release.asked_about] = release

    def _refuse_repeated(self, release: Release) -> None:
        before = self._answers.get(release.question)
        if before is not None:
            raise ReleaseRefused(
                f"round = {release.round}, attempt = {release.attempt}: data set {release.dataset!r} answered this "
                f"{release.purpose!r} of run {release.run} on {before.time:%Y-%m-%d %H:%M:%S}; it answers once. Ask in "
                "a new round."
            )
        before = self._models.get(release.asked_about)
        if before is not None:
            raise ReleaseRefused(
                f"model = {release.model[:12]}…: data set {release.dataset!r} answered {release.purpose!r} for this "
                f"very model in round {before.round} attempt {before.attempt} of run {before.run}; no model is "
                "answered twice. Ask with another one."
            )

    def _cannot(self, error: Exception) -> LedgerError:
        return LedgerError(
            f"{self._path}: cannot be read or written ({error}). Nothing leaves that is not in the ledger: make room "
            "on the disk or repair it."
        )


def told(problems: Sequence[str]) -> str:
    """The first problem, where it began, and how many more there are."""
    return problems[0] + (f", and {len(problems) - 1} more." if len(problems) > 1 else ".")


def beginning(owner_id: str) -> str:
    """The genesis of an owner's ledger."""
    return chain.genesis(f"fedward privacy ledger 1 of {owner_id}")


def covering(data: bytes) -> dict[str, Any]:
    """What an `accepted` line says of the bytes before it."""
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


@lru_cache(maxsize=1024)
def _check_event(text: str) -> None:
    try:
        event = json.loads(text)
        right = isinstance(event, dict) and type(event.get("kind")) is str and canonical(event) == text
    except (ValueError, TypeError, RecursionError):
        right = False
    if not right:
        raise LedgerError(f"event = {text!r:.100}: must be the canonical JSON of an object with a 'kind'.")
