"""The roster on a node: what counts, what waits for the admin's yes, what is refused, and the log of it all."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from fedward_client.enrol import Enrolled, rotate_key
from fedward_client.guard import Guard
from fedward_client.link import RunInfo
from fedward_client.member_approval import MemberApprovals
from fedward_client.membership import Membership, RosterPinned
from fedward_client.paths import NodePaths
from fedward_client.policy import parse_policy
from fedward_client.roster_log import RosterLog
from fedward_client.settings import NodeSettings
from fedward_common.cli import build
from fedward_common.files import owner_folder
from fedward_common.manifest import KIND as MANIFEST
from fedward_common.members import Kind, Member
from fedward_common.messages import Purpose, Reason, Request
from fedward_common.node import Refused
from fedward_common.roster import Roster, RosterError, RosterNode, RosterScientist
from fedward_common.signing import (
    SignatureError,
    generate,
    key_id,
    load_private,
    parse_public,
    public_text,
    save_private,
    sign_envelope,
)

from enrolment.site import Site

ASK = "approve_roster_changes = true\n"


def key() -> str:
    return public_text(generate())


class Node:
    """Hospital-a of a federation in which the test signs the rosters: what the server sends is up to the test."""

    def __init__(self, root: Path, policy: str = ASK) -> None:
        self.authority = generate()
        self.paths = NodePaths(root / "node")
        owner_folder(self.paths.keys)
        own = generate()
        save_private(self.paths.identity_key, own)
        self.own = RosterNode(name="hospital-a", node_id="a" * 32, flower_id="7", identity=public_text(own))
        self.paths.ca.write_text("no certificate")
        fields = ("hospital-a", self.own.node_id, "https://localhost:1", "localhost:2", "0" * 64)
        enrolled = Enrolled(*fields, public_text(self.authority))
        self.paths.node.write_text(json.dumps(enrolled.__dict__))
        self.b, self.c = self.other("b"), self.other("c")
        self.ada = RosterScientist(name="ada", key=key())
        self.first = Roster(version=1, federation="f", nodes=(self.own, self.b), scientists=(self.ada,))
        self.paths.roster.write_text(json.dumps(self.first.sign(self.authority)))
        self.use(policy)

    def other(self, letter: str) -> RosterNode:
        return RosterNode(name=f"hospital-{letter}", node_id=letter * 32, flower_id="1", identity=key())

    def use(self, policy: str) -> None:
        self.paths.policy.write_text(policy)
        self.member = Membership(self.paths, parse_policy(policy))

    def approve(self) -> None:
        """Everybody who is there, as the command does it: in another process."""
        member = Membership(self.paths, self.member.policy)
        for one in member.unapproved():
            member.approve(one)

    def next(self, **fields: Any) -> Roster:
        newest = self.member.newest()
        return newest.model_copy(update={"version": newest.version + 1, **fields})

    def receive(self, roster: Roster | None = None, **fields: Any) -> Roster:
        roster = roster if roster is not None else self.next(**fields)
        self.member.accept_roster(roster.sign(self.authority))
        return roster

    def counting(self) -> list[str]:
        roster = self.member.roster()
        return [node.name for node in roster.nodes] + [person.name for person in roster.scientists]

    def log(self) -> list[tuple[str, ...]]:
        entries = RosterLog(self.paths.roster_log).entries()
        return [tuple(str(entry.get(field, "")) for field in ("name", "change", "state")) for entry in entries]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_without_the_rule_everybody_counts_at_once(tmp_path: Path) -> None:
    node = Node(tmp_path, policy="")
    node.receive(nodes=(node.own, node.b, node.c))
    assert node.counting() == ["hospital-a", "hospital-b", "hospital-c", "ada"]
    assert node.member.pending() == ()
    assert node.log() == [("hospital-c", "new", "accepted")]


def test_with_the_rule_only_this_node_counts_until_somebody_is_approved(node: Node) -> None:
    assert node.counting() == ["hospital-a"]
    assert [str(one) for one in node.member.pending()] == ["node hospital-b", "scientist ada"]
    node.approve()
    # The guard's own object sees it: no restart.
    assert node.counting() == ["hospital-a", "hospital-b", "ada"]
    assert node.member.pending() == ()
    assert node.log() == [("hospital-b", "approval", "approved"), ("ada", "approval", "approved")]


def test_an_injected_member_waits_and_the_others_go_on(node: Node) -> None:
    node.approve()
    eve = RosterScientist(name="eve", key=key())
    node.receive(nodes=(node.own, node.b, node.c), scientists=(node.ada, eve))
    assert node.counting() == ["hospital-a", "hospital-b", "ada"]
    assert key_id(parse_public(eve.key)) not in node.member.roster().scientist_keys()
    # The version is the newest: rounds among approved members bind the same one on all nodes.
    assert node.member.roster().version == node.member.newest().version == 2
    (invented,) = (one for one in node.member.pending() if one.kind is Kind.NODE)
    assert invented == Member(Kind.NODE, "hospital-c", node.c.identity, node.c.node_id)
    assert "fedward node roster approve node:hospital-c" in node.member.why_not(invented)
    assert node.log()[-2:] == [("hospital-c", "new", "pending"), ("eve", "new", "pending")]
    # It is still so after a restart.
    node.use(ASK)
    assert node.counting() == ["hospital-a", "hospital-b", "ada"]
    node.approve()
    assert node.counting() == ["hospital-a", "hospital-b", "hospital-c", "ada", "eve"]


def test_the_same_member_with_another_key_waits_again(node: Node) -> None:
    node.approve()
    forged = node.b.model_copy(update={"identity": key()})
    node.receive(nodes=(node.own, forged), scientists=(node.ada.model_copy(update={"key": key()}),))
    assert node.counting() == ["hospital-a"]
    assert node.log()[-2:] == [("hospital-b", "new key", "pending"), ("ada", "new key", "pending")]
    entry = RosterLog(node.paths.roster_log).entries()[-2]
    assert (entry["was"], entry["key"]) == tuple(key_id(parse_public(n.identity)) for n in (node.b, forged))
    # Back to the old key is a change too, and its approval is gone with it.
    node.receive(nodes=(node.own, node.b))
    assert node.counting() == ["hospital-a"]


def test_another_node_id_makes_another_node(node: Node) -> None:
    node.approve()
    node.receive(nodes=(node.own, node.b.model_copy(update={"node_id": "e" * 32})))
    assert node.counting() == ["hospital-a", "ada"]


def test_this_node_under_another_key_does_not_count(node: Node) -> None:
    node.approve()
    node.receive(nodes=(node.own.model_copy(update={"identity": key()}), node.b))
    assert node.counting() == ["hospital-b", "ada"]
    assert not node.member.listed()


def test_removals_and_details_count_at_once_while_others_wait(node: Node) -> None:
    node.approve()
    node.receive(nodes=(node.own, node.b, node.c))
    tagged = node.b.model_copy(update={"tags": ("eu",), "flower_id": "99"})
    node.receive(nodes=(node.own, tagged, node.c))
    assert node.member.roster().node("hospital-b") == tagged
    node.receive(nodes=(node.own, node.c), scientists=())
    assert node.counting() == ["hospital-a"]
    assert node.log()[-4:] == [
        ("hospital-c", "new", "pending"), ("hospital-b", "tags or link", "accepted"),
        ("hospital-b", "gone", "accepted"), ("ada", "gone", "accepted"),
    ]  # fmt: skip


def test_who_was_removed_and_comes_back_is_new(node: Node) -> None:
    node.approve()
    node.receive(nodes=(node.own,))
    node.receive(nodes=(node.own, node.b))
    assert node.counting() == ["hospital-a", "ada"]


def test_an_approval_that_is_given_too_late_is_none(node: Node) -> None:
    """The admin's command read the roster; then the guard took the removal in; then the approval is written."""
    command = Membership(node.paths, node.member.policy)
    node.receive(nodes=(node.own,))
    for one in command.unapproved():
        command.approve(one)
    node.receive(nodes=(node.own, node.b))
    assert node.counting() == ["hospital-a", "ada"]


