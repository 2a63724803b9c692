"""Sums of summands: no overflow by construction, unbiased, exact where they say so, and recognised when wrong."""

from __future__ import annotations

import math
import re
from fractions import Fraction

import numpy as np
import pytest
from fedward_common.errors import UpdateError
from fedward_common.pipeline import Clip, Flat, Quantize
from fedward_common.summand import Group, Shape, ShapeError, WrongSum, decode
from fedward_common.update import Update
from fedward_server.aggregation import StreamingSum
from hypothesis import given, settings
from hypothesis import strategies as st

GRID = 1 << 20
widths = st.sampled_from(range(12, 33, 4))


def most(bits):
    """The largest cohort that leaves 256 levels."""
    return ((1 << bits) - 1) // 256


class Seeded:
    """Uniform words, the same in every run."""

    def __init__(self, seed=0):
        self._rng = np.random.default_rng(seed)

    def words(self, count):
        return self._rng.integers(0, 1 << 32, count, dtype=np.uint32)


class Extreme:
    """The same word for ever."""

    def __init__(self, word):
        self._word = word

    def words(self, count):
        return np.full(count, self._word, np.uint32)


def encode(shape, update, stream=None):
    return Quantize(shape, stream or Seeded())(Clip(shape)(Flat(update)))


def modular(shape, summands):
    """The sum as secure aggregation gives it."""
    total = sum(words.astype(object) for words in summands)
    return (total % (1 << shape.bits)).astype(np.uint32)


@st.composite
def cohorts(draw):
    """A shape with two groups, and the updates of some of its nodes, all within range."""
    bits = draw(widths)
    capacity = draw(st.integers(2, min(most(bits), 40)))
    scale = draw(st.sampled_from([1.0, 0.5, 64.0, 300.0]))
    first, second = draw(st.floats(1e-6, 1e6)), 2.0 ** draw(st.integers(-30, 30))
    shape = Shape((Group("delta", 5, first), Group("c", 2, second)), ("examples", "loss"), bits, capacity, scale)
    updates = []
    for _ in range(draw(st.integers(1, min(capacity, 6)))):
        weight = draw(st.integers(1, 10**7) | st.floats(2.0**-19, 1e7))
        groups = {}
        for group, dtype in zip(shape.groups, (np.float32, np.float64), strict=True):
            shares = draw(st.lists(st.floats(-1, 1), min_size=group.length, max_size=group.length))
            # Clipped is (w/W)·x with the weight as it is summed, a whole number of steps of the grid.
            summed = max(float(exact_weight(weight)), weight)
            groups[group.name] = (np.array(shares) * group.range * scale / summed * (1 - 1e-5)).astype(dtype)
        metrics = {"examples": float(weight), "loss": draw(st.floats(-(2.0**42), 2.0**42))}
        updates.append(Update(groups, float(weight), metrics))
    return shape, updates


def exact_weight(weight):
    return Fraction(round(Fraction(weight) * GRID), GRID)


def exact_weights(updates):
    return [exact_weight(u.weight) for u in updates]


@settings(max_examples=200, deadline=None)
@given(cohorts())
def test_the_mean_is_the_weighted_mean_within_a_step_a_node(case):
    shape, updates = case
    mean = decode(shape, modular(shape, [encode(shape, u, Seeded(i)) for i, u in enumerate(updates)]), len(updates))
    weights = exact_weights(updates)
    assert mean.weight == float(sum(weights))
    assert mean.metrics["clipped.delta"] == mean.metrics["clipped.c"] == 0
    for group in shape.groups:
        step = 2 * Fraction(group.range) / shape.levels
        for i, got in enumerate(mean.groups[group.name]):
            exact = sum(w * Fraction(float(u.groups[group.name][i])) for w, u in zip(weights, updates, strict=True))
            wrong = abs(Fraction(float(got)) * sum(weights) - exact) / Fraction(shape.weight_scale)
            assert wrong <= len(updates) * (step + Fraction(group.range) * Fraction(2) ** -48)


@settings(max_examples=100, deadline=None)
@given(cohorts())
def test_scalars_are_exact_to_the_grid(case):
    shape, updates = case
    mean = decode(shape, modular(shape, [encode(shape, u) for u in updates]), len(updates))
    for name in ("examples", "loss"):
        exact = sum(round(Fraction(u.metrics[name]) * GRID) for u in updates)
        assert mean.metrics[name] == float(Fraction(exact, GRID))


