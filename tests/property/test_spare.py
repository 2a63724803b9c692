"""Rounds with noise that comes off, under any drop-outs: the sum has exactly the parts that stay, or there is none."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from fedward_common.privacy.noise import Skellam
from fedward_common.privacy.spare import SpareNoise
from fedward_common.secagg.cells import Words, cells_of, gather, scatter
from fedward_common.secagg.graph import choose
from fedward_common.secagg.server import Aborted
from hypothesis import event, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from secagg.cohort import BITS, LENGTH, Cohort
from secagg.test_spare import Round

FRACTIONS = ((0.2, 0.2), (0.34, 0.0), (0.2, 0.3), (0.4, 0.1))
STAGES = ("deal", "mask", "agree", "unmask")
START = 2


class Noised(Round):
    """Numbers plus 2^(b−1), as `distributed` makes them, with both parts of the noise; the own one is kept apart."""

    def __post_init__(self) -> None:
        super().__post_init__()
        spare = self.cohort.spare
        assert isinstance(spare, SpareNoise)
        self.spare = spare
        self.own: dict[int, Words] = {}
        for i, client in self.clients.items():
            with_part = np.zeros(LENGTH, np.int64)
            with_part[START:] = spare.draw(client.spare_key) + (1 << (BITS - 1))
            part = np.zeros(LENGTH, np.uint32)
            spare.take_off(part, [client.spare_key])  # minus the part
            self.parts[i] = with_part.astype(np.uint32)
            self.own[i] = self._summed({i: self.parts[i], 0: part})

    def vector(self, i: int) -> Words:
        return self.parts[i].copy()

    def expected(self) -> Words:
        off = self.server.unneeded
        return self._summed({i: self.own[i] if i in off else self.parts[i] for i in self.server.survivors})

    @staticmethod
    def _summed(vectors: Mapping[int, Words]) -> Words:
        count = cells_of(LENGTH, BITS)
        total = np.empty(LENGTH, np.uint32)
        cells = sum((gather(words, BITS, 0, count) for words in vectors.values()), np.zeros(count, np.uint64))
        scatter(cells, total, BITS, 0)
        return total


@st.composite
def rounds(draw: st.DrawFn) -> tuple[int, tuple[float, float], dict[str, list[int]]]:
    n = draw(st.integers(5, 12))
    fractions = draw(st.sampled_from(FRACTIONS))
    gone = draw(st.dictionaries(st.integers(1, n), st.sampled_from(STAGES), max_size=4))
    return n, fractions, {stage: [i for i, at in gone.items() if at == stage] for stage in STAGES}


@settings(max_examples=40, deadline=None)
@given(rounds())
def test_what_stays_in_the_sum(drawn: tuple[int, tuple[float, float], dict[str, list[int]]]) -> None:
    n, fractions, silent = drawn
    chosen = choose(n, *fractions)
    m, c = chosen.survivors, chosen.colluders
    spare = SpareNoise(n, m, c, Skellam(50.0), Skellam(50.0 * (n - m) / (m - c)), BITS, START, LENGTH - START)
    played = Noised(Cohort(n, *fractions, spare=spare), silent)
    played.deal()
    try:
        words = played.unmasked(played.agreed())
    except Aborted:
        event("aborted")
        assert sum(map(len, silent.values())) > n - m
        return
    signed, survivors = len(played.server.signers), played.server.survivors
    off = len(played.server.unneeded)
    event("some came off" if off else "none came off")
    assert off == len(survivors) - spare.keepers(len(survivors), signed)
    assert (off == len(survivors)) == (signed == n)
    assert np.array_equal(words, played.expected())
