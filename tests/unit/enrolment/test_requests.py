"""Signed requests at the service: once, in time, unchanged, by somebody known. And what errors look like."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from fedward_client.paths import NodePaths
from fedward_common.credential import Credential
from fedward_common.http import Service, ServiceError, Unreachable
from fedward_common.signing import authorize, generate, load_private
from fedward_server.store import Store
from fedward_server.web.app import create_app
from starlette.testclient import TestClient

from enrolment.site import Site, body_of


def signed(site: Site, method: str, target: str, body: bytes = b"", **options: Any) -> dict[str, str]:
    key = options.pop("key", None) or Credential.load(site.paths.credential).key
    return {"Authorization": authorize(key, method, target, body, **options)}


def test_a_data_scientist_sees_the_nodes(site: Site) -> None:
    site.join("hospital-a")
    with site.scientist() as service:
        found = service.get("/nodes")["nodes"]
        assert [(node["name"], node["link"]) for node in found] == [("hospital-a", "online")]
        site.control.down = True
        assert service.get("/nodes")["nodes"][0]["link"] == "unknown"


def test_the_query_is_signed(site: Site) -> None:
    with site.scientist() as service:
        service.get("/nodes", params={"a": "b c", "d": "ä/?&"})
    with site.raw() as client:
        headers = signed(site, "GET", "/nodes?a=1")
        assert body_of(client.get("/nodes?a=2", headers=headers))["error"] == "signature_wrong"


def test_a_replayed_request_is_refused(site: Site) -> None:
    with site.raw() as client:
        headers = signed(site, "GET", "/nodes")
        assert client.get("/nodes", headers=headers).status_code == 200
        for _ in range(2):
            again = client.get("/nodes", headers=headers)
            assert (again.status_code, body_of(again)["error"]) == (401, "request_repeated")
    assert [line["code"] for line in site.audit("request_refused")] == ["request_repeated"] * 2


def test_a_replay_is_refused_after_a_restart(site: Site) -> None:
    with site.raw() as client:
        headers = signed(site, "GET", "/nodes")
        assert client.get("/nodes", headers=headers).status_code == 200
    store = Store(site.paths.database)
    with TestClient(create_app(site.paths, store, site.enrolment, site.control)) as client:
        assert body_of(client.get("/nodes", headers=headers))["error"] == "request_repeated"
    store.close()


@pytest.mark.parametrize("off", [-400, 400, -(10**6)])
def test_a_request_out_of_time(site: Site, off: int) -> None:
    with site.raw() as client:
        now = time.time()
        answer = client.get("/nodes", headers=signed(site, "GET", "/nodes", now=now + off))
    assert (answer.status_code, body_of(answer)["error"]) == (401, "clock_off")
    assert body_of(answer)["message"].count(time.strftime("%Y-", time.gmtime(now))) >= 1
    assert "server's" in body_of(answer)["message"]


@pytest.mark.parametrize(
    ("method", "target", "body"), [("POST", "/nodes", b""), ("GET", "/runs", b""), ("GET", "/nodes", b"x")]
)
def test_a_signature_for_something_else(site: Site, method: str, target: str, body: bytes) -> None:
    with site.raw() as client:
        answer = client.get("/nodes", headers=signed(site, method, target, body))
    assert body_of(answer)["error"] == "signature_wrong"


def test_somebody_unknown(site: Site) -> None:
    site.join("hospital-a")
    identity = load_private(NodePaths(site.root / "hospital-a").identity_key)
    with site.raw() as client:
        # A node is no data scientist, nor the other way round.
        for key in (generate(), identity):
            headers = signed(site, "GET", "/nodes", key=key)
            assert body_of(client.get("/nodes", headers=headers))["error"] == "key_unknown"
        headers = signed(site, "GET", "/nodes/me")
        assert body_of(client.get("/nodes/me", headers=headers))["error"] == "key_unknown"


@pytest.mark.parametrize("header", ["Bearer x", "Fedward", "Fedward a:b:c:d", f"Fedward {'0' * 16}:١٢:{'a' * 20}"])
def test_a_malformed_header(site: Site, header: str) -> None:
    with site.raw() as client:
        answer = client.get("/nodes", headers={"Authorization": header.encode()})
        assert (answer.status_code, body_of(answer)["error"]) == (401, "auth_malformed")
        assert body_of(client.get("/nodes"))["error"] == "auth_missing"


def test_large_bodies_are_refused(site: Site) -> None:
    with site.raw() as client:
        stated = client.post("/enrol", content=b"x" * 300_000)
        assert (stated.status_code, body_of(stated)["error"]) == (413, "too_large")
        chunks = client.post("/enrol", content=(b"x" * 50_000 for _ in range(10)))
        assert (chunks.status_code, body_of(chunks)["error"]) == (413, "too_large")


def test_a_bad_body_is_not_echoed(site: Site) -> None:
    with site.raw() as client:
        answer = client.post("/enrol", json={"secret": "hush" * 100, "name": 7})
    assert (answer.status_code, body_of(answer)["error"]) == (422, "bad_request")
    assert "hush" not in answer.text and "name" in answer.text


def test_no_stack_trace_leaves_the_service(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down(_: Any) -> None:
        raise RuntimeError("patient 4711")

    monkeypatch.setattr(site.enrolment, "enrol", break_down)
    site.now = time.time
    with pytest.raises(ServiceError, match="its log has the details") as refused:
        site.join("hospital-a")
    assert refused.value.code == "internal" and "4711" not in str(refused.value)


def test_unknown_routes_answer_in_the_same_form(site: Site) -> None:
    with site.raw() as client:
        for method, path, status in (("GET", "/nothing", 404), ("DELETE", "/enrol", 405), ("GET", "/docs", 404)):
            answer = client.request(method, path)
            assert answer.status_code == status and set(body_of(answer)) == {"error", "message"}


def test_health_and_readiness(site: Site) -> None:
    with site.raw() as client:
        assert body_of(client.get("/health")) == {"status": "ok"}
        assert client.get("/ready").status_code == 200
        site.app.state.checks = (lambda: {"superexec": "gone"}, dict)
        answer = client.get("/ready")
        assert (answer.status_code, body_of(answer)["parts"]) == (503, {"superexec": "gone"})


def test_the_roster_is_public(site: Site) -> None:
    site.join("hospital-a")
    with site.raw() as client:
        assert "hospital-a" in client.get("/roster").text


def test_other_cas_are_not_trusted(site: Site, tmp_path: Path) -> None:
    other = Site(tmp_path / "other")
    with Service(site.url, other.paths.public_ca.read_text()) as service:  # noqa: SIM117
        with pytest.raises(Unreachable, match="man in the middle"):
            service.get("/health")
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{site.url}/health", trust_env=False)
    other.store.close()
