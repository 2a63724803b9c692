"""Each rule against loops from the paper, Flower's own functions and SciPy, at the scale that updates have."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from fedward_server import robust
from flwr.server.strategy import aggregate as flower
from flwr.serverapp.strategy import multikrum
from scipy.optimize import minimize

from . import by_loops

CASES = [(7, 2, seed) for seed in range(4)] + [(11, 2, 5), (5, 1, 6), (15, 3, 7), (20, 4, 8)]


def updates(n, seed, size=40, scale=1e-6, dtype=np.float32, common=0.0):
    rng = np.random.default_rng(seed)
    shared = common * rng.normal(size=size)
    return [(shared + rng.normal(scale=scale, size=size)).astype(dtype) for _ in range(n)]


def results(vectors):
    """As Flower's functions take them; in float64, since theirs follow the dtype."""
    return [([vector.astype(np.float64)], 1) for vector in vectors]


@pytest.mark.parametrize(("n", "f", "seed"), CASES)
def test_krum_chooses_as_loops_in_float64_do(n, f, seed):
    vectors = updates(n, seed)
    np.testing.assert_allclose(
        robust.krum_scores(robust.squared_distances(vectors), f), by_loops.scores(vectors, f), rtol=1e-12
    )
    assert robust.krum(vectors, f) == [by_loops.krum(vectors, f)]
    for keep in (2, n - f):
        assert robust.krum(vectors, f, keep) == by_loops.multi_krum(vectors, f, keep)


def test_what_updates_have_in_common_does_not_drown_distances():
    """Differences of 1e-6 beside a common part of 1. By ‖x‖² + ‖y‖² − 2xy in float32, as Flower has it, distances come
    out wrong by factors, some negative."""
    vectors = updates(9, 1, size=200, common=1.0)
    true = np.array([[by_loops.squared(a, b) for b in vectors] for a in vectors])
    np.testing.assert_allclose(robust.squared_distances(vectors), true, rtol=1e-12)
    assert robust.krum(vectors, 2) == [by_loops.krum(vectors, 2)]
    assert robust.krum(vectors, 2, 7) == by_loops.multi_krum(vectors, 2, 7)
    from flwr.app import Array, ArrayRecord

    expanded = multikrum.compute_distances([ArrayRecord({"w": Array(vector)}) for vector in vectors])
    apart = ~np.eye(9, dtype=bool)
    assert np.abs(expanded[apart] / true[apart] - 1).max() > 10