@settings(max_examples=100, deadline=None)
@given(widths, st.data())
def test_nothing_overflows_at_the_extremes(bits, data):
    """All n nodes send the largest values there are, and all randomness is at its end."""
    capacity = data.draw(st.integers(2, most(bits)) | st.just(most(bits)) | st.just(2))
    sign = data.draw(st.sampled_from([-1.0, 1.0]))
    size = data.draw(st.sampled_from([1.0, 1 + 2.0**-52, 1e30]))
    word = data.draw(st.sampled_from([0, 1 << 31, (1 << 32) - 1]))
    reach = data.draw(st.sampled_from([1.0, 0.1, 3e-7, 2.0**20 / 3]))
    shape = Shape((Group("x", 3, reach),), ("m",), bits, capacity, 2.0**42)
    vector = np.full(3, sign * reach * size)
    words = encode(shape, Update({"x": vector}, 2.0**42, {"m": sign * 2.0**42}), Extreme(word)).astype(object)
    assert max(words) * capacity < 1 << bits
    mean = decode(shape, (words * capacity).astype(np.uint32), capacity)
    assert mean.weight == capacity * 2.0**42
    assert mean.metrics == {"m": sign * capacity * 2.0**42, "clipped.x": 3.0 * capacity * (size > 1)}
    np.testing.assert_allclose(mean.groups["x"], sign * reach, rtol=1e-12)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([np.float32, np.float64]),
    st.floats(1e-8, 1e8),
    st.integers(1, 10**6),
    st.lists(st.tuples(st.integers(-3, 3), st.sampled_from([-1, 1])) | st.floats(-1e9, 1e9), min_size=1, max_size=20),
)
def test_clipped_coordinates_are_counted_exactly(dtype, reach, weight, spots):
    """Also those a few of the dtype's steps beside the bound."""
    shape = Shape((Group("x", len(spots), reach),), (), 20, 10, 7.0)
    bound = reach * 7.0 / weight
    vector = np.array([spot if isinstance(spot, float) else spot[1] * bound for spot in spots], dtype)
    for i, spot in enumerate(spots):
        if not isinstance(spot, float):
            for _ in range(abs(spot[0])):
                vector[i] = np.nextafter(vector[i], dtype(np.inf if spot[0] > 0 else -np.inf))
    before = vector.copy()
    update = Clip(shape)(Flat(Update({"x": vector}, float(weight))))
    assert update.metrics == {"clipped.x": sum(abs(Fraction(float(x))) > Fraction(bound) for x in before)}
    assert np.array_equal(vector, before), "the caller's vector was changed"
    assert all(abs(Fraction(float(x))) <= Fraction(bound) for x in update.groups["x"])
    unclipped = np.abs(before.astype(float)) <= bound
    assert np.array_equal(update.groups["x"][unclipped], before[unclipped])


@pytest.mark.parametrize(("bits", "capacity"), [(12, 15), (16, 10), (20, 100), (32, 2)])
def test_rounding_is_unbiased(bits, capacity):
    """100 000 roundings at each of 11 places between two levels. The variance is at most step²/4; five standard
    deviations of the mean. (Rounding to the nearest would be off by up to half a step, 60 times the tolerance.)"""
    count, reach = 100_000, 0.7
    shape = Shape((Group("x", count, reach),), (), bits, capacity)
    step = 2 * reach / shape.levels
    for place in range(11):
        for level in (-0.3, 0.6):
            x = math.floor(level / step) * step + place / 10 * step
            got = decode(shape, encode(shape, Update({"x": np.full(count, x)}, 1.0), Seeded(place)), 1).groups["x"]
            assert abs(got.mean() - x) <= 5 * (step / 2) / math.sqrt(count)
            assert len(np.unique(got)) <= 2


def test_roundings_of_different_nodes_and_coordinates_are_independent():
    """The variance of the mean of n falls as 1/n: ten nodes halfway between two levels, variance step²/4 each."""
    count, reach, nodes = 100_000, 1.0, 10
    shape = Shape((Group("x", count, reach),), (), 16, nodes)
    step = 2 * reach / shape.levels
    stream = Seeded()
    summands = [encode(shape, Update({"x": np.full(count, step / 2)}, 1.0), stream) for _ in range(nodes)]
    got = decode(shape, modular(shape, summands), nodes).groups["x"]
    assert got.var() == pytest.approx(step**2 / 4 / nodes, rel=0.03)


def test_what_did_not_move_stays_exactly_where_it_is():
    """Zero is on a level, also where (2^b − 1)/n is odd, as 4095/15 = 273 is."""
    shape = Shape((Group("x", 1000, 0.3),), (), 12, 15)
    assert shape.levels == 272
    summands = [encode(shape, Update({"x": np.zeros(1000, np.float32)}, 1.0), Seeded(i)) for i in range(3)]
    assert not decode(shape, modular(shape, summands), 3).groups["x"].any()


