"""The ledger: on disk before a release, chained, answered once, whole after any crash."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from fedward_common import chain
from fedward_common.chain import Head
from fedward_common.errors import ConfigError
from fedward_common.privacy.anchor import accept
from fedward_common.privacy.ledger import Ledger, LedgerError, Release, ReleaseRefused, Unit, verify

NODE = "a" * 32
EVENT = '{"kind":"gaussian","noise_multiplier":1.1}'
WHEN = datetime(2026, 3, 1, 12, 0, 0, 123456, UTC)


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def release(round_: int = 1, **more) -> Release:
    fields = {
        "run": "r1", "attempt": 0, "purpose": "train", "dataset": "xray", "unit": Unit.RECORD, "server": "s",
        "event": EVENT, "time": WHEN,
    }  # fmt: skip
    return Release(round=round_, **{**fields, **more})


def lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


@pytest.fixture
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


@pytest.fixture
def six(path: Path) -> Path:
    """Six releases of a node that stopped."""
    ledger = Ledger(path, NODE)
    for number in range(1, 7):
        ledger.append(release(number))
    assert verify(path).problems == []
    return path


def test_a_line_says_all_it_must_and_its_head_is_its_hash(path: Path) -> None:
    ledger = Ledger(path, NODE)
    assert ledger.head() == Head(0, sha(f"fedward privacy ledger 1 of {NODE}".encode()))
    first = release(model="b" * 64, count=3, unit=Unit.PATIENT)
    head = ledger.append(first)
    assert json.loads(path.read_bytes()) == {
        "number": 1, "previous": sha(f"fedward privacy ledger 1 of {NODE}".encode()), "owner": NODE,
        "time": "2026-03-01T12:00:00.123456+00:00", "kind": "release", "run": "r1", "round": 1, "attempt": 0,
        "purpose": "train", "dataset": "xray", "unit": "patient", "server": "s",
        "event": {"kind": "gaussian", "noise_multiplier": 1.1}, "count": 3, "model": "b" * 64,
    }  # fmt: skip
    assert head == ledger.head() == Head(1, sha(path.read_bytes().removesuffix(b"\n")))
    assert path.stat().st_mode & 0o777 == 0o600
    second = ledger.append(release(2))
    assert json.loads(lines(path)[1])["previous"] == head.sha256 and second.number == 2
    assert list(Ledger(path, NODE).releases()) == list(ledger.releases()) == [first, release(2)]
    assert Ledger(path, NODE).head() == second


def test_another_zone_is_the_same_moment(path: Path) -> None:
    from datetime import timezone

    there = WHEN.astimezone(timezone(timedelta(hours=5)))
    Ledger(path, NODE).append(release(time=there))
    assert json.loads(path.read_bytes())["time"] == "2026-03-01T12:00:00.123456+00:00"


def test_the_line_is_synced_and_whole_before_append_returns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(path, NODE)
    synced: list[tuple[str, int]] = []

    def sync(descriptor: int) -> None:
        target = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append((target.name, len([line for line in lines(path) if line.endswith(b"\n")])))

    monkeypatch.setattr(os, "fsync", sync)
    ledger.append(release(1))
    ledger.append(release(2))
    # The folder, too, when the file is new: its name must last.
    assert synced == [(path.name, 1), (path.parent.name, 1), (path.name, 2)]


SPENT = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_ledger import NODE, release
from fedward_common.privacy.ledger import Ledger

ledger = Ledger(Path(sys.argv[1]), NODE)
ledger.append(release(1))
os.kill(os.getpid(), signal.SIGKILL)
print("released")
"""


