"""The streaming sum: exact against rationals, the same bits in any order, never an overflow."""

import math
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from fedward_common.errors import UpdateError
from fedward_common.update import Update
from fedward_server import aggregation
from fedward_server.aggregation import LSB, MetricSums, StreamingSum, averages
from hypothesis import given, settings
from hypothesis import strategies as st

SIZE = 5

values = st.floats(-100, 100, width=32)
vectors = st.lists(values, min_size=SIZE, max_size=SIZE).map(lambda x: np.array(x, np.float32))
wide = st.lists(st.floats(-50, 50), min_size=3, max_size=3).map(np.array)
metrics = st.fixed_dictionaries({"loss": st.floats(-1e6, 1e6)}, optional={"accuracy": st.floats(0, 1e9)})
updates = st.builds(
    lambda delta, extra, weight, numbers: Update({"delta": delta, "extra": extra}, float(weight), numbers),
    vectors,
    wide,
    st.integers(1, 60_000) | st.floats(2**-10, 1e4),
    metrics,
)


def total(cohort, capacity=None):
    out = StreamingSum({"delta": SIZE, "extra": 3}, capacity or len(cohort))
    for update in cohort:
        out.add(update)
    return out.mean()


def bits(update):
    groups = {name: vector.tobytes() for name, vector in update.groups.items()}
    return groups, update.weight, dict(update.metrics)


@settings(max_examples=200, deadline=None)
@given(st.lists(updates, min_size=1, max_size=8).flatmap(lambda c: st.tuples(st.just(c), st.permutations(c))))
def test_any_order_gives_the_same_bits(cohorts):
    first, second = cohorts
    assert bits(total(first)) == bits(total(second))


@settings(max_examples=200, deadline=None)
@given(st.lists(updates, min_size=1, max_size=8))
def test_equals_the_exact_mean(cohort):
    mean = total(cohort)
    weight = sum(Fraction(u.weight) for u in cohort)
    assert mean.weight == float(weight)
    for group in ("delta", "extra"):
        for i, got in enumerate(mean.groups[group]):
            terms = [Fraction(u.weight) * Fraction(float(u.groups[group][i])) for u in cohort]
            exact = sum(terms) / weight
            # Half a step for each rounded term, and what float64 itself can hold of a term and of the result.
            slack = len(cohort) * Fraction(LSB) / 2 + sum(map(abs, terms)) * Fraction(2) ** -52
            assert abs(Fraction(float(got)) - exact) <= slack / weight + abs(exact) * Fraction(2) ** -51


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-(2.0**28), 2.0**28), min_size=2, max_size=6), st.permutations(range(6)))
def test_nothing_overflows_and_refusal_does_not_depend_on_order(numbers, order):
    """Every update is either refused for itself, or in the sum, and the sum is right."""
    order = [i for i in order if i < len(numbers)]
    out = StreamingSum({"x": 1}, len(numbers))
    taken = []
    for i in order:
        try:
            out.add(Update({"x": np.array([numbers[i]])}, 1.0))
            taken.append(i)
        except UpdateError as error:
            assert "'x'" in str(error)
    limit = (2**63 - 1) // len(numbers)
    assert sorted(taken) == [i for i, x in enumerate(numbers) if round(abs(x) / LSB) <= limit]
    if taken:
        exact = sum(Fraction(numbers[i]) for i in taken) / len(taken)
        assert (
            abs(Fraction(float(out.mean().groups["x"][0])) - exact) <= Fraction(LSB) + abs(exact) * Fraction(2) ** -51
        )


def test_a_refused_update_leaves_no_trace():
    good = Update({"a": np.ones(3), "b": np.ones(2)}, 2.0, {"loss": 1.0})
    bad = Update({"a": np.ones(3), "b": np.array([1.0, 1e30])}, 2.0, {"loss": 1.0})
    worse = Update(good.groups, 2.0, {"loss": math.nan})
    out = StreamingSum({"a": 3, "b": 2}, 4)
    out.add(good)
    for update in (bad, worse):
        with pytest.raises(UpdateError):
            out.add(update)
    mean = out.mean()
    assert mean.weight == 2 and mean.metrics == {"loss": 1.0}
    np.testing.assert_array_equal(mean.groups["a"], np.ones(3))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38])
def test_not_finite_or_too_large_names_the_group(value):
    with pytest.raises(UpdateError, match="delta_c"):
        StreamingSum({"delta_c": 2}, 1).add(Update({"delta_c": np.array([0.0, value])}, 1.0))


def test_no_update_no_mean():
    with pytest.raises(UpdateError, match="sum to 0"):
        StreamingSum({"delta": 2}, 3).mean()


def test_wrong_shapes_and_groups_are_never_broadcast():
    out = StreamingSum({"delta": 3}, 3)
    for groups in ({"delta": np.ones(1)}, {"delta": np.ones((3, 1))}, {"other": np.ones(3)}, {}):
        with pytest.raises(UpdateError):
            out.add(Update(groups, 1.0))
    assert out.count == 0


def test_float32_is_widened_before_it_is_weighted():
    x = np.array([np.float32(1 / 3)])
    out = StreamingSum({"x": 1}, 1)
    out.add(Update({"x": x}, 59_999.0))
    assert out.mean().groups["x"][0] == pytest.approx(float(x[0]), rel=1e-15)


def test_vectors_longer_than_a_chunk(monkeypatch):
    rng = np.random.default_rng(0)
    cohort = [rng.normal(size=1000).astype(np.float32) for _ in range(3)]

    def mean():
        out = StreamingSum({"x": 1000}, 3)
        for vector in cohort:
            out.add(Update({"x": vector}, 3.0))
        return out.mean().groups["x"]

    whole = mean()
    monkeypatch.setattr(aggregation, "_CHUNK", 7)
    np.testing.assert_array_equal(whole, mean())
    np.testing.assert_allclose(whole, np.mean(cohort, axis=0, dtype=np.float64), atol=LSB)


def test_memory_is_two_models_whatever_the_cohort():
    """Growth in float32 model sizes: 2 for the accumulator, the mean in its place, a little scratch."""
    size = 2_000_000
    x = np.ones(size, np.float32)
    update = Update({"x": x}, 1.0)
    tracemalloc.start()
    try:
        out = StreamingSum({"x": size}, 20)
        for _ in range(20):
            out.add(update)
        out.mean()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak / x.nbytes < 2.3


def test_metric_sums_are_exact_and_bounded():
    sums = MetricSums()
    for value in (1e17, 1.0, -1e17):
        sums.add({"loss": value})
    assert sums.total() == {"loss": 1.0}
    with pytest.raises(UpdateError, match="'loss'"):
        sums.add({"loss": 1e300})
    assert averages({"examples": 4.0, "loss": 2.0}) == {"examples": 4.0, "loss": 0.5}
    assert averages({"loss": 2.0}) is None
