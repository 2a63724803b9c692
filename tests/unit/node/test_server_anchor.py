"""The head of a node's ledger at the server: what the node's own anchor does not tell, and what a lying server can do.

Engine, secure sums, guards' accounts and files are the real ones; only the link and the training are not.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from anchored_federation import Federation, Site, Watching, config, purposes, work
from fedward_common.chain import Head
from fedward_common.messages import LEDGER_HEAD, Purpose, Reason, Reply, Request
from fedward_common.node import MemoryStore
from fedward_common.privacy.anchor import default_place, read_anchor, server_place, write_anchor
from fedward_common.privacy.ledger import verify
from fedward_server.ledger_heads import Told


@pytest.fixture
def world(tmp_path: Path) -> Federation:
    world = Federation(tmp_path)
    assert world.run("first").status == "finished"
    return world


def snapshot(world: Federation, site: Site) -> Path:
    copy = world.folder / "snapshot"
    shutil.copytree(site.paths.root, copy)
    return copy


def everyone(world: Federation) -> set[str]:
    return {site.name for site in world.sites}


def lie(world: Federation, site: Site, head: Head) -> None:
    """The server remembers what the node never told."""
    world.heads.note([Told(site.id, head, None, False)], "lie")


def test_heads_reach_the_server_with_the_replies_that_follow_a_write(world: Federation) -> None:
    watching = Watching()
    assert world.run("second", faults=watching).status == "finished"
    for site in world.sites:
        assert site.head().number == 4 and world.heads.newest()[site.id] == site.head()
        # A masked vector brings the head of the line that accounts for it.
        told = [reply.info[LEDGER_HEAD] for name, request, reply in watching.seen
                if name == site.name and request.purpose is Purpose.MASK]  # fmt: skip
        lines = [line.split(b'"previous": "')[1][:64].decode() for line in site.paths.ledger.read_bytes().splitlines()]
        assert told == [f"3:{lines[3]}", str(site.head())]
        # It names what it was told before, and the site keeps that.
        asked = [request.settings.get(LEDGER_HEAD) for name, request, _ in watching.seen
                 if name == site.name and request.purpose in (Purpose.PREPARE, Purpose.TRAIN)]  # fmt: skip
        assert asked == [f"2:{lines[2]}", f"2:{lines[2]}", f"3:{lines[3]}"]
        kept = read_anchor(server_place(site.paths.ledger))
        assert kept is not None and str(kept.head) == asked[-1]
        # Not one message for it.
        assert purposes(watching.seen, site.name) == [
            Purpose.PREPARE, *2 * [Purpose.TRAIN, Purpose.MASK, Purpose.AGREE, Purpose.UNMASK], Purpose.FINISH
        ]  # fmt: skip
    assert world.events("second", "ledger_mismatch") == []


def test_a_run_without_privacy_tells_nothing(world: Federation) -> None:
    site = world.sites[0]
    other = site.guard._participant("plain", config(private=False), MemoryStore(), work)
    reply = other.handle(Request(Purpose.PREPARE, "plain"))
    assert reply.failure is None and LEDGER_HEAD not in reply.info


@pytest.mark.parametrize("lines", [2, 1])
def test_a_node_that_was_rolled_back_as_a_whole_stops_until_its_admin_decides(world: Federation, lines: int) -> None:
    site = world.sites[0]
    before = snapshot(world, site)
    world.run("second", rounds=lines)
    known = world.heads.newest()[site.id]
    assert known.number == 2 + lines
    site.roll_back(before)
    # Nothing on the node tells.
    assert site.command("verify").exit_code == 0

    assert world.run("third").status == "finished"
    assert world.answered("third") == [everyone(world) - {site.name}] * 2
    (said,) = {event["missing"][site.name] for event in world.events("third", "waiting")}
    assert said.startswith("policy (this node's privacy ledger does not hold line")
    assert "fedward node ledger verify" in said and "fedward node ledger accept" in said
    (mismatch,) = world.events("third", "ledger_mismatch")
    assert (mismatch["node"], mismatch["expected"], mismatch["told"], mismatch["settled"]) == (
        site.name, str(known), str(site.head()), False
    )  # fmt: skip
    assert world.heads.newest()[site.id] == known and site.head().number == 2

    # It stays so: for other runs, after a restart, and if the server then says nothing.
    site.restart()
    shutil.move(world.folder / "heads.json", world.folder / "heads.kept")
    world.run("fourth")
    assert site.name not in set().union(*world.answered("fourth")) and site.head().number == 2
    shutil.move(world.folder / "heads.kept", world.folder / "heads.json")

    # The site admin looks, and decides.
    looked = site.command("verify")
    assert looked.exit_code == 1 and "the ledger ends at line 2, but the head that the server named" in looked.output
    assert str(known) in looked.output
    done = site.command("accept", "--why", "the disk was restored", "--who", "Ada")
    assert done.exit_code == 0, done.exception
    (decision,) = verify(site.paths.ledger).accepted
    assert decision.expected == (known,)
    assert site.command("verify").exit_code == 0
    site.restart()
    assert world.run("fifth", rounds=3).status == "finished"
    assert world.answered("fifth") == [everyone(world)] * 3
    (settled,) = world.events("fifth", "ledger_mismatch")
    assert (settled["expected"], settled["told"], settled["settled"]) == (str(known), f"3:{decision_hash(site)}", True)
    # What was accepted is on record from there on: rolled back once more, it is found once more.
    assert world.heads.newest()[site.id] == site.head()
    shutil.copytree(site.paths.root, world.folder / "later")
    world.run("sixth", rounds=1)
    site.roll_back(world.folder / "later")
    world.run("seventh", rounds=1)
    assert world.answered("seventh") == [everyone(world) - {site.name}]


def decision_hash(site: Site) -> str:
    lines = site.paths.ledger.read_bytes().splitlines()
    return lines[3].split(b'"previous": "')[1][:64].decode()


@pytest.mark.parametrize("harm", ["deleted", "edited"])
def test_a_ledger_that_was_deleted_or_edited_with_its_anchors(world: Federation, harm: str) -> None:
    site = world.sites[0]
    if harm == "deleted":
        for path in site.remembered():
            path.unlink()
    else:
        # By one who knows the format: a chain that is right, with a cheaper last line, and anchored.
        for path in site.remembered()[1:]:
            path.unlink()
        text = site.paths.ledger.read_bytes()
        site.paths.ledger.write_bytes(text[:-3] + text[-3:].replace(b"}", b" }"))
        write_anchor(default_place(site.paths.ledger), site.head())
    assert site.command("verify").exit_code == 0
    site.restart()
    world.run("second")
    assert world.answered("second") == [everyone(world) - {site.name}] * 2
    assert [event["settled"] for event in world.events("second", "ledger_mismatch")] == [False]


def test_a_ledger_that_comes_back_from_a_backup_goes_on(world: Federation) -> None:
    site = world.sites[0]
    before = snapshot(world, site)
    world.run("second")
    whole = site.paths.ledger.read_bytes()
    site.roll_back(before)
    world.run("third")
    assert site.command("verify").exit_code == 1
    site.paths.ledger.write_bytes(whole)
    assert site.command("verify").exit_code == 0
    site.restart()
    world.run("fourth")
    assert world.answered("fourth") == [everyone(world)] * 2 and verify(site.paths.ledger).accepted == []
    assert world.events("fourth", "ledger_mismatch") == []


def test_what_remains_undetected(world: Federation) -> None:
    """The node rolled back as a whole, and the server's record gone or rolled back with it."""
    site = world.sites[0]
    before = snapshot(world, site)
    record = (world.folder / "heads.json").read_bytes()
    world.run("second")
    site.roll_back(before)
    (world.folder / "heads.json").write_bytes(record)
    world.run("third")
    assert world.answered("third") == [everyone(world)] * 2


