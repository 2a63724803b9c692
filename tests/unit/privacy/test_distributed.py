"""Distributed DP: the plan against its equations, and sums of encoded vectors against sums of clipped ones."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass

import numpy as np
import pytest
from fedward_common.errors import ConfigError, UpdateError
from fedward_common.privacy.distributed import BETA, Mechanism, plan, rounded_norm, without_carries
from fedward_common.privacy.noise import DiscreteGaussian, Noise, Skellam
from fedward_common.privacy.rotation import rotate, rotate_back, rotation_seed
from fedward_common.secagg import masks
from fedward_common.secagg.masks import add_keystreams
from fedward_common.secagg.packing import PackedSum, pack
from fedward_common.summand import Shape, decode
from scipy import stats

SEED = rotation_seed("run", 1, 1)
PLAIN = {"dimension": 1000, "bits": 16, "summands": 10, "honest": 7, "clip": 2.0, "noise_multiplier": 1.0}


@dataclass(frozen=True)
class Silence:
    """No noise."""

    variance: float = 0.0

    def log_tail(self, k):
        return -math.inf

    def weights(self, last):
        return [1, *(0 for _ in range(last))]


def planned(**changes) -> Mechanism:
    return plan(**{**PLAIN, **changes})


def silent(mechanism: Mechanism) -> Mechanism:
    """The same without its noise."""
    return dataclasses.replace(mechanism, law=Silence())


def whole(mechanism: Mechanism, words: np.ndarray) -> np.ndarray:
    """One node's numbers."""
    return words.astype(np.int64) - (mechanism.modulus >> 1)


def modular(mechanism: Mechanism, cohort) -> np.ndarray:
    """The sum of words as a sum of masked ones gives it."""
    return (sum(words.astype(np.int64) for words in cohort) % mechanism.modulus).astype(np.uint32)


def normal(size, norm=None, seed=0, dtype=np.float32):
    vector = np.random.default_rng(seed).normal(size=size)
    return (vector if norm is None else vector * (norm / np.linalg.norm(vector))).astype(dtype)


# The plan


@pytest.mark.parametrize("dimension", [1, 2, 1000, 1024, 10**6])
@pytest.mark.parametrize(("bits", "summands", "honest"), [(16, 10, 10), (20, 100, 51), (20, 2, 1), (24, 1000, 700)])
def test_the_scale_makes_the_sum_fit(dimension, bits, summands, honest):
    """What Kairouz, Liu, Steinke 2021 solve for γ = 1/s: 2^b = 2κ·√(ρ/d·(cn)² + (γ²/4 + σ²)n)/γ, ρ = 1."""
    c, z = 3.0, 2.0
    made = planned(dimension=dimension, bits=bits, summands=summands, honest=honest, clip=c, noise_multiplier=z)
    padded = 1 << math.ceil(math.log2(dimension))
    gamma, sigma = 1 / made.scale, z * c / math.sqrt(honest)
    spread = math.sqrt((c * summands) ** 2 / padded + (gamma**2 / 4 + sigma**2) * summands)
    assert 2 * made.kappa * spread / gamma == pytest.approx(2**bits, rel=1e-12)
    assert made.padded == padded and made.modulus == 2**bits
    assert isinstance(made.law, Skellam) and made.law.variance == pytest.approx((sigma / gamma) ** 2, rel=1e-12)
    assert made.variance(honest) == pytest.approx((made.scale * z * c) ** 2, rel=1e-12)


def test_kappa_is_that_of_the_wrap_probability():
    assert planned().kappa == pytest.approx(stats.norm.isf(0.5e-4), rel=1e-12)
    assert planned(wrap=1e-9).kappa == pytest.approx(stats.norm.isf(0.5e-9), rel=1e-12)


