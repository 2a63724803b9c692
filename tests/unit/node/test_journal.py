"""The journal: every line on disk and chained; whatever is done to it shows."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fedward_client.cli import app
from fedward_client.journal import Journal, JournalError, Note
from fedward_client.journal_lines import tail
from fedward_client.journal_verify import Report, verify
from fedward_client.paths import NodePaths
from fedward_client.traffic import Traffic
from fedward_common.chain import Head
from fedward_common.errors import ConfigError
from typer.testing import CliRunner

NODE = "a" * 32


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Node:
    """A node's journal with a link that only counts."""

    def __init__(self, folder: Path) -> None:
        self.paths = NodePaths(folder)
        self.start()

    def start(self) -> None:
        """A new guard on the same files."""
        self.traffic = Traffic()
        self.journal = Journal(self.paths.journal, self.paths.sent, NODE, self.traffic)
        self.journal.opened()

    def poll(self) -> None:
        self.traffic.call("PullMessages", 30)
        self.traffic.headers("PullMessages", 200)

    def send(self, round_: int, size: int = 1000, run: str = "r1", **more) -> None:
        """A message that leaves whole."""
        note = Note(run, round_, 0, "train", "answered", **more)
        self.journal.message(note, size, sha(b"%d" % round_))
        self.traffic.call("PushMessages", 100, 100)
        self.traffic.call("PushObject", size - 100 + 36, size - 100)

    def verify(self, head: str | None = None) -> Report:
        return verify(self.paths.journal, self.paths.sent, Head.parse(str(head)) if head else None)

    @property
    def lines(self) -> list[bytes]:
        return self.paths.journal.read_bytes().splitlines(keepends=True)

    @lines.setter
    def lines(self, lines: list[bytes]) -> None:
        self.paths.journal.write_bytes(b"".join(lines))


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some tests write hundreds of lines."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.fixture
def stopped(node: Node) -> Node:
    """Nine lines: opened, four messages, a count, two messages, closed."""
    for round_ in range(1, 5):
        node.poll()
        node.send(round_)
    node.poll()
    node.journal.control()
    node.send(5, run="r2")
    node.send(6, run="r2")
    node.journal.closed()
    assert node.verify().problems == []
    return node


def test_a_message_says_all_it_must(node: Node) -> None:
    node.poll()
    node.send(1, 4000, tensors=("delta",), metrics=("loss",), bundle="b" * 64, config="c" * 64, protections=("gate",))
    node.send(2, rule="max_epochs = 5\nnext", verdict="max_epochs = 5\nnext")
    opened, first, second = (json.loads(line) for line in node.lines)
    assert opened["kind"] == "opened" and opened["node"] == NODE and opened["control"] == {}
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "number": 2, "previous": sha(node.lines[0][:-1]), "kind": "message", "run": "r1", "round": 1, "attempt": 0,
        "purpose": "train", "outcome": "answered", "rule": "", "incident": "", "tensors": ["delta"],
        "metrics": ["loss"], "bundle": "b" * 64, "config": "c" * 64, "protections": ["gate"], "verdict": "allowed",
        "bytes": 4000, "sha256": sha(b"1"), "control": {"PullMessages": {"calls": 1, "bytes": 230}}, "withheld": {},
    }  # fmt: skip
    assert second["verdict"] == "max_epochs = 5\nnext"
    # What the first message took beyond its own bytes: the server's session id, twice 0 bytes of the message.
    assert second["control"] == {"PushMessages": {"calls": 1, "bytes": 0}, "PushObject": {"calls": 1, "bytes": 36}}
    assert node.paths.journal.stat().st_mode & 0o777 == 0o600


def test_the_chain_by_hand(stopped: Node) -> None:
    previous = sha(f"fedward journal 1 of node {NODE}".encode())
    for number, line in enumerate(stopped.lines, 1):
        entry = json.loads(line)
        assert (entry["number"], entry["previous"]) == (number, previous)
        previous = sha(line.removesuffix(b"\n"))
    last = stopped.verify().last
    assert last is not None and str(last.head) == f"9:{previous}"


