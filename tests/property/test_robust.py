"""What the rules promise, over many inputs: the order of nodes is nothing, and few liars move a result not far."""

from __future__ import annotations

import numpy as np
import pytest
from fedward_common.aggregation_options import (
    Bulyan,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    TrimmedMean,
)
from fedward_common.update import Update
from fedward_server import robust
from fedward_server.combining import Kept
from hypothesis import assume, given, settings
from hypothesis import strategies as st

SIZE = 4
honest_values = st.floats(-1, 1, width=32)
any_values = st.floats(allow_nan=False, allow_infinity=False, width=32)
honest = st.lists(honest_values, min_size=SIZE, max_size=SIZE).map(lambda x: np.array(x, np.float32))
hostile = st.lists(any_values, min_size=SIZE, max_size=SIZE).map(lambda x: np.array(x, np.float32))
RULES = [
    Krum(byzantine=2), MultiKrum(byzantine=2), MultiKrum(byzantine=2, keep=3), Bulyan(byzantine=1), Median(),
    TrimmedMean(trim=3), TrimmedMean(share=0.2), GeometricMedian(),
]  # fmt: skip


def combined(rule, cohort, order):
    kept = Kept(rule)
    for name in order:
        kept.add(name, cohort[name])
    update, told = kept.combined()
    return {group: vector.tobytes() for group, vector in update.groups.items()}, update.weight, update.metrics, told


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(RULES), st.lists(st.tuples(hostile, honest), min_size=9, max_size=12), st.randoms())
def test_the_order_of_arrival_leaves_no_trace(rule, vectors, random):
    cohort = {
        f"n{i:02d}": Update({"delta": delta, "statistic": statistic}, 1.0, {"examples": float(i)})
        for i, (delta, statistic) in enumerate(vectors)
    }
    order = random.sample(sorted(cohort), len(cohort))
    assert combined(rule, cohort, sorted(cohort)) == combined(rule, cohort, order)


@pytest.mark.parametrize("rule", [rule for rule in RULES if not isinstance(rule, Bulyan)], ids=str)
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(9, 12), st.randoms())
def test_names_matter_for_ties_alone(rule, seed, n, random):
    """Bulyan's last choice is always a tie: among 2f + 1 Krum looks at one neighbour, and two are nearest to each
    other."""
    vectors = np.random.default_rng(seed).normal(scale=1e-6, size=(n, 5)).astype(np.float32)
    order = random.sample(range(n), n)

    def result(rows):
        kept = Kept(rule)
        for i, row in enumerate(rows):
            kept.add(f"n{i:02d}", Update({"delta": row}, 1.0))
        return kept.combined()[0].groups["delta"]

    np.testing.assert_allclose(result(vectors), result(vectors[order]), rtol=1e-9, atol=1e-15)


mixed = st.integers(1, 3).flatmap(
    lambda f: st.tuples(
        st.lists(honest, min_size=f + 1, max_size=f + 6), st.lists(hostile, min_size=f, max_size=f), st.randoms()
    )
)


@settings(max_examples=60, deadline=None)
@given(mixed)
def test_medians_and_trimmed_means_stay_where_the_honest_are(case):
    """f < n/2 liars, whatever they say."""
    good, bad, random = case
    vectors = random.sample([*good, *bad], len(good) + len(bad))
    low, high = np.min(good, axis=0), np.max(good, axis=0)
    for result in (robust.median(vectors), robust.trimmed_mean(vectors, len(bad))):
        slack = 1e-12  # a mean is rounded
        assert (result >= low - slack).all() and (result <= high + slack).all()


@settings(max_examples=40, deadline=None)
@given(mixed)
def test_the_geometric_median_stays_near_the_honest(case):
    """Cohen et al. 2016: within 2(1 − α)/(1 − 2α) times the honest ones' largest distance from any point."""
    good, bad, random = case
    vectors = random.sample([*good, *bad], len(good) + len(bad))
    found = robust.geometric_median(vectors, 3000, 1e-9, 1e-9)
    assume(found.converged)
    centre = np.mean(good, axis=0, dtype=np.float64)
    radius = max(np.linalg.norm(vector - centre) for vector in good)
    alpha = len(bad) / len(vectors)
    assert np.linalg.norm(found.vector - centre) <= 2 * (1 - alpha) / (1 - 2 * alpha) * radius + 1e-4


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 3), st.integers(0, 4), st.integers(0, 2**32 - 1),
    st.floats(1e3, 1e30), st.booleans(), st.randoms(),
)  # fmt: skip
def test_krum_never_returns_an_outlier(f, more, seed, distance, together, random):
    """n ≥ 2f + 3, the f liars far away, all in one place or each by itself."""
    n = 2 * f + 3 + more
    rng = np.random.default_rng(seed)
    good = list(rng.uniform(-1, 1, (n - f, SIZE)))
    spot = rng.normal(size=SIZE)
    bad = [distance * (spot if together else rng.normal(size=SIZE)) for _ in range(f)]
    bad = [vector + np.sign(vector) * 1e3 for vector in bad]
    order = random.sample(range(n), n)
    vectors = [[*good, *bad][i] for i in order]
    liars = {i for i, place in enumerate(order) if place >= n - f}
    assert not liars & set(robust.krum(vectors, f))
    assert not liars & set(robust.krum(vectors, f, n - f))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 2), st.integers(0, 3), st.data())
def test_bulyan_stays_within_one_width_of_the_honest(f, more, data):
    n = 4 * f + 3 + more
    good = data.draw(st.lists(honest, min_size=n - f, max_size=n - f))
    bad = data.draw(st.lists(hostile, min_size=f, max_size=f))
    vectors = data.draw(st.permutations([*good, *bad]))
    _, result = robust.bulyan(vectors, f)
    low, high = np.min(good, axis=0).astype(float), np.max(good, axis=0).astype(float)
    width = high - low
    assert (result >= low - width - 1e-9).all() and (result <= high + width + 1e-9).all()
