"""Who a roster names, and what differs between two."""

from __future__ import annotations

import hashlib

import pytest
from fedward_common.members import Change, Kind, Member, What, changes, members, only
from fedward_common.roster import Roster, RosterNode, RosterScientist
from fedward_common.signing import SignatureError, generate, public_text, read_public
from pydantic import ValidationError

KEYS = [public_text(generate()) for _ in range(4)]


def node(name: str, key: int = 0, number: int = 1, tags: tuple[str, ...] = (), flower_id: str = "7") -> RosterNode:
    return RosterNode(name=name, node_id=f"{number:032x}", flower_id=flower_id, identity=KEYS[key], tags=tags)


def roster(*nodes: RosterNode, people: tuple[RosterScientist, ...] = (), version: int = 1) -> Roster:
    return Roster(version=version, federation="fl.example.org", nodes=nodes, scientists=people)


def test_everyone_is_new_in_the_first_roster() -> None:
    first = roster(node("a"), people=(RosterScientist(name="a", key=KEYS[1]),))
    a, person = Member(Kind.NODE, "a", KEYS[0], f"{1:032x}"), Member(Kind.SCIENTIST, "a", KEYS[1])
    assert members(first) == (a, person)
    assert changes(None, first) == [Change(What.NEW, a), Change(What.NEW, person)]
    assert changes(first, first) == []


@pytest.mark.parametrize(
    ("after", "what"),
    [
        (node("a", key=1), What.NEW_KEY),
        # The same key under another id: secure aggregation orders nodes by their ids.
        (node("a", number=2), What.NEW_KEY),
        (node("a", tags=("x",)), What.DETAILS),
        (node("a", flower_id="8"), What.DETAILS),
    ],
)
def test_what_may_change_about_a_node(after: RosterNode, what: What) -> None:
    found = changes(roster(node("a")), roster(after, version=2))
    assert [change.what for change in found] == [what]
    assert (found[0].was is not None) == (what is What.NEW_KEY)


def test_one_name_goes_and_another_comes_with_its_key() -> None:
    found = changes(roster(node("a")), roster(node("b"), version=2))
    assert [(change.what, change.member.name) for change in found] == [(What.GONE, "a"), (What.NEW, "b")]


def test_a_roster_cut_down_to_some() -> None:
    whole = roster(node("a"), node("b", 1, 2), people=(RosterScientist(name="c", key=KEYS[2]),), version=9)
    a, _, person = members(whole)
    assert only(whole, frozenset(members(whole))) == whole
    cut = only(whole, frozenset({a}))
    assert (cut.version, [n.name for n in cut.nodes], cut.scientists) == (9, ["a"], ())
    assert [s.name for s in only(whole, frozenset({person})).scientists] == ["c"]
    # A key of one is no key of another.
    assert only(whole, frozenset({Member(Kind.NODE, "a", KEYS[1], a.node_id)})).nodes == ()


def test_a_rosters_hash_is_that_of_the_signed_text() -> None:
    one = roster(node("a"))
    signed = one.sign(generate())
    assert hashlib.sha256(signed["roster"].encode()).hexdigest() == one.sha256()
    assert roster(node("a"), version=2).sha256() != one.sha256()


@pytest.mark.parametrize("name", ["a\x1b[2J", "a\n", "hospital\u202e", "[red]x", "A", "", "а"])  # the last is Cyrillic
def test_no_name_plays_tricks_on_a_terminal(name: str) -> None:
    with pytest.raises(ValidationError):
        node(name)
    with pytest.raises(ValidationError):
        node("a", tags=(name,))
    with pytest.raises(ValidationError):
        RosterScientist(name=name, key=KEYS[0])
    if name not in ("A",):
        with pytest.raises(ValidationError):
            Roster(version=1, federation=name)


def test_a_public_key_is_typed_or_read_from_a_file(tmp_path) -> None:
    path = tmp_path / "roster.pub"
    path.write_text(KEYS[0] + "\n")
    assert public_text(read_public(KEYS[0])) == public_text(read_public(str(path))) == KEYS[0]
    for wrong in (KEYS[0][:-1], str(tmp_path / "absent"), str(tmp_path), "x" * 5000, "\0"):
        with pytest.raises(SignatureError, match="neither a public key"):
            read_public(wrong)
