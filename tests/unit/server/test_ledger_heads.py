"""The record of nodes' ledger heads: a truthful node never raises an alarm, whatever is overtaken; a rolled-back one
always does."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from fedward_common.chain import Head
from fedward_server.ledger_heads import LedgerHeads, LedgerHeadsError, Told

NODE = "a" * 32


def head(number: int, branch: str = "") -> Head:
    return Head(number, hashlib.sha256(f"{number}{branch}".encode()).hexdigest())


@pytest.fixture
def heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LedgerHeads:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    return LedgerHeads(tmp_path / "ledger-heads.json")


def told(number: int, before: int | None = None, confirmed: bool = False, branch: str = "") -> Told:
    return Told(NODE, head(number, branch), None if before is None else head(before), confirmed)


def test_the_newest_head_is_on_record(heads: LedgerHeads) -> None:
    assert heads.newest() == {}
    assert heads.note([], "r") == []
    assert heads.note([told(0), told(3), Told("b" * 32, head(7), None, False), told(4, 3, True)], "r") == []
    assert heads.newest() == {NODE: head(4), "b" * 32: head(7)}
    assert heads.note([told(4, 4, True)], "r") == []


@pytest.mark.parametrize(
    ("one", "alarm", "newest"),
    [
        # On record: line 10. (told, before, confirmed, branch)
        (told(11, 10, True), None, 11),
        (told(10, 10, True), None, 10),
        (told(9, 8), None, 10),  # overtaken by another run's reply
        (told(9, 9, True), None, 10),
        (told(9), None, 10),
        (told(7, 8), False, 10),
        (told(9, 10), False, 10),
        (told(8, 8, branch="x"), False, 10),
        (told(10, branch="x"), False, 10),
        (told(10, 10, branch="x"), False, 10),
        (told(9, 10, True), True, 9),
        (told(10, 10, True, "x"), True, "x"),
        (told(7, 8, True), False, 10),  # it confirmed an older record
    ],
)
def test_what_is_a_mismatch(heads: LedgerHeads, one: Told, alarm: bool | None, newest: int | str) -> None:
    heads.note([told(10)], "before")
    found = heads.note([one], "now")
    assert [(node, m.expected, m.told, m.settled) for node, m in found] == (
        [] if alarm is None else [(NODE, str(head(10)), str(one.head), alarm)]
    )
    assert heads.newest() == {NODE: head(10, newest) if isinstance(newest, str) else head(newest)}
    # Said once, kept for good.
    assert heads.note([one], "again") == []


def test_a_record_that_went_back_is_no_alarm_for_what_was_on_its_way(heads: LedgerHeads) -> None:
    """Two runs prepare a node whose admin accepted the loss of lines; one of them is heard late."""
    heads.note([told(100)], "r1")
    assert [m.settled for _, m in heads.note([told(51, 100, True), told(52, 51)], "r2")] == [True]
    assert heads.note([told(51, 100, True)], "r3") == [] and heads.newest() == {NODE: head(52)}


@pytest.mark.parametrize("seed", range(40))
def test_runs_that_overtake_each_other(heads: LedgerHeads, seed: int) -> None:
    """A node with a real history answers several runs at once; what it says arrives in any order."""
    rng = random.Random(seed)
    lines, under_way, newest = 0, [], 0
    for _ in range(60):
        act = rng.random()
        if act < 0.4:
            # A request leaves, naming what is on record; the node answers at once.
            before = heads.newest().get(NODE)
            assert before is None or before == head(before.number)
            lines += rng.random() < 0.6
            under_way.append(Told(NODE, head(lines), before, rng.random() < 0.5))
        elif under_way:
            arrived = under_way.pop(rng.randrange(len(under_way)))
            assert heads.note([arrived], f"r{rng.randrange(3)}") == []
            newest = max(newest, arrived.head.number)
            assert heads.newest() == {NODE: head(newest)}
        if act > 0.97 and newest:
            # Rolled back: the next request is answered with less, and says so.
            before = heads.newest()[NODE]
            back = rng.randrange(newest)
            assert len(heads.note([Told(NODE, head(back), before, False)], "r")) <= 1
            assert any(m["told"] == str(head(back)) for m in stored(heads)[NODE]["mismatches"])
            assert heads.newest() == {NODE: before}


def stored(heads: LedgerHeads) -> dict:
    return json.loads(heads._path.read_bytes())


def test_what_is_kept_of_mismatches_has_a_bound(heads: LedgerHeads) -> None:
    heads.note([told(1000)], "r")
    for number in range(300):
        assert len(heads.note([told(number, 1000)], "r")) == 1
    kept = [mismatch["told"] for mismatch in stored(heads)[NODE]["mismatches"]]
    assert kept == [str(head(number)) for number in range(280, 300)]


def test_processes_do_not_lose_each_others_heads(tmp_path: Path) -> None:
    path = tmp_path / "heads.json"
    script = (
        "import sys; from pathlib import Path; from fedward_common.chain import Head\n"
        "from fedward_server.ledger_heads import LedgerHeads, Told\n"
        "heads, me = LedgerHeads(Path(sys.argv[1])), sys.argv[2]\n"
        "for i in range(1, 61): assert not heads.note([Told(me, Head(i, 'a' * 64), None, False)], me)\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", script, str(path), f"{i}" * 32]) for i in range(4)]
    assert [one.wait(timeout=100) for one in running] == [0] * 4
    assert LedgerHeads(path).newest() == {f"{i}" * 32: Head(60, "a" * 64) for i in range(4)}


def test_a_crash_leaves_the_old_record(heads: LedgerHeads, monkeypatch: pytest.MonkeyPatch) -> None:
    heads.note([told(1)], "r")

    def broken(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", broken)
        with pytest.raises(OSError, match="No space"):
            heads.note([told(2)], "r")
    assert heads.newest() == {NODE: head(1)}
    heads.note([told(2)], "r")
    assert heads.newest() == {NODE: head(2)}


@pytest.mark.parametrize("text", [b"", b"[]", b'{"a": 1}', b'{"a": {"head": "1:x", "run": "r", "time": "2026-01-01"}}'])
def test_a_file_that_cannot_be_read(heads: LedgerHeads, tmp_path: Path, text: bytes) -> None:
    (tmp_path / "ledger-heads.json").write_bytes(text)
    for act in (heads.newest, lambda: heads.note([told(1)], "r")):
        with pytest.raises(LedgerHeadsError, match=r"ledger-heads\.json: cannot be read.*move it away"):
            act()
    assert (tmp_path / "ledger-heads.json").read_bytes() == text