def test_the_line_is_synced_before_message_returns(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: seen.append(len(node.lines)))
    node.send(1)
    node.send(2)
    assert seen == [2, 3]


def test_the_sums(stopped: Node) -> None:
    report = stopped.verify()
    assert {name: (tally.count, tally.bytes) for name, tally in report.runs.items()} == {
        "r1": (4, 4000),
        "r2": (2, 2000),
    }
    assert (report.purposes["train"].count, report.messages) == (6, 6000)
    calls = {name: (tally.count, tally.bytes) for name, tally in report.control.items()}
    assert calls == {"PullMessages": (5, 5 * 230), "PushMessages": (6, 0), "PushObject": (6, 6 * 36)}
    assert report.total == 6000 + 5 * 230 + 6 * 36
    assert report.sent is not None and (report.sent.total, report.sent.unsent) == (report.total, 0)
    assert report.killed == report.torn == report.torn_end == report.withheld == 0


def test_repeated_calls_and_bytes_that_never_left_are_in_the_sums(node: Node) -> None:
    node.journal.message(Note("r", 1, 0, "train", "answered"), 1000, "m1")
    node.traffic.call("PushMessages", 100, 100)
    node.traffic.call("PushObject", 636, 600)
    node.traffic.call("PushObject", 636)
    node.journal.control()
    report = node.verify()
    assert report.problems == [] and report.sent is not None
    assert (report.sent.total, report.sent.unsent) == (1372, 300)
    node.traffic.withhold("m1", 300)
    node.journal.closed()
    report = node.verify()
    assert report.problems == [] and report.sent is not None
    assert (report.withheld, report.total, report.sent.total, report.sent.unsent) == (300, 1372, 1372, 0)


def test_nothing_sent_nothing_written(node: Node) -> None:
    node.journal.control()
    assert len(node.lines) == 1


def byte_changed(lines: list[bytes]) -> list[bytes]:
    return [*lines[:3], lines[3].replace(b'"bytes": 1000', b'"bytes": 1001'), *lines[4:]]


TAMPERING: dict[str, tuple[Callable[[list[bytes]], list[bytes]], str]] = {
    "a byte changed": (byte_changed, "line 5 "),
    "a name changed": (lambda lines: [*lines[:2], lines[2].replace(b"answered", b"refused!"), *lines[3:]], "line 4 "),
    "the node changed": (lambda lines: [lines[0].replace(b"aaaa", b"bbbb"), *lines[1:]], "line 1 "),
    "a space inserted": (lambda lines: [*lines[:4], b" " + lines[4], *lines[5:]], "line 6 "),
    "made no JSON": (lambda lines: [*lines[:3], lines[3].replace(b"{", b"[", 1), *lines[4:]], "before line 5 "),
    "a line removed": (lambda lines: lines[:3] + lines[4:], "line 5 "),
    "the first line removed": (lambda lines: lines[1:], "line 2 "),
    "the first lines removed": (lambda lines: lines[5:], "line 6 "),
    "two lines swapped": (lambda lines: [*lines[:2], lines[3], lines[2], *lines[4:]], "line 4 "),
    "a line twice": (lambda lines: [*lines[:4], lines[3], *lines[4:]], "line 4 "),
    "an invented line": (
        lambda lines: [*lines[:4], lines[3].replace(b'"number": 4', b'"number": 5'), *lines[4:]],
        "line 5 ",
    ),
    "an empty line": (lambda lines: [*lines[:4], b"\n", *lines[4:]], "before line 5 "),
    "two lines made one": (lambda lines: [*lines[:3], lines[3][:-1], *lines[4:]], "before line 6 "),
    "cut off at the end": (lambda lines: lines[:-1], "ends at line 8"),
    "cut off in the middle": (lambda lines: lines[:3], "ends at line 3"),
    "the last line cut": (lambda lines: [*lines[:-1], lines[-1][:-9]], "ends at line 8"),
    "the last line changed": (lambda lines: [*lines[:-1], lines[-1].replace(b"closed", b"clozed")], "line 9 "),
    "everything gone": (lambda lines: [], "ends at line 0"),
}


