"""The random rotation against SciPy's Hadamard matrix, and how evenly it spreads what it is given."""

from __future__ import annotations

import math

import numpy as np
import pytest
from fedward_common.privacy.rotation import padded_length, rotate, rotate_back, rotation_seed
from fedward_common.secagg.masks import Keystream, MaskError
from scipy import stats
from scipy.linalg import hadamard

SIZES = [1, 2, 3, 4, 5, 8, 16, 17, 31, 100, 1000, 1024, 1025]
SEED = rotation_seed("run", 1, 1)


def normal(size, dtype=np.float64, seed=0):
    return np.random.default_rng(seed).normal(size=size).astype(dtype)


def dense(length, seed=SEED):
    """H D/√N restricted to the first `length` columns, bit by bit."""
    size = 1
    while size < length:
        size *= 2
    words = Keystream(seed).words(-(-length // 32)).tolist()
    signs = [-1 if words[i // 32] >> (i % 32) & 1 else 1 for i in range(length)]
    return hadamard(size)[:, :length] * np.array(signs) / math.sqrt(size)


@pytest.mark.parametrize("length", SIZES)
@pytest.mark.parametrize(("dtype", "error"), [(np.float32, 3e-6), (np.float64, 1e-14)])
def test_equals_the_matrix(length, dtype, error):
    vector = normal(length, dtype)
    rotated = rotate(vector, SEED)
    assert rotated.dtype == dtype and rotated.shape == (padded_length(length),)
    np.testing.assert_allclose(rotated, dense(length) @ vector.astype(float), atol=error * math.sqrt(length))


@pytest.mark.parametrize("length", SIZES)
@pytest.mark.parametrize(("dtype", "error"), [(np.float32, 3e-6), (np.float64, 1e-14)])
def test_the_inverse_and_the_norm(length, dtype, error):
    vector = normal(length, dtype)
    rotated = rotate(vector, SEED)
    assert np.linalg.norm(rotated.astype(float)) == pytest.approx(np.linalg.norm(vector.astype(float)), rel=error)
    back = rotate_back(rotated, SEED, length)
    assert back.dtype == dtype and back.shape == (length,)
    np.testing.assert_allclose(back, vector, atol=error * math.sqrt(length))


@pytest.mark.parametrize("size", [1, 2, 16, 32, 64, 256, 512])
def test_unit_vectors_become_an_orthonormal_basis(size):
    basis = np.array([rotate(row, SEED) for row in np.eye(size)])
    np.testing.assert_allclose(basis @ basis.T, np.eye(size), atol=1e-14)
    back = np.array([rotate_back(row.copy(), SEED, size) for row in np.eye(size)])
    np.testing.assert_allclose(back, basis.T, atol=1e-14)


def test_a_large_vector_against_the_plain_butterfly():
    """log2(N) rounds of sums and differences (the textbook's fast transform)."""
    length = (1 << 17) - 5
    vector = normal(length, np.float32)
    signs = 1.0 - 2.0 * np.unpackbits(Keystream(SEED).words(1 << 12).view(np.uint8), bitorder="little")[:length]
    x = np.append(vector * signs, np.zeros(5))
    step = 1
    while step < len(x):
        pairs = x.reshape(-1, 2, step)
        x = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1).reshape(-1)
        step *= 2
    np.testing.assert_allclose(rotate(vector, SEED), x / math.sqrt(len(x)), atol=1e-5)


def test_the_largest_numbers_do_not_overflow():
    """Sums of 2^16 such numbers are beyond float32."""
    vector = np.full(1 << 16, 1e36, np.float32)
    rotated = rotate(vector, SEED)
    assert np.isfinite(rotated).all()
    np.testing.assert_allclose(rotate_back(rotated, SEED, len(vector)), vector, rtol=1e-5)


def test_the_vector_of_the_caller_is_not_changed():
    vector = normal(16)
    vector.flags.writeable = False
    assert not np.shares_memory(rotate(vector, SEED), vector)


def test_signs_are_another_in_each_run_round_and_attempt():
    rounds = [("a", 1, 1), ("a", 1, 2), ("a", 2, 1), ("b", 1, 1), ("a1", 1, 1), ("a", 11, 1)]
    seeds = {rotation_seed(*of) for of in rounds}
    assert len(seeds) == 6 and {len(seed) for seed in seeds} == {32}
    assert rotation_seed("a", 1, 1) == rotation_seed("a", 1, 1)
    ones = np.ones(1024)
    vectors = [rotate(ones, seed) for seed in seeds]
    for i, first in enumerate(vectors):
        for second in vectors[:i]:
            assert abs(np.corrcoef(first, second)[0, 1]) < 5 / 32


def test_sums_are_rotated_as_their_parts_are():
    first, second = normal(100, seed=1), normal(100, seed=2)
    both = rotate(first, SEED) + rotate(second, SEED)
    np.testing.assert_allclose(rotate_back(both, SEED, 100), first + second, atol=1e-13)


def test_a_seed_of_another_length_is_refused():
    with pytest.raises(MaskError, match="has 32 bytes"):
        rotate(normal(4), b"short")


SHAPES = {
    "constant": np.ones(1 << 14),
    "one in ten": np.where(np.arange(1 << 14) % 10 == 0, np.linspace(1, 3, 1 << 14), 0.0),
    "steep": 0.999 ** np.arange(1 << 14),
    "filled up": np.linspace(-1, 3, (1 << 13) + 1),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_whatever_it_was_it_is_spread_like_a_normal_variable(shape):
    """Mean 0, variance ‖x‖²/N; κ standard deviations are exceeded as seldom as the wrap probability says, 10^-4: 20
    seeds make 327 680 coordinates, of which 33 are expected beyond (five standard deviations of that allowed)."""
    vector = SHAPES[shape]
    size = padded_length(len(vector))
    scale = np.linalg.norm(vector) / math.sqrt(size)
    spread = np.concatenate([rotate(vector, rotation_seed("flat", i, 1)) / scale for i in range(20)])
    assert stats.kstest(spread, "norm").statistic < 5 / math.sqrt(len(spread))
    assert np.count_nonzero(np.abs(spread) > stats.norm.isf(0.5e-4)) < 33 + 5 * math.sqrt(33)
    assert stats.kstest(np.tile(vector / scale, 20), "norm").statistic > 0.1, "it was spread before"


def test_few_coordinates_that_are_not_zero_stay_below_the_sum_of_theirs():
    """k equal ones can at most add up to √k standard deviations: under κ for up to 15 of them."""
    for count in (1, 4, 15):
        vector = np.zeros(1 << 12)
        vector[:count] = 1
        peak = np.abs(rotate(vector, SEED)).max() / (math.sqrt(count) / 64)
        assert peak <= math.sqrt(count) * (1 + 1e-12)
