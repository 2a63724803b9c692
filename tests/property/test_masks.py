"""Masks cancel for every cohort and every set of survivors; packed words come back and sum up."""

from __future__ import annotations

import hashlib

import numpy as np
from fedward_common.secagg.masks import add_keystreams
from fedward_common.secagg.packing import PackedSum, pack, packed_size, unpack
from hypothesis import given, settings
from hypothesis import strategies as st

BITS = st.sampled_from(range(12, 33, 4))


def vectors(length: int) -> st.SearchStrategy[np.ndarray]:
    """Any words of 32 bits."""
    size = 4 * length
    raw = st.binary(min_size=size, max_size=size) | st.sampled_from([bytes(size), b"\xff" * size])
    return raw.map(lambda data: np.frombuffer(data, "<u4"))


def fitting(words: np.ndarray, bits: int, nodes: int) -> np.ndarray:
    """The words scaled down to what `nodes` summands may hold without overflow."""
    return (words.astype(np.uint64) * ((2**bits - 1) // nodes) // (2**32 - 1)).astype(np.uint32)


def key(*names: object) -> bytes:
    return hashlib.sha256(repr(names).encode()).digest()


@st.composite
def rounds(draw):
    """(inputs, edges of the mask graph, survivors): any graph, and any non-empty set that answered."""
    nodes = draw(st.integers(1, 7))
    length = draw(st.integers(0, 9))
    inputs = [draw(vectors(length)) for _ in range(nodes)]
    pairs = [(i, j) for i in range(nodes) for j in range(i + 1, nodes)]
    edges = draw(st.sets(st.sampled_from(pairs))) if pairs else set()
    survivors = draw(st.sets(st.integers(0, nodes - 1), min_size=1))
    return inputs, edges, survivors


@settings(max_examples=200, deadline=None)
@given(rounds(), BITS)
def test_masks_cancel_for_every_set_of_survivors(case, bits):
    """Bonawitz et al. 2017, section 4: Σ y − Σ PRG(b_u) + what the dropped nodes' partners added = Σ x."""
    inputs, edges, survivors = case
    inputs = [fitting(words, bits, len(inputs)) for words in inputs]
    length = len(inputs[0])
    total = PackedSum(length, bits)
    for node in survivors:
        masked = inputs[node].copy()
        lower = [key("pair", i, j) for i, j in edges if j == node]
        upper = [key("pair", i, j) for i, j in edges if i == node]
        add_keystreams(masked, bits, [key("self", node), *upper], lower)
        total.add(pack(masked, bits))
    plus = [key("pair", i, j) for i, j in edges if j in survivors and i not in survivors]
    minus = [key("pair", i, j) for i, j in edges if i in survivors and j not in survivors]
    words = total.total()
    add_keystreams(words, bits, plus, [*minus, *(key("self", node) for node in survivors)])
    assert words.tolist() == [sum(int(inputs[node][at]) for node in survivors) for at in range(length)]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 41).flatmap(vectors), BITS)
def test_words_come_back(words, bits):
    words = words & np.uint32(2**bits - 1)
    packed = pack(words, bits)
    assert packed.dtype == np.uint8 and packed.shape == (packed_size(len(words), bits),)
    assert unpack(packed, len(words), bits).tolist() == words.tolist()


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 21).flatmap(lambda d: st.lists(vectors(d), min_size=1, max_size=6)), BITS)
def test_a_packed_sum_is_the_plain_sum(cohort, bits):
    cohort = [fitting(words, bits, len(cohort)) for words in cohort]
    total = PackedSum(len(cohort[0]), bits)
    for words in cohort:
        total.add(pack(words, bits))
    assert total.count == len(cohort)
    assert total.total().tolist() == [sum(map(int, column)) for column in zip(*cohort, strict=True)]