def test_sensitivities():
    made = planned(bits=14)
    x, d = made.clip * made.scale, 1024
    assert made.l2 == pytest.approx(math.sqrt(x**2 + d / 4 + (x + math.sqrt(d) / 2)), rel=1e-12), "√(2 ln 1/β) = 1"
    assert made.l1 == pytest.approx(32 * made.l2, rel=1e-12)
    low = planned(bits=8, dimension=4, noise_multiplier=60.0)
    assert low.l2 < 2 and low.l1 == pytest.approx(low.l2**2, rel=1e-12), "the smaller of the two bounds"
    strict = planned(bits=8, dimension=4, beta=1e-15)
    assert strict.l2 == pytest.approx(strict.clip * strict.scale + 2, rel=1e-12), "that bound always holds"


def test_the_surcharge_over_the_gaussian():
    """ε by the Rényi divergence of Skellams (Agarwal, Kairouz, Liu 2021) over that of the Gaussian at d = 2^20,
    n = 100, z = 4 and 200 rounds: 57 % at 14 bits, 3.95 % at 16, 0.25 % at 18, 0.02 % at 20, as is known of it."""
    orders = np.concatenate([np.arange(1.05, 12, 0.05), np.arange(12, 200)])

    def epsilon(rdp, delta=1e-5):
        conversion = np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1)
        return (200 * rdp(orders) + conversion).min()

    surcharge = {}
    for bits in (14, 16, 18, 20):
        made = planned(dimension=1 << 20, bits=bits, summands=100, honest=100, noise_multiplier=4.0)
        mu, l2, l1 = made.variance(100), made.l2, made.l1
        skellam = epsilon(
            lambda a, mu=mu, l2=l2, l1=l1: a * l2**2 / (2 * mu)
            + np.minimum(((2 * a - 1) * l2**2 + 6 * l1) / (4 * mu**2), 3 * l1 / (2 * mu))
        )
        surcharge[bits] = skellam / epsilon(lambda a: a / 32) - 1
    assert surcharge[14] == pytest.approx(0.57, rel=0.05)
    assert surcharge[16] == pytest.approx(0.0395, rel=0.05)
    assert surcharge[18] == pytest.approx(0.0025, rel=0.05)
    assert surcharge[20] == pytest.approx(0.0002, abs=5e-5) and surcharge[20] < 0.001


@pytest.mark.parametrize(("norm", "d"), [(0.5, 1), (10.48, 1), (3.0, 16), (100.0, 64), (20.0, 1024)])
def test_rounding_holds_its_bound_as_often_as_is_said(norm, d):
    """But for β at most; 4 000 roundings each of the vectors that are hardest to tell."""
    rng = np.random.default_rng(0)
    for vector in (np.full(d, 1.0), rng.normal(size=d), np.eye(d)[0], np.floor(norm / math.sqrt(d)) + np.full(d, 0.5)):
        vector = vector * (norm / np.linalg.norm(vector))
        rounded = np.floor(vector + rng.random((4000, d)))
        norms = np.linalg.norm(rounded, axis=1)
        held = np.count_nonzero(norms <= rounded_norm(norm, d, BETA)) / 4000
        assert held >= 1 - BETA - 5 * math.sqrt(0.25 / 4000)
        assert norms.max() <= rounded_norm(norm, d, 1e-300) <= norm + math.sqrt(d)


def test_noise_is_sized_for_the_honest_survivors():
    some, all_of_them = planned(honest=5), planned(honest=10)
    for made, honest in ((some, 5), (all_of_them, 10)):
        deviation = math.sqrt(made.variance(honest)) / made.scale
        assert deviation == pytest.approx(made.clip * made.noise_multiplier, rel=1e-12)
    assert some.variance(10) / some.scale**2 == pytest.approx(2 * some.clip**2, rel=1e-12), "the rest comes on top"


def test_what_is_charged_to_delta_is_all_draws_of_the_honest():
    assert planned().truncation(7) == Noise.of(planned().law).truncation(7 * 1024) < 1e-24


