"""The head of a ledger elsewhere: what was deleted, edited or rolled back is told, with the way out."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from fedward_common.chain import Head
from fedward_common.privacy import anchor as anchors
from fedward_common.privacy.anchor import Anchor, accept, compare, default_place, local, read_anchor, write_anchor
from fedward_common.privacy.ledger import Ledger, LedgerError, Release, ReleaseRefused, Unit, verify

NODE = "a" * 32
WHEN = datetime(2026, 3, 1, 12, tzinfo=UTC)


def release(round_: int) -> Release:
    event = '{"kind":"gaussian","noise_multiplier":1.1}'
    return Release("r1", round_, 0, "train", "xray", Unit.SITE, "s", event, time=WHEN)


class Node:
    """A guard that does as it should: ledger, anchor, release; and a server that remembers what came with a reply."""

    def __init__(self, folder: Path) -> None:
        self.path, self.place = folder / "state" / "ledger.jsonl", folder / "elsewhere" / "anchor.json"
        for one in (self.path, self.place):
            one.parent.mkdir(exist_ok=True)
        self.server: Anchor | None = None
        self.start()

    def start(self) -> None:
        problem = self.compare()
        if problem is not None:
            raise LedgerError(problem)
        self.ledger = Ledger(self.path, NODE)
        write_anchor(self.place, self.ledger.head())

    def answer(self, round_: int) -> None:
        head = self.ledger.append(release(round_))
        write_anchor(self.place, head)
        self.server = Anchor.from_json(Anchor(head).to_json())

    def compare(self) -> str | None:
        theirs = {"the server's anchor": self.server} if self.server else {}
        return compare(self.path, {**local(self.place), **theirs})


@pytest.fixture
def node(tmp_path: Path) -> Node:
    node = Node(tmp_path)
    for round_ in range(1, 6):
        node.answer(round_)
    assert node.compare() is None
    return node


def test_a_new_node_is_anchored_before_its_first_line(tmp_path: Path) -> None:
    node = Node(tmp_path)
    anchor = read_anchor(node.place)
    assert anchor is not None and anchor.head.number == 0
    # A crash before the first answer, and one between ledger and anchor.
    node.start()
    node.ledger.append(release(1))
    node.start()
    node.answer(2)
    assert node.compare() is None
    node.path.write_bytes(node.path.read_bytes().replace(b"aaaa", b"bbbb"))
    assert "line 1 " in str(node.compare())


def test_an_anchor_comes_back_from_its_file_and_its_text(tmp_path: Path) -> None:
    anchor = Anchor(Head(3, "c" * 64), WHEN)
    assert json.loads(anchor.to_json()) == {"head": "3:" + "c" * 64, "time": "2026-03-01T12:00:00+00:00"}
    assert Anchor.from_json(anchor.to_json()) == anchor
    assert read_anchor(tmp_path / "none") is None
    assert default_place(tmp_path / "ledger.jsonl") == tmp_path / "ledger-anchor.json"


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "null", '{"head": "1:a", "time": "2026-03-01"}', '{"head": 1}', "\xff"]
)
def test_an_anchor_that_cannot_be_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "anchor.json").write_text(text, encoding="latin-1")
    with pytest.raises(LedgerError, match=r"anchor\.json: cannot be read as the anchor.*fedward node ledger accept"):
        read_anchor(tmp_path / "anchor.json")


def test_an_anchor_that_cannot_be_written_stops_the_release(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LedgerError, match=r"cannot be written.*Nothing leaves"):
        write_anchor(node.place / "none", Head(1, "a" * 64))

    def broken(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    before = node.place.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", broken)
        with pytest.raises(LedgerError, match="No space left"):
            node.answer(6)
    # The old anchor whole, the ledger ahead of it: right, and the budget is spent.
    assert node.place.read_bytes() == before and node.compare() is None
    node.start()
    with pytest.raises(ReleaseRefused):
        node.answer(6)


def cut(count: int) -> Callable[[Path], None]:
    def harm(path: Path) -> None:
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:count]))

    return harm


def rewritten(path: Path) -> None:
    """By somebody who knows the format: another ledger, whose chain is right."""
    path.unlink()
    ledger = Ledger(path, NODE)
    for round_ in range(10, 19):
        ledger.append(release(round_))


HARM: dict[str, tuple[Callable[[Path], None], str]] = {
    "deleted": (Path.unlink, "ends at line 0"),
    "emptied": (cut(0), "ends at line 0"),
    "rolled back": (cut(3), "ends at line 3"),
    "rolled back by one": (cut(4), "ends at line 4"),
    "its last line broken": (lambda path: path.write_bytes(path.read_bytes()[:-30]), "ends at line 4"),
    "written anew": (rewritten, "line 5 is not the line of"),
    "edited": (lambda path: path.write_bytes(path.read_bytes().replace(b"1.1", b"9.1", 1)), "line 2 (byte"),
    "its last line edited": (
        lambda path: path.write_bytes(path.read_bytes().replace(b'"round": 5', b'"round": 7')),
        "line 5 is not the line of",
    ),
}


@pytest.mark.parametrize("remembers", ["both", "node", "server"])
@pytest.mark.parametrize("name", HARM)
def test_harm_is_told_by_either_anchor_until_the_admin_decides(node: Node, name: str, remembers: str) -> None:
    harm, told = HARM[name]
    harm(node.path)
    if remembers == "node":
        node.server = None
    elif remembers == "server":
        # Rolled back with the ledger, as in a snapshot of the machine.
        lines = node.path.read_bytes().splitlines() if node.path.exists() else []
        whole = [line for line in lines if line.endswith(b"}")]
        write_anchor(node.place, verify(node.path).last.head if whole else Head(0, "0" * 64))  # type: ignore[union-attr]
        if not whole:
            node.place.unlink()
    problem = node.compare()
    assert problem is not None and told in problem and "fedward node ledger accept --why" in problem
    with pytest.raises(LedgerError, match="answers nothing"):
        node.start()
    # What the text says to type:
    expected = [Head.parse(text) for text in problem.split("accept", 1)[1].split() if ":" in text]
    head = accept(node.path, NODE, "Ada", "as in ticket 7", expected)
    write_anchor(node.place, head)
    node.start()
    (decision,) = verify(node.path).accepted
    assert (decision.who, decision.why, list(decision.expected)) == ("Ada", "as in ticket 7", expected)
    if name != "edited":
        assert node.ledger.holds(expected[0])
    node.answer(20)
    assert node.compare() is None and node.server is not None and node.server.head.number == head.number + 1
    # It counts for that once: rolled back again, it is told again.
    cut(head.number)(node.path)
    assert "lines are missing at the end" in str(node.compare())


def test_a_decision_for_one_server_is_none_for_another(node: Node) -> None:
    early = Anchor(node.ledger.head())
    node.answer(6)
    cut(3)(node.path)
    accept(node.path, NODE, "Ada", "lost", [node.ledger.head()])
    assert compare(node.path, {"late": Anchor(node.ledger.head())}) is None
    problem = compare(node.path, {"early": early, "late": Anchor(node.ledger.head())})
    assert problem is not None and "but early is of line 5" in problem and f"--expected {early.head}" in problem


def test_an_anchor_that_is_gone_is_missed(node: Node) -> None:
    node.place.unlink()
    problem = node.compare()
    assert problem is not None and "is not there, but the ledger has 5 lines" in problem
    write_anchor(node.place, accept(node.path, NODE, "Ada", "new place"))
    assert node.compare() is None


def test_an_older_anchor_fits_and_another_nodes_does_not(node: Node) -> None:
    older = Anchor(node.ledger.head())
    node.answer(6)
    assert compare(node.path, {"older": older}) is None
    other = Anchor(Head(0, Ledger(node.path.with_name("other"), "b").head().sha256))
    assert "line 0 is not the line of other" in str(compare(node.path, {"other": other}))


def test_what_remains_undetected(node: Node, tmp_path: Path) -> None:
    """The whole machine rolled back, with a server that plays along. The text of the module says so."""
    shutil.copytree(tmp_path, tmp_path.parent / "snapshot")
    server = node.server
    node.answer(6)
    for name in ("state", "elsewhere"):
        shutil.rmtree(tmp_path / name)
        shutil.copytree(tmp_path.parent / "snapshot" / name, tmp_path / name)
    assert "the server's anchor is of line 6" in str(node.compare())
    node.server = server
    assert node.compare() is None
    assert "remains undetected" in str(anchors.__doc__)


def test_a_decision_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="cannot be written"):
        accept(tmp_path / "none" / "ledger.jsonl", NODE, "Ada", "why")
