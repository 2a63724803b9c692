"""A server that does not hold the key of the roster: what waits, what is installed, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import CliRunner, Result
from fedward_client.enrol import EnrolError, Enrolled, is_listed, join, rotate_key, standing
from fedward_client.membership import Membership
from fedward_client.paths import NodePaths
from fedward_client.policy import parse_policy
from fedward_client.traffic import Traffic
from fedward_common.cli import build
from fedward_common.credential import Credential
from fedward_common.http import ServiceError
from fedward_common.manifest import KIND as MANIFEST
from fedward_common.members import What
from fedward_common.roster import Roster, RosterError, RosterNode, read_roster
from fedward_common.signing import SignatureError, generate, load_private, public_text, sign_envelope
from fedward_server.authority import add_scientist
from fedward_server.commands import server as commands
from fedward_server.commands.authority import app as authority_app
from fedward_server.publication import (
    PublicationError,
    export_roster,
    install_roster,
    read_signed,
    waiting_roster,
)
from fedward_server.refusal import Refusal
from fedward_server.roster_authority import AuthorityFolderError, RosterAuthority

from enrolment.site import Site, body_of


@pytest.fixture
def authority(tmp_path: Path) -> RosterAuthority:
    return RosterAuthority.create(tmp_path / "authority")


@pytest.fixture
def apart(tmp_path: Path, authority: RosterAuthority) -> Iterator[Site]:
    """A server whose first roster has not been signed yet."""
    made = Site(tmp_path, authority.public_key())
    with made.running():
        yield made
    made.store.close()


def exported(site: Site) -> Roster:
    roster = export_roster(site.paths, site.settings, site.store)
    assert roster is not None
    return roster


def install(site: Site, envelope: dict[str, Any]) -> Roster:
    return install_roster(site.paths, site.settings, site.store, envelope)


def signed(site: Site, authority: RosterAuthority) -> Roster:
    """The whole way: export, sign, install."""
    return install(site, authority.sign(exported(site)))


def waiting(site: Site) -> int | None:
    roster = waiting_roster(site.paths, site.settings, site.store)
    return roster.version if roster is not None else None


def test_the_server_has_no_key_to_sign_with(apart: Site, authority: RosterAuthority) -> None:
    assert not apart.paths.roster_key.exists()
    private = load_private(authority.root / "roster.key").private_bytes_raw()
    for path in apart.paths.root.rglob("*"):
        assert path.is_dir() or private not in path.read_bytes()
    credential = Credential.load(apart.paths.credential)
    assert credential.authority == public_text(authority.public_key())
    assert apart.audit("init")[0]["authority"] != ""


def test_before_the_first_signature_nobody_is_invited(apart: Site, authority: RosterAuthority, tmp_path: Path) -> None:
    for act in (lambda: apart.invite("hospital-a"), lambda: read_signed(apart.paths)):
        with pytest.raises(Refusal, match="has not signed") as refused:
            act()
        assert (refused.value.code, refused.value.status) == ("roster_unsigned", 503)
    with apart.raw() as client:
        answer = client.get("/roster")
    assert (answer.status_code, body_of(answer)["error"]) == (503, "roster_unsigned")
    # The service's watch over registrations lives with it.
    assert apart.enrolment.reconcile() == 0
    assert waiting(apart) == 1
    assert signed(apart, authority).version == 1
    assert waiting(apart) is None and export_roster(apart.paths, apart.settings, apart.store) is None
    assert apart.join("hospital-a").name == "hospital-a"


def test_a_token_from_a_time_with_a_roster_is_not_spent_without(apart: Site, authority: RosterAuthority) -> None:
    signed(apart, authority)
    token = str(apart.invite())
    aside = apart.paths.roster.rename(apart.root / "aside")
    with pytest.raises(ServiceError) as refused:
        join(apart.url, token, apart.root / "hospital-a")
    assert refused.value.code == "roster_unsigned" and not apart.control.nodes
    aside.rename(apart.paths.roster)
    join(apart.url, token, apart.root / "hospital-a")


def test_a_node_joins_while_its_signature_is_outstanding(apart: Site, authority: RosterAuthority) -> None:
    signed(apart, authority)
    apart.join("hospital-a")
    paths = NodePaths(apart.root / "hospital-a")
    # It is in the store, and its link would be let in; the public roster does not know it.
    standing(paths)
    assert len(apart.control.nodes) == 1
    assert apart.roster().nodes == () and waiting(apart) == 2
    assert not is_listed(paths)
    member = Membership(paths, parse_policy(""))
    assert not member.listed() and member.roster().nodes == ()
    member.accept_roster(signed(apart, authority).sign(load_private(authority.root / "roster.key")))
    assert member.listed() and [node.name for node in member.roster().nodes] == ["hospital-a"]


def test_a_node_that_waits_knows_its_flower_id_from_the_last_guard(
    apart: Site, authority: RosterAuthority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed guard's session is ended by that id; without it the next guard would be refused for a minute."""
    seen: list[int | None] = []
    monkeypatch.setattr("fedward_client.membership.Link", lambda *arguments: seen.append(arguments[3]))
    signed(apart, authority)
    apart.join("hospital-a")
    paths = NodePaths(apart.root / "hospital-a")
    Membership(paths, parse_policy("")).link(Traffic())
    paths.status.write_text(json.dumps({"runs": [], "flower_id": "-77"}))
    Membership(paths, parse_policy("")).link(Traffic())
    signed(apart, authority)
    member = Membership(paths, parse_policy(""))
    member.accept_roster(read_roster(apart.paths.roster))
    member.link(Traffic())
    assert seen == [None, -77, int(apart.roster().nodes[0].flower_id or 0)]


