"""Groups of single numbers travel as scalars: no range, nothing lost but what is under the grid."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from fedward_common import scalar_groups
from fedward_common.errors import UpdateError
from fedward_common.steps import laid_out
from fedward_common.summand import Group, Shape, decode
from fedward_common.update import Kind, Layout, TensorSpec, Update

LAYOUT = Layout((TensorSpec("w", (3,), "float32", Kind.TRAINABLE),))
SUMMED = {"delta": Kind.TRAINABLE, "count": 2, "norm": 1}


def shape(n):
    lengths = scalar_groups.lengths(LAYOUT, SUMMED)
    groups = tuple(Group(name, length, 1.0) for name, length in lengths.items())
    return Shape(groups, ("loss", *scalar_groups.names(SUMMED)), 20, n, 64.0)


def summand(of, groups, weight):
    metrics = {"loss": 0.5, **scalar_groups.weighted(SUMMED, groups, weight)}
    return laid_out(of, Update({"delta": groups["delta"]}, weight, metrics))


def test_coordinates_and_numbers_are_told_apart_by_their_extent():
    assert scalar_groups.lengths(LAYOUT, SUMMED) == {"delta": 3}
    assert scalar_groups.names(SUMMED) == ("number.count.0", "number.count.1", "number.norm.0")
    assert scalar_groups.names({"delta": Kind.TRAINABLE}) == ()


def test_weighted_means_of_numbers_are_exact_whatever_their_size():
    of, rng = shape(4), np.random.default_rng(1)
    updates = []
    for weight in (1.0, 7.0, 4000.0, 33.0):
        count, norm = rng.integers(-(10**6), 10**6, 2).astype(float), np.array([rng.integers(1, 500) / 8])
        updates.append(({"delta": np.zeros(3, np.float32), "count": count, "norm": norm}, weight))
    words = np.sum([summand(of, groups, weight) for groups, weight in updates], axis=0, dtype=np.uint64)
    mean = decode(of, (words % 2**20).astype(np.uint32), 4)
    found = scalar_groups.means(SUMMED, mean)
    total = sum(Fraction(weight) for _, weight in updates)
    for name in ("count", "norm"):
        for place in range(len(found[name])):
            exact = sum(Fraction(weight) * Fraction(groups[name][place]) for groups, weight in updates) / total
            assert found[name][place] == pytest.approx(float(exact), rel=1e-15)
    assert found["norm"].dtype == np.float64 and found["norm"].shape == (1,)


def test_weight_and_numbers_see_the_same_rounded_weight():
    of = shape(2)
    groups = {"delta": np.zeros(3, np.float32), "count": np.array([3e5, -1.0]), "norm": np.array([2.0])}
    words = np.sum([summand(of, groups, 1 / 3e4) for _ in range(2)], axis=0, dtype=np.uint64)
    found = scalar_groups.means(SUMMED, decode(of, words.astype(np.uint32), 2))
    # A weight of 35 steps of the grid is 0.1 % off 1/30000; the mean of equal numbers is not.
    assert found["count"][0] == pytest.approx(3e5, rel=1e-7)


def test_a_number_that_no_scalar_holds_is_refused():
    groups = {"delta": np.zeros(3, np.float32), "count": np.array([2.0**41, 0]), "norm": np.zeros(1)}
    with pytest.raises(Exception, match=r"'number\.count\.0' is not a number within") as refused:
        summand(shape(2), groups, 4.0)
    assert isinstance(refused.value.__cause__, UpdateError)
