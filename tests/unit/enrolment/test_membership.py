"""After joining: new keys, leaving, revocation, and a SuperLink that forgets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from fedward_client.enrol import EnrolError, Enrolled, join, leave, rotate_key, standing
from fedward_client.paths import NodePaths
from fedward_common.errors import ConfigError
from fedward_common.http import Service, ServiceError, Unreachable
from fedward_common.roster import RosterError, accept_roster, read_roster
from fedward_common.signing import load_private, parse_public, public_text

from enrolment.site import Site


@pytest.fixture
def node(site: Site) -> NodePaths:
    site.join("hospital-a")
    return NodePaths(site.root / "hospital-a")


def test_rotation_changes_the_keys_and_nothing_else(site: Site, node: NodePaths) -> None:
    before, old_key = site.roster().nodes[0], load_private(node.identity_key)
    old_flower = node.flower_key.read_bytes()
    rotate_key(node)
    after = site.roster().nodes[0]
    assert (after.name, after.node_id, after.tags) == (before.name, before.node_id, before.tags)
    assert after.flower_id != before.flower_id and after.identity != before.identity
    assert after.identity == public_text(load_private(node.identity_key))
    assert node.flower_key.read_bytes() != old_flower
    assert set(site.control.nodes) == {int(after.flower_id or 0)}
    assert not node.next_keys.exists()
    assert len(site.audit("keys_rotated")) == 1
    standing(node)
    with Service(site.url, node.ca.read_text(), old_key) as old, pytest.raises(ServiceError) as refused:
        old.get("/nodes/me")
    assert refused.value.code == "key_unknown"


def test_a_rotation_whose_answer_is_lost_goes_on(
    site: Site, node: NodePaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = site.roster().nodes[0]
    send = httpx.Client.request

    def lose(client: httpx.Client, method: str, path: str, **options: Any) -> httpx.Response:
        send(client, method, path, **options)
        raise httpx.ReadError("cut")

    with monkeypatch.context() as patch:
        patch.setattr(httpx.Client, "request", lose)
        with pytest.raises(Unreachable):
            rotate_key(node)
    with pytest.raises(ServiceError):
        standing(node)
    rotate_key(node)
    standing(node)
    after = site.roster().nodes[0]
    assert after.node_id == before.node_id
    assert len(site.audit("keys_rotated")) == 1


@pytest.mark.parametrize("moved", [0, 1, 2, 3])
def test_a_rotation_cut_off_while_files_move_is_finished(site: Site, node: NodePaths, moved: int) -> None:
    rotate_key(node)
    names = ("flower.key", "flower.pub", "identity.key")
    rotated = {name: (node.keys / name).read_bytes() for name in names}
    # As a crash leaves it: accepted by the server, some files moved, the others still in `next`.
    node.next_keys.mkdir()
    (node.next_keys / "accepted").touch()
    for name in names[moved:]:
        (node.next_keys / name).write_bytes(rotated[name])
        (node.keys / name).write_bytes(b"old")
    Enrolled.load(node)
    assert {name: (node.keys / name).read_bytes() for name in names} == rotated
    assert not node.next_keys.exists()
    standing(node)


def test_a_rotation_that_flower_refuses_changes_nothing(site: Site, node: NodePaths) -> None:
    before = site.roster()
    site.control.down = True
    with pytest.raises(ServiceError) as refused:
        rotate_key(node)
    assert refused.value.code == "link_unavailable"
    assert site.roster() == before
    site.control.down = False
    standing(node)
    rotate_key(node)
    assert site.roster().nodes[0].identity != before.nodes[0].identity


def test_a_revoked_node_is_cut_off_and_told_why(site: Site, node: NodePaths) -> None:
    old_roster = read_roster(node.roster)
    assert site.enrolment.revoke("hospital-a")
    assert not site.control.nodes and site.roster().nodes == ()
    for act in (standing, rotate_key):
        with pytest.raises(ServiceError, match="has been revoked by the server admin") as refused:
            act(node)
        assert (refused.value.code, refused.value.status) == ("node_revoked", 403)
    assert [line["name"] for line in site.audit("revoked")] == ["hospital-a"]
    assert {line["code"] for line in site.audit("request_refused")} == {"node_revoked"}
    # An old roster that still holds the node is no use to anyone who knows the new one.
    authority = parse_public(Enrolled.load(node).authority)
    with pytest.raises(RosterError, match="is known already"):
        accept_roster(old_roster, authority, site.roster())


def test_a_revocation_while_a_rotation_is_on_its_way(
    site: Site, node: NodePaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request was let in; then the admin revokes; then the rotation reaches the store."""
    rotate = site.enrolment.rotate

    def late(*arguments: Any) -> Any:
        site.enrolment.revoke("hospital-a")
        return rotate(*arguments)

    monkeypatch.setattr(site.enrolment, "rotate", late)
    with pytest.raises(ServiceError) as refused:
        rotate_key(node)
    assert refused.value.code == "node_revoked"
    assert not site.control.nodes


def test_a_name_is_free_again_after_revocation(site: Site, node: NodePaths, tmp_path: Path) -> None:
    old = Enrolled.load(node)
    with pytest.raises(ConfigError, match="is enrolled already"):
        site.invite("hospital-a")
    site.enrolment.revoke("hospital-a")
    new = join(site.url, str(site.invite("hospital-a")), tmp_path / "new")
    assert new.node_id != old.node_id
    with pytest.raises(ServiceError):
        standing(node)


def test_leaving(site: Site, node: NodePaths) -> None:
    node.journal.write_text("kept\n")
    leave(node)
    assert not site.control.nodes and site.roster().nodes == ()
    assert not node.node.exists() and not node.keys.exists()
    assert node.journal.read_text() == "kept\n"
    assert site.audit("left")[0]["actor"] == "hospital-a"
    with pytest.raises(EnrolError, match="not enrolled"):
        Enrolled.load(node)
    # The same directory may join again.
    assert join(site.url, str(site.invite("hospital-a")), node.root).name == "hospital-a"


def test_leaving_after_revocation_cleans_up(site: Site, node: NodePaths) -> None:
    site.enrolment.revoke("hospital-a")
    leave(node)
    assert not node.keys.exists()


def test_nobody_of_that_name(site: Site) -> None:
    with pytest.raises(ConfigError, match="no enrolled node is named 'nobody'"):
        site.enrolment.revoke("nobody")


def test_revocation_without_a_superlink_is_made_good_later(site: Site, node: NodePaths) -> None:
    site.control.down = True
    assert not site.enrolment.revoke("hospital-a")
    assert site.roster().nodes == () and site.control.nodes
    site.control.down = False
    assert site.enrolment.reconcile() == 1
    assert not site.control.nodes


def test_a_superlink_that_forgot_learns_every_node_again(site: Site, node: NodePaths) -> None:
    site.join("hospital-b")
    before = site.roster()
    site.control.forget_everything()
    assert site.enrolment.reconcile() == 2
    after = site.roster()
    assert after.version == before.version + 1
    assert {int(entry.flower_id or 0) for entry in after.nodes} == set(site.control.nodes)
    assert [entry.node_id for entry in after.nodes] == [entry.node_id for entry in before.nodes]
    assert site.enrolment.reconcile() == 0
    assert site.roster() == after
    assert len(site.audit("registered_again")) == 2