def test_new_keys_wait_as_well(apart: Site, authority: RosterAuthority) -> None:
    signed(apart, authority)
    apart.join("hospital-a")
    signed(apart, authority)
    paths = NodePaths(apart.root / "hospital-a")
    old = apart.roster().nodes[0].identity
    rotate_key(paths)
    standing(paths)
    assert apart.roster().nodes[0].identity == old and not is_listed(paths)
    # The key that the roster still names is not this node's any more.
    assert not Membership(paths, parse_policy("")).listed()
    assert signed(apart, authority).nodes[0].identity != old


def test_a_revocation_cuts_the_link_before_anything_is_signed(apart: Site, authority: RosterAuthority) -> None:
    signed(apart, authority)
    apart.join("hospital-a")
    signed(apart, authority)
    assert apart.enrolment.revoke("hospital-a")
    assert not apart.control.nodes
    with pytest.raises(ServiceError) as refused:
        standing(NodePaths(apart.root / "hospital-a"))
    assert refused.value.code == "node_revoked"
    assert len(apart.roster().nodes) == 1 and waiting(apart) == 3
    assert signed(apart, authority).nodes == ()


def test_a_data_scientist_counts_once_signed(apart: Site, authority: RosterAuthority, tmp_path: Path) -> None:
    signed(apart, authority)
    add_scientist(apart.paths, apart.settings, apart.store, "bob", tmp_path / "bob.json")
    credential = Credential.load(tmp_path / "bob.json")
    assert credential.authority == public_text(authority.public_key())
    envelope = sign_envelope(MANIFEST, {}, credential.key)
    assert envelope["key"] not in read_signed(apart.paths).scientist_keys()
    signed(apart, authority)
    assert envelope["key"] in read_signed(apart.paths).scientist_keys()


def test_what_changes_after_the_export_waits_for_the_next(apart: Site, authority: RosterAuthority) -> None:
    signed(apart, authority)
    apart.join("hospital-a")
    envelope = authority.sign(exported(apart))
    apart.join("hospital-b")
    assert install(apart, envelope).version == 2
    assert [node.name for node in apart.roster().nodes] == ["hospital-a"]
    assert waiting(apart) == 3
    # Installed twice: nothing happens.
    assert install(apart, envelope).version == 2
    assert [line["version"] for line in apart.audit("roster_installed")] == [1, 2]


def test_what_is_not_installed(apart: Site, authority: RosterAuthority) -> None:
    key = load_private(authority.root / "roster.key")
    signed(apart, authority)
    first = read_roster(apart.paths.roster)
    apart.join("hospital-a")
    second = signed(apart, authority)
    before = apart.paths.roster.read_bytes()
    apart.join("hospital-b")
    third = exported(apart)
    invented = RosterNode(name="mallory", node_id="e" * 32, flower_id=None, identity=public_text(generate()))
    with_invented = third.model_copy(update={"nodes": (*third.nodes, invented)})
    attacks: list[tuple[dict[str, Any], type[Exception], str]] = [
        (third.sign(generate()), SignatureError, "not trusted here"),
        (first, RosterError, "2 is known already"),
        (with_invented.sign(key), PublicationError, "neither what this server exported"),
        (third.model_copy(update={"version": 4}).sign(key), PublicationError, "neither"),
        (third.model_copy(update={"version": 2}).sign(key), RosterError, "two different"),
        (third.model_copy(update={"federation": "other"}).sign(key), RosterError, "is of 'other'"),
        ({**third.sign(key), "roster": "{}"}, SignatureError, "wrong"),
    ]
    for envelope, error, text in attacks:
        with pytest.raises(error, match=text):
            install(apart, envelope)
        assert apart.paths.roster.read_bytes() == before
    assert apart.roster() == second


