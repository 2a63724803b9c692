"""Checking a node's journal offline: the chain, a remembered head, and the sums against the link's own total."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from fedward_common.chain import Line, Torn
from fedward_common.errors import ConfigError, FedwardError

from fedward_client.journal_lines import CLOSED, MESSAGE, OPENED, accounted, forwards, genesis
from fedward_client.sent import Sent, read_sent

_HEAD = re.compile(r"([1-9][0-9]{0,17}):([0-9a-f]{64})", re.ASCII)


@dataclass(frozen=True)
class Head:
    """A line that somebody remembered."""

    number: int
    sha256: str

    @classmethod
    def parse(cls, text: str) -> Head:
        """From NUMBER:HASH, as 'show' and 'verify' print it. Raises `ConfigError`."""
        match = _HEAD.fullmatch(text.strip())
        if match is None:
            raise ConfigError(
                f"head = {text!r}: not NUMBER:HASH with a line's number and its 64 hex digits, as 'fedward node "
                "journal show' prints them."
            )
        return cls(int(match[1]), match[2])


@dataclass
class Tally:
    """How many messages or calls, and their bytes."""

    count: int = 0
    bytes: int = 0

    def add(self, count: int, size: int) -> None:
        """Some more."""
        self.count += count
        self.bytes += size


@dataclass
class Report:
    """What a journal holds, and what is wrong with it.

    purposes, runs: messages with their bytes as announced. control: all other bytes, by method of the Fleet API.
    torn: pieces of lines that a crash left and the next line sealed; torn_end: bytes of one at the very end that the
    next line will seal. killed: guards that ended without a 'closed' line. withheld: announced bytes that never left.
    sent: the link's total, which the sum up to its line is compared with.
    """

    lines: int = 0
    last: Line | None = None
    node_id: str = ""
    first_time: str = ""
    torn: int = 0
    torn_end: int = 0
    killed: int = 0
    purposes: dict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))
    runs: dict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))
    control: dict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))
    withheld: int = 0
    sent: Sent | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def messages(self) -> int:
        """Bytes of all messages, as announced."""
        return sum(tally.bytes for tally in self.purposes.values())

    @property
    def total(self) -> int:
        """All bytes that the journal accounts for."""
        return self.messages + sum(calls.bytes for calls in self.control.values()) - self.withheld


def verify(path: Path, sent_path: Path, head: Head | None = None) -> Report:
    """Read the journal at `path` and the link's total at `sent_path`; needs no guard, and one may be running."""
    report = Report()
    try:
        # First the total, then the lines: a running guard may add some in between.
        report.sent = read_sent(sent_path)
    except FedwardError as error:
        report.problems.append(str(error))
    check = _Check(report, head)
    for part in forwards(path):
        check.take(part)
    check.end()
    return report


class _Check:
    """Goes through the lines once. A break of the chain is reported where it shows; the check goes on behind it."""

    def __init__(self, report: Report, head: Head | None) -> None:
        self._report = report
        self._wanted = {}
        if head is not None:
            self._wanted["the remembered head"] = head
        if report.sent is not None:
            self._wanted["the link's total"] = Head(report.sent.number, report.sent.sha256)
        self._torn: Torn | None = None
        self._announced: dict[str, int] = {}
        self._open = False
        self._total = 0

    def take(self, part: Line | Torn) -> None:
        if isinstance(part, Torn):
            self._torn = part
            return
        self._seal(part)
        self._chain(part)
        self._sum(part)
        self._compare(part)
        self._report.lines += 1
        self._report.last = part
        self._torn = None

    def end(self) -> None:
        report = self._report
        if self._torn is not None:
            report.torn_end = self._torn.size
        at = report.last.number if report.last else 0
        for what, head in self._wanted.items():
            self._problem(
                f"the journal ends at line {at}, but {what} is of line {head.number}: lines are missing at the end"
            )
        if report.lines and report.sent is None and not report.problems:
            self._problem("the link's total is missing (sent.json), the sums have nothing to be compared with")

    def _problem(self, text: str) -> None:
        self._report.problems.append(text)

    def _seal(self, line: Line) -> None:
        """Bytes that are no line must be those that the line behind them names."""
        told = line.entry.get("torn")
        found = None if self._torn is None else {"bytes": self._torn.size, "sha256": self._torn.sha256}
        where = f"before line {line.number} (byte {self._torn.start if self._torn else line.start})"
        if found is not None and told is None:
            self._problem(f"{where}: {found['bytes']} bytes that are no line of the journal: changed or inserted")
        elif found != told:
            self._problem(f"{where}: not the torn bytes that line {line.number} names: changed or removed")
        elif found is not None:
            self._report.torn += 1

    def _chain(self, line: Line) -> None:
        report, before, entry = self._report, self._report.last, line.entry
        where = f"line {line.number} (byte {line.start})"
        if before is None:
            if entry["kind"] != OPENED or line.number != 1:
                self._problem(f"{where}: the journal does not begin here: lines are missing before it")
            elif entry["previous"] != genesis(entry["node"]):
                self._problem(f"{where}: does not begin the journal of node {entry['node']}: it was changed")
            report.first_time = entry["time"]
            return
        if line.number != before.number + 1:
            self._problem(f"{where}: comes right behind line {before.number}: lines were removed, inserted or swapped")
        if entry["previous"] != before.sha256:
            self._problem(
                f"{where}: does not fit line {before.number} before it: one of the two was changed or replaced"
            )

    def _sum(self, line: Line) -> None:
        report, entry = self._report, line.entry
        if entry["kind"] == OPENED:
            report.killed += self._open
            self._open = True
            report.node_id = entry["node"]
        elif entry["kind"] == CLOSED:
            self._open = False
        elif entry["kind"] == MESSAGE:
            self._announced[entry["sha256"]] = entry["bytes"]
            for tally in (report.purposes[entry["purpose"]], report.runs[entry["run"]]):
                tally.add(1, entry["bytes"])
        for method, calls in entry["control"].items():
            report.control[method].add(calls["calls"], calls["bytes"])
        for message, size in entry["withheld"].items():
            report.withheld += size
            if not 0 <= size <= self._announced.get(message, 0):
                self._problem(f"line {line.number}: withholds {size} bytes of message {message[:12]}, more than it has")
        self._total += accounted(entry)

    def _compare(self, line: Line) -> None:
        for what, head in list(self._wanted.items()):
            if head.number == line.number:
                del self._wanted[what]
                if head.sha256 != line.sha256:
                    self._problem(
                        f"line {line.number} is not the line of {what}: the journal was written anew or changed"
                    )
        sent = self._report.sent
        if sent is not None and sent.number == line.number and self._total != sent.total + sent.unsent:
            self._problem(
                f"up to line {line.number} the journal accounts for {self._total} bytes, the link counted "
                f"{sent.total + sent.unsent}: lines were removed or changed"
            )