def test_both_sides_plan_the_same_and_a_discrete_gaussian_can_be_had():
    assert planned() == planned() and hash(planned()) == hash(planned())
    assert planned(law=DiscreteGaussian).law == DiscreteGaussian(planned().law.variance)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"dimension": 0}, "dimension = 0: must be a whole number from 1"),
        ({"dimension": 10.0}, r"dimension = 10\.0"),
        ({"summands": 0}, "summands = 0"),
        ({"summands": True}, "summands = True"),
        ({"bits": 1}, "bits = 1: words have 2 to 32 bits"),
        ({"bits": 33}, "bits = 33"),
        ({"honest": 0}, "honest = 0: .* of the 10 nodes.*Give the least number of survivors"),
        ({"honest": 11}, "honest = 11"),
        ({"clip": 0.0}, r"clip = 0\.0"),
        ({"clip": math.nan}, "clip = nan"),
        ({"noise_multiplier": 0.0}, r"noise_multiplier = 0\.0"),
        ({"noise_multiplier": math.inf}, "noise_multiplier = inf"),
        ({"wrap": 0.0}, r"wrap = 0\.0"),
        ({"wrap": 0.6}, r"wrap = 0\.6"),
        ({"beta": 0.0}, r"beta = 0\.0"),
        ({"beta": 1.0}, r"beta = 1\.0"),
        ({"noise_multiplier": 1e-5, "bits": 8}, "one node's noise would have the variance .* more bits or a larger"),
    ],
)
def test_other_parameters_are_refused(changes, text):
    with pytest.raises(ConfigError, match=text):
        planned(**changes)


@pytest.mark.parametrize(
    ("bits", "summands", "wrap"),
    [(2, 10, 1e-4), (4, 17, 1e-4), (4, 100, 1e-4), (6, 271, 1e-4), (8, 5000, 1e-4), (2, 1, 1e-9), (4, 30, 1e-9)],
)
def test_too_few_bits_for_the_roundings_are_refused_with_a_way_out_that_works(bits, summands, wrap):
    text = f"bits = {bits}: rounding alone fills the sum of {summands} nodes"
    with pytest.raises(ConfigError, match=text) as refusal:
        planned(bits=bits, summands=summands, honest=1, wrap=wrap)
    fits = int(re.search(r"at least (\d+) bits", str(refusal.value))[1])
    assert planned(bits=fits, summands=summands, honest=1, wrap=wrap)
    with pytest.raises(ConfigError):
        planned(bits=fits - 1, summands=summands, honest=1, wrap=wrap)
    few = re.search(r"at most (\d+) nodes", str(refusal.value))
    assert (few is None) == (bits == 2 and wrap == 1e-9)
    if few:
        assert planned(bits=bits, summands=int(few[1]), honest=1, wrap=wrap)
        with pytest.raises(ConfigError):
            planned(bits=bits, summands=int(few[1]) + 1, honest=1, wrap=wrap)


@pytest.mark.parametrize("bits", [22, 24, 28, 32])
def test_more_bits_than_a_table_can_serve_are_refused_with_a_way_out_that_works(bits):
    with pytest.raises(ConfigError, match=f"bits = {bits}: .*more gain nothing") as refusal:
        planned(bits=bits)
    fits = int(re.search(r"Use (\d+) bits", str(refusal.value))[1])
    assert planned(bits=fits)
    with pytest.raises(ConfigError):
        planned(bits=fits + 1)


@pytest.mark.parametrize("summands", [2, 5, 10, 100, 10_000])
@pytest.mark.parametrize("z", [0.1, 1.0, 10.0, 1000.0])
def test_20_bits_serve_every_cohort(summands, z):
    assert planned(bits=20, summands=summands, honest=summands, noise_multiplier=z)


# Sums


