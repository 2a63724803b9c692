"""What a person watching a run sees, made from its events: a live table, plain lines or JSON lines."""

from __future__ import annotations

import json
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fedward_server.events import Event

ENDS = frozenset({"finished", "early_stopped", "budget_spent", "stopped", "failed"})
"""Status words of a run that is over."""

_COLOURS = {**dict.fromkeys(ENDS, "green"), "stopped": "yellow", "failed": "red"}


class Display(Protocol):
    """Takes a run's events in order."""

    def show(self, event: Event) -> None:
        """Take one event."""


@dataclass(frozen=True)
class Row:
    """One round as a line of the table."""

    round: int
    of: int | None
    cohort: int
    replies: int
    failures: Mapping[str, str]
    train_loss: float | None
    loss: float | None
    metric: float | None
    bytes_down: int
    bytes_up: int
    seconds: float
    reason: str = ""
    """Why the round failed; empty if it did not."""
    clipped: int = 0
    """Coordinates, over all nodes, that were outside the secure sum's range."""
    epsilon: float | None = None
    """What the run has spent, with this round."""
    aggregation: str = ""
    """What the run's rule did; empty if it says nothing of single nodes."""


@dataclass
class Board:
    """A run as far as its events tell."""

    name: str = ""
    run: str = ""
    algorithm: str = ""
    rounds: int | None = None
    status: str = "starting"
    reason: str = ""
    best_round: int | None = None
    metric: str = "accuracy"
    missing: Mapping[str, str] = field(default_factory=dict)
    ready: int = 0
    needed: int = 0
    rows: deque[Row] = field(default_factory=lambda: deque(maxlen=200))

    def add(self, event: Event) -> None:
        """Take one event. Kinds that are not known are left out: a newer server may tell more."""
        taker = {
            "run_started": self._started,
            "waiting": self._waiting,
            "round": self._round,
            "round_failed": self._round_failed,
            "evaluation": self._evaluation,
            "run_finished": self._finished,
        }.get(event["event"])
        if taker is not None:
            taker(event)

    def _started(self, event: Event) -> None:
        self.run, self.name = event["run"], clean(event["name"])
        self.algorithm, self.rounds = clean(event["algorithm"]), event["rounds"]
        self.status, self.reason = "running", ""

    def _waiting(self, event: Event) -> None:
        self.status = "waiting"
        self.ready, self.needed = len(event["ready"]), event["needed"]
        self.missing = {clean(name): clean(text) for name, text in event["missing"].items()}

    def _round(self, event: Event) -> None:
        self.status = "running"
        if "round_before" in event:
            self._evaluation(event["round_before"])
        evaluated = event.get("evaluate") or event.get("central") or {}
        self._choose_metric(evaluated)
        self.rows.append(
            Row(
                event["round"],
                event["of"],
                len(event["cohort"]),
                len(event["replies"]),
                _clean_all(event["failures"]),
                (event.get("train") or {}).get("loss"),
                evaluated.get("loss"),
                evaluated.get(self.metric),
                event["bytes_down"],
                event["bytes_up"],
                event["seconds"],
                clipped=sum((event.get("secure_sum") or {}).get("clipped", {}).values()),
                epsilon=(event.get("privacy") or {}).get("epsilon"),
                aggregation=_aggregation(event.get("aggregation") or {}),
            )
        )

    def _evaluation(self, event: Mapping[str, Any]) -> None:
        """Figures of a round that is shown already: a secure sum brings them with the round after it."""
        evaluated = event["evaluate"]
        self._choose_metric(evaluated)
        for i, row in enumerate(self.rows):
            if row.round == event["round"] and not row.reason:
                self.rows[i] = replace(row, loss=evaluated.get("loss"), metric=evaluated.get(self.metric))

    def _choose_metric(self, evaluated: Mapping[str, float]) -> None:
        if evaluated and self.metric not in evaluated:
            others = [name for name in evaluated if name not in ("loss", "examples")]
            self.metric = others[0] if others else self.metric

    def _round_failed(self, event: Event) -> None:
        failures = _clean_all(event["failures"])
        self.rows.append(
            Row(
                event["round"],
                self.rounds,
                len(failures),
                0,
                failures,
                None,
                None,
                None,
                0,
                0,
                event["seconds"],
                clean(event["reason"]),
            )
        )

    def _finished(self, event: Event) -> None:
        self.status, self.reason = event["status"], clean(event.get("reason") or "")
        self.best_round = event.get("best_round")

    @property
    def over(self) -> bool:
        """Whether the run has ended."""
        return self.status in ENDS

    def headline(self) -> str:
        """Name, status and what is waited for, on one line."""
        text = f"{self.name or 'run'} · {self.algorithm} · {self.status}" if self.algorithm else self.status
        if self.status == "waiting":
            text += f": {self.ready} of {self.needed} nodes ready"
        if self.reason:
            text += f" ({self.reason})"
        if self.best_round is not None:
            text += f" · best round {self.best_round}"
        return text


