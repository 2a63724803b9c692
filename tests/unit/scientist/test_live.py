"""What a watcher sees, from events as `events.py` describes them."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from typing import Any

import pytest
from fedward_server.live import (
    Board,
    JsonLines,
    LiveTable,
    PlainLines,
    by_reason,
    follow,
    megabytes,
    open_display,
    render,
)
from rich.console import Console
from rich.live import Live

STARTED = {
    "event": "run_started", "time": "2026-01-01T00:00:00.000+00:00", "run": "a" * 32, "name": "trial",
    "algorithm": "scaffold", "rounds": 3, "nodes": ["a", "b", "c"], "resumed_from": None, "epoch": 1,
}  # fmt: skip
WAITING = {
    "event": "waiting", "time": "t", "ready": ["a"], "needed": 3,
    "missing": {"b": "bundle_not_approved", "c": "policy (max_epochs: 5 > 2)"},
}  # fmt: skip
FAILED_ROUND = {
    "event": "round_failed", "time": "t", "round": 2, "reason": "no quorum: 1 of 2", "seconds": 30.0,
    "failures": {"b": "no_reply", "c": "task_error [incident 4f2a]"},
}  # fmt: skip
FINISHED = {
    "event": "run_finished", "time": "t", "status": "finished", "reason": "", "round": 3, "best_round": 2,
    "seconds": 4.5,
}  # fmt: skip


def round_(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "event": "round", "time": "t", "round": number, "of": 3, "cohort": ["a", "b", "c"], "replies": ["a", "b"],
        "failures": {"c": "time_limit (5 s)"}, "weight": 10.0, "train": {"loss": 1.25, "examples": 64.0},
        "evaluate": {"loss": 0.5, "accuracy": 0.875, "examples": 20.0}, "holdout": None, "central": None,
        "bytes_down": 2_500_000, "bytes_up": 1_250_000, "seconds": 0.75, **changes,
    }  # fmt: skip


RUN = [STARTED, WAITING, round_(1), FAILED_ROUND, round_(2), round_(3, evaluate=None, failures={}), FINISHED]


def on_screen(events: Iterable[dict[str, Any]], height: int = 40) -> str:
    """The live table's last picture on a terminal."""
    console = Console(file=io.StringIO(), force_terminal=True, width=140, height=height, color_system=None)
    with Live(console=console, auto_refresh=False) as live:
        display = LiveTable(live, console)
        follow(events, display)
        picture = live.get_renderable()
    plain = Console(file=io.StringIO(), width=140, color_system=None)
    plain.print(picture)
    return plain.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def plain(events: Iterable[dict[str, Any]]) -> list[str]:
    out = io.StringIO()
    follow(events, PlainLines(out))
    return out.getvalue().splitlines()


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        ({"rule": "krum", "delta": {"selected": ["a"], "left_out": ["b", "c"]}}, "left out b, c"),
        ({"rule": "krum", "delta": {"selected": ["a"], "left_out": list("bcdefg")}}, "left out b, c, d, e, 2 more"),
        ({"rule": "krum", "delta": {"selected": ["a"], "left_out": ["b\x1b[2J"]}}, "left out b?[2J"),
        ({"rule": "norm_bound", "bound": 1.0, "scaled": 2, "over": ["c"]}, "2 scaled to the bound, over the bound c"),
        ({"rule": "norm_bound", "bound": 1.0, "scaled": 1}, "1 scaled to the bound"),
        ({"rule": "geometric_median", "delta": {"converged": False}}, "median not converged"),
    ],
)
def test_what_a_rule_did_stands_in_its_round(told, shown) -> None:
    events = [STARTED, round_(1, aggregation=told, failures={})]
    assert shown.split()[0] in on_screen(events)
    assert any(shown in line for line in plain(events))
    quiet = plain([STARTED, round_(1, aggregation={"rule": "median", "updates": 3}, failures={})])
    assert not any("median" in line for line in quiet)


def test_the_table_says_what_happened() -> None:
    lines = on_screen(RUN).splitlines()
    assert lines[0].strip() == "trial · scaffold · finished · best round 2"
    heads = lines[1].split()
    assert " ".join(heads) == "round replies failures train loss loss accuracy MB down MB up seconds"
    assert " ".join(lines[2].split()) == "1/3 2/3 1 time_limit 1.2500 0.5000 0.8750 2.5 1.25 0.75"
    assert "2/3" in lines[3] and "no quorum: 1 of 2; 1 no_reply, 1 task_error" in lines[3]
    assert lines[5].split() == ["3/3", "2/3", "1.2500", "–", "–", "2.5", "1.25", "0.75"]


def test_epsilon_is_shown_where_a_run_has_one() -> None:
    spent = [round_(number, privacy={"epsilon": epsilon}) for number, epsilon in ((1, 1.0125), (2, 1.4849))]
    lines = on_screen([STARTED, *spent]).splitlines()
    assert [line.split()[-1] for line in lines[1:4]] == ["ε", "1.01", "1.48"]
    assert plain([STARTED, *spent])[-2].count("ε 1.48") == 1
    assert "ε" not in on_screen(RUN)
    # Without a bound.
    assert on_screen([STARTED, round_(1, privacy={"epsilon": None})]).splitlines()[2].split()[-1] == "0.75"