def test_nobody_believes_a_roster_that_the_authority_did_not_sign(apart: Site, authority: RosterAuthority) -> None:
    """The server invents a member, signs with a key of its own and publishes that."""
    signed(apart, authority)
    apart.join("hospital-a")
    signed(apart, authority)
    paths = NodePaths(apart.root / "hospital-a")
    member = Membership(paths, parse_policy(""))
    invented = RosterNode(name="mallory", node_id="e" * 32, flower_id=None, identity=public_text(generate()))
    roster = apart.roster()
    forged = roster.model_copy(update={"version": 9, "nodes": (*roster.nodes, invented)}).sign(generate())
    apart.paths.roster.write_text(json.dumps(forged))
    with pytest.raises(SignatureError, match="not trusted here"):
        member.accept_roster(forged)
    # The server's own parts do not either.
    with pytest.raises(SignatureError):
        read_signed(apart.paths)


def test_a_server_names_another_authority(site: Site, authority: RosterAuthority) -> None:
    """It holds a key of its own and says that this is the authority's. A site that was told the right one is safe."""
    token = site.invite()
    with pytest.raises(EnrolError, match="not in order"):
        join(site.url, str(token), site.root / "node", authority=authority.public_key())
    assert not site.control.nodes and site.audit("enrolled") == []
    # The token was not spent, and the right key lets it in.
    right = load_private(site.paths.roster_key).public_key()
    assert join(site.url, str(token), site.root / "node", authority=right).authority == public_text(right)