def test_approvals_given_before_the_rule_is_switched_on_count(tmp_path: Path) -> None:
    node = Node(tmp_path, policy="")
    node.approve()
    node.receive(nodes=(node.own, node.b, node.c))
    node.use(ASK)
    assert node.counting() == ["hospital-a", "hospital-b", "ada"]


def test_an_approval_is_taken_back_by_removing_its_file(node: Node) -> None:
    node.approve()
    (found,) = node.paths.members.glob("node-hospital-b-*")
    found.unlink()
    assert node.counting() == ["hospital-a", "ada"]


def test_an_approval_is_for_one_member_only(tmp_path: Path) -> None:
    approvals = MemberApprovals(tmp_path / "members")
    one = Member(Kind.NODE, "b", key(), "b" * 32)
    others = [
        replace(one, kind=Kind.SCIENTIST), replace(one, name="c"), replace(one, key=key()),
        replace(one, node_id="c" * 32), replace(one, name="c", node_id=""),
    ]  # fmt: skip
    assert approvals.approved([one]) == frozenset()
    approvals.approve(one)
    assert approvals.approved([one, *others]) == {one}
    # What a crash left of a write is no approval.
    (path,) = (tmp_path / "members").iterdir()
    path.rename(path.with_name(f".{path.name}.tmp"))
    assert approvals.approved([one]) == frozenset()
    approvals.approve(one)
    approvals.keep_only([*others])
    assert approvals.approved([one]) == frozenset()


