"""The steps of the road: what each does, what it refuses, and what it costs."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from fedward_common import quantize
from fedward_common.errors import UpdateError
from fedward_common.pipeline import Clip, Flat, Mask, Quantize, Quantized, Road, build
from fedward_common.summand import Group, Shape, decode
from fedward_common.update import Update

SHAPE = Shape((Group("delta", 4, 0.5), Group("statistic", 2, 2.0)), ("examples", "loss"), 20, 10, 8.0)


class Seeded:
    """Uniform words, the same in every run."""

    def __init__(self, seed=0):
        self._rng = np.random.default_rng(seed)

    def words(self, count):
        return self._rng.integers(0, 1 << 32, count, dtype=np.uint32)


def update(weight=8.0, metrics=None, **groups):
    vectors = {"delta": np.array([0.25, -0.25, 0.0, 0.5], np.float32), "statistic": np.array([1.0, -2.0]), **groups}
    return Flat(Update(vectors, weight, {"examples": 8.0, "loss": 3.5} if metrics is None else metrics))


def test_the_road_from_one_end_to_the_other():
    road = build(SHAPE, Seeded(), lambda words: words.tobytes())
    sent = road(update())
    assert isinstance(sent, bytes)
    assert road.names == ("clip", "quantise", "mask")
    mean = decode(SHAPE, np.frombuffer(sent, np.uint32), 1)
    assert mean.weight == 8
    assert mean.metrics == {"examples": 8.0, "loss": 3.5, "clipped.delta": 0.0, "clipped.statistic": 0.0}
    assert mean.groups["delta"] == pytest.approx([0.25, -0.25, 0.0, 0.5], abs=1 / SHAPE.levels)
    assert mean.groups["statistic"] == pytest.approx([1.0, -2.0], abs=4 / SHAPE.levels)


def test_names_are_those_of_the_steps_that_run():
    assert Road.of(Clip(SHAPE)).names == ("clip",)
    assert Road.of(Quantize(SHAPE, Seeded())).then(Mask(lambda words: b"")).names == ("quantise", "mask")


def test_the_mask_is_given_the_summand_and_its_bytes_are_what_leaves():
    words = Quantized(np.arange(3, dtype=np.uint32))
    seen = []
    assert Mask(lambda given: seen.append(given) or b"sealed")(words) == b"sealed"
    assert seen[0] is words


def test_clipping_counts_and_says_nothing_of_values_within():
    """w/W = 2, so delta is held within ±0.25 and statistic within ±1."""
    bounded = Clip(SHAPE)(update(16.0))
    assert bounded.groups["delta"].tolist() == [0.25, -0.25, 0.0, 0.25]
    assert bounded.groups["statistic"].tolist() == [1.0, -1.0]
    assert bounded.metrics == {"examples": 8.0, "loss": 3.5, "clipped.delta": 1.0, "clipped.statistic": 1.0}
    assert bounded.groups["delta"].dtype == np.float32


def test_an_update_within_range_is_not_copied():
    given = update()
    assert Clip(SHAPE)(given).groups["delta"] is given.groups["delta"]


def test_both_sums_see_the_same_weight():
    """0.3 is no multiple of 2^-20: were only its sum rounded, the mean of one node would not be its own value."""
    shape = Shape((Group("x", 1, 1.0),), (), 32, 2, 1e-5)
    weight = 1e-5 + 2.0**-22
    words = Quantize(shape, Seeded())(Clip(shape)(Flat(Update({"x": np.array([0.3])}, weight))))
    mean = decode(shape, words, 1)
    assert mean.weight == round(weight * 2**20) / 2**20 != weight
    assert mean.groups["x"][0] == pytest.approx(0.3, abs=1e-8)


@pytest.mark.parametrize(("bad", "rule"), [
    (update(delta=np.ones(3, np.float32)), r"'delta' has shape \(3,\), the sum \(4,\)"),
    (update(delta=np.ones((4, 1), np.float32)), r"shape \(4, 1\)"),
    (update(delta=np.ones(4, np.int64)), "dtype int64: only float32 and float64"),
    (update(delta=np.ones(4, np.float16)), "dtype float16"),
    (update(delta=np.array([0, np.nan, 9, 0], np.float32)), "'delta' holds values that are not finite"),
    (update(delta=np.array([0, np.inf, 0, 0], np.float32)), "'delta' holds values that are not finite"),
    (update(delta=np.array([0, -np.inf, 0, 0], np.float32)), "not finite"),
    (update(extra=np.ones(1, np.float32)), r"groups \['delta', 'extra', 'statistic'\], the sum has"),
    (update(weight=0.0), "weight is not positive"),
    (update(weight=-1.0), "weight is not positive"),
    (update(weight=2.0**-22), "weight is not positive: under 2.-20"),
    (update(weight=float("nan")), "'weight' is not a number within"),
    (update(weight=2.0**43), "'weight' is not a number within"),
    (update(metrics={"examples": 1.0}), r"missing: \['loss'\]; that it did not declare: \[\]"),
    (update(metrics={"examples": 1.0, "loss": 1.0, "auc": 1.0}), r"missing: \[\]; that it did not declare: \['auc'\]"),
    (update(metrics={"examples": 1.0, "loss": 1.0, "clipped.delta": 0.0}), r"\['clipped\.delta'\]"),
    (update(metrics={"examples": 1.0, "loss": float("inf")}), "'loss' is not a number within"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(bad, rule):
    with pytest.raises(UpdateError, match=rule):
        build(SHAPE, Seeded(), lambda words: b"")(bad)


@pytest.mark.parametrize("reach", [2.0**-100, 2.0**100])
@pytest.mark.parametrize("scale", [2.0**-20, 2.0**42])
@pytest.mark.parametrize("weight", [2.0**-20, 2.0**42])
@pytest.mark.filterwarnings("error")
def test_the_ends_of_what_a_shape_allows(reach, scale, weight):
    """Bounds beyond what a float32 can hold, and under it: no warning, no word over L."""
    shape = Shape((Group("x", 3, reach),), (), 32, 2, scale)
    vector = np.array([3e38, -1e-45, 0], np.float32)
    bounded = Clip(shape)(Flat(Update({"x": vector}, weight)))
    words = Quantize(shape, Seeded())(bounded)
    assert words[-3:].max() <= shape.levels
    assert words[-1] == shape.levels // 2
    assert bounded.metrics["clipped.x"] == (np.abs(vector.astype(float)) > reach * scale / weight).sum()


def test_no_value_makes_a_word_over_the_largest():
    """Whatever a step after clipping made of it: scale·x far out, and out by the last bit."""
    for levels in (256, (1 << 31) - 2):
        vector = np.array([1.0, np.nextafter(1.0, 2), 1e30, -1.0, np.nextafter(-1.0, -2), -1e30])
        words = np.zeros(6, np.uint32)
        quantize.quantize(vector, levels / 2, levels, Seeded(), words)
        assert words.tolist() == [levels] * 3 + [0] * 3


def test_vectors_longer_than_a_chunk(monkeypatch):
    shape = Shape((Group("x", 1000, 1.0),), (), 20, 10)
    vector = np.random.default_rng(1).normal(0, 0.5, 1000).astype(np.float32)

    def encoded():
        return Quantize(shape, Seeded())(Clip(shape)(Flat(Update({"x": vector}, 1.0))))

    whole = encoded()
    monkeypatch.setattr(quantize, "_CHUNK", 7)
    np.testing.assert_array_equal(encoded(), whole)


def test_memory_is_the_words_and_a_few_chunks():
    """Counted in float32 vectors of the update; one more where something had to be clipped."""
    size = 2_000_000
    shape = Shape((Group("x", size, 1.0),), (), 20, 10)
    road = Road.of(Clip(shape)).then(Quantize(shape, Seeded()))
    vector = np.zeros(size, np.float32)
    for largest, copies in ((1.0, 1), (2.0, 2)):
        vector[0] = largest
        tracemalloc.start()
        try:
            road(Flat(Update({"x": vector}, 1.0)))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak / vector.nbytes < copies + 0.3