@pytest.mark.parametrize("name", TAMPERING)
def test_tampering_shows_where_it_was_done(stopped: Node, name: str) -> None:
    change, where = TAMPERING[name]
    stopped.lines = change(stopped.lines)
    problems = stopped.verify().problems
    assert problems and where in problems[0]


def test_a_file_that_is_gone_is_missed(stopped: Node) -> None:
    stopped.paths.journal.unlink()
    assert "ends at line 0" in stopped.verify().problems[0]


def rewritten(lines: list[bytes], start: int) -> list[bytes]:
    """What somebody with the file and this source can do: change a line and chain all that follow anew."""
    entries = [json.loads(line) for line in lines]
    entries[start]["bytes"] = 1
    entries[start]["run"] = "innocent"
    for number in range(start + 1, len(entries)):
        entries[number]["previous"] = sha(json.dumps(entries[number - 1]).encode())
    return [json.dumps(entry).encode() + b"\n" for entry in entries]


def test_a_rewritten_journal_is_told_by_a_remembered_head_and_by_the_links_total(stopped: Node) -> None:
    last = stopped.verify().last
    assert last is not None
    stopped.lines = rewritten(stopped.lines, 2)
    assert any("line 9 is not the line of the remembered head" in text for text in stopped.verify(last.head).problems)
    problems = stopped.verify().problems
    assert any("line 9 is not the line of the link's total" in problem for problem in problems)
    assert any("accounts for 6367 bytes, the link counted 7366" in problem for problem in problems)
    # Who can change that file too is told by the head alone.
    sent = json.loads(stopped.paths.sent.read_text())
    stopped.paths.sent.write_text(json.dumps({**sent, "total": 6367, "sha256": sha(stopped.lines[-1][:-1])}))
    assert stopped.verify().problems == []
    assert stopped.verify(last.head).problems


def test_a_chain_made_anew_without_a_line_has_a_gap(stopped: Node) -> None:
    stopped.lines = rewritten(stopped.lines[:3] + stopped.lines[4:], 2)
    assert "line 5" in stopped.verify().problems[0] and "comes right behind line 3" in stopped.verify().problems[0]


def test_a_head_still_fits_when_the_journal_has_grown(stopped: Node) -> None:
    last = stopped.verify().last
    assert last is not None
    stopped.start()
    stopped.send(7)
    stopped.journal.closed()
    assert stopped.verify(last.head).problems == []
    stopped.lines = stopped.lines[:8]
    assert any("the remembered head is of line 9" in problem for problem in stopped.verify(last.head).problems)


@pytest.mark.parametrize("text", ["", "9", "9:abc", "00:" + "a" * 64, "9:" + "A" * 64, "-1:" + "a" * 64])
def test_a_head_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match="NUMBER:HASH"):
        Head.parse(text)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"total": "1", "unsent": 0, "number": 1, "sha256": ""}'])
def test_a_total_that_is_broken_or_gone(stopped: Node, text: str) -> None:
    stopped.paths.sent.write_text(text)
    assert "not the link's total" in stopped.verify().problems[0]
    with pytest.raises(JournalError, match="not the link's total"):
        stopped.start()
    stopped.paths.sent.unlink()
    assert "is missing" in stopped.verify().problems[0]


def test_a_cut_at_the_end_stays_visible_after_the_next_start(stopped: Node) -> None:
    stopped.lines = stopped.lines[:6]
    stopped.start()
    stopped.send(7)
    stopped.journal.closed()
    assert any("lines were removed" in problem for problem in stopped.verify().problems)