@pytest.mark.parametrize("policy", [ASK, ""])
def test_rosters_that_are_refused(node: Node, policy: str) -> None:
    node.approve()
    node.receive(nodes=(node.own, node.b, node.c))
    node.use(policy)
    before, counting = node.member.newest(), node.counting()
    other = node.next(federation="g")
    twin = node.next(version=2, nodes=(node.own,))
    attacks: list[tuple[Any, type[Exception], str]] = [
        (node.next().sign(generate()), SignatureError, "not trusted here"),
        (node.first.sign(node.authority), RosterError, "2 is known already"),
        (twin.sign(node.authority), RosterError, "two different rosters"),
        (other.sign(node.authority), RosterError, "is of 'g'"),
        ({**node.next().sign(node.authority), "roster": "{}"}, SignatureError, "wrong"),
        ("roster", SignatureError, "fields"),
        (None, SignatureError, "fields"),
        (["roster", "key", "signature"], SignatureError, "fields"),
    ]
    for envelope, error, text in attacks:
        with pytest.raises(error, match=text):
            node.member.accept_roster(envelope)
        assert node.member.newest() == before and node.counting() == counting
    refused = [entry for entry in RosterLog(node.paths.roster_log).entries() if entry["state"] == "refused"]
    # The last three have the same reason, which is noted once.
    assert len(refused) == len(attacks) - 2
    node.use(policy)
    assert node.member.newest() == before


def test_a_pinned_roster_is_the_only_one(node: Node) -> None:
    pinned = node.next(nodes=(node.own, node.b, node.c))
    node.use(f'pinned_roster = "{pinned.sha256()}"')
    # The one from before the pin does not count either.
    with pytest.raises(RosterPinned) as refused:
        node.member.roster()
    assert pinned.sha256() in str(refused.value) and node.first.sha256() in str(refused.value)
    node.receive(pinned)
    assert node.counting() == ["hospital-a", "hospital-b", "hospital-c", "ada"]
    later = node.next(nodes=(node.own,))
    with pytest.raises(RosterPinned) as refused:
        node.receive(later)
    assert pinned.sha256() in str(refused.value) and later.sha256() in str(refused.value)
    assert node.member.roster() == pinned
    assert node.log()[-1] == ("", "roster", "refused")
    # The pin names the content: the same members with another version, or signed by another key, are not it.
    with pytest.raises(RosterPinned):
        node.receive(pinned.model_copy(update={"version": 3}))
    with pytest.raises(SignatureError):
        node.member.accept_roster(pinned.sign(generate()))


def test_a_log_that_a_crash_cut_off_goes_on(node: Node) -> None:
    node.receive(nodes=(node.own, node.b, node.c))
    with node.paths.roster_log.open("ab") as file:
        file.write(b'{"time": "20')
    node.receive(nodes=(node.own, node.b))
    assert [entry[:2] for entry in node.log()] == [("hospital-c", "new"), ("hospital-c", "gone")]
    assert node.paths.roster_log.stat().st_mode & 0o777 == 0o600