def test_a_server_that_changes_its_mind_about_the_authority(
    site: Site, authority: RosterAuthority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shows the authority's roster when it is asked, and one of its own to the node that has joined."""
    envelope = site.roster().sign(load_private(authority.root / "roster.key"))
    monkeypatch.setattr("fedward_server.web.roster.signed_envelope", lambda _: envelope)
    with pytest.raises(EnrolError, match="not in order"):
        join(site.url, str(site.invite()), site.root / "node", authority=authority.public_key())
    with pytest.raises(EnrolError):
        Enrolled.load(NodePaths(site.root / "node"))


def test_a_server_that_leaves_a_node_out_must_say_that_it_waits(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    before = read_roster(site.paths.roster)
    monkeypatch.setattr(site.enrolment, "publish", lambda: before)
    with pytest.raises(EnrolError, match="does not hold this node's key"):
        site.join("hospital-a")


def test_a_server_with_its_own_key_has_nothing_to_export(site: Site) -> None:
    for act in (lambda: exported(site), lambda: install(site, {})):
        with pytest.raises(PublicationError, match="publishes each change by itself"):
            act()
    assert waiting(site) is None


# The authority


def test_what_the_authority_signs(authority: RosterAuthority) -> None:
    node = RosterNode(name="a", node_id="a" * 32, flower_id=None, identity=public_text(generate()))
    first = Roster(version=3, federation="f", nodes=(node,))
    assert [change.what for change in authority.differences(first)] == [What.NEW]
    envelope = authority.sign(first)
    assert envelope == first.sign(load_private(authority.root / "roster.key"))
    # The same again, after the file was lost on the way.
    assert authority.sign(first) == envelope and authority.differences(first) == []
    later = Roster(version=10, federation="f", nodes=(node.model_copy(update={"identity": public_text(generate())}),))
    assert [change.what for change in authority.differences(later)] == [What.NEW_KEY]
    authority.sign(later)
    for wrong, text in (
        (first, "10 is known already"),
        (later.model_copy(update={"nodes": ()}), "two different"),
        (later.model_copy(update={"version": 11, "federation": "g"}), "is of 'g'"),
    ):
        for act in (authority.differences, authority.sign):
            with pytest.raises(RosterError, match=text):
                act(wrong)
    assert authority.last() == later
    assert len(list((authority.root / "signed").iterdir())) == 2


def test_the_authoritys_folder(authority: RosterAuthority, tmp_path: Path) -> None:
    assert authority.root.stat().st_mode & 0o777 == 0o700
    assert (authority.root / "roster.key").stat().st_mode & 0o777 == 0o600
    with pytest.raises(AuthorityFolderError, match="A key is made once"):
        RosterAuthority.create(authority.root)
    with pytest.raises(AuthorityFolderError, match="no authority here"):
        RosterAuthority.open(tmp_path / "nothing")
    authority.sign(Roster(version=1, federation="f"))
    (kept,) = (authority.root / "signed").iterdir()
    kept.write_text(json.dumps(Roster(version=1, federation="g").sign(generate())))
    with pytest.raises(SignatureError):
        authority.sign(Roster(version=2, federation="g"))


# As typed


def offline(*words: str, answer: str | None = None) -> Result:
    # The group is found by an entry point; here it is called by itself.
    return CliRunner().invoke(typer.main.get_command(authority_app), list(words), input=answer)


@pytest.fixture
def fedward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.chdir(tmp_path)

    def invoke(*words: str) -> Result:
        return CliRunner().invoke(build(), ["server", *words, "--dir", str(tmp_path / "server")])

    return invoke


def test_from_two_machines(fedward: Callable[..., Result], tmp_path: Path) -> None:
    made = offline("init", "--dir", "office")
    public = made.stdout.strip()
    assert len(public) == 43 and f"--authority {public}" in made.stderr and "PRIVATE" not in made.output
    assert offline("init", "--dir", "office").exit_code == 1

    first = fedward("init", "--name", "localhost", "--authority", public)
    assert first.exit_code == 0 and "not here" in first.output and "fedward server roster export" in first.output
    assert "nothing has been changed" in fedward("init", "--name", "localhost", "--authority", public).output
    for other in ((), ("--authority", public_text(generate()))):
        assert "not as you asked for" in fedward("init", "--name", "localhost", *other).output
    status = fedward("status").output
    assert "on another machine" in status and "no roster yet" in status
    assert "Roster version 1 waits for the authority's signature" in status
    assert fedward("invite", "hospital-a").exit_code == 1

    assert "pending-roster.json" in fedward("roster", "export").output
    refused = offline("sign", "pending-roster.json", "--dir", "office", answer="n\n")
    assert refused.exit_code == 1 and "admin" in refused.output and not (tmp_path / "signed-roster.json").exists()
    admin = public_text(Credential.load(tmp_path / "server" / "credential.json").key)
    done = offline("sign", "pending-roster.json", "--dir", "office", answer="y\n")
    assert done.exit_code == 0 and "the first that is signed here" in done.output
    # The whole key on one line, also in a terminal of 80 columns.
    assert any(line.split() == ["new", "scientist", "admin", admin] for line in done.output.splitlines())
    assert "Roster version 1 is public." in fedward("roster", "install", "signed-roster.json").output
    assert "waits" not in fedward("status").output
    assert "Nothing waits" in fedward("roster", "export").output
    assert fedward("invite", "hospital-a").exit_code == 0

    added = fedward("scientist", "add", "bob", "-o", "bob.json")
    assert "Roster version 2 waits for the authority's signature" in added.output
    assert public_text(Credential.load(tmp_path / "bob.json").key) in added.output
    fedward("roster", "export", "-o", "next.json")
    done = offline("sign", "next.json", "-o", "s.json", "--yes", "--dir", "office")
    assert "after version 1" in done.output and "bob" in done.output and "admin" not in done.output
    again = offline("sign", "pending-roster.json", "--yes", "--dir", "office")
    assert isinstance(again.exception, RosterError) and "2 is known already" in str(again.exception)
    assert fedward("roster", "install", "signed-roster.json").exit_code == 0
    assert fedward("roster", "install", "s.json").exit_code == 0
    old = fedward("roster", "install", "signed-roster.json")
    assert old.exit_code == 1 and "2 is known already" in old.output


def test_what_the_authority_is_given_must_be_a_roster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    offline("init", "--dir", "office")
    Path("bad.json").write_text('{"version": 1}')
    Path("evil.json").write_text('{"version": 1, "federation": "f\\u001b[2J"}')
    for name in ("absent.json", "bad.json", "evil.json", "."):
        result = offline("sign", name, "--yes", "--dir", "office")
        assert isinstance(result.exception, AuthorityFolderError) and name in str(result.exception)
    assert isinstance(offline("sign", "bad.json", "--dir", "nowhere").exception, AuthorityFolderError)


def test_a_key_must_be_one(fedward: Callable[..., Result], tmp_path: Path) -> None:
    result = fedward("init", "--name", "localhost", "--authority", "not-a-key")
    assert result.exit_code == 1 and "neither a public key" in result.output
    assert not (tmp_path / "server").exists()


def test_the_commands_say_what_waits(
    apart: Site, authority: RosterAuthority, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(commands, "_control", lambda *_: apart.control)
    signed(apart, authority)

    def run(group: str, *words: str) -> Result:
        return CliRunner().invoke(build(), [group, *words])

    words = run("server", "invite", "hospital-a", "--dir", str(apart.paths.root)).stdout.split()
    public = tmp_path / "authority.pub"
    public.write_text(public_text(authority.public_key()))
    folder = str(tmp_path / "node")
    joined = run("node", *words[2:4], "--token", words[5].strip("'"), "--authority", str(public), "--dir", folder)
    assert joined.exit_code == 0 and "has still to sign this node's entry" in joined.output
    own = public_text(load_private(NodePaths(tmp_path / "node").identity_key))
    assert own in run("node", "status", "--dir", folder).output
    status = " ".join(run("node", "status", "--dir", folder).output.split())
    assert "version 1, 0 nodes, without this node: the authority has still to sign its entry" in status
    revoked = run("server", "node", "revoke", "hospital-a", "--dir", str(apart.paths.root))
    assert "its link is cut" in revoked.output and "version 3 waits" in revoked.output