class JsonLines:
    """The events unchanged, one JSON object a line."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def show(self, event: Event) -> None:
        self._out.write(json.dumps(event, separators=(",", ":")) + "\n")
        self._out.flush()


class PlainLines:
    """One line an event, for logs and pipes."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._board = Board()

    def show(self, event: Event) -> None:
        self._board.add(event)
        for line in self._lines(event):
            self._out.write(line + "\n")
        self._out.flush()

    def _lines(self, event: Event) -> Iterator[str]:
        board, kind = self._board, event["event"]
        told = event.get("round_before") if kind == "round" else event if kind == "evaluation" else None
        if told is not None:
            yield f"after round {told['round']}: " + _figures(told["evaluate"])
        if kind in ("run_started", "waiting", "run_finished"):
            yield board.headline()
        if kind == "waiting":
            yield from (f"  {name}: {text}" for name, text in board.missing.items())
        if kind in ("round", "round_failed") and board.rows:
            row = board.rows[-1]
            yield plain_row(row, board.metric)
            yield from (f"  {name}: {text}" for name, text in row.failures.items())


class LiveTable:
    """A table that grows in the terminal; the newest rounds stay in view."""

    def __init__(self, live: Live, console: Console) -> None:
        self._live = live
        self._console = console
        self._board = Board()

    def show(self, event: Event) -> None:
        self._board.add(event)
        # Header, table frame, notes: what is left of the window is for rounds.
        fit = max(3, self._console.height - 12)
        self._live.update(render(self._board, None if self._board.over else fit), refresh=True)


@contextmanager
def open_display(as_json: bool = False, out: TextIO | None = None) -> Iterator[Display]:
    """The display that fits: JSON lines if asked for, a live table on a terminal, plain lines elsewhere."""
    stream = out if out is not None else sys.stdout
    if as_json:
        yield JsonLines(stream)
        return
    console = Console(file=stream)
    if not console.is_terminal:
        yield PlainLines(stream)
        return
    with Live(Text("starting"), console=console, auto_refresh=False) as live:
        yield LiveTable(live, console)


def follow(events: Iterable[Event], display: Display) -> Event | None:
    """Show all events; returns the last one. A resumed run has a "run_finished" in the middle."""
    last: Event | None = None
    for event in events:
        display.show(event)
        last = event
    return last


def render(board: Board, fit: int | None = None) -> RenderableType:
    """The board for a terminal; only the last `fit` rounds if given."""
    parts: list[RenderableType] = [Text(board.headline(), style=f"bold {_COLOURS.get(board.status, '')}".strip())]
    if board.status == "waiting":
        parts.extend(Text(f"  {name}: {text}", style="yellow") for name, text in board.missing.items())
    rows = list(board.rows) if fit is None else list(board.rows)[-fit:]
    if rows:
        parts.append(_table(rows, board.metric))
        parts.extend(Text(f"  {name}: {text}", style="yellow") for name, text in rows[-1].failures.items())
    return Group(*parts)