@pytest.mark.parametrize(("n", "f", "seed"), CASES)
def test_krum_is_flowers(n, f, seed):
    vectors = updates(n, seed, scale=1.0)
    [theirs] = flower.aggregate_krum(results(vectors), f, 0)
    np.testing.assert_array_equal(robust.mean([vectors[i] for i in robust.krum(vectors, f)]), theirs)
    [theirs] = flower.aggregate_krum(results(vectors), f, n - f)
    kept = [vectors[i] for i in robust.krum(vectors, f, n - f)]
    np.testing.assert_allclose(robust.mean(kept), theirs, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(("n", "f", "seed"), [(7, 1, 0), (8, 1, 1), (11, 2, 2), (12, 2, 3), (20, 4, 4)])
@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_bulyan_is_the_loops_and_flowers(n, f, seed, scale):
    vectors = updates(n, seed, scale=scale)
    chosen, vector = robust.bulyan(vectors, f)
    by_hand = by_loops.bulyan(vectors, f)
    assert chosen == by_hand[0] and len(chosen) == n - 2 * f
    np.testing.assert_allclose(vector, by_hand[1], rtol=1e-9, atol=1e-12 * scale)
    [theirs] = flower.aggregate_bulyan(results(vectors), f, flower.aggregate_krum, to_keep=0)
    np.testing.assert_allclose(vector, theirs, rtol=1e-9, atol=1e-12 * scale)


def test_bulyan_chooses_one_after_another():
    """Not the θ best of one ranking (as Flower's newer strategy has it): with each that goes, neighbours go."""
    different = 0
    for seed in range(20):
        vectors = updates(11, seed, size=3)
        chosen, _ = robust.bulyan(vectors, 2)
        assert chosen == by_loops.bulyan(vectors, 2)[0]
        different += chosen != robust.krum(vectors, 2, 7)
    assert different


@pytest.mark.parametrize("n", [3, 4, 7, 20])
def test_medians_and_trimmed_means_are_flowers(n):
    vectors = updates(n, n)
    np.testing.assert_allclose(robust.median(vectors), flower.aggregate_median(results(vectors))[0], rtol=1e-15)
    for trim in range(1, (n - 1) // 2 + 1):
        # Their share, chosen so that int(share · n) is what it should be.
        [theirs] = flower.aggregate_trimmed_avg(results(vectors), (trim + 0.25) / n)
        np.testing.assert_allclose(robust.trimmed_mean(vectors, trim), theirs, rtol=1e-12)


@pytest.mark.parametrize("trim", [0, 2, 3])
def test_a_trimmed_mean_trims_somebody_and_not_all(trim):
    with pytest.raises(ValueError, match="at each end"):
        robust.trimmed_mean(updates(4, 0), trim)


@pytest.mark.parametrize("scale", [1.0, 1e-6])
@pytest.mark.parametrize(("n", "size", "seed"), [(5, 2, 0), (9, 4, 1), (20, 6, 2)])
def test_the_geometric_median_is_scipys(n, size, seed, scale):
    vectors = updates(n, seed, size, scale, np.float64)
    found = robust.geometric_median(vectors, 2000, 1e-9, 1e-9)

    def total(z):
        return sum(np.linalg.norm(vector / scale - z) for vector in vectors)

    best = minimize(total, np.zeros(size), method="BFGS", options={"gtol": 1e-9})
    assert found.converged
    assert total(found.vector / scale) <= best.fun * (1 + 1e-9)
    np.testing.assert_allclose(found.vector / scale, best.x, atol=1e-4)
    assert found.shares.sum() == pytest.approx(1)
    np.testing.assert_allclose(found.shares @ np.array(vectors), found.vector, rtol=1e-9)


def test_the_geometric_median_of_collinear_points_is_the_middle_one():
    vectors = [np.array([float(x), 2.0 * x]) for x in (0, 1, 2, 40, 1000)]
    found = robust.geometric_median(vectors, 100, 1e-6, 1e-6)
    np.testing.assert_allclose(found.vector, [2, 4], rtol=1e-4)


def test_the_geometric_median_has_a_scale_of_its_own():
    """A ν of the paper's 1e-6 would make updates of that size count alike: a mean, with the liar in it."""
    small = updates(9, 3, scale=1e-9, dtype=np.float64)
    liar = [*small[:-1], 1e-6 * np.ones(40)]
    large = [1e9 * vector for vector in liar]
    one, other = (robust.geometric_median(vectors, 100, 1e-6, 1e-6) for vectors in (liar, large))
    np.testing.assert_allclose(1e9 * one.vector, other.vector, rtol=1e-6)
    assert np.linalg.norm(other.vector) < np.linalg.norm(np.mean(large, axis=0)) / 10


def test_more_than_half_alike_are_the_geometric_median():
    alike = np.array([1.0, -2.0, 3.0])
    found = robust.geometric_median([alike] * 3 + [np.full(3, 1e30), np.full(3, -1e9)], 100, 1e-6, 1e-6)
    np.testing.assert_array_equal(found.vector, alike)
    assert found.converged and found.shares.tolist() == [1 / 3] * 3 + [0, 0]


def test_values_near_the_end_of_float64_are_outliers_like_others():
    honest = updates(8, 4, dtype=np.float64)
    huge = [np.full(40, 1e308), np.full(40, -1e308)]
    vectors = [huge[0], *honest, huge[1]]
    assert not {0, 9} & set(robust.krum(vectors, 2, 8))
    chosen, vector = robust.bulyan([huge[0], *updates(10, 4, dtype=np.float64)], 1)
    assert 0 not in chosen and np.abs(vector).max() < 1e-5
    centre = robust.geometric_median(vectors, 50, 1e-6, 1e-6).vector
    for result in (robust.median(vectors), robust.trimmed_mean(vectors, 2), centre):
        assert np.abs(result).max() < 1e-5


def test_ties_go_to_the_first_name():
    one, other = np.array([0.0, 1.0]), np.array([1.0, 0.0])
    assert robust.krum([one, one, other, other, one, other], 1) == [0]
    assert robust.krum([other, other, one, one, one, other], 1, 2) == [0, 1]
    chosen, _ = robust.bulyan([one] * 8, 1)
    assert chosen == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "rule",
    [
        lambda v: robust.mean([v[i] for i in robust.krum(v, 2, 8)]),
        lambda v: robust.bulyan(v, 1)[1],
        robust.median,
        lambda v: robust.trimmed_mean(v, 2),
    ],
)
def test_blocks_make_no_difference_and_memory_stays_small(monkeypatch, rule):
    vectors = updates(10, 5, size=1_000)
    whole = rule(vectors)
    monkeypatch.setattr(robust, "_CELLS", 70)  # seven columns at a time
    np.testing.assert_allclose(rule(vectors), whole, rtol=1e-12)
    monkeypatch.setattr(robust, "_CELLS", 10_000)
    vectors = updates(10, 5, size=200_000)
    tracemalloc.start()
    rule(vectors)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 200_000 * 8 * 1.5  # the result, in float64, and small change
