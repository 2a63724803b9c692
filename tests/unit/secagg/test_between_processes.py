"""A node whose processes do not live from one step to the next: the round goes on from what was written down."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fedward_common.secagg.client import Client, Guarantees, Refusal
from fedward_common.secagg.keys import AdvertisementError, Keyring
from fedward_common.secagg.packing import pack
from fedward_common.secagg.terms import Terms

from .cohort import BITS, Cohort


def again(cohort: Cohort, index: int, client: Client) -> Client:
    """The client half in the next process."""
    asked = Guarantees(cohort.parameters, 2, cohort.identities)
    return Client.restore(client.export(), cohort.sites[index - 1].identity, asked)


@pytest.mark.parametrize("n", [4, 40])
def test_the_sum_is_exact_though_every_step_has_a_process_of_its_own(n: int) -> None:
    cohort = Cohort(n, dropout=0.25)
    server = cohort.server()
    clients = {i: again(cohort, i, cohort.client(i)) for i in range(1, n + 1)}
    for i, client in clients.items():
        server.deal(i, client.deal())
        clients[i] = again(cohort, i, client)
    for i, delivery in server.close_dealing().items():
        if i == 2:
            continue  # its masks are taken off
        words = cohort.sites[i - 1].words.copy()
        clients[i].mask(delivery, words)
        server.masked(i, pack(words, BITS))
        clients[i] = again(cohort, i, clients[i])
    survivors = server.close_masking()
    for i in sorted(server.survivors):
        server.signed(i, clients[i].agree(survivors))
        clients[i] = again(cohort, i, clients[i])
    request = server.close_agreement()
    for i in sorted(server.signers):
        server.revealed(i, clients[i].unmask(request))
    assert np.array_equal(server.unmask(), cohort.total(server.survivors))
    with pytest.raises(Refusal, match="over"):
        clients[1].export()


def test_a_step_that_was_taken_is_not_taken_again_by_the_next_process() -> None:
    cohort = Cohort(3)
    client = cohort.client(1)
    client.deal()
    with pytest.raises(Refusal, match="out of turn"):
        again(cohort, 1, client).deal()


def test_the_terms_are_checked_again() -> None:
    cohort = Cohort(3)
    client = cohort.client(1)
    asked = Guarantees(replace(cohort.parameters, threshold=3), 2, cohort.identities)
    with pytest.raises(Refusal, match="threshold"):
        Client.restore(client.export(), cohort.sites[0].identity, asked)


def test_terms_come_back_with_the_same_digest() -> None:
    terms = Cohort(5).terms
    assert Terms.from_json(terms.to_json()) == terms
    assert Terms.from_json(terms.to_json()).digest == terms.digest


def test_outstanding_keys_come_back_and_used_ones_do_not() -> None:
    ring = Keyring(bytes(16), "run", None)
    used, unused = ring.advertise(), ring.advertise()
    keys = ring.take(used)
    later = Keyring.from_bytes(bytes(16), "run", None, ring.to_bytes())
    assert later.take(used) is None
    found = later.take(unused)
    assert found is not None and found.mask.public_key().public_bytes_raw() == unused.mask_key
    assert found.seal.public_key().public_bytes_raw() == unused.seal_key
    assert keys is not None and keys.mask.private_bytes_raw() not in ring.to_bytes()
    with pytest.raises(AdvertisementError, match="224 bytes"):
        Keyring.from_bytes(bytes(16), "run", None, b"short")
