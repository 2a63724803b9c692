"""The journal for a person: its messages as a table, and the verdict of a check."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedward_common.chain import Line
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedward_client.journal_lines import MESSAGE, forwards
from fedward_client.journal_verify import Report

_WIDTH = 160
"""Columns that the table takes at least."""
_MOST = 20
"""Problems shown; the first ones tell where it began."""


def messages(path: Path, last: int, run: str) -> tuple[list[Mapping[str, Any]], Line | None]:
    """The entries of the last `last` messages of runs whose id begins with `run`, and the journal's last line."""
    found: deque[Mapping[str, Any]] = deque(maxlen=last)
    end = None
    for part in forwards(path):
        if isinstance(part, Line):
            end = part
            if part.entry["kind"] == MESSAGE and part.entry["run"].startswith(run):
                found.append(part.entry)
    return list(found), end


def print_messages(out: Console, entries: list[Mapping[str, Any]]) -> None:
    """A table with one row a message."""
    table = Table(box=None)
    for name in ("time", "run", "round", "purpose", "outcome", "bytes", "protections"):
        table.add_column(name, no_wrap=True, justify="right" if name in ("round", "bytes") else "left")
    table.add_column("policy, or the rule broken", overflow="fold")
    for entry in entries:
        table.add_row(
            plain(entry["time"][:19]),
            plain(entry["run"][:8]),
            str(entry["round"]),
            plain(entry["purpose"]),
            plain(entry["outcome"]),
            f"{entry['bytes']:,}",
            plain(", ".join(map(str, entry["protections"])) or "none"),
            # A step of a secure sum that was refused breaks a rule of the protocol's, not of the policy's.
            plain(entry["rule"] or entry["verdict"]),
        )
    # A verdict needs its room even where the terminal is narrow.
    Console(width=max(out.width, _WIDTH)).print(table)


def print_report(out: Console, report: Report) -> None:
    """What was checked, what the node sent, and what is wrong."""
    if report.last is not None:
        out.print(_facts(report, report.last))
        out.print(_sums(report))
        print_head(out, report.last)
    for problem in report.problems[:_MOST]:
        out.print(Text("wrong: ", "red") + plain(problem), soft_wrap=True)
    if len(report.problems) > _MOST:
        out.print(f"and {len(report.problems) - _MOST} more")
    if not report.problems:
        out.print("[green]The journal is intact.[/]" if report.last else "The journal is empty.")


def print_head(out: Console, last: Line) -> None:
    """The journal's last line, to be remembered elsewhere."""
    out.print(Text(f"head: {last.head}"), soft_wrap=True)


def plain(text: str) -> Text:
    """`text` without effect on a terminal: part of it is what a server wrote."""
    return Text("".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in text))


def _facts(report: Report, last: Line) -> Table:
    table = Table(show_header=False, box=None)
    table.add_row("node", plain(report.node_id))
    table.add_row("lines", f"{report.lines:,}")
    table.add_row("time", plain(f"{report.first_time} to {last.entry['time']}"))
    if report.killed:
        what = "what they sent besides messages in their last minute is not counted"
        table.add_row("killed guards", f"{report.killed}: {what}")
    if report.torn or report.torn_end:
        end = f", {report.torn_end} bytes at the end still open" if report.torn_end else ""
        table.add_row("torn lines", f"{report.torn} left by a crash and sealed by the line behind{end}")
    return table


def _sums(report: Report) -> Table:
    table = Table("sent", box=None)
    table.add_column("count", justify="right")
    table.add_column("bytes", justify="right")
    parts = {"messages, by purpose": report.purposes, "messages, by run": report.runs, "other": report.control}
    for title, tallies in parts.items():
        table.add_row(title, style="bold")
        for name, tally in sorted(tallies.items()):
            table.add_row(Text("  ") + plain(name), f"{tally.count:,}", f"{tally.bytes:,}")
    if report.withheld:
        table.add_row("announced, but never sent", "", f"-{report.withheld:,}")
    table.add_row("total", "", f"{report.total:,}", style="bold")
    if report.sent is not None:
        open_ = f", {report.sent.unsent:,} on their way" if report.sent.unsent else ""
        table.add_row(f"the link's own total at line {report.sent.number:,}{open_}", "", f"{report.sent.total:,}")
    return table
