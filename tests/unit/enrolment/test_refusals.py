"""Each way of not getting in: its own code and text on the node, an audit line on the server, and no node."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from fedward_client.enrol import join
from fedward_common.enrolment import JoinToken, NodeKeys, flower_public_pem
from fedward_common.http import ServiceError
from fedward_common.signing import encode, generate, public_text
from fedward_server.enrolment import invite

from enrolment.site import Site, body_of


def expired(site: Site) -> JoinToken:
    return invite(site.paths, site.store, "hospital-a", -1.0)


def used(site: Site) -> JoinToken:
    token = site.invite()
    join(site.url, str(token), site.root / "first")
    site.enrolment.revoke("hospital-a")
    return token


def wrong_secret(site: Site) -> JoinToken:
    return replace(site.invite(), secret="A" * 43)


def unknown_id(site: Site) -> JoinToken:
    return replace(site.invite(), id="hospital-a~00000000")


def name_taken(site: Site) -> JoinToken:
    second = site.invite()
    site.join("hospital-a")
    return second


@pytest.mark.parametrize(
    ("make", "code", "text"),
    [
        (expired, "token_expired", "expired at 20"),
        (used, "token_used", "has been used already"),
        (wrong_secret, "token_wrong", "not one of this server's"),
        (unknown_id, "token_wrong", "not one of this server's"),
        (name_taken, "name_taken", "is enrolled already"),
    ],
)
def test_a_token_that_is_no_good(site: Site, make: Callable[[Site], JoinToken], code: str, text: str) -> None:
    token = make(site)
    nodes = dict(site.control.nodes)
    with pytest.raises(ServiceError, match=text) as refused:
        join(site.url, str(token), site.root / "node")
    assert refused.value.code == code
    assert token.secret not in str(refused.value)
    lines = site.audit("enrol_refused")
    assert lines == [{"actor": "hospital-a", "code": code, "token": token.id}]
    assert site.control.nodes == nodes
    assert not (site.root / "node" / "node.json").exists()


@pytest.mark.parametrize("off", [-3600, -400, 400, 3600])
def test_a_clock_that_is_off(site: Site, off: int) -> None:
    with pytest.raises(ServiceError) as refused:
        join(site.url, str(site.invite()), site.root / "node", clock=lambda: 1.7e9 + off)
    assert refused.value.code == "clock_off"
    site.now = lambda: 1.7e9
    token = site.invite()
    with pytest.raises(ServiceError, match=r"sender's clock says 2023-.*, the server's 2023-11-14 22:13:20") as refused:
        join(site.url, str(token), site.root / "node", clock=lambda: 1.7e9 + off)
    assert refused.value.code == "clock_off"
    assert [line["code"] for line in site.audit("enrol_refused")] == ["clock_off"] * 2
    # The token is not spent.
    join(site.url, str(token), site.root / "node", clock=lambda: 1.7e9 + off / 20)


def claim_of(site: Site, token: JoinToken, time_off: float = 0, **changes: Any) -> dict[str, Any]:
    """A claim with `changes` made after it was signed, one of them to its time by `time_off` seconds."""
    keys = NodeKeys.generate()
    claim = keys.claim("enrolment", token.id, token.name, token.ca_sha256, int(time.time()))
    return {**claim, "time": claim["time"] + time_off, "token": token.id, "secret": token.secret, **changes}


def other_identity() -> str:
    return public_text(generate())


def other_flower_key() -> str:
    return flower_public_pem(ec.generate_private_key(ec.SECP256R1()))


def weak_flower_key() -> str:
    return flower_public_pem(ec.generate_private_key(ec.SECP192R1()))


@pytest.mark.parametrize(
    "changes",
    [
        {"identity": other_identity()},
        {"flower_key": other_flower_key()},
        {"flower_key": weak_flower_key()},
        {"flower_key": "no key"},
        {"identity": "no key"},
        {"identity_proof": encode(b"\0" * 64)},
        {"identity_proof": ""},
        {"flower_proof": encode(b"\0" * 64)},
        {"flower_proof": "*"},
        {"time_off": -7},
    ],
)
def test_a_forged_proof(site: Site, changes: dict[str, Any]) -> None:
    token = site.invite()
    with site.raw() as client:
        answer = client.post("/enrol", json=claim_of(site, token, **changes))
        assert (answer.status_code, body_of(answer)["error"]) == (403, "proof_wrong")
        assert [line["code"] for line in site.audit("enrol_refused")] == ["proof_wrong"]
        assert not site.control.nodes
        # The token is not spent.
        assert client.post("/enrol", json=claim_of(site, token)).status_code == 200


def test_a_proof_for_another_token_or_purpose(site: Site) -> None:
    keys, token, other = NodeKeys.generate(), site.invite("hospital-a"), site.invite("hospital-b")
    now = int(time.time())
    with site.raw() as client:
        for claim in (
            keys.claim("enrolment", other.id, "hospital-a", token.ca_sha256, now),
            keys.claim("rotation", token.id, "hospital-a", token.ca_sha256, now),
        ):
            answer = client.post("/enrol", json={**claim, "token": token.id, "secret": token.secret})
            assert body_of(answer)["error"] == "proof_wrong"


def test_a_token_for_another_name(site: Site) -> None:
    token = site.invite("hospital-a")
    claim = NodeKeys.generate().claim("enrolment", token.id, "hospital-b", token.ca_sha256, int(time.time()))
    with site.raw() as client:
        answer = client.post("/enrol", json={**claim, "token": token.id, "secret": token.secret})
    assert body_of(answer)["error"] == "token_other_name"
    assert site.audit("enrol_refused")[0]["code"] == "token_other_name"


def test_keys_of_a_revoked_node_never_come_back(site: Site) -> None:
    keys = NodeKeys.generate()
    with site.raw() as client:
        for name, wanted in (("hospital-a", 200), ("hospital-b", 409)):
            token = site.invite(name)
            claim = keys.claim("enrolment", token.id, name, token.ca_sha256, int(time.time()))
            answer = client.post("/enrol", json={**claim, "token": token.id, "secret": token.secret})
            assert answer.status_code == wanted
            if wanted == 200:
                site.enrolment.revoke(name)
    assert body_of(answer)["error"] == "key_taken"


def test_a_foreign_token_at_the_service(site: Site) -> None:
    """The join command stops before it sends anything; a client that does not is refused by the service."""
    token = replace(site.invite(), ca_sha256="0" * 64)
    with site.raw() as client:
        answer = client.post("/enrol", json=claim_of(site, token))
    assert (answer.status_code, body_of(answer)["error"]) == (403, "token_foreign")
    assert site.audit("enrol_refused")[0]["code"] == "token_foreign"


def test_a_flood_of_refusals_does_not_fill_the_audit(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(site.enrolment.refusals, "_clock", lambda: now[0])
    monkeypatch.setattr(site.enrolment.refusals, "_window", 0.0)
    for _ in range(250):
        site.enrolment.refusals.add("x" * 5000, "enrol_refused", "token_wrong")
    lines = site.audit("enrol_refused")
    assert len(lines) == 100 and lines[0]["actor"] == "x" * 100
    now[0] = 61.0
    site.enrolment.refusals.add("x", "enrol_refused", "token_wrong")
    assert site.audit("refusals_not_shown") == [{"actor": "server", "count": 150}]
