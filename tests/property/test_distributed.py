"""Distributed DP for all shapes of rounds: sums come back, norms hold, carries come off, plans keep what they say."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from fedward_common.errors import ConfigError
from fedward_common.privacy.clip import clip
from fedward_common.privacy.distributed import Mechanism, plan, without_carries
from fedward_common.privacy.noise import DiscreteGaussian, Noise, Skellam
from fedward_common.privacy.rotation import padded_length, rotate, rotate_back, rotation_seed
from fedward_common.secagg.masks import Keystream
from fedward_common.secagg.packing import PackedSum, pack
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

floats = st.floats(-1e6, 1e6, width=32)
any_vector = hnp.arrays(
    np.float32, st.integers(0, 20), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)
) | hnp.arrays(np.float64, st.integers(0, 20), elements=st.floats(allow_nan=False, allow_infinity=False))


@dataclass(frozen=True)
class Silence:
    """No noise."""

    variance: float = 0.0

    def log_tail(self, k):
        return -math.inf

    def weights(self, last):
        return [1, *(0 for _ in range(last))]


@st.composite
def rounds(draw):
    """A mechanism without noise, the vectors of some of its nodes, and a seed."""
    dimension, summands = draw(st.integers(1, 40)), draw(st.integers(2, 6))
    made = plan(
        dimension=dimension,
        bits=draw(st.integers(8, 20)),
        summands=summands,
        honest=draw(st.integers(1, summands)),
        clip=draw(st.sampled_from([1e-3, 1.0, 300.0])),
        noise_multiplier=draw(st.sampled_from([0.3, 1.0, 5.0])),
    )
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    count = draw(st.integers(1, summands))
    vectors = [draw(hnp.arrays(dtype, dimension, elements=floats)) for _ in range(count)]
    return dataclasses.replace(made, law=Silence()), vectors, draw(st.binary(min_size=32, max_size=32))


def whole(made: Mechanism, words: np.ndarray) -> list[int]:
    return [int(word) - made.modulus // 2 for word in words]


def modular(cohort, modulus):
    return (sum(words.astype(object) for words in cohort) % modulus).astype(np.uint32)


@settings(max_examples=150, deadline=None)
@given(rounds())
def test_a_sum_is_that_of_the_clipped_vectors_within_a_step_a_node(case):
    made, vectors, seed = case
    cohort = [made.encode(vector, seed) for vector in vectors]
    got = made.decode(modular(cohort, made.modulus), len(cohort), seed)
    total = [sum(column) for column in zip(*(whole(made, words) for words in cohort), strict=True)]
    half = made.modulus // 2
    assume(all(-half <= x < half for x in total))  # one coordinate in 10^4 wraps around
    clipped = [clip({"x": vector}, made.clip)[0]["x"].astype(float) for vector in vectors]
    # Each coordinate of each node moves by less than a step before the rotation back, which keeps norms.
    wrong = np.linalg.norm(got - sum(clipped))
    assert wrong <= len(cohort) * (math.sqrt(made.padded) / made.scale + 1e-5 * made.clip)


@settings(max_examples=150, deadline=None)
@given(rounds())
def test_no_node_adds_more_than_the_sensitivity(case):
    made, vectors, seed = case
    for vector in vectors:
        numbers = whole(made, made.encode(vector, seed))
        assert sum(Fraction(x) ** 2 for x in numbers) <= Fraction(made.l2) ** 2
        assert sum(map(abs, numbers)) <= made.l1 * (1 + 1e-12)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([12, 16, 20, 24, 28, 32]), st.integers(1, 9), st.integers(0, 12), st.integers(0, 30), st.data())
def test_carries_come_off_whatever_the_words(bits, count, start, length, data):
    """As long as no sum of numbers wraps around; the words before them are of sums below 2^b."""
    half = 1 << (bits - 1)
    below = data.draw(hnp.arrays(np.int64, (count, start), elements=st.integers(0, ((1 << bits) - 1) // count)))
    most = (half - 1) // count
    numbers = data.draw(hnp.arrays(np.int64, (count, length), elements=st.integers(-most, most)))
    total = PackedSum(start + length, bits)
    for first, second in zip(below, numbers, strict=True):
        total.add(pack(np.append(first, second + half).astype(np.uint32), bits))
    words = without_carries(total.total(), bits, count, start)
    assert words[:start].tolist() == below.sum(axis=0).tolist()
    assert words[start:].tolist() == ((numbers.sum(axis=0) + count * half) % (1 << bits)).tolist()


@settings(max_examples=200, deadline=None)
@given(st.lists(any_vector, min_size=1, max_size=4), st.floats(2.0**-64, 2.0**64))
def test_clipping_bounds_the_joint_norm_exactly_and_moves_nothing_else(vectors, bound):
    groups = {str(i): vector for i, vector in enumerate(vectors)}
    clipped, moved = clip(groups, bound)
    before, after = (
        sum((Fraction(float(x)) ** 2 for vector in some.values() for x in vector), Fraction())
        for some in (groups, clipped)
    )
    limit = Fraction(bound) ** 2
    assert after <= limit
    if before <= limit * (1 - Fraction(1, 10**9)):
        assert not moved
    if moved:
        assert after >= limit * (1 - Fraction(1, 10**6))
    else:
        assert all(clipped[name] is vector for name, vector in groups.items())


@settings(max_examples=200, deadline=None)
@given(
    hnp.arrays(np.float64, st.integers(1, 70), elements=st.floats(-1e6, 1e6).map(lambda x: round(x, 9))),
    st.binary(min_size=32, max_size=32),
)
def test_rotation_keeps_the_norm_and_comes_back(vector, seed):
    rotated = rotate(vector, seed)
    size = np.linalg.norm(vector)
    assert rotated.shape == (padded_length(len(vector)),)
    assert abs(np.linalg.norm(rotated) - size) <= 1e-13 * size
    np.testing.assert_allclose(rotate_back(rotated, seed, len(vector)), vector, atol=1e-13 * size)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([Skellam, DiscreteGaussian]), st.floats(2.0**-20, 1e5), st.binary(min_size=32, max_size=32))
def test_noise_of_every_variance_can_be_drawn(law, variance, key):
    drawn = Noise(law(variance)).draw(500, Keystream(key)).astype(float)
    assert np.abs(drawn).max() <= 12 * math.sqrt(variance) + 12
    assert abs((drawn**2).mean() - variance) < 10 * math.sqrt((2 * variance**2 + variance) / 500) + 10 / 500


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 10**7), st.integers(1, 32), st.integers(1, 10**4), st.floats(0.01, 1), st.floats(1e-6, 1e6),
    st.floats(1e-6, 1e6),
)  # fmt: skip
def test_a_plan_keeps_what_it_says_or_is_refused(dimension, bits, summands, share, bound, z):
    honest = max(1, int(share * summands))
    try:
        made = plan(
            dimension=dimension, bits=bits, summands=summands, honest=honest, clip=bound, noise_multiplier=z
        )  # fmt: skip
    except ConfigError as refusal:
        assert str(refusal).startswith(("bits = ", "noise_multiplier = "))
        return
    assert math.isclose(made.variance(honest), (z * bound * made.scale) ** 2, rel_tol=1e-9)
    assert made.clip * made.scale < made.l2 <= made.clip * made.scale + math.sqrt(made.padded)
    assert made.l2 <= made.l1 * (1 + 1e-12) or made.l2 < 1
    assert 2**-20 <= made.law.variance <= 1e10


def test_seeds_of_rounds_differ():
    seeds = {rotation_seed(run, number, attempt) for run in "ab" for number in range(20) for attempt in range(5)}
    assert len(seeds) == 200
