"""Joining: what it leaves on both sides, once and only once."""

from __future__ import annotations

import json
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from fedward_client.enrol import EnrolError, Enrolled, join, standing
from fedward_client.paths import NodePaths
from fedward_common.errors import FedwardError
from fedward_common.files import Locked, lock_file
from fedward_common.http import ServiceError, Unreachable
from fedward_common.roster import open_roster, read_roster
from fedward_common.signing import load_private, parse_public, public_text
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from enrolment.site import Site


def test_a_node_joins(site: Site, tmp_path: Path) -> None:
    token = site.invite("hospital-a", tags=("eu", "ct"))
    enrolled = join(site.url, str(token), tmp_path / "node")
    paths = NodePaths(tmp_path / "node")
    assert Enrolled.load(paths) == enrolled
    assert (enrolled.name, enrolled.fleet_address) == ("hospital-a", "localhost:9092")

    entry = site.roster().node("hospital-a")
    assert entry is not None and entry.node_id == enrolled.node_id and entry.tags == ("ct", "eu")
    assert entry.identity == public_text(load_private(paths.identity_key))
    # The node's copy is the server's, and verifies with the key that the node pinned.
    assert open_roster(read_roster(paths.roster), parse_public(enrolled.authority)) == site.roster()

    # The key that Flower knows is the one that its own tools read from the node's files.
    private = load_ssh_private_key(paths.flower_key.read_bytes(), None)
    public = load_ssh_public_key(paths.flower_public.read_bytes())
    assert private.public_key() == public
    assert site.control.nodes == {int(entry.flower_id or 0): public_key_to_bytes(public)}

    assert [line["actor"] for line in site.audit("enrolled")] == ["hospital-a"]
    standing(paths)


def test_everything_is_for_the_owner_only(site: Site, tmp_path: Path) -> None:
    site.join("hospital-a")
    for root in (site.paths.root, tmp_path / "hospital-a"):
        assert stat.S_IMODE(root.stat().st_mode) == 0o700
        for path in root.rglob("*"):
            public = path.name == "roster.json"
            wanted = 0o700 if path.is_dir() else 0o644 if public else 0o600
            assert stat.S_IMODE(path.stat().st_mode) == wanted, path


def test_the_secret_is_stored_nowhere(site: Site, tmp_path: Path) -> None:
    token = site.invite()
    join(site.url, str(token), tmp_path / "node")
    assert token.secret.encode() not in site.whole_store()
    for path in (tmp_path / "node").rglob("*"):
        assert path.is_dir() or token.secret.encode() not in path.read_bytes()
    assert token.secret not in repr(token)


def test_of_two_nodes_with_one_token_one_joins(site: Site, tmp_path: Path) -> None:
    token = str(site.invite())
    together = threading.Barrier(4)

    def race(number: int) -> str:
        together.wait()
        try:
            return join(site.url, token, tmp_path / str(number)).node_id
        except ServiceError as error:
            return error.code

    with ThreadPoolExecutor(4) as pool:
        results = sorted(pool.map(race, range(4)), key=len)
    assert results[:3] == ["token_used"] * 3
    assert [node.node_id for node in site.roster().nodes] == results[3:]
    assert len(site.control.nodes) == 1
    assert len(site.audit("enrolled")) == 1
    assert [line["code"] for line in site.audit("enrol_refused")] == ["token_used"] * 3


def test_a_directory_joins_once(site: Site, tmp_path: Path) -> None:
    site.join("hospital-a")
    other = site.invite("hospital-b")
    before = (tmp_path / "hospital-a" / "node.json").read_bytes()
    with pytest.raises(EnrolError, match=r"enrolled already, as 'hospital-a'.*node leave.*another directory"):
        join(site.url, str(other), tmp_path / "hospital-a")
    assert (tmp_path / "hospital-a" / "node.json").read_bytes() == before
    # The second token was not spent.
    assert join(site.url, str(other), tmp_path / "hospital-b").name == "hospital-b"


def test_a_directory_in_use_is_refused(site: Site, tmp_path: Path) -> None:
    paths = NodePaths(tmp_path / "node")
    paths.root.mkdir()
    with lock_file(paths.lock), pytest.raises(Locked, match=r"process \d+ uses this directory"):
        join(site.url, str(site.invite()), paths.root)
    assert not site.control.nodes


def test_a_lost_answer_is_asked_for_again(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = str(site.invite())
    send = httpx.Client.request

    def lose(client: httpx.Client, method: str, path: str, **options: Any) -> httpx.Response:
        answer = send(client, method, path, **options)
        if path == "/enrol":
            raise httpx.ReadError("cut")
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(httpx.Client, "request", lose)
        with pytest.raises(Unreachable):
            join(site.url, token, tmp_path / "node")
    node = site.roster().nodes[0]
    # The same machine with the same keys gets the same answer; another one gets nothing.
    with pytest.raises(ServiceError) as refused:
        join(site.url, token, tmp_path / "thief")
    assert refused.value.code == "token_used"
    assert join(site.url, token, tmp_path / "node").node_id == node.node_id
    assert len(site.control.nodes) == 1


def test_a_failing_superlink_gives_the_token_back(site: Site, tmp_path: Path) -> None:
    token = str(site.invite())
    version = site.roster().version
    site.control.down = True
    with pytest.raises(ServiceError, match="the token is still good") as refused:
        join(site.url, token, tmp_path / "node")
    assert (refused.value.code, refused.value.status) == ("link_unavailable", 503)
    assert not (tmp_path / "node" / "node.json").exists()
    assert (site.roster().version, site.roster().nodes) == (version, ())
    site.control.down = False
    join(site.url, token, tmp_path / "node")


@pytest.mark.parametrize("url", ["http://localhost:1", "https://user@localhost:1", "https://localhost:99999", "ftp:x"])
def test_an_address_must_be_https(site: Site, tmp_path: Path, url: str) -> None:
    with pytest.raises(EnrolError, match="server address"):
        join(url, str(site.invite()), tmp_path / "node")


@pytest.mark.parametrize("text", ["", "FW1", "FW1abc::x.y", "K10" + "0" * 64 + "::a~00000000." + "A" * 43])
def test_what_is_no_token_is_said_to_be_none(tmp_path: Path, text: str) -> None:
    with pytest.raises(FedwardError, match="not a join token"):
        join("https://localhost:1", text, tmp_path / "node")


def test_node_json_holds_no_secret(site: Site, tmp_path: Path) -> None:
    site.join("hospital-a")
    fields = json.loads((tmp_path / "hospital-a" / "node.json").read_text())
    assert set(fields) == {"name", "node_id", "server", "fleet_address", "ca_sha256", "authority"}
