"""Signed things: roster and manifest, and that neither passes for the other."""

from __future__ import annotations

import hashlib
import json
import stat
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from fedward_common.config import parse_config
from fedward_common.manifest import Manifest, ManifestError, open_manifest
from fedward_common.roster import Roster, RosterError, RosterNode, RosterScientist, accept_roster, open_roster
from fedward_common.signing import (
    SignatureError,
    decode,
    encode,
    generate,
    key_id,
    keys_by_id,
    load_private,
    open_envelope,
    parse_public,
    public_text,
    save_private,
    sign_envelope,
)

# RFC 8032, section 7.1, test 1: a key pair that this code did not make.
SEED = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
PUBLIC = bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")

CONFIG = parse_config(
    {
        "name": "r",
        "task": "t:T",
        "rounds": 1,
        "algorithm": {"name": "fedavg"},
        "local": {"lr": 0.1, "epochs": 1, "batch_size": 8},
    }
)
RUN = "0123456789abcdef" * 2


def test_key_texts_and_ids() -> None:
    key = Ed25519PrivateKey.from_private_bytes(SEED)
    assert decode(public_text(key)) == PUBLIC
    assert key_id(key.public_key()) == hashlib.sha256(PUBLIC).hexdigest()[:16]
    assert public_text(parse_public(public_text(key))) == public_text(key)


@pytest.mark.parametrize("text", ["", "AAAA", "A" * 43 + "=", "A" * 42 + "B", " " + "A" * 43, "+" * 43, "ä" * 43])
def test_public_keys_have_one_spelling(text: str) -> None:
    with pytest.raises(SignatureError):
        parse_public(text)


def test_keys_are_kept_for_the_owner(tmp_path: Path) -> None:
    key = generate()
    save_private(tmp_path / "k", key)
    assert stat.S_IMODE((tmp_path / "k").stat().st_mode) == 0o600
    assert public_text(load_private(tmp_path / "k")) == public_text(key)
    (tmp_path / "bad").write_text("no key")
    for name in ("bad", "absent"):
        with pytest.raises(SignatureError, match=name):
            load_private(tmp_path / name)


def test_kinds_are_not_interchangeable() -> None:
    key = generate()
    keys = keys_by_id(key.public_key())
    envelope = sign_envelope("roster", {"version": 1}, key)
    assert open_envelope("roster", envelope, keys) == {"version": 1}
    disguised = {"manifest": envelope["roster"], "key": envelope["key"], "signature": envelope["signature"]}
    with pytest.raises(SignatureError, match="wrong"):
        open_envelope("manifest", disguised, keys)
    with pytest.raises(SignatureError, match="fields"):
        open_envelope("manifest", envelope, keys)


@pytest.mark.parametrize(
    "change",
    [
        {"x": '{"a":2}'},
        {"x": '{"a": 1}'},
        {"x": "\ud800"},
        {"x": 7},
        {"signature": encode(b"\0" * 64)},
        {"signature": ""},
        {"signature": None},
        {"key": "0" * 16},
        {"extra": 1},
    ],
)
def test_a_changed_envelope_is_refused(change: dict[str, Any]) -> None:
    key = generate()
    envelope = sign_envelope("x", {"a": 1}, key)
    with pytest.raises(SignatureError):
        open_envelope("x", {**envelope, **change}, keys_by_id(key.public_key()))


def test_the_key_must_be_the_one_named() -> None:
    key, other = generate(), generate()
    envelope = sign_envelope("x", {}, key)
    with pytest.raises(SignatureError, match="not trusted here"):
        open_envelope("x", envelope, keys_by_id(other.public_key()))
    with pytest.raises(SignatureError, match="wrong"):
        open_envelope("x", {**envelope, "key": key_id(other)}, keys_by_id(key.public_key(), other.public_key()))


@pytest.mark.parametrize("kind", ["", "X", "a\nb", "a b", "-a", "a" * 33])
def test_kinds_are_plain_words(kind: str) -> None:
    with pytest.raises(ValueError, match="kind"):
        sign_envelope(kind, {}, generate())


def node(name: str = "a", number: int = 1, identity: str = "") -> RosterNode:
    return RosterNode(name=name, node_id=f"{number:032x}", flower_id="12", identity=identity or public_text(generate()))


def roster(version: int = 1, *, federation: str = "f", nodes: tuple[RosterNode, ...] = (), **people: Any) -> Roster:
    scientists = tuple(RosterScientist(name=name, key=public_text(key)) for name, key in people.items())
    return Roster(version=version, federation=federation, nodes=nodes, scientists=scientists)


def test_rosters_only_go_forward() -> None:
    authority = generate()
    public = authority.public_key()
    known = roster(5)
    assert accept_roster(roster(6).sign(authority), public, known).version == 6
    assert accept_roster(known.sign(authority), public, known) == known
    for other, text in (
        (roster(4), "5 is known already"),
        (roster(5, nodes=(node(),)), "two different rosters"),
        (roster(6, federation="g"), "the known one of 'f'"),
    ):
        with pytest.raises(RosterError, match=text):
            accept_roster(other.sign(authority), public, known)
    with pytest.raises(SignatureError):
        accept_roster(roster(6).sign(generate()), public, known)


def test_a_roster_names_everyone_once() -> None:
    shared = public_text(generate())
    for nodes in (
        (node("a", 1), node("a", 2)),
        (node("a", 1), node("b", 1)),
        (node("a", 1, shared), node("b", 2, shared)),
    ):
        with pytest.raises(ValueError, match="twice"):
            roster(nodes=nodes)


def test_a_signed_roster_that_breaks_its_rules() -> None:
    authority = generate()
    with pytest.raises(RosterError, match="breaks its rules"):
        open_roster(sign_envelope("roster", {"version": 0}, authority), authority.public_key())


def manifest(**changes: Any) -> Manifest:
    made = Manifest.make(RUN, CONFIG, b"bundle", None, "ann")
    return made.model_copy(update=changes)


def test_a_manifest_by_a_data_scientist_of_the_roster() -> None:
    ann = generate()
    opened = open_manifest(json.loads(json.dumps(manifest().sign(ann))), roster(ann=ann))
    assert opened == manifest(created=opened.created)
    assert opened.run_config() == CONFIG
    opened.check_bundle(b"bundle")
    opened.check_initial(None)
    with pytest.raises(ManifestError, match="bundle"):
        opened.check_bundle(b"other")
    with pytest.raises(ManifestError, match="starting model"):
        opened.check_initial(b"model")


def test_nobody_signs_for_another() -> None:
    ann, bob = generate(), generate()
    everyone = roster(ann=ann, bob=bob)
    with pytest.raises(ManifestError, match="somebody else signed it"):
        open_manifest(manifest().sign(bob), everyone)
    with pytest.raises(SignatureError, match="not trusted here"):
        open_manifest(manifest().sign(ann), roster(bob=bob))


@pytest.mark.parametrize(
    "change",
    [{"run": "../../etc"}, {"version": 2}, {"bundle": "0"}, {"initial": "x"}, {"created": "yesterday"}, {"more": 1}],
)
def test_a_signed_manifest_that_breaks_its_rules(change: dict[str, Any]) -> None:
    ann = generate()
    payload = {**manifest().model_dump(mode="json"), **change}
    with pytest.raises(ManifestError, match="breaks its rules"):
        open_manifest(sign_envelope("manifest", payload, ann), roster(ann=ann))