def _table(rows: Iterable[Row], metric: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    rows = list(rows)
    private = any(row.epsilon is not None for row in rows)
    headers = ["round", "replies", "failures", "train loss", "loss", metric, "MB down", "MB up", "seconds"]
    if private:
        headers.append("ε")
    for header in headers:
        # Only the reasons may wrap: numbers stay whole in a narrow window.
        wraps = header == "failures"
        table.add_column(
            Text(header),
            justify="left" if wraps else "right",
            no_wrap=not wraps,
            overflow="fold",
            min_width=8 if wraps else None,
        )
    for row in rows:
        failed = f"failed: {row.reason}; " if row.reason else ""
        table.add_row(
            f"{row.round}/{row.of or '?'}",
            f"{row.replies}/{row.cohort}",
            Text(", ".join(p for p in (failed + by_reason(row.failures), _clipped(row), row.aggregation) if p)),
            _number(row.train_loss),
            _number(row.loss),
            _number(row.metric),
            megabytes(row.bytes_down),
            megabytes(row.bytes_up),
            f"{row.seconds:.2f}",
            *(["–" if row.epsilon is None else f"{row.epsilon:.3g}"] if private else []),
            style="red" if row.reason else None,
        )
    return table


def plain_row(row: Row, metric: str) -> str:
    """A round as one line of text."""
    text = f"round {row.round}/{row.of or '?'}"
    if row.reason:
        return f"{text} failed: {row.reason}  {by_reason(row.failures)}  {row.seconds:.2f} s".rstrip()
    text += f"  replies {row.replies}/{row.cohort}"
    if row.failures:
        text += f"  failures {by_reason(row.failures)}"
    if row.clipped:
        text += f"  {_clipped(row)}"
    if row.aggregation:
        text += f"  {row.aggregation}"
    named = (("train loss", row.train_loss), ("loss", row.loss), (metric, row.metric))
    text += "".join(f"  {name} {value:.4f}" for name, value in named if value is not None)
    if row.epsilon is not None:
        text += f"  ε {row.epsilon:.3g}"
    return f"{text}  down {megabytes(row.bytes_down)} MB  up {megabytes(row.bytes_up)} MB  {row.seconds:.2f} s"


def _clipped(row: Row) -> str:
    return f"{row.clipped} coordinates clipped" if row.clipped else ""


def _aggregation(told: Mapping[str, Any]) -> str:
    """{"delta": {"left_out": ["a", "b"]}} -> "left out a, b"."""
    delta = told.get("delta") or {}
    parts = (
        (told.get("scaled"), f"{told.get('scaled')} scaled to the bound"),
        (told.get("over"), f"over the bound {_few(told.get('over') or [])}"),
        (delta.get("left_out"), f"left out {_few(delta.get('left_out') or [])}"),
        (delta.get("converged") is False, "median not converged"),
    )
    return ", ".join(text for there, text in parts if there)


def _few(names: Sequence[str], most: int = 4) -> str:
    shown = [clean(name) for name in names[:most]]
    return ", ".join(shown + [f"{len(names) - most} more"] * (len(names) > most))


def _figures(evaluated: Mapping[str, float]) -> str:
    return "  ".join(f"{clean(name)} {value:.4g}" for name, value in evaluated.items() if name != "examples")


def by_reason(failures: Mapping[str, str]) -> str:
    """{"a": "policy (…)", "b": "policy", "c": "no_reply"} -> "2 policy, 1 no_reply"."""
    counts = Counter(text.split(" ", 1)[0] for text in failures.values())
    return ", ".join(f"{count} {reason}" for reason, count in counts.most_common())


def megabytes(size: int) -> str:
    """Bytes as MB (10^6) with about three digits."""
    return f"{size / 1e6:.3g}" if size < 1e9 else f"{size / 1e6:.0f}"


def clean(text: object) -> str:
    """Text from elsewhere without control characters: a name must not move the cursor."""
    return "".join(c if c.isprintable() else "?" for c in str(text))


def _clean_all(failures: Mapping[str, Any]) -> dict[str, str]:
    return {clean(name): clean(text) for name, text in failures.items()}


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