@pytest.mark.parametrize("number", [1, 2, 99])
def test_a_server_that_names_a_head_the_node_never_had(world: Federation, number: int) -> None:
    site, other = world.sites[:2]
    record = (world.folder / "heads.json").read_bytes()
    (world.folder / "heads.json").unlink()
    false = Head(number, "f" * 64)
    lie(world, site, false)
    before = [one.read_bytes() for one in site.remembered()[:2]]
    world.run("second")
    # The worst is that the node refuses; nothing of what it knows of itself has changed.
    assert world.answered("second") == [everyone(world) - {site.name}] * 2
    assert [one.read_bytes() for one in site.remembered()[:2]] == before
    # Nor does the truth bring it back without its admin.
    (world.folder / "heads.json").write_bytes(record)
    world.heads.note([Told(other.id, other.head(), None, False)], "second")
    world.run("third")
    assert world.answered("third") == [everyone(world) - {site.name}] * 2
    assert site.command("accept", "--why", "the server lies").exit_code == 0
    site.restart()
    world.run("fourth")
    assert world.answered("fourth") == [everyone(world)] * 2
    # That lie is used up; the truth is still missed.
    (world.folder / "heads.json").unlink()
    lie(world, site, false)
    world.run("fifth")
    assert world.answered("fifth") == [everyone(world)] * 2


