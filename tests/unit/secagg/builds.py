"""Builds of the protocol without one of its checks, to show that an attack which fails against ours is a real one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from fedward_common.secagg.client import Client
from fedward_common.secagg.keys import Advertisement

from .hostile import HostileServer

Patch = pytest.MonkeyPatch
Build = Callable[[Patch], None]


def ours(monkeypatch: Patch) -> None:
    """Nothing is removed."""


def without(*checks: str) -> Build:
    """Nodes that do not make these checks, methods of `Client`."""

    def build(monkeypatch: Patch) -> None:
        for check in checks:
            monkeypatch.setattr(Client, check, lambda self, *arguments: None)

    return named("without" + " and".join(check.replace("_", " ") for check in checks), build)


def both(*builds: Build) -> Build:
    """What all of these lack is lacking."""

    def build(monkeypatch: Patch) -> None:
        for one in builds:
            one(monkeypatch)

    return named(", ".join(one.__name__ for one in builds), build)


def named(name: str, build: Build) -> Build:
    build.__name__ = name
    return build


def builds(
    in_ours: str, *falls: Build, holds: Mapping[Build, str] | None = None, **others: Any
) -> pytest.MarkDecorator:
    """Parametrise a test over (build, rule). rule: what of a refusal's text is to be seen where the attack fails, in
    ours and in the builds of `holds`; None in the builds that fall."""
    cases = [(ours, in_ours), *(holds or {}).items(), *((build, None) for build in falls)]
    ids = [f"{build.__name__}-{'falls' if rule is None else 'holds'}" for build, rule in cases]
    return pytest.mark.parametrize(("build", "rule"), cases, ids=ids)


def judge(rule: str | None, found: Any, wanted: Any, hostile: HostileServer) -> None:
    """The attack found exactly what it wanted, or nothing, and `rule` is what it ran into ("": chance only)."""
    if rule is None:
        assert found is not None, hostile.refusals
        assert np.array_equal(found, wanted)
    else:
        assert found is None
        assert not rule or any(rule in refusal for refusal in hostile.refusals), hostile.refusals


def verify_each_once(monkeypatch: Patch) -> None:
    """No weaker, only faster: all nodes of a large cohort verify the same advertisements."""
    verified: set[tuple[Advertisement, str, bytes]] = set()
    verify = Advertisement.verify

    def once(self: Advertisement, run: str, identity: Ed25519PublicKey) -> None:
        case = (self, run, identity.public_bytes_raw())
        if case not in verified:
            verify(self, run, identity)
            verified.add(case)

    monkeypatch.setattr(Advertisement, "verify", once)
