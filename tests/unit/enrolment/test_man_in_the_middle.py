"""Whoever stands between node and server never gets the secret."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fedward_client.enrol import CaMismatch, join
from fedward_common.http import NotTrusted, Unreachable
from fedward_server.authority import init
from fedward_server.paths import ServerPaths
from fedward_server.settings import make_settings
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from enrolment.site import Site, free_port, serving


class Attacker:
    """Answers with a CA of its choice and keeps whatever it is sent."""

    def __init__(self, root: Path) -> None:
        self.paths = ServerPaths(root)
        self.port = free_port()
        init(self.paths, make_settings(name="localhost", service_port=self.port))
        self.ca = self.paths.public_ca.read_bytes()
        self.heard = b""
        self.app = Starlette(routes=[Route("/{path:path}", self.answer, methods=["GET", "POST"])])
        self.url = f"https://localhost:{self.port}"

    async def answer(self, request: Request) -> Response:
        self.heard += str(request.url).encode() + repr(request.headers.raw).encode() + await request.body()
        return Response(self.ca)


@pytest.fixture
def attacker(tmp_path: Path) -> Iterator[Attacker]:
    made = Attacker(tmp_path / "attacker")
    with serving(made.app, made.port, made.paths.server_certificate, made.paths.server_key):
        yield made


def test_its_own_ca_is_noticed(site: Site, attacker: Attacker, tmp_path: Path) -> None:
    token = site.invite()
    with pytest.raises(CaMismatch, match=r"another server, or somebody stands between .*man in the middle"):
        join(attacker.url, str(token), tmp_path / "node")
    assert b"/ca.pem" in attacker.heard
    assert token.secret.encode() not in attacker.heard
    assert not (tmp_path / "node").exists()


def test_the_genuine_ca_does_not_help_it(site: Site, attacker: Attacker, tmp_path: Path) -> None:
    token = site.invite()
    attacker.ca = site.paths.public_ca.read_bytes()
    with pytest.raises(NotTrusted, match=r"man in the middle.*Nothing has been sent"):
        join(attacker.url, str(token), tmp_path / "node")
    assert token.secret.encode() not in attacker.heard
    # The real server still takes the token.
    assert join(site.url, str(token), tmp_path / "node").name == "hospital-a"


@pytest.mark.parametrize("ca", [b"", b"<html>", b"x" * 10**6])
def test_rubbish_for_a_ca(site: Site, attacker: Attacker, tmp_path: Path, ca: bytes) -> None:
    attacker.ca = ca
    with pytest.raises(Unreachable, match="not a certificate"):
        join(attacker.url, str(site.invite()), tmp_path / "node")


def test_a_token_of_another_server_is_noted_there(site: Site, attacker: Attacker, tmp_path: Path) -> None:
    other = Site(tmp_path / "other")
    token = other.invite()
    with pytest.raises(CaMismatch, match=token.ca_sha256):
        join(site.url, str(token), tmp_path / "node")
    assert site.audit("enrol_refused") == [{"actor": "unknown", "code": "token_foreign", "ca": token.ca_sha256}]
    other.store.close()


def test_nobody_is_there(site: Site, tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match="cannot be reached"):
        join(f"https://localhost:{free_port()}", str(site.invite()), tmp_path / "node")
