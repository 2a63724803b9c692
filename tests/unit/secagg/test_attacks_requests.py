"""What a server that lies can try with the requests of a run: whatever it asks a node, no value of the node's own comes
back, and no pair of sums gives one away. Against ours, and against builds without the check (see `test_attacks`)."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from fedward_client import session
from fedward_client.policy import Policy
from fedward_client.session import admit
from fedward_common.manifest import Manifest
from fedward_common.messages import Purpose, Reason, Reply, Request
from fedward_common.node import MemoryStore, Participant, Refused
from fedward_common.roster import Roster, RosterScientist
from fedward_common.secagg.keys import Advertisement, KeyPairs
from fedward_common.secagg.messages import advertisements_to_bytes
from fedward_common.secure import SecureParticipant
from fedward_common.signing import public_text
from fedward_common.steps import ADVERTISEMENT, ADVERTISEMENTS, DEALT, MASKED, TERMS, blob
from fedward_common.work import Done, Work
from fedward_server.secure import SumFailed

from .federation import RUN, SCALE, WIDTH, Federation, Site, config

shape = Federation.shape
BUILDS = pytest.mark.parametrize("checked", [True, False], ids=["ours-holds", "unchecked-falls"])
VICTIM = "node-2"


def request(purpose: Purpose, federation: Federation, terms: bool, **settings: Any) -> Request:
    """A request to all of a cohort, with all that a training wants in it, and the terms of a secure sum or not."""
    vectors: dict[str, Any] = {"model": np.zeros(WIDTH)}
    if terms:
        n = len(federation.nodes)
        advertised = [
            Advertisement.from_bytes(node._steps.fresh()[ADVERTISEMENT].tobytes()) for node in federation.nodes.values()
        ]
        vectors[ADVERTISEMENTS] = blob(advertisements_to_bytes(sorted(advertised, key=lambda a: a.node)))
        parameters = asdict(federation.config.secure_sum.parameters(n))
        settings[TERMS] = {"shape": federation.shape(n).to_json(), "parameters": parameters}
    return Request(purpose, RUN, 1, 1, vectors, settings={"cohort": len(federation.nodes), "seconds": 9.0, **settings})


def gives_away(reply: Reply, site: Site) -> bool:
    """Whether a value of the node's own can be read off a reply: as an array, a number, or in its bytes or text."""
    if any(vector.dtype != np.uint8 for vector in reply.vectors.values()) or reply.weight or reply.metrics:
        return True
    numbers = [*site.delta, site.examples, site.loss]
    sent = b"".join(vector.tobytes() for vector in reply.vectors.values())
    said = json.dumps([dict(reply.info), str(reply.failure)])
    return any(np.float64(x).tobytes() in sent or np.float32(x).tobytes() in sent for x in numbers) or any(
        f"{x:.6g}" in said for x in numbers
    )


def in_the_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node lets the message decide what leaves it: requests without terms are answered as in a plain run."""
    secure = SecureParticipant._handlers

    def handlers(self: SecureParticipant) -> Any:
        plain = Participant._handlers(self)
        return {**secure(self), **{p: plain[p] for p in (Purpose.TRAIN, Purpose.EVALUATE, Purpose.COLLECT)}}

    monkeypatch.setattr(SecureParticipant, "_handlers", handlers)


@BUILDS
@pytest.mark.parametrize("settings", [{}, {"hold": True}, {"split": "train"}])
@pytest.mark.parametrize("terms", [False, True], ids=["without terms", "with terms"])
def test_a_training_under_any_name(
    terms: bool, settings: dict[str, Any], checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each purpose there is, then COLLECT in case something was held back for it."""
    if not checked:
        in_the_open(monkeypatch)
    told = []
    for purpose in Purpose:
        federation = Federation()
        node, site = federation.nodes[VICTIM], federation.sites[VICTIM]
        for reply in (
            node.handle(request(purpose, federation, terms, **settings)),
            node.handle(request(Purpose.COLLECT, federation, terms, **settings)),
        ):
            told += [reply] if gives_away(reply, site) else []
            assert not checked or set(reply.vectors) <= {ADVERTISEMENT, DEALT}
            assert not checked or set(reply.info) <= {"seconds", "layout"}
    if checked:
        assert told == []
        return
    assert any(np.array_equal(reply.vectors["delta"], site.delta) for reply in told if "delta" in reply.vectors)
    assert any(reply.metrics.get("loss") == site.loss for reply in told)


def test_the_masked_vector_gives_nothing_away() -> None:
    """What does leave the node, in a round as it should be."""
    federation = Federation()
    replies: list[tuple[str, Reply]] = []
    for name, node in federation.nodes.items():
        handle = node.handle
        node.handle = lambda asked, name=name, handle=handle: replies.append((name, handle(asked))) or replies[-1][1]  # type: ignore[method-assign]
    federation.train()
    assert sum(MASKED in reply.vectors for _, reply in replies) == 5
    assert not any(gives_away(reply, federation.sites[name]) for name, reply in replies)


class Papers:
    """A run's papers, in order: manifest signed by a data scientist, its bundle approved."""

    def __init__(self, secure: bool) -> None:
        key = Ed25519PrivateKey.generate()
        self.roster = Roster(
            version=1, federation="t", scientists=(RosterScientist(name="ada", key=public_text(key)),)
        )
        run = config(secure_sum={"enabled": secure})
        self._manifest = Manifest.make(RUN, run, b"bundle", None, "ada").sign(key)
        self.approvals: Any = SimpleNamespace(
            known=lambda bundle: True, missing_dependencies=lambda bundle: [], approved=lambda bundle: True
        )

    def manifest(self) -> Any:
        return self._manifest

    def bundle_sha256(self) -> str:
        return hashlib.sha256(b"bundle").hexdigest()

    def bundle(self) -> bytes:
        return b"bundle"