def test_a_crash_before_the_roster_is_written_loses_no_line_of_the_log(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    node.approve()
    envelope = node.next(nodes=(node.own, node.c)).sign(node.authority)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("fedward_client.kept_roster.write_roster", crash)
        node.member.accept_roster(envelope)
    assert ("hospital-c", "new", "pending") in node.log()
    # Fail closed: who was about to go does not count again.
    assert node.counting() == ["hospital-a", "ada"]
    node.member.accept_roster(envelope)
    assert node.counting() == ["hospital-a", "ada"]


def test_tasks_never_read_any_of_it(node: Node) -> None:
    node.approve()
    private = node.paths.private()
    assert {node.paths.roster, node.paths.roster_log, node.paths.members} <= set(private)


# As the guard asks


class FakeLink:
    def __init__(self, envelope: dict[str, Any]) -> None:
        self._info = RunInfo(5, "0" * 64, {"fedward-manifest": json.dumps(envelope)})

    def run_info(self, _: int) -> RunInfo:
        return self._info


def refusal(node: Node, signer: Any, roster: Any) -> Refused:
    """What the guard says to a PREPARE that brings `roster`, of a run signed by `signer`."""
    guard = Guard(node.member, NodeSettings(), node.member.policy)
    link = FakeLink(sign_envelope(MANIFEST, {}, signer))
    with pytest.raises(Refused) as refused:
        guard._session(link, 5, Request(Purpose.PREPARE, "run", settings={"roster": roster}))  # type: ignore[arg-type]
    return refused.value


def test_the_guard_names_the_rule(node: Node) -> None:
    node.approve()
    eve = generate()
    people = (node.ada, RosterScientist(name="eve", key=public_text(eve)))
    failure = refusal(node, eve, node.next(scientists=people).sign(node.authority)).failure
    assert failure.reason is Reason.POLICY
    assert failure.rule.startswith("approve_roster_changes = true: scientist eve")
    assert "fedward node roster approve scientist:eve" in failure.rule
    # Once approved it is let further: to the manifest, which is empty here.
    newest = node.member.newest().sign(node.authority)
    node.approve()
    assert refusal(node, eve, newest).failure.reason is Reason.MANIFEST_INVALID
    assert "not trusted here" not in refusal(node, eve, newest).failure.rule
    assert "not trusted here" in refusal(node, generate(), newest).failure.rule


def test_the_guard_refuses_rosters(node: Node) -> None:
    for roster in (7, None, [], node.next().sign(generate()), {"roster": "{}"}):
        failure = refusal(node, generate(), roster).failure
        assert failure.reason is Reason.MANIFEST_INVALID and failure.rule.startswith("roster refused: ")
    node.use(f'pinned_roster = "{"0" * 64}"')
    failure = refusal(node, generate(), node.next().sign(node.authority)).failure
    assert failure.reason is Reason.POLICY and failure.rule.startswith(f"pinned_roster = {'0' * 64}: version 2")
    # A server that sends no roster gets no further.
    guard = Guard(node.member, NodeSettings(), node.member.policy)
    with pytest.raises(Refused) as refused:
        guard._session(FakeLink({}), 5, Request(Purpose.TRAIN, "run"))  # type: ignore[arg-type]
    assert refused.value.failure.reason is Reason.POLICY


# As typed


@pytest.fixture
def fedward(node: Node) -> Callable[..., Result]:
    def invoke(*words: str) -> Result:
        return CliRunner().invoke(build(), ["node", "roster", *words, "--dir", str(node.paths.root)])

    return invoke


def states(text: str) -> dict[str, str]:
    """Name -> last word of its line in the table of 'show'."""
    lines = [line.split() for line in text.splitlines()]
    return {words[1]: words[-1] for words in lines if words[:1] in (["node"], ["scientist"])}


def test_show_and_approve(node: Node, fedward: Callable[..., Result]) -> None:
    node.receive(nodes=(node.own, node.b.model_copy(update={"tags": ("eu",)}), node.c))
    text = fedward("show").output
    assert node.member.newest().sha256() in text and public_text(node.authority) in text
    assert states(text) == {"hospital-a": "node", "hospital-b": "pending", "hospital-c": "pending", "ada": "pending"}
    assert key_id(parse_public(node.c.identity)) in text and " eu " in text
    assert f'pinned_roster = "{node.member.newest().sha256()}"' in text

    done = fedward("approve", "hospital-b", "scientist:ada")
    # Whole keys, on one line each: a person compares them.
    assert node.b.identity in done.output and node.ada.key in done.output and node.c.identity not in done.output
    assert node.counting() == ["hospital-a", "hospital-b", "ada"]
    again = fedward("approve", "hospital-b")
    assert again.exit_code == 1 and "Waiting: node:hospital-c." in again.output

    node.receive(nodes=(node.own, node.c))
    text = fedward("show").output
    assert states(text) == {"hospital-a": "node", "hospital-c": "pending", "ada": "approved", "hospital-b": "gone"}
    assert "hospital-b: gone" in text and "scientist ada: approval" in text
    assert fedward("approve", "--all").exit_code == 0
    assert node.counting() == ["hospital-a", "hospital-c", "ada"]
    assert "Nobody waits" in fedward("approve", "--all").output


def test_approve_wants_to_know_whom(node: Node, fedward: Callable[..., Result]) -> None:
    for words in (("approve",), ("approve", "hospital-b", "--all")):
        result = fedward(*words)
        assert result.exit_code == 1 and "--all" in result.output
    node.receive(scientists=(node.ada, RosterScientist(name="hospital-b", key=key())))
    result = fedward("approve", "hospital-b")
    assert result.exit_code == 1 and "Write node:hospital-b or scientist:hospital-b." in result.output
    assert fedward("approve", "scientist:hospital-b").exit_code == 0
    assert node.counting() == ["hospital-a", "hospital-b"] and not node.member.roster().node("hospital-b")
    for word in ("nobody", "node:ada", ":", "x:hospital-b"):
        result = fedward("approve", word)
        assert result.exit_code == 1 and "waits for approval" in result.output
    assert node.log().count(("hospital-b", "approval", "approved")) == 1


def test_show_where_a_roster_is_pinned(node: Node, fedward: Callable[..., Result]) -> None:
    node.use(f'pinned_roster = "{node.first.sha256()}"')
    assert "pinned" in fedward("show").output and "accepted" in fedward("show").output
    node.use(f'pinned_roster = "{"0" * 64}"')
    assert "every run is refused" in fedward("show").output


def test_a_directory_that_is_not_enrolled_is_told_so(tmp_path: Path) -> None:
    for words in (("status",), ("up",), ("roster", "show"), ("roster", "approve", "--all")):
        result = CliRunner().invoke(build(), ["node", *words, "--dir", str(tmp_path)])
        assert result.exit_code == 1 and "this node is not enrolled" in result.output


def test_an_enrolled_node_that_lost_its_policy_does_not_start(node: Node) -> None:
    node.paths.policy.unlink()
    for words in (("up",), ("roster", "show")):
        result = CliRunner().invoke(build(), ["node", *words, "--dir", str(node.paths.root)])
        assert result.exit_code == 1 and "a node has a policy" in result.output


# With a real server


def test_a_node_keeps_the_log_from_its_first_day(site: Site) -> None:
    site.join("hospital-b")
    paths = NodePaths(site.root / "hospital-a")
    owner_folder(paths.root)
    paths.policy.write_text(ASK)
    site.join("hospital-a")
    entries = RosterLog(paths.roster_log).entries()
    assert [(entry["name"], entry["change"], entry["state"]) for entry in entries] == [
        ("hospital-a", "new", "accepted"), ("hospital-b", "new", "pending"), ("admin", "new", "pending"),
    ]  # fmt: skip
    member = Membership(paths, parse_policy(ASK))
    assert [node.name for node in member.roster().nodes] == ["hospital-a"]
    for one in member.pending():
        member.approve(one)
    # New keys of its own need nobody's yes, and cost no approval.
    rotate_key(paths)
    member = Membership(paths, parse_policy(ASK))
    assert member.pending() == () and member.listed()
    assert member.roster().node("hospital-a") == site.roster().node("hospital-a")
    last = RosterLog(paths.roster_log).entries()[-1]
    assert (last["name"], last["change"], last["state"]) == ("hospital-a", "new key", "accepted")
    assert last["key"] == key_id(load_private(paths.identity_key))


def test_a_rotation_brings_no_old_roster_back(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that answers a rotation with an old version, in which a revoked node still stands."""
    site.join("hospital-a")
    site.join("hospital-b")
    paths = NodePaths(site.root / "hospital-a")
    member = Membership(paths, parse_policy(""))
    site.enrolment.revoke("hospital-b")
    member.accept_roster(json.loads(site.paths.roster.read_text()))
    rotate = site.enrolment.rotate

    def lie(*arguments: Any) -> Any:
        admission = rotate(*arguments)
        old = site.roster().model_copy(update={"version": 2})
        object.__setattr__(admission, "roster", old.sign(load_private(site.paths.roster_key)))
        return admission

    monkeypatch.setattr(site.enrolment, "rotate", lie)
    with pytest.raises(RosterError, match="is known already"):
        rotate_key(paths)
    assert Membership(paths, parse_policy("")).newest().version == member.newest().version