@pytest.mark.parametrize(
    ("nodes", "d", "law"),
    [
        (1, 1, Skellam),
        (4, 1, Skellam),
        (2, 2, DiscreteGaussian),
        (3, 3, Skellam),
        (5, 17, Skellam),
        (3, 1000, DiscreteGaussian),
        (20, 1024, Skellam),
        (10, 5000, Skellam),
    ],
)
def test_the_sum_is_that_of_the_clipped_vectors_and_of_the_noise(nodes, d, law):
    """Over as many rounds as make 20 000 coordinates, 300 at most: the error has mean 0 and the stated variance, and is
    normal."""
    made = planned(dimension=d, summands=nodes, honest=nodes, law=law)
    errors = []
    for number in range(min(300, math.ceil(20_000 / d))):
        seed = rotation_seed("sums", number, 1)
        vectors = [normal(d, 0.5 + i, seed=100 * number + i) for i in range(nodes)]
        clipped = sum(v.astype(float) * min(1, 2.0 / np.linalg.norm(v.astype(float))) for v in vectors)
        got = made.decode(modular(made, [made.encode(v, seed) for v in vectors]), nodes, seed)
        assert got.dtype == np.float64 and got.shape == (d,)
        errors.append(got - clipped)
    error = np.concatenate(errors)
    deviation = math.sqrt(made.variance(nodes) + nodes / 6) / made.scale  # rounding: ∫p(1−p) = 1/6
    assert abs(error.mean()) < 5 * deviation / math.sqrt(len(error))
    assert error.std() == pytest.approx(deviation, rel=5 / math.sqrt(2 * len(error)) + 0.01)
    assert stats.kstest(error / deviation, "norm").statistic < 2.5 / math.sqrt(len(error)) + 0.005


def test_the_noise_in_a_sum_after_a_drop_out():
    """The scale within 5 %; the same test fails when the noise of each node is cut by 0.7."""
    made = planned(dimension=20_000, summands=10, honest=7)
    for law, holds in ((made.law, True), (Skellam(made.law.variance * 0.7**2), False)):
        cut = dataclasses.replace(made, law=law)
        cohort = [cut.encode(np.zeros(20_000, np.float32), SEED) for _ in range(7)]
        noise = made.decode(modular(made, cohort), 7, SEED)
        assert (abs(noise.std() / (made.clip * made.noise_multiplier) - 1) < 0.05) == holds


def test_noise_of_two_nodes_and_of_two_rounds_is_independent():
    made = planned(dimension=1 << 15)
    zero = np.zeros(1 << 15, np.float32)
    first, second = (whole(made, made.encode(zero, SEED)).astype(float) for _ in range(2))
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / math.sqrt(1 << 15)


def test_rounding_and_noise_take_a_fresh_key_each(monkeypatch):
    asked = []

    def urandom(count):
        asked.append(np.random.default_rng(len(asked)).bytes(count))
        return asked[-1]

    monkeypatch.setattr(masks.os, "urandom", urandom)
    made = planned()
    words = [made.encode(normal(1000), SEED) for _ in range(2)]
    assert len(asked) == len(set(asked)) == 4 and not np.array_equal(*words)