@BUILDS
def test_a_plain_run_where_the_policy_wants_masks(checked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not checked:
        monkeypatch.setattr(session, "check_run", lambda policy, config: [])
    papers = Papers(secure=False)
    if checked:
        with pytest.raises(Refused, match="require_secure_sum = true"):
            admit(papers, papers.roster, Policy(), papers.approvals, "a")
        secure = Papers(secure=True)
        assert admit(secure, secure.roster, Policy(), secure.approvals, "a").config.secure_sum.enabled
        return
    admitted = admit(papers, papers.roster, Policy(), papers.approvals, "a")
    site = Site(np.arange(WIDTH) / 8, 100.0, 3.0)
    node = Participant(admitted.config, MemoryStore(), site)
    reply = node.handle(Request(Purpose.TRAIN, RUN, 1, 1, {"model": np.zeros(WIDTH)}))
    assert np.array_equal(reply.vectors["delta"], site.delta)


@BUILDS
@pytest.mark.parametrize("restarted", [False, True], ids=["", "restarted"])
def test_a_round_played_again_without_the_victim(
    restarted: bool, checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sums of one round: of all, and of all but the victim, whose masked vector is said to be lost. What lies
    between them is the victim's."""
    if not checked:
        monkeypatch.setattr(SecureParticipant, "_check_new", lambda self, request: None)
    federation = Federation()
    victim = federation.sites[VICTIM]
    first = federation.train()
    if restarted:
        # A node that has just started knows of its last training from what it keeps on disk.
        federation.nodes |= {name: federation.started(name) for name in federation.nodes}
        federation.server._advertised.clear()
    federation.faults.lost.add((VICTIM, Purpose.MASK))
    if checked:
        with pytest.raises(SumFailed, match="0 of 5 nodes dealt") as failed:
            federation.train()
        assert all("was answered already" in failure.rule for failure in failed.value.failures.values())
        federation.faults.lost.clear()
        federation.train(2, 1)
        return
    second = federation.train()
    assert first.mean.weight - second.mean.weight == victim.examples
    assert first.mean.metrics["train.loss"] - second.mean.metrics["train.loss"] == victim.loss
    sums = [found.mean.groups["delta"] * found.mean.weight for found in (first, second)]
    # Both sums are of values rounded at random, to steps of 2R/L.
    step = 2 * SCALE / first.shape.levels
    np.testing.assert_allclose((sums[0] - sums[1]) / victim.examples, victim.delta, atol=9 * step / victim.examples)


@pytest.mark.parametrize("broken", ["weight", "equal weights", "count", "metric", "group", "state"])
def test_a_refusal_does_not_say_what_was_refused(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and counts that break a rule; values that task code hides in the names of what it returns."""
    federation = Federation(config=config(cohort={"max_weight": 0.5 if broken == "weight" else 1e7}))
    node, site = federation.nodes[VICTIM], federation.sites[VICTIM]

    def execute(work: Work) -> Done:
        done = site(work)
        if work.op != "train" or broken not in ("metric", "group", "state"):
            return done
        hidden = f"{site.loss:.6g}"
        more = {
            "metric": {"metrics": {**done.metrics, hidden: 1.0}},
            "group": {"vectors": {**done.vectors, hidden: site.delta}},
            "state": {"state": {hidden: site.delta}},
        }
        return replace(done, **more[broken])

    monkeypatch.setattr(node, "_execute", execute)
    if broken == "equal weights":
        monkeypatch.setattr(type(node._algorithm), "uniform", True)
        monkeypatch.setattr(Federation, "shape", lambda self, n: replace(shape(self, n), weight_scale=1.0))
    if broken == "count":
        site.examples = -site.examples
    reply = node.handle(request(Purpose.TRAIN, federation, terms=True))
    assert reply.failure is not None and reply.failure.reason is Reason.BAD_UPDATE, reply
    assert not gives_away(reply, site), reply.failure


def test_a_node_that_sends_a_negative_weight_costs_a_round_only(monkeypatch: pytest.MonkeyPatch) -> None:
    federation = Federation()
    liar = federation.nodes[VICTIM]

    def words(request: Request, shape: Any, broadcast: Any) -> Any:
        return shape.blank({**dict.fromkeys(shape.scalars, 0.0), "weight": -1e6})

    monkeypatch.setattr(liar, "_words", words)
    with pytest.raises(SumFailed, match="there is no mean"):
        federation.train()
    monkeypatch.undo()
    assert federation.train(1, 2).mean.weight == sum(site.examples for site in federation.sites.values())


@pytest.mark.parametrize("key", ["mask_key", "seal_key"])
def test_a_node_that_advertises_a_key_of_low_order_costs_a_round_only(key: str) -> None:
    """With it every exchange gives zero: nobody masks or seals with that."""
    federation = Federation()
    liar, node = federation.nodes[VICTIM], federation.roster.node(VICTIM)
    assert node is not None
    made = KeyPairs.make(node.id_bytes, RUN, None)
    low = replace(made.advertisement, **{key: bytes(32)})
    signed = replace(low, signature=federation.identities[VICTIM].sign(low.signed(RUN)))
    liar._steps._keyring._outstanding[signed.serial] = KeyPairs(signed, made.mask, made.seal)
    liar._steps.fresh = lambda: {ADVERTISEMENT: blob(signed.to_bytes())}  # type: ignore[method-assign]
    with pytest.raises(SumFailed) as failed:
        federation.train()
    others = [failure for name, failure in failed.value.failures.items() if name != VICTIM]
    assert len(others) == 4
    assert all(failure.reason is Reason.SECURE_SUM and "low order" in failure.rule for failure in others), others
