from __future__ import annotations

import io
import json
import logging

import pytest
from fedward_server.logs import STYLE_VARIABLE, SUPERLINK_ROUTINE, configure, part_line


@pytest.fixture(autouse=True)
def restore_logging() -> object:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def entry(style: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(STYLE_VARIABLE, style)
    stream = io.StringIO()
    configure(stream=stream)
    logging.getLogger("somewhere").warning("lost %d", 3, extra={"run": "r1", "round": 7})
    return stream.getvalue()


def test_an_entry_for_programs_has_its_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    found = json.loads(entry("json", monkeypatch))
    assert found.pop("time")
    assert found == {"level": "warning", "logger": "somewhere", "message": "lost 3", "run": "r1", "round": 7}


def test_an_entry_for_people_has_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    assert entry("human", monkeypatch) == "WARNING lost 3  run=r1  round=7\n"


def test_a_traceback_stays_in_one_json_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STYLE_VARIABLE, "json")
    stream = io.StringIO()
    configure(stream=stream)
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("somewhere").exception("it broke")
    assert "ValueError: broken" in json.loads(stream.getvalue())["traceback"]


@pytest.mark.parametrize(
    ("line", "level", "message"),
    [
        ("INFO :      Starting", "info", "Starting"),
        ("2026-11-30T02:20:44.143Z WARN [x] odd", "warning", "[x] odd"),
        ("\x1b[91mERROR\x1b[0m: bad", "error", "bad"),
        ("INFORMATION about nothing", "info", "INFORMATION about nothing"),
        ("{broken", "info", "{broken"),
    ],
)
def test_lines_of_other_programs_become_entries(line: str, level: str, message: str) -> None:
    found = json.loads(part_line("superlink", line, "json"))
    assert (found["part"], found["level"], found["message"]) == ("superlink", level, message)


@pytest.mark.parametrize(
    ("line", "routine"),
    [
        ('2026Z INFO [uvicorn.access] 127.0.0.1:1 - "POST /v1/control/list-runs HTTP/1.1" 200', True),
        ('2026Z INFO [uvicorn.access] 127.0.0.1:1 - "POST /v1/control/list-runs HTTP/1.1" 500', False),
        ("INFO :      ControlServicer.ListRuns", True),
        ("INFO :      ControlServicer.StartRun", False),
        ("INFO :      [Fleet.PushMessages] Push results", True),
        ("INFO :      [Fleet.ActivateNode] Activated node_id=1", False),
        ("WARNING :   database is locked", False),
    ],
)
def test_what_counts_as_routine(line: str, routine: bool) -> None:
    assert bool(SUPERLINK_ROUTINE.search(line)) == routine