@pytest.mark.parametrize("d", [1, 2, 100])
def test_a_zero_update_is_nothing_but_noise(d):
    made = planned(dimension=d)
    assert not silent(made).decode(silent(made).encode(np.zeros(d), SEED), 1, SEED).any()
    drawn = np.concatenate([whole(made, made.encode(np.zeros(d), SEED)) for _ in range(1000 // d)])
    assert drawn.std() == pytest.approx(math.sqrt(made.law.variance), rel=0.15)


def test_one_number_without_a_dimension():
    made = planned(dimension=1, summands=3, honest=3)
    cohort = [silent(made).encode(np.array(x, np.float32), SEED) for x in (0.5, -1.5, 9.0)]
    assert cohort[0].shape == (1,)
    got = silent(made).decode(modular(made, cohort), 3, SEED)
    np.testing.assert_allclose(got, [0.5 - 1.5 + 2.0], atol=3 / made.scale)


@pytest.mark.parametrize(("nodes", "d"), [(1, 1), (4, 5), (7, 300), (2, 1024)])
def test_without_noise_the_sum_is_exact(nodes, d):
    """It is the inverse matrix times the sum of the nodes' whole numbers, in whatever order they came."""
    made = silent(planned(dimension=d, summands=nodes, honest=nodes))
    cohort = [made.encode(normal(d, seed=i), SEED) for i in range(nodes)]
    got = made.decode(modular(made, cohort), nodes, SEED)
    assert np.array_equal(got, made.decode(modular(made, cohort[::-1]), nodes, SEED))
    columns = np.array([rotate(row, SEED) for row in np.eye(made.padded)[:d]])
    assert np.abs(columns).max() == pytest.approx(1 / math.sqrt(made.padded))
    total = sum(whole(made, words) for words in cohort)
    np.testing.assert_allclose(got, columns @ total / made.scale, rtol=1e-9, atol=1e-12)
    clipped = sum(normal(d, seed=i) * min(1, 2 / np.linalg.norm(normal(d, seed=i))) for i in range(nodes))
    np.testing.assert_allclose(got, clipped, atol=nodes * math.sqrt(made.padded) / made.scale)


def test_rounding_is_unbiased():
    """2 000 encodings of one vector well within its bound, without noise; five standard errors of a variance ≤ 1/4."""
    made = silent(planned(dimension=64, bits=12))
    vector = normal(64, 1.0, dtype=np.float64)
    exact = rotate(vector, SEED) * made.scale
    rounded = np.array([whole(made, made.encode(vector, SEED)) for _ in range(2000)])
    assert np.abs(rounded.mean(axis=0) - exact).max() < 5 * 0.5 / math.sqrt(2000)
    assert set(np.unique(rounded - np.floor(exact))) == {0, 1}


@pytest.mark.parametrize("bits", [6, 8, 12, 16, 20])
@pytest.mark.parametrize("d", [1, 2, 3, 16, 1000])
def test_the_norm_after_rounding_is_never_over_its_bound(bits, d):
    """In whole numbers, at the largest norm there is, for vectors all of whose coordinates lie halfway, too."""
    made = silent(planned(dimension=d, bits=bits, summands=3, honest=3))
    even = np.full(made.padded, made.clip / math.sqrt(made.padded))
    halfway = rotate_back(even, SEED, d) if d == made.padded else np.ones(d)
    for number in range(30):
        for vector in (normal(d, 2.0, seed=number, dtype=np.float64), halfway, normal(d, 100.0, seed=number)):
            numbers = whole(made, made.encode(vector, SEED)).tolist()
            assert sum(x * x for x in numbers) <= made.l2**2
            assert sum(map(abs, numbers)) <= made.l1 * (1 + 1e-12)


def test_a_rounding_over_the_bound_is_drawn_again():
    """d = 1 at norm 10.48: 11 is over √(x² + 1/4 + x + 1/2) = 11.003 − 0.01. Without drawing again, 11 would come up in
    47 % of the roundings."""
    made = silent(planned(dimension=1))
    made = dataclasses.replace(made, scale=10.45 / made.clip)
    assert 10.9 < made.l2 < 11
    assert {int(whole(made, made.encode(np.array([2.0]), SEED))[0]) for _ in range(100)} <= {10, -10}


@pytest.mark.parametrize("z", [0.01, 0.3, 3.0])
def test_sums_wrap_around_as_seldom_as_is_said(z):
    """All nodes send the same vector of the largest norm. 2^17 coordinates: 13 beyond are expected, and many more
    where the scale is twice as large."""
    nodes, d = 20, 1 << 12
    made = planned(dimension=d, summands=nodes, honest=nodes, noise_multiplier=z, bits=16)
    beyond, twice = 0, 0
    for number in range(32):
        seed = rotation_seed("wrap", number, 1)
        vector = normal(d, 2.0, seed=number)
        # One draw of nodes times the variance is the sum of as many draws (a Skellam's).
        signal = sum(whole(silent(made), silent(made).encode(vector, seed)) for _ in range(nodes))
        total = signal + Noise.of(Skellam(made.variance(nodes))).draw(d)
        half = made.modulus / 2
        beyond += np.count_nonzero((total < -half) | (total >= half))
        twice += np.count_nonzero(np.abs(2 * total) >= half)
    assert beyond < 13 + 5 * math.sqrt(13)
    assert twice > 1000


def test_what_wraps_around_is_read_modulo_the_modulus():
    made = silent(planned(dimension=4, summands=3, honest=3))
    total = np.array([0, 1, made.modulus - 1, made.modulus // 2], np.uint32)
    half = made.modulus // 2
    for count in (1, 2, 3):
        got = made.decode((total + np.uint32(count * half)) & np.uint32(made.modulus - 1), count, SEED)
        expected = rotate_back(np.array([0, 1, -1, -half]) / made.scale, SEED, 4)
        np.testing.assert_allclose(got, expected, rtol=1e-12)


@pytest.mark.parametrize("bits", [12, 16])
def test_words_are_of_b_bits_about_their_middle(bits):
    made = planned(dimension=5000, bits=bits, noise_multiplier=1000.0, summands=2, honest=2)
    words = made.encode(normal(5000), SEED)
    assert words.dtype == np.uint32 and words.shape == (8192,)
    assert words.max() < 1 << bits and words.max() > 0.75 * (1 << bits) and words.min() < 0.25 * (1 << bits)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_vector_of_the_caller_is_not_changed(dtype):
    vector = normal(1000, 100.0, dtype=dtype)
    vector.flags.writeable = False
    planned().encode(vector, SEED)
    words = planned().encode(vector, SEED)
    words.flags.writeable = False
    planned().decode(words, 1, SEED)


def test_other_updates_are_refused():
    with pytest.raises(UpdateError, match="the update has 999 coordinates, the round's mechanism 1000"):
        planned().encode(np.zeros(999), SEED)
    with pytest.raises(UpdateError, match="not finite"):
        planned().encode(np.full(1000, np.nan), SEED)
    with pytest.raises(UpdateError, match="dtype int64"):
        planned().encode(np.zeros(1000, np.int64), SEED)


def test_other_words_are_refused():
    made = planned()
    for words in (np.zeros(1000, np.uint32), np.zeros(1024, np.int64), np.zeros((1, 1024), np.uint32)):
        with pytest.raises(ValueError, match="not \\(1024,\\) uint32"):
            made.decode(words, 1, SEED)
    for count in (0, 11):
        with pytest.raises(ValueError, match="for 1 to 10 summands"):
            made.decode(np.zeros(1024, np.uint32), count, SEED)


# Under the masks


@pytest.mark.parametrize(("bits", "d"), [(12, 1), (12, 3000), (16, 1), (16, 50), (20, 3000)])
def test_a_masked_sum_of_cells_gives_each_word_its_own_sum(bits, d):
    """The whole road: words after the check words, pairwise masks, packing, the sum as it comes, carries taken off."""
    nodes = 5
    made = planned(dimension=d, bits=bits, summands=nodes, honest=nodes)
    shape = Shape((), (), bits, nodes)
    start = shape.length
    total, plain = PackedSum(start + made.padded, bits), []
    for node in range(nodes):
        plain.append(np.append(shape.blank({"weight": 1.0}), made.encode(normal(d, seed=node), SEED)))
        masked = plain[-1].copy()
        key, following = (bytes([i % nodes]) * 32 for i in (node, node + 1))
        add_keystreams(masked, bits, [key], [following])
        total.add(pack(masked, bits))
    assert d < 50 or not np.array_equal(total.total(), modular(made, plain)), "words were carried into"
    words = without_carries(total.total(), bits, nodes, start)
    expected = modular(made, plain)
    off = (words.astype(np.int64) - expected + made.modulus // 2) % made.modulus - made.modulus // 2
    # Where a sum wraps around, which one in 10^4 does, its neighbour is off by one.
    assert np.abs(off).max() <= 1 and np.count_nonzero(off) <= 10
    assert not off[:start].any() and decode(shape, words[:start], nodes).weight == nodes
    np.testing.assert_allclose(
        made.decode(words[start:], nodes, SEED), made.decode(expected[start:], nodes, SEED), atol=3 / made.scale
    )
