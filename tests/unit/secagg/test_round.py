"""Whole secure rounds: the sum is exact whoever drops out where, or the round ends without one."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from fedward_common.secagg import client as client_module
from fedward_common.secagg.client import Refusal
from fedward_common.secagg.graph import Parameters
from fedward_common.secagg.messages import Delivery, members_to_bytes, sealed_size
from fedward_common.secagg.server import Aborted
from fedward_common.secagg.terms import Terms

from .cohort import LENGTH, Cohort, run

STAGES = ("deal", "mask", "agree", "unmask")


@pytest.mark.parametrize("n", [3, 4, 5, 10, 31, 60])
def test_without_drop_outs_the_sum_is_exact(n: int) -> None:
    cohort = Cohort(n)
    words, survivors = run(cohort)
    assert survivors == frozenset(range(1, n + 1))
    assert np.array_equal(words, cohort.total(survivors))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("n", [5, 10, 40])
def test_as_many_as_promised_may_drop_out_at_any_stage(n: int, stage: str) -> None:
    cohort = Cohort(n)
    gone = range(2, 2 + cohort.parameters.n - cohort.parameters.survivors)
    words, survivors = run(cohort, lambda at, i: i in gone and STAGES.index(at) >= STAGES.index(stage))
    assert (len(survivors) == n) == (stage in ("agree", "unmask"))
    assert np.array_equal(words, cohort.total(survivors))


def test_any_mix_of_stages() -> None:
    # Two of ten may be gone: each pair of nodes at each pair of stages.
    for a, b in itertools.product(STAGES, repeat=2):
        cohort = Cohort(10)
        from_stage = {3: a, 8: b}
        words, survivors = run(
            cohort, lambda at, i, f=from_stage: i in f and STAGES.index(at) >= STAGES.index(f[i])
        )
        assert np.array_equal(words, cohort.total(survivors))


@pytest.mark.parametrize("stage", STAGES)
def test_one_more_ends_the_round(stage: str) -> None:
    cohort = Cohort(5)
    with pytest.raises(Aborted):
        run(cohort, lambda at, i: i in (1, 2) and at == stage)


def test_a_round_beyond_its_drop_outs_reveals_nothing() -> None:
    cohort = Cohort(5)
    clients = {i: cohort.client(i) for i in range(1, 6)}
    server = cohort.server()
    for i, client in clients.items():
        server.deal(i, client.deal())
    deliveries = server.close_dealing()
    for i in (1, 2, 3):
        words = cohort.sites[i - 1].words.copy()
        clients[i].mask(deliveries[i], words)
    with pytest.raises(Aborted, match="3 of 5"):
        for i in (1, 2, 3):
            server._survivors.add(i)
        server.close_masking()
    assert not server._shares


def test_secrets_are_gone_after_unmasking() -> None:
    cohort = Cohort(3)
    clients = {i: cohort.client(i) for i in range(1, 4)}
    server = cohort.server()
    for i, client in clients.items():
        server.deal(i, client.deal())
    for i, delivery in server.close_dealing().items():
        clients[i].mask(delivery, cohort.sites[i - 1].words.copy())
        server._survivors.add(i)
    survivors = server.close_masking()
    for i in clients:
        server.signed(i, clients[i].agree(survivors))
    request = server.close_agreement()
    for client in clients.values():
        client.unmask(request)
        assert not client._seed and client._keys is None and not client._held and client._own_shares is None
        with pytest.raises(Refusal, match="out of turn"):
            client.unmask(request)


def test_nobody_unmasks_a_node_whose_partners_are_said_to_be_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    # A server that knows the graph names the partners of one node as dropped out: its vector would be in the open.
    def rounds(kept: int) -> None:
        cohort = Cohort(40)
        cohort.terms = replace(cohort.terms, parameters=replace(cohort.parameters, kept=kept))
        monkeypatch.setattr(Cohort, "parameters", cohort.terms.parameters)
        run(cohort, lambda at, i: i == 7 and at != "deal")

    whole = Cohort(40).parameters.partners
    rounds(whole - 1)
    with pytest.raises(Refusal, match="mask partners of node"):
        rounds(whole)
    monkeypatch.setattr("fedward_common.secagg.client.Client._check_kept", lambda self, survivors: None)
    rounds(whole)


FORGED = 7


def forged_terms(cohort: Cohort) -> Terms:
    """The cohort's terms in which the server signed one node's keys itself."""
    advertisements = list(cohort.terms.advertisements)
    advertisements[FORGED - 1] = replace(advertisements[FORGED - 1], signature=bytes(64))
    return replace(cohort.terms, advertisements=tuple(advertisements))


def draws(monkeypatch: pytest.MonkeyPatch, parameters: Parameters, first: int, without: int) -> None:
    """Whom the next node draws: `first`, and others but for `without`."""
    others = [x for x in range(2, parameters.n + 1) if x not in (first, without)]
    drawn = (first, *others)[: parameters.holders]
    monkeypatch.setattr(client_module, "draw_holders", lambda parameters, me: drawn)


def test_in_a_sparse_graph_a_drawn_node_s_keys_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    cohort = Cohort(60, dropout=0.05, corrupt=0.05)
    assert not cohort.parameters.complete
    lied_to = cohort.client(1, forged_terms(cohort))
    draws(monkeypatch, cohort.parameters, FORGED, without=0)
    with pytest.raises(Refusal, match="is not signed by its identity"):
        lied_to.deal()


def test_in_a_sparse_graph_the_keys_of_whoever_drew_a_node_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that this node has nothing to do with is not looked at: it must sign the survivors of terms that are not its
    own, or is no survivor."""
    cohort = Cohort(60, dropout=0.05, corrupt=0.05)
    lied_to = cohort.client(1, forged_terms(cohort))
    draws(monkeypatch, cohort.parameters, 2, without=FORGED)
    lied_to.deal()
    everybody = members_to_bytes(range(1, 61), 60)
    drew = b"\x01\x00" * cohort.parameters.partners
    sealed = bytes(sealed_size(2)) + drew
    with pytest.raises(Refusal, match="is not signed by its identity"):
        lied_to.mask(Delivery(everybody, {FORGED: sealed}), np.zeros(LENGTH, np.uint32))