def test_a_file_that_loses_lines_under_a_running_guard(node: Node) -> None:
    node.send(1)
    node.send(2)
    node.lines = node.lines[:2]
    node.send(3)
    assert "line 4" in node.verify().problems[0]


def test_a_line_cut_off_by_a_crash_is_sealed_by_the_next(node: Node) -> None:
    node.send(1)
    node.send(2)
    files = node.paths.journal.read_bytes(), node.paths.sent.read_bytes()
    whole = len(files[0].rsplit(b"\n", 2)[0]) + 1
    for size in range(whole + 1, len(files[0]), 7):
        node.paths.journal.write_bytes(files[0][:size])
        node.paths.sent.write_bytes(files[1])
        report = node.verify()
        assert (report.problems, report.torn_end, report.lines) == ([], size - whole, 2)
        assert [entry["round"] for entry in tail(node.paths.journal, 9)] == [1]
        node.start()
        node.send(3)
        node.journal.closed()
        report = node.verify()
        assert (report.problems, report.torn, report.killed, report.lines) == ([], 1, 1, 5)
        assert [entry["round"] for entry in tail(node.paths.journal, 9)] == [1, 3]
        # The torn piece is part of the chain: it cannot be changed or taken out.
        data = node.paths.journal.read_bytes()
        for tampered in (data[:whole] + data[size + 1 :], data[:whole] + b"x" + data[whole + 1 :]):
            node.paths.journal.write_bytes(tampered)
            assert "torn bytes that line 3 names" in node.verify().problems[0]


def test_a_line_that_lacks_only_its_newline_counts(node: Node) -> None:
    node.send(1)
    node.paths.journal.write_bytes(node.paths.journal.read_bytes()[:-1])
    assert (node.verify().problems, node.verify().lines) == ([], 2)
    node.start()
    assert (node.verify().problems, node.verify().lines, node.verify().torn) == ([], 3, 0)


def test_two_crashes_in_a_row(node: Node) -> None:
    node.send(1)
    data = node.paths.journal.read_bytes()
    node.paths.journal.write_bytes(data + b'{"number": 3, "prev\n{"number"')
    node.start()
    assert (node.verify().problems, node.verify().torn) == ([], 1)