@settings(max_examples=200, deadline=None)
@given(cohorts(), st.data())
def test_wrong_check_words_are_recognised(case, data):
    shape, updates = case
    words = modular(shape, [encode(shape, u) for u in updates])
    checks = 1 + -(-80 // shape.bits)
    at = data.draw(st.integers(0, checks - 1))
    words[at] = (int(words[at]) + data.draw(st.integers(1, (1 << shape.bits) - 1))) % (1 << shape.bits)
    with pytest.raises(WrongSum, match="told different things"):
        decode(shape, words, len(updates))


def test_one_summand_too_many_or_too_few_is_recognised():
    shape = Shape((Group("x", 2, 1.0),), (), 16, 10)
    words = modular(shape, [encode(shape, Update({"x": np.ones(2)}, 1.0))] * 3)
    for count in (2, 4):
        with pytest.raises(WrongSum, match=f"counts 3 participants where {count} were expected"):
            decode(shape, words, count)


def test_a_mask_left_over_is_recognised():
    """At least 80 bits are checked: a uniform vector passes with probability 2^-80."""
    for bits in range(12, 33, 4):
        shape = Shape((Group("x", 2, 1.0),), (), bits, 2)
        words = encode(shape, Update({"x": np.ones(2)}, 1.0))
        zeros = words[1 : 1 + -(-80 // bits)]
        assert zeros.size * bits >= 80 and not zeros.any()
        words[1:] = Seeded().words(words.size - 1) >> np.uint32(32 - bits)
        with pytest.raises(WrongSum):
            decode(shape, words, 1)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 12), st.booleans())
def test_equals_the_plain_sum(seed, nodes, uniform):
    """What a plain round computes, within the roundings: eight standard deviations, var ≤ step²/4 a node."""
    rng = np.random.default_rng(seed)
    shape = Shape((Group("delta", 50, 4.0),), ("examples",), 28, nodes, 1.0 if uniform else 512.0)
    plain = StreamingSum({"delta": 50}, nodes)
    summands = []
    for i in range(nodes):
        weight = 1.0 if uniform else float(rng.integers(1, 1000))
        update = Update({"delta": rng.uniform(-1, 1, 50).astype(np.float32)}, weight, {"examples": weight})
        plain.add(update)
        summands.append(encode(shape, update, Seeded(seed + i)))
    secure, mean = decode(shape, modular(shape, summands), nodes), plain.mean()
    assert secure.weight == mean.weight
    assert secure.metrics == {**mean.metrics, "clipped.delta": 0.0}
    step = 2 * 4.0 / shape.levels * shape.weight_scale / mean.weight
    np.testing.assert_allclose(secure.groups["delta"], mean.groups["delta"], atol=8 * step / 2 * math.sqrt(nodes))


@given(cohorts())
def test_a_shape_survives_json(case):
    shape, _ = case
    assert Shape.from_json(shape.to_json()) == shape


@given(widths, st.integers(2, 2**25))
def test_too_few_levels_are_refused_with_a_way_out_that_works(bits, capacity):
    try:
        shape = Shape((), (), bits, capacity)
    except ShapeError as error:
        levels = ((1 << bits) - 1) // capacity
        assert levels < 256
        most_nodes = int(re.search(r"cohort of at most (\d+)\.", str(error))[1])
        assert Shape((), (), bits, most_nodes)
        with pytest.raises(ShapeError):
            Shape((), (), bits, most_nodes + 1)
        wider = re.search(r"Use (\d+) bits", str(error))
        if wider:
            assert Shape((), (), int(wider[1]), capacity)
            with pytest.raises(ShapeError):
                Shape((), (), int(wider[1]) - 4, capacity)
        else:
            assert capacity > most(32)
    else:
        assert shape.levels >= 256 and shape.levels % 2 == 0 and shape.levels * capacity < 1 << bits


@given(st.floats())
def test_a_scalar_is_refused_beyond_its_bound_never_clipped(value):
    shape = Shape((), ("loss",), 20, 10)
    update = Update({}, 1.0, {"loss": value})
    if abs(value) <= 2.0**42:
        assert decode(shape, encode(shape, update), 1).metrics["loss"] == round(Fraction(value) * GRID) / GRID
    else:
        with pytest.raises(UpdateError, match="'loss' is not a number within ±2\\^42") as refusal:
            encode(shape, update)
        assert repr(value) not in str(refusal.value)