def test_killed_between_ledger_and_release_the_budget_is_spent(path: Path) -> None:
    command = [sys.executable, "-c", SPENT, str(path), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == -9 and done.stdout == b""
    ledger = Ledger(path, NODE)
    assert list(ledger.releases()) == [release(1)]
    with pytest.raises(ReleaseRefused, match="answers once"):
        ledger.append(release(1))
    ledger.append(release(1, attempt=1))


BUSY = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_ledger import NODE, release
from fedward_common.privacy.ledger import Ledger

ledger = Ledger(Path(sys.argv[1]), NODE)
first = sum(1 for _ in ledger.releases())
for number in range(first, 1_000_000):
    ledger.append(release(number))
    print(number, flush=True)
"""


def test_nothing_was_released_that_is_not_in_the_ledger_whenever_it_is_killed(path: Path) -> None:
    released: set[int] = set()
    for _ in range(3):
        command = [sys.executable, "-c", BUSY, str(path), str(Path(__file__).parent)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as guard:
            assert guard.stdout is not None
            released.add(int(guard.stdout.readline()))
            time.sleep(0.05)
            guard.kill()
            released |= {int(line) for line in guard.stdout if line.endswith(b"\n")}
    ledger = Ledger(path, NODE)
    counted = [one.round for one in ledger.releases()]
    assert len(released) > 3 and released <= set(counted)
    assert counted == list(range(len(counted)))
    # At most one for each kill was written down and not told of.
    assert len(counted) <= len(released) + 3
    ledger.append(release(len(counted)))
    assert verify(path).problems == []


@pytest.mark.parametrize("step", ["write", "fsync"])
@pytest.mark.parametrize("part", [0, 1, 200, 10_000])
def test_a_failure_of_the_disk_stops_the_release(
    path: Path, monkeypatch: pytest.MonkeyPatch, step: str, part: int
) -> None:
    ledger = Ledger(path, NODE)
    ledger.append(release(1))
    write = os.write
    size = len(path.read_bytes())

    def broken(descriptor: int, data: bytes = b"") -> int:
        if data:
            write(descriptor, data[:part])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, step, broken)
        with pytest.raises(LedgerError, match=r"ledger\.jsonl.*No space left.*Nothing leaves"):
            ledger.append(release(2))
    whole = step == "fsync" or path.stat().st_size > size + 250
    if whole:
        # It may be on the disk, so it counts.
        with pytest.raises(ReleaseRefused):
            ledger.append(release(2))
    else:
        ledger.append(release(2))
    ledger.append(release(3))
    assert [one.round for one in ledger.releases()] == [1, 2, 3]
    assert list(Ledger(path, NODE).releases()) == list(ledger.releases())
    report = verify(path)
    assert report.problems == [] and report.torn == (step == "write" and 0 < part < 250)


def test_a_ledger_that_cannot_be_read_opens_for_nobody(tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").mkdir()
    with pytest.raises(LedgerError, match="cannot be read"):
        Ledger(tmp_path / "ledger.jsonl", NODE)
    with pytest.raises(LedgerError, match="cannot be read or written"):
        Ledger(tmp_path / "none" / "ledger.jsonl", NODE).append(release())


def test_one_answer_for_a_question(path: Path) -> None:
    ledger = Ledger(path, NODE)
    ledger.append(release(3))
    later = release(3, server="other", event='{"kind":"x"}', unit=Unit.SITE, time=WHEN + timedelta(1))
    for again in (release(3), later):
        with pytest.raises(ReleaseRefused, match=r"round = 3, attempt = 0.*'xray'.*'train' of run r1.*answers once"):
            ledger.append(again)
    for other in (
        release(4), release(3, attempt=1), release(3, purpose="evaluate"), release(3, dataset="ct"),
        release(3, run="r2"),
    ):  # fmt: skip
        ledger.append(other)
    assert sum(1 for _ in ledger.releases()) == 6
    with pytest.raises(ReleaseRefused):
        Ledger(path, NODE).append(release(3, attempt=1))


def test_no_model_is_answered_twice(path: Path) -> None:
    ledger = Ledger(path, NODE)
    ledger.append(release(1, model="c" * 64))
    for where in ({"round_": 2}, {"round_": 1, "attempt": 1}, {"round_": 9, "run": "r2"}):
        with pytest.raises(ReleaseRefused, match=r"model = cccc.*round 1 attempt 0 of run r1.*answered twice"):
            ledger.append(release(model="c" * 64, **where))
    # A model that was trained may be evaluated, and on another data set; "" is no model.
    ledger.append(release(2, purpose="evaluate", model="c" * 64))
    ledger.append(release(2, dataset="ct", model="c" * 64))
    ledger.append(release(2))
    ledger.append(release(3))
    with pytest.raises(ReleaseRefused, match="answered twice"):
        Ledger(path, NODE).append(release(4, model="c" * 64))


def test_a_rule_is_asked_with_all_before_and_nothing_is_written_if_it_forbids(path: Path) -> None:
    ledger = Ledger(path, NODE)
    ledger.append(release(1))
    seen: list[Sequence[Release]] = []

    def rule(releases: Sequence[Release]) -> str | None:
        seen.append(list(releases))
        return "no more" if len(releases) == 2 else None

    ledger.append(release(2), rule)
    before = path.read_bytes()
    with pytest.raises(ReleaseRefused, match=r"^no more$"):
        ledger.append(release(3), rule)
    assert path.read_bytes() == before and seen == [[release(1)], [release(1), release(2)]]


def test_threads_cannot_share_the_last_of_the_budget(path: Path, quick_disk: None) -> None:
    ledger = Ledger(path, NODE)

    def rule(releases: Sequence[Release]) -> str | None:
        full = len(releases) >= 20
        time.sleep(0.0005)
        return "full" if full else None

    refused = []

    def work(number: int) -> None:
        for round_ in range(10):
            try:
                ledger.append(release(round_, run=f"r{number}"), rule)
            except ReleaseRefused:
                refused.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(lines(path)) == 20 and len(refused) == 60
    assert verify(path).problems == []


def test_nothing_is_read_again_when_a_line_is_written(six: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(six, NODE)
    monkeypatch.setattr(chain, "forwards", None)
    monkeypatch.setattr(chain, "backwards", None)
    for number in range(10, 20):
        ledger.append(release(number))
    monkeypatch.undo()
    assert len(list(Ledger(six, NODE).releases())) == 16


def changed(number: int, old: bytes, new: bytes) -> Callable[[list[bytes]], list[bytes]]:
    def change(all_: list[bytes]) -> list[bytes]:
        assert old in all_[number - 1]
        return [*all_[: number - 1], all_[number - 1].replace(old, new, 1), *all_[number:]]

    return change


TAMPERING: dict[str, tuple[Callable[[list[bytes]], list[bytes]], str]] = {
    "a value changed": (changed(3, b'"count": 1', b'"count": 2'), "line 4 "),
    "the noise raised": (changed(2, b"1.1", b"9.1"), "line 3 "),
    "the owner changed": (changed(1, b"aaaa", b"bbbb"), "line 1 "),
    "a space inserted": (changed(4, b"{", b" {"), "line 5 "),
    "made no JSON": (changed(3, b"{", b"["), "before line 4 "),
    "the last line of another form": (changed(6, b'"record"', b'"recodr"'), "line 6 "),
    "the last line of another kind": (changed(6, b'"release"', b'"nothing"'), "line 6 "),
    "the last line of another owner": (changed(6, b"aaaa", b"bbbb"), "line 6 "),
    "the last line without a time": (changed(6, b'"time"', b'"tome"'), "line 6 "),
    "a line removed": (lambda all_: all_[:2] + all_[3:], "line 4 "),
    "the first line removed": (lambda all_: all_[1:], "line 2 "),
    "two lines swapped": (lambda all_: [*all_[:2], all_[3], all_[2], *all_[4:]], "line 4 "),
    "a line twice": (lambda all_: [*all_[:4], all_[3], *all_[4:]], "line 4 "),
    "an invented line": (
        lambda all_: [*all_[:4], all_[3].replace(b'"number": 4', b'"number": 5'), *all_[4:]],
        "line 5 ",
    ),
    "an empty line": (lambda all_: [*all_[:4], b"\n", *all_[4:]], "before line 5 "),
    "two lines made one": (lambda all_: [*all_[:3], all_[3][:-1], *all_[4:]], "before line 6 "),
}


@pytest.mark.parametrize("name", TAMPERING)
def test_tampering_shows_where_it_was_done_and_the_ledger_stays_shut(six: Path, name: str) -> None:
    change, where = TAMPERING[name]
    six.write_bytes(b"".join(change(lines(six))))
    problems = verify(six).problems
    assert problems and where in problems[0]
    with pytest.raises(LedgerError, match="fedward node ledger accept"):
        Ledger(six, NODE)


def chained_anew(entries: list[dict[str, Any]], first: str) -> bytes:
    """What somebody with the file and this source can do."""
    done: list[bytes] = []
    for entry in entries:
        previous = sha(done[-1]) if done else first
        done.append(json.dumps({**entry, "previous": previous}).encode())
    return b"".join(line + b"\n" for line in done)


def test_a_chain_made_anew_has_a_gap_or_another_beginning(six: Path) -> None:
    entries = [json.loads(line) for line in lines(six)]
    first = entries[0]["previous"]
    six.write_bytes(chained_anew(entries, first))
    assert verify(six).problems == []
    six.write_bytes(chained_anew([*entries[:3], *entries[4:]], first))
    assert verify(six).problems[0].endswith("comes right behind line 3: lines were removed, inserted or swapped")
    six.write_bytes(chained_anew(entries[2:], first))
    assert verify(six).problems[0].endswith("the ledger does not begin here: lines are missing before it")
    six.write_bytes(chained_anew(entries, "0" * 64))
    assert "line 1 (byte 0): does not begin the ledger" in verify(six).problems[0]
    # Numbered anew as well, nothing but a head tells it.
    six.write_bytes(chained_anew([{**entry, "number": number} for number, entry in enumerate(entries[2:], 1)], first))
    assert verify(six).problems == []


def test_a_cut_at_the_end_is_told_by_a_remembered_head_alone(six: Path) -> None:
    head = Ledger(six, NODE).head()
    assert verify(six, {"a friend": head}).problems == []
    six.write_bytes(b"".join(lines(six)[:4]))
    assert verify(six).problems == []
    report = verify(six, {"a friend": head})
    assert report.problems == [
        "the ledger ends at line 4, but a friend is of line 6: lines are missing at the end"
    ] and report.missing == {"a friend": head}
    forged = Ledger(six, NODE)
    for number in (7, 8, 9):
        forged.append(release(number))
    assert "line 6 is not the line of a friend" in verify(six, {"a friend": head}).problems[0]
    six.unlink()
    assert "ends at line 0, but a friend is of line 6" in verify(six, {"a friend": head}).problems[0]


def test_a_line_cut_off_by_a_crash_is_sealed_by_the_next(six: Path) -> None:
    data = six.read_bytes()
    whole = len(b"".join(lines(six)[:5]))
    for size in range(whole + 1, len(data) - 1, 31):
        six.write_bytes(data[:size])
        report = verify(six)
        assert (report.problems, report.torn_end, len(report.releases)) == ([], size - whole, 5)
        # Its release did not leave, so the question is open still.
        Ledger(six, NODE).append(release(6))
        report = verify(six)
        assert (report.problems, report.torn, len(report.releases)) == ([], 1, 6)
        after = six.read_bytes()
        for tampered in (after[:whole] + after[size + 1 :], after[:whole] + b"x" + after[whole + 1 :]):
            six.write_bytes(tampered)
            assert "torn bytes that line 6 names" in verify(six).problems[0]


def test_a_line_that_lacks_only_its_newline_counts(six: Path) -> None:
    six.write_bytes(six.read_bytes()[:-1])
    ledger = Ledger(six, NODE)
    with pytest.raises(ReleaseRefused):
        ledger.append(release(6))
    ledger.append(release(7))
    report = verify(six)
    assert (report.problems, report.torn, report.lines) == ([], 0, 7)


def test_two_crashes_in_a_row(six: Path) -> None:
    six.write_bytes(six.read_bytes() + b'{"number": 7, "prev\n{"number"')
    Ledger(six, NODE).append(release(7))
    report = verify(six)
    assert (report.problems, report.torn, report.lines) == ([], 1, 7)


def test_a_crash_in_the_first_line(path: Path) -> None:
    path.write_bytes(b'{"number": 1, "prev')
    Ledger(path, NODE).append(release(1))
    assert (verify(path).problems, verify(path).torn) == ([], 1)


@pytest.mark.parametrize("harm", ["deleted", "cut", "rolled back", "grown"])
def test_a_file_that_changes_under_a_running_guard(six: Path, harm: str) -> None:
    ledger = Ledger(six, NODE)
    if harm == "deleted":
        six.unlink()
    elif harm == "cut":
        six.write_bytes(six.read_bytes()[:-3])
    elif harm == "rolled back":
        six.write_bytes(b"".join(lines(six)[:3]))
    else:
        # Another writer, whatever it is: what it spent is counted from then on.
        Ledger(six, NODE).append(release(7))
    with pytest.raises(LedgerError, match=r"cannot be read or written"):
        ledger.append(release(8))
    assert (not six.exists()) == (harm == "deleted")
    if harm == "grown":
        ledger.append(release(8))
        assert [one.round for one in ledger.releases()] == [1, 2, 3, 4, 5, 6, 7, 8]
        return
    # It does not begin anew on what is left, however often it is asked.
    for _ in range(2):
        with pytest.raises(LedgerError, match="the last one written is of line 6"):
            ledger.append(release(8))


def test_a_ledger_of_another_node(six: Path) -> None:
    with pytest.raises(LedgerError, match=r"is the ledger of 'aaaa.*not of 'b'"):
        Ledger(six, "b")


def test_which_heads_it_holds(six: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(six, NODE)
    heads = [Head(number, sha(line[:-1])) for number, line in enumerate(lines(six), 1)]
    monkeypatch.setattr(chain, "forwards", None)
    assert all(ledger.holds(head) for head in heads)
    assert ledger.holds(Head(0, sha(f"fedward privacy ledger 1 of {NODE}".encode())))
    assert not ledger.holds(Head(3, heads[3].sha256)) and not ledger.holds(Head(7, "0" * 64))
    assert not ledger.holds(Head(0, "0" * 64))
    six.unlink()
    assert not ledger.holds(heads[5])


def test_an_accepted_ledger_opens_and_what_was_accepted_cannot_change(six: Path) -> None:
    whole = lines(six)
    lost = Head(6, sha(whole[5][:-1]))
    # The fourth line changed, the last one gone.
    six.write_bytes(b"".join(changed(4, b"1.1", b"8.1")(whole)[:5]))
    with pytest.raises(LedgerError):
        Ledger(six, NODE)
    accept(six, NODE, "Ada", "disk broke", [lost])
    ledger = Ledger(six, NODE)
    assert ledger.holds(lost) and [one.round for one in ledger.releases()] == [1, 2, 3, 4, 5]
    ledger.append(release(6))
    report = verify(six, {"server": lost})
    assert report.problems == [] and report.missing == {} and len(report.settled) == 1
    (one,) = report.accepted
    assert (one.who, one.why, one.expected) == ("Ada", "disk broke", (lost,))
    accepted = lines(six)
    for number, old, new in ((2, b"1.1", b"7.1"), (4, b"8.1", b"1.1"), (6, b"Ada", b"Eve"), (6, b"aaaa", b"bbbb")):
        six.write_bytes(b"".join(changed(number, old, new)(accepted)))
        assert any(f"line {6 if number < 6 else 7} " in problem for problem in verify(six).problems)
        with pytest.raises(LedgerError):
            Ledger(six, NODE)


def test_a_lost_ledger_begins_again_with_the_decision(path: Path) -> None:
    lost = Head(40, "d" * 64)
    head = accept(path, NODE, "Ada", "stolen", [lost])
    assert head.number == 1 and verify(path, {"server": lost}).problems == []
    Ledger(path, NODE).append(release(1))
    assert verify(path).problems == []


def test_what_was_torn_or_is_another_nodes_can_be_accepted(six: Path) -> None:
    data = six.read_bytes()
    for left in (data[:-40], b"rubbish", b"rubbish\n", data[:-1], data + b"\n\n"):
        six.write_bytes(left)
        accept(six, "b", "Ada", "took over")
        assert verify(six).problems == []
        Ledger(six, "b").append(release(9))
        assert verify(six).problems == [] and verify(six).owner == "b"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("run", ""), ("run", 1), ("purpose", ""), ("dataset", None), ("server", ""), ("round_", -1), ("round_", True),
        ("attempt", -1), ("attempt", 1.0), ("count", 0), ("unit", "record"), ("model", "C" * 64), ("model", "c" * 63),
        ("model", None), ("time", datetime(2026, 3, 1)), ("time", "2026-03-01"), ("event", "{}"), ("event", "[]"),
        ("event", '{"kind": "spaced"}'), ("event", '{"kind":1}'), ("event", '{"z":1,"kind":"x"}'), ("event", "no JSON"),
        ("event", '{"kind":"x","z":NaN}'), ("event", None), ("event", "[" * 5000),
    ],
)  # fmt: skip
def test_a_release_of_another_form(field: str, value: object) -> None:
    with pytest.raises(LedgerError, match=f"^{field.rstrip('_')} = "):
        release(**{field: value})


def test_what_a_server_wrote_does_nothing_to_the_terminal(path: Path) -> None:
    strange = release(run="\x1b[2J\u202e\ud800", event='{"kind":"ü\\u001b"}')
    Ledger(path, NODE).append(strange)
    assert path.read_bytes().isascii() and b"\x1b" not in path.read_bytes()
    assert list(Ledger(path, NODE).releases()) == [strange]


@pytest.mark.parametrize("text", ["", "9", "9:abc", "9:" + "A" * 64, "-1:" + "a" * 64, "01:" + "a" * 64])
def test_a_head_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match="NUMBER:HASH"):
        Head.parse(text)


def test_a_head_as_text() -> None:
    for number in (0, 1, 40):
        assert Head.parse(f" {Head(number, 'a' * 64)}\n") == Head(number, "a" * 64)


def test_the_end_of_a_long_log(path: Path, quick_disk: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(path, NODE)
    for number in range(60):
        ledger.append(release(number, purpose="é" * (1 + number % 50)))
    path.write_bytes(path.read_bytes() + b"torn")
    for block in (1, 7, 1000, 1 << 16):
        monkeypatch.setattr(chain, "_BLOCK", block)
        with path.open("rb") as file:
            assert [line.entry["round"] for line in chain.backwards(file.fileno())] == list(range(59, -1, -1))
        assert chain.find_end(path, "first").head == ledger.head()


def test_releases_are_a_snapshot(path: Path) -> None:
    ledger = Ledger(path, NODE)
    ledger.append(release(1))
    before = ledger.releases()
    ledger.append(release(2))
    assert [one.round for one in before] == [1]
    assert replace(release(1), time=WHEN + timedelta(1)) != release(1)


def test_writing_is_quick_however_long_the_ledger(path: Path, quick_disk: None) -> None:
    ledger = Ledger(path, NODE)
    for number in range(3000):
        ledger.append(release(number))
    ledger = Ledger(path, NODE)
    seconds = []
    for number in range(3000, 3100):
        started = time.thread_time()
        ledger.append(release(number, model=f"{number:064x}"))
        seconds.append(time.thread_time() - started)
    assert sorted(seconds)[50] < 0.005