def test_lines_from_before_the_chain_are_sealed(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").write_text('{"run": "old", "bytes": 40}\n{"run": "older"}\n')
    node = Node(tmp_path)
    node.send(1)
    node.journal.control()
    assert (node.verify().problems, node.verify().torn, node.verify().lines) == ([], 1, 3)
    node.lines = [node.lines[0].replace(b"40", b"41"), *node.lines[1:]]
    assert "torn bytes" in node.verify().problems[0]


def test_what_a_killed_guard_sent_stays_accounted_for(node: Node) -> None:
    node.poll()
    node.journal.control()
    node.send(1)
    node.poll()
    node.send(2)
    # Killed here: the poll after the count is in a line, what came after the last line is not.
    node.poll()
    node.start()
    node.send(3)
    node.journal.closed()
    report = node.verify()
    assert (report.problems, report.killed) == ([], 1)
    assert report.sent is not None and report.total == report.sent.total == 3000 + 2 * 230 + 2 * 36


def test_a_full_disk_stops_the_message_and_loses_no_count(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.poll()
    write = os.write

    def full(descriptor: int, data: bytes) -> int:
        if len(data) < 50:
            raise OSError(28, "No space left on device")
        return write(descriptor, data[:40])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(JournalError, match="No space left"):
            node.journal.message(Note("r", 1, 0, "train", "answered"), 1000, "m")
    node.send(2)
    node.journal.closed()
    report = node.verify()
    assert (report.problems, report.torn, report.runs.keys()) == ([], 1, {"r1"})
    assert report.total == 230 + 1000 + 36


def test_many_threads(node: Node) -> None:
    def work(number: int) -> None:
        for round_ in range(10):
            node.poll()
            node.send(100 * number + round_)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        node.journal.control()
    for thread in threads:
        thread.join()
    node.journal.closed()
    report = node.verify()
    assert report.problems == []
    assert report.sent is not None and report.total == report.sent.total == 80 * (1000 + 36 + 230)
    rounds = sorted(entry["round"] for entry in tail(node.paths.journal, 100))
    assert rounds == [100 * number + round_ for number in range(8) for round_ in range(10)]


def test_the_tail_of_a_long_journal(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(300):
        node.send(number, metrics=("é" * (number % 50),))
        if number % 3 == 0:
            node.journal.control()
    for block in (1, 7, 1000, 1 << 16):
        monkeypatch.setattr("fedward_common.chain._BLOCK", block)
        assert [entry["round"] for entry in tail(node.paths.journal, 3)] == [297, 298, 299]
    assert [entry["round"] for entry in tail(node.paths.journal, 250)] == list(range(50, 300))
    assert len(tail(node.paths.journal, 10_000)) == 300
    assert tail(node.paths.journal, 0) == []
    assert tail(node.paths.root / "none", 5) == []


def command(node: Node, *arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["journal", *arguments, "--dir", str(node.paths.root)])
    return done.exit_code, done.output


def test_show(stopped: Node) -> None:
    code, text = command(stopped, "show", "--last", "3")
    assert code == 0 and text.count("train") == 3 and "1,000" in text and "r2" in text
    assert text.count("allowed") == 3
    last = stopped.verify().last
    assert last is not None and f"head: {last.head}" in text
    assert command(stopped, "show", "--run", "r2")[1].count("train") == 2
    code, text = command(stopped, "show", "--json", "--run", "r1")
    assert [json.loads(line)["round"] for line in text.splitlines()] == [1, 2, 3, 4]


def test_what_a_server_wrote_does_nothing_to_the_terminal(node: Node) -> None:
    node.send(1, run="\x1b[2J\u202e[red]\ud800", verdict="\x9b2J[bold]")
    assert node.paths.journal.read_bytes().isascii() and b"\x1b" not in node.paths.journal.read_bytes()
    node.journal.closed()
    for which in ("show", "verify"):
        code, text = command(node, which)
        assert code == 0
        assert not set(text) & {"\x1b", "\x9b", "\u202e", "\ud800"}
        assert "\\u001b[2J" in text


def test_verify_says_what_is_wrong_and_where(stopped: Node) -> None:
    last = stopped.verify().last
    assert last is not None
    code, text = command(stopped, "verify", "--head", str(last.head))
    assert code == 0 and "intact" in text and f"head: {last.head}" in text and "7,366" in text
    stopped.lines = byte_changed(stopped.lines)
    code, text = command(stopped, "verify")
    assert code == 1 and "wrong: line 5 (byte" in text and "intact" not in text
    assert command(stopped, "verify", "--head", "x")[0] == 1


def test_an_empty_journal(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["journal", "verify", "--dir", str(tmp_path)])
    assert done.exit_code == 0 and "empty" in done.output
    assert CliRunner().invoke(app, ["journal", "show", "--dir", str(tmp_path)]).exit_code == 0


BUSY = """
import sys, threading
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_journal import Node

node = Node(Path(sys.argv[1]))

def work(number):
    for round_ in range(1_000_000):
        node.poll()
        node.send(round_)
        if round_ % 5 == 0:
            node.journal.control()

for number in range(2):
    threading.Thread(target=work, args=(number,)).start()
print("busy", flush=True)
"""


def test_guards_that_are_killed_in_mid_work(tmp_path: Path) -> None:
    for _ in range(3):
        command = [sys.executable, "-c", BUSY, str(tmp_path), str(Path(__file__).parent)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as guard:
            assert guard.stdout is not None and guard.stdout.readline() == b"busy\n"
            time.sleep(0.2)
            guard.kill()
    node = Node(tmp_path)
    node.journal.closed()
    report = node.verify()
    assert (report.problems, report.killed) == ([], 3)
    assert report.runs["r1"].count > 3
