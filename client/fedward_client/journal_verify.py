"""Checking a node's journal offline: the chain, a remembered head, and the sums against the link's own total."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from fedward_common import chain
from fedward_common.chain import Head, Line, Torn
from fedward_common.errors import FedwardError

from fedward_client.journal_lines import CLOSED, MESSAGE, OPENED, accounted, forwards, genesis
from fedward_client.sent import Sent, read_sent


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


class _Check(chain.Check):
    """Goes through the lines once: the chain, and what the lines say."""

    def __init__(self, report: Report, head: Head | None) -> None:
        expected = {} if head is None else {"the remembered head": head}
        if report.sent is not None:
            expected["the link's total"] = Head(report.sent.number, report.sent.sha256)
        super().__init__("journal", lambda entry: genesis(str(entry.get("node"))), expected)
        self._report = report
        self.problems = report.problems
        self._announced: dict[str, int] = {}
        self._open = False
        self._total = 0

    def take(self, part: Line | Torn) -> None:
        super().take(part)
        if isinstance(part, Line):
            self._report.first_time = self._report.first_time or part.entry["time"]
            self._report.lines += 1
            self._sum(part)
            self._compare(part)

    def end(self) -> None:
        super().end()
        report = self._report
        report.last, report.torn, report.torn_end = self.last, self.sealed, self.torn_end
        if report.lines and report.sent is None and not report.problems:
            report.problems.append("the link's total is missing (sent.json), the sums have nothing to be compared with")

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
                report.problems.append(
                    f"line {line.number}: withholds {size} bytes of message {message[:12]}, more than it has"
                )
        self._total += accounted(entry)

    def _compare(self, line: Line) -> None:
        sent = self._report.sent
        if sent is not None and sent.number == line.number and self._total != sent.total + sent.unsent:
            self._report.problems.append(
                f"up to line {line.number} the journal accounts for {self._total} bytes, the link counted "
                f"{sent.total + sent.unsent}: lines were removed or changed"
            )