def test_waiting_names_who_is_missing_and_why() -> None:
    picture = on_screen([STARTED, WAITING])
    assert "trial · scaffold · waiting: 1 of 3 nodes ready" in picture
    assert "b: bundle_not_approved" in picture and "c: policy (max_epochs: 5 > 2)" in picture
    after = on_screen([STARTED, WAITING, round_(1)])
    assert "bundle_not_approved" not in after and "· running" in after


def test_a_long_run_keeps_the_newest_rounds_in_the_window() -> None:
    rounds = [round_(number, of=40) for number in range(1, 41)]
    picture = on_screen([STARTED, *rounds], height=20)
    assert "40/40" in picture and "33/40" in picture and "32/40" not in picture
    whole = on_screen([STARTED, *rounds, FINISHED], height=20)
    assert "\n 1/40" in whole


def test_plain_lines_where_there_is_no_terminal() -> None:
    lines = plain(RUN)
    assert lines[:4] == [
        "trial · scaffold · running",
        "trial · scaffold · waiting: 1 of 3 nodes ready",
        "  b: bundle_not_approved",
        "  c: policy (max_epochs: 5 > 2)",
    ]
    assert lines[4] == (
        "round 1/3  replies 2/3  failures 1 time_limit  train loss 1.2500  loss 0.5000  accuracy 0.8750"
        "  down 2.5 MB  up 1.25 MB  0.75 s"
    )
    assert lines[5] == "  c: time_limit (5 s)"
    assert lines[6].startswith("round 2/3 failed: no quorum: 1 of 2  1 no_reply, 1 task_error")
    assert "  c: task_error [incident 4f2a]" in lines
    assert lines[-1] == "trial · scaffold · finished · best round 2"


def test_open_display_sees_that_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with open_display() as display:
        follow(RUN, display)
    assert capsys.readouterr().out.splitlines() == plain(RUN)


def test_json_lines_are_the_events_unchanged() -> None:
    out = io.StringIO()
    follow(RUN, JsonLines(out))
    assert [json.loads(line) for line in out.getvalue().splitlines()] == RUN


def test_a_resumed_run_goes_on_after_its_first_end() -> None:
    again = {**STARTED, "resumed_from": 1, "epoch": 2}
    stopped = {**FINISHED, "status": "stopped", "reason": "stopped by ada", "best_round": None}
    lines = plain([STARTED, round_(1), stopped, again, round_(2), FINISHED])
    assert "trial · scaffold · stopped (stopped by ada)" in lines
    assert lines[-1] == "trial · scaffold · finished · best round 2"


def test_another_metric_takes_the_place_of_accuracy() -> None:
    picture = on_screen([STARTED, round_(1, evaluate={"loss": 1.0, "auc": 0.9, "examples": 3.0})])
    assert "auc" in picture and "0.9000" in picture and "accuracy" not in picture


def test_central_evaluation_is_shown_where_nodes_do_not_evaluate() -> None:
    assert "0.9100" in on_screen([STARTED, round_(1, evaluate=None, central={"loss": 1.0, "accuracy": 0.91})])


def test_text_from_nodes_cannot_play_tricks_on_the_terminal() -> None:
    nasty = round_(1, failures={"[red]b[/red]\x1b[2J": "task_error\x1b]0;owned\x07 [/bold]"})
    for shown in ("\n".join(plain([STARTED, nasty])), on_screen([STARTED, nasty])):
        assert "\x1b" not in shown and "\x07" not in shown
        assert "[red]b[/red]?[2J: task_error?]0;owned? [/bold]" in shown


def test_events_of_a_kind_not_known_here_are_left_out() -> None:
    board = Board()
    board.add({"event": "weather", "time": "t"})
    assert board == Board()
    assert render(board) is not None


def test_by_reason_counts() -> None:
    failures = {"a": "policy (max_epochs: 5 > 2)", "b": "policy", "c": "no_reply"}
    assert by_reason(failures) == "2 policy, 1 no_reply"
    assert by_reason({}) == ""


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0"), (193_360, "0.193"), (1_500_000, "1.5"), (123_456_789, "123"), (9_345_678_900, "9346")],
)
def test_megabytes(size: int, text: str) -> None:
    assert megabytes(size) == text


def test_the_figures_of_a_secure_round_come_with_the_next_one() -> None:
    secure = {"secure_sum": {"clipped": {"delta": 2, "statistic": 1}}, "evaluate": None, "failures": {}}
    before = {"round": 1, "evaluate": {"loss": 0.25, "accuracy": 0.75, "examples": 9.0}}
    figures = {"loss": 0.125, "accuracy": 0.5, "examples": 9.0}
    last = {"event": "evaluation", "time": "t", "round": 2, "evaluate": figures}
    events = [STARTED, round_(1, **secure), round_(2, **secure, round_before=before), last]
    lines = [" ".join(line.split()) for line in on_screen(events).splitlines()]
    assert "1/3 2/3 3 coordinates clipped 1.2500 0.2500 0.7500 2.5 1.25 0.75" in lines
    assert "2/3 2/3 3 coordinates clipped 1.2500 0.1250 0.5000 2.5 1.25 0.75" in lines
    told = plain(events)
    assert "after round 1: loss 0.25  accuracy 0.75" in told and "after round 2: loss 0.125  accuracy 0.5" in told
    assert any("3 coordinates clipped" in line for line in told)