def test_what_is_no_head_is_refused_and_forgotten(world: Federation) -> None:
    site = world.sites[0]
    for rubbish in ("", "2", 2, {"number": 2}, "2:" + "g" * 64, "٢:" + "a" * 64):
        reply = site.handle("x", config(), Request(Purpose.PREPARE, "x", settings={LEDGER_HEAD: rubbish}))
        assert reply.failure is not None and reply.failure.reason is Reason.BAD_REQUEST
    assert site.handle("x", config(), Request(Purpose.PREPARE, "x")).failure is None


def test_a_guard_that_is_restarted_in_mid_run_is_asked_too(world: Federation) -> None:
    """The server may not notice, and asks it to train without having it prepare."""
    site = world.sites[0]
    before = snapshot(world, site)

    class Rolled(Watching):
        def answers(self, name: str, request: Request, reply: Reply) -> Reply | None:
            if name == site.name and request.purpose is Purpose.UNMASK and request.round == 1:
                site.roll_back(before)
            return super().answers(name, request, reply)

    watching = Rolled()
    world.run("second", rounds=3, faults=watching)
    assert world.answered("second") == [everyone(world)] + [everyone(world) - {site.name}] * 2
    assert purposes(watching.seen, site.name).count(Purpose.MASK) == 1
    refusals = [(request.purpose, reply.failure.rule) for name, request, reply in watching.seen
                if name == site.name and reply.failure]  # fmt: skip
    assert refusals[0][0] is Purpose.TRAIN and "does not hold line 3" in refusals[0][1]


def test_two_runs_at_once_lose_nothing_and_raise_no_alarm(world: Federation) -> None:
    """The replies of one run to a round are on their way while another run does a whole round, and more."""

    class Late(Watching):
        done = False

        def order(self, names: list[str]) -> list[str]:
            return names

        def answers(self, name: str, request: Request, reply: Reply) -> Reply | None:
            if request.purpose is Purpose.MASK and request.round == 1 and not Late.done:
                Late.done = True
                assert world.run("inside", rounds=2).status == "finished"
            return super().answers(name, request, reply)

    assert world.run("outside", rounds=2, faults=Late()).status == "finished"
    for site in world.sites:
        assert site.head().number == 6 and world.heads.newest()[site.id] == site.head()
    assert world.events("inside", "ledger_mismatch") == world.events("outside", "ledger_mismatch") == []


def test_the_file_of_the_named_head_is_broken(world: Federation) -> None:
    site = world.sites[0]
    server_place(site.paths.ledger).write_text("rubbish")
    site.restart()
    world.run("second")
    assert world.answered("second") == [everyone(world) - {site.name}] * 2
    assert site.command("verify").exit_code == 1
    assert site.command("accept", "--why", "disk").exit_code == 0
    assert site.command("verify").exit_code == 0
    site.restart()
    world.run("third")
    assert world.answered("third") == [everyone(world)] * 2
