"""L2 clipping: the norm in exact arithmetic, over one vector and over several."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from fedward_common.errors import ConfigError, UpdateError
from fedward_common.privacy.clip import clip

FLOATS = [np.float32, np.float64]


def squared(*vectors) -> Fraction:
    """The exact square of the joint norm."""
    return sum((Fraction(float(x)) ** 2 for vector in vectors for x in vector.reshape(-1)), Fraction())


def normal(shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [1, 2, 3, 10, 1000, 4097])
def test_the_norm_is_exactly_within_the_bound_after_rounding(size, dtype):
    """Without room for rounding about every second of these would be over it."""
    for seed in range(60 if size < 1000 else 5):
        vector = normal(size, dtype, seed)
        bound = math.sqrt(squared(vector)) * np.random.default_rng(seed).uniform(0.01, 1)
        clipped, moved = clip({"delta": vector}, bound)
        assert moved
        assert Fraction(bound) ** 2 * (1 - Fraction(10**-6)) < squared(clipped["delta"]) <= Fraction(bound) ** 2
        assert clipped["delta"].dtype == dtype


def test_the_joint_norm_of_both_dtypes_is_exactly_within_the_bound():
    for seed in range(60):
        groups = {"delta": normal(10, np.float32, seed), "delta_c": 0.01 * normal(3, np.float64, seed)}
        clipped, moved = clip(groups, 0.3)
        assert moved and squared(*clipped.values()) <= Fraction(0.3) ** 2


@pytest.mark.parametrize("dtype", FLOATS)
def test_all_elements_rounded_up_are_still_within_the_bound(dtype):
    """The worst case: one value many times, times a factor that rounds it up."""
    for bound in (0.3, 0.7, 1 / 3, 1e-3):
        for count in (1, 7, 100):
            clipped, _ = clip({"delta": np.full(count, 3, dtype)}, bound)
            assert squared(clipped["delta"]) <= Fraction(bound) ** 2


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("steps", range(-4, 5))
def test_beside_the_bound(dtype, steps):
    """A vector whose norm is the bound but for a few steps of its dtype: whatever is given back is within it."""
    length = np.float64(5)
    for _ in range(abs(steps)):
        length = np.nextafter(length, length + steps)
    clipped, _ = clip({"delta": np.array([3, 4], dtype)}, float(length))
    assert squared(clipped["delta"]) <= Fraction(float(length)) ** 2


def test_several_groups_have_one_norm_and_one_factor():
    groups = {"delta": normal(100, seed=1), "delta_c": 10 * normal((3, 7), np.float64, 2), "bias": normal(())}
    norm = math.sqrt(squared(*groups.values()))
    clipped, moved = clip(groups, norm / 2)
    assert moved and list(clipped) == list(groups)
    for name, vector in groups.items():
        assert clipped[name].shape == vector.shape and clipped[name].dtype == vector.dtype
        np.testing.assert_allclose(clipped[name], vector / 2, rtol=1e-6)
    assert squared(*clipped.values()) <= Fraction(norm / 2) ** 2
    assert not clip(groups, norm * 1.001)[1]


def test_what_is_within_the_bound_is_given_back_as_it_is():
    groups = {"delta": normal(50), "delta_c": normal(50, np.float64)}
    clipped, moved = clip(groups, 1000)
    assert not moved and clipped is not groups
    assert all(clipped[name] is groups[name] for name in groups)


def test_the_vector_of_the_caller_is_not_changed():
    vector = normal(5000)
    before = vector.copy()
    vector.flags.writeable = False
    clipped, _ = clip({"delta": vector}, 1.0)
    assert np.array_equal(vector, before) and not np.shares_memory(clipped["delta"], vector)


@pytest.mark.parametrize("dtype", FLOATS)
def test_clipping_twice_is_clipping_once(dtype):
    for seed in range(30):
        once, _ = clip({"delta": normal(100, dtype, seed)}, 0.7)
        twice, moved = clip(once, 0.7)
        assert not moved and twice["delta"] is once["delta"]


@pytest.mark.parametrize("dtype", FLOATS)
def test_zeros_stay_zeros(dtype):
    for shape in [(), (0,), (1,), (5000,)]:
        clipped, moved = clip({"delta": np.zeros(shape, dtype)}, 2.0**-64)
        assert not moved and clipped["delta"].shape == shape and not clipped["delta"].any()
    assert clip({}, 1.0) == ({}, False)


def test_one_number_without_a_dimension():
    clipped, moved = clip({"bias": np.array(-3.0)}, 2.0)
    assert moved and clipped["bias"].shape == ()
    assert float(clipped["bias"]) == pytest.approx(-2, rel=1e-10) and abs(float(clipped["bias"])) <= 2


@pytest.mark.parametrize(
    ("dtype", "value"), [(np.float32, 3e38), (np.float32, 1e-45), (np.float64, 1.7e308), (np.float64, 5e-324)]
)
def test_the_largest_and_smallest_numbers_there_are(dtype, value):
    vector = np.full(1000, value, dtype)
    vector[::2] *= -1
    clipped, moved = clip({"delta": vector, "delta_c": 10 * normal(3, np.float64)}, 1.0)
    assert moved and squared(*clipped.values()) <= 1
    if value > 1:
        np.testing.assert_allclose(np.abs(clipped["delta"]), 1 / math.sqrt(1000), rtol=1e-6)
        assert np.abs(clipped["delta_c"]).max() < 1e-37


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 4999])
def test_what_is_not_finite_is_refused(dtype, value, place):
    vector = normal(5000, dtype)
    vector[place] = value
    with pytest.raises(UpdateError, match="group 'delta_c' holds values that are not finite"):
        clip({"delta": normal(3), "delta_c": vector}, 1.0)


@pytest.mark.parametrize("dtype", [np.float16, np.int64, np.complex64, bool, ">f4"])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(UpdateError, match=r"group 'delta' has dtype .*: only float32 and float64"):
        clip({"delta": np.ones(3, dtype)}, 1.0)


@pytest.mark.parametrize("bound", [0, 0.0, -1.0, math.nan, math.inf, 2.0**-65, 2.0**65, True, "1", None, np.float32(1)])
def test_other_bounds_are_refused(bound):
    with pytest.raises(ConfigError, match=r"clip = .*: a bound of the L2 norm is a number from 2\^-64 to 2\^64"):
        clip({"delta": np.ones(3)}, bound)
