"""`fedward node ledger`: what the site admin sees of it, and decides."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import Result
from fedward_client.commands.ledger import app
from fedward_client.paths import NodePaths
from fedward_common.chain import Head
from fedward_common.errors import FedwardError
from fedward_common.files import Locked, lock_file
from fedward_common.privacy import budget
from fedward_common.privacy.anchor import default_place, read_anchor, write_anchor
from fedward_common.privacy.ledger import Ledger, LedgerError, Release, Unit, verify
from typer.testing import CliRunner

NODE = "a" * 32
EVENT = '{"kind":"gaussian","noise_multiplier":5.0}'


class Node:
    """A node that answered, and stopped."""

    def __init__(self, folder: Path) -> None:
        self.paths = NodePaths(folder)
        fields = ("name", "node_id", "server", "fleet_address", "ca_sha256", "authority")
        self.paths.node.write_text(json.dumps({**dict.fromkeys(fields, "x"), "node_id": NODE}))
        self.path = self.paths.ledger
        self.place = default_place(self.path)
        self.ledger = Ledger(self.path, NODE)

    def answer(self, round_: int, **more) -> None:
        fields = {"run": "r1", "attempt": 0, "purpose": "train", "dataset": "xray", "unit": Unit.RECORD, "server": "s"}
        release = Release(round=round_, event=EVENT, time=datetime(2026, 3, 1, tzinfo=UTC), **{**fields, **more})
        write_anchor(self.place, self.ledger.append(release))

    def command(self, *arguments: str) -> Result:
        return CliRunner().invoke(app, [*arguments, "--dir", str(self.paths.root)])


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setenv("COLUMNS", "200")
    return Node(tmp_path)


@pytest.fixture
def busy(node: Node) -> Node:
    """Two data sets, two units, three runs."""
    for round_ in range(100):
        node.answer(round_, run="r2" if round_ > 70 else "r1")
    node.answer(1, run="r3", unit=Unit.SITE)
    node.answer(2, run="r3", unit=Unit.SITE)
    node.answer(1, dataset="ct")
    return node


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_show(busy: Node) -> None:
    """A hundred Gaussians with z = 5 cost 9.99726 at 1e-5 (published), whoever asked for them."""
    done = busy.command("show")
    assert done.exit_code == 0
    table = rows(done.output)
    assert ["xray", "record", "2", "100", "9.997"] in table
    assert [row[:4] for row in table if "xray" in row or "ct" in row] == [
        ["ct", "record", "1", "1"], ["xray", "record", "2", "100"], ["xray", "site", "1", "2"],
    ]  # fmt: skip
    assert f"head: {busy.ledger.head()}" in done.output


def test_show_asks_the_accountant_once_a_row(busy: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def accountant(events: Sequence[tuple[str, int]], delta: float) -> float:
        asked.append((list(events), delta))
        return 0.5

    monkeypatch.setattr(budget, "accounted", accountant)
    done = busy.command("show", "--json", "--delta", "1e-7")
    assert asked == [([(EVENT, 1)], 1e-7), ([(EVENT, 100)], 1e-7), ([(EVENT, 2)], 1e-7)]
    shown = [json.loads(line) for line in done.output.splitlines()]
    assert shown[1] == {
        "dataset": "xray", "unit": "record", "runs": 2, "releases": 100, "epsilon": 0.5, "delta": 1e-7
    }  # fmt: skip
    assert [(row["dataset"], row["unit"]) for row in shown] == [("ct", "record"), ("xray", "record"), ("xray", "site")]


def test_an_infinite_epsilon_is_no_number_in_json(busy: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "accounted", lambda events, delta: float("inf"))
    assert json.loads(busy.command("show", "--json").output.splitlines()[0])["epsilon"] is None
    assert "inf" in busy.command("show").output


def test_an_empty_ledger(node: Node) -> None:
    assert "Nothing was released" in node.command("show").output
    done = node.command("verify")
    assert (done.exit_code, done.output) == (0, "The ledger is empty.\n")
    assert isinstance(node.command("show", "--delta", "0").exception, FedwardError)


def test_verify(busy: Node) -> None:
    done = busy.command("verify", "--head", str(busy.ledger.head()))
    assert done.exit_code == 0 and "The ledger is intact." in done.output
    assert "103, with 103 releases" in done.output and NODE in done.output
    busy.path.write_bytes(busy.path.read_bytes().replace(b"5.0", b"9.0", 1))
    done = busy.command("verify")
    assert done.exit_code == 1 and "wrong: line 2 (byte" in done.output and "intact" not in done.output
    assert "damaged" in busy.command("show").output
    assert busy.command("verify", "--head", "x").exit_code == 1


def test_verify_compares_with_the_anchor_wherever_it_is(busy: Node, tmp_path: Path) -> None:
    busy.path.write_bytes(b"".join(busy.path.read_bytes().splitlines(keepends=True)[:50]))
    done = busy.command("verify")
    assert done.exit_code == 1 and "the ledger ends at line 50, but the anchor in" in done.output
    elsewhere, config = tmp_path / "elsewhere.json", tmp_path / "node.toml"
    config.write_text(f'[node]\nledger_anchor = "{elsewhere}"\n')
    done = busy.command("verify", "--config", str(config))
    assert done.exit_code == 1 and "is not there, but the ledger has 50 lines" in done.output
    old = read_anchor(busy.place)
    assert busy.command("accept", "--why", "a new place", "--config", str(config)).exit_code == 0
    assert busy.command("verify", "--config", str(config)).exit_code == 0
    assert read_anchor(busy.place) == old
    assert busy.command("verify").exit_code == 1


def test_a_harmed_ledger_is_accepted_by_a_person(busy: Node) -> None:
    before = busy.ledger.head()
    theirs = Head(99, "b" * 64)
    busy.path.write_bytes(b"".join(busy.path.read_bytes().splitlines(keepends=True)[:50]))
    done = busy.command("accept", "--why", "disk\x1b broke", "--who", "Ada", "--expected", str(theirs))
    assert done.exit_code == 0, done.exception
    assert "accepted: the ledger ends at line 50" in done.output
    report = verify(busy.path)
    assert report.problems == [] and report.lines == 51 and report.last is not None
    (decision,) = report.accepted
    assert (decision.who, decision.why, decision.expected) == ("Ada", "disk\x1b broke", (theirs, before))
    anchor = read_anchor(busy.place)
    assert anchor is not None and anchor.head == report.last.head and f"head: {anchor.head}" in done.output
    for which in ("show", "verify"):
        done = busy.command(which)
        assert done.exit_code == 0
        assert f"by Ada: disk\\u001b broke (heads no longer in it: {theirs}, {before})" in done.output
    Ledger(busy.path, NODE)


def test_a_lost_ledger_and_a_broken_anchor_are_accepted(busy: Node) -> None:
    busy.path.unlink()
    assert busy.command("accept", "--why", "lost").exit_code == 0
    assert [line.number for line in [verify(busy.path).last] if line] == [1]
    busy.place.write_text("rubbish")
    assert busy.command("verify").exit_code == 1
    assert busy.command("accept", "--why", "broken").exit_code == 0
    assert busy.command("verify").exit_code == 0


def test_another_nodes_ledger_is_accepted(busy: Node) -> None:
    fields = json.loads(busy.paths.node.read_text())
    busy.paths.node.write_text(json.dumps({**fields, "node_id": "b"}))
    assert "it is the ledger of aaaa" in busy.command("accept", "--why", "joined again").output
    Ledger(busy.path, "b")


def test_nothing_to_accept(busy: Node) -> None:
    before = busy.path.read_bytes()
    done = busy.command("accept", "--why", "bored")
    assert isinstance(done.exception, LedgerError) and "nothing to accept" in str(done.exception)
    assert busy.path.read_bytes() == before
    assert busy.command("accept").exit_code == 2


def test_not_while_a_guard_runs(busy: Node) -> None:
    busy.path.unlink()
    with lock_file(busy.paths.lock):
        done = busy.command("accept", "--why", "lost")
    assert isinstance(done.exception, Locked) and not busy.path.exists()
