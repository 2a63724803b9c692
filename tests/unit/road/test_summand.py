"""The layout of a summand, the text of a shape, and what is refused."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from fedward_common.errors import UpdateError
from fedward_common.summand import Group, Shape, ShapeError, decode

SHAPE = Shape((Group("delta", 3, 0.5), Group("statistic", 2, 2.0)), ("train.examples", "train.loss"), 20, 10, 64.0)
TEXT = '[[["delta",3,0.5],["statistic",2,2.0]],["train.examples","train.loss"],20,10,64.0,0]'


def test_the_layout():
    """20 bits, 10 nodes: L = 104856, limbs of 16 bits, 4 a scalar; 4 zero words."""
    assert SHAPE.levels == 104856
    assert SHAPE.scalars == ("weight", "train.examples", "train.loss", "clipped.delta", "clipped.statistic")
    assert SHAPE.length == 1 + 4 + 5 * 4 + 3 + 2
    scalars = {"weight": 0.0, "train.examples": 2.0**-20, "train.loss": -(2.0**42), "clipped.delta": 2.0**42}
    words = SHAPE.blank({**scalars, "clipped.statistic": 1.0})
    assert words.tolist() == [
        *(1, 0, 0, 0, 0),
        *(0, 0, 0, 1 << 14),
        *(1, 0, 0, 1 << 14),
        *(0, 0, 0, 0),
        *(0, 0, 0, 1 << 15),
        *(0, 1 << 4, 0, 1 << 14),
        *(0, 0, 0, 0, 0),
    ]
    assert [(group.name, part.size) for group, part in SHAPE.parts(words)] == [("delta", 3), ("statistic", 2)]
    next(part for _, part in SHAPE.parts(words))[:] = 7
    assert words[25:].tolist() == [7, 7, 7, 0, 0]


def test_coordinates_are_read_from_their_levels():
    """Two nodes; L/2 is zero and L is R."""
    scalars = dict.fromkeys(SHAPE.scalars, 0.0)
    words = SHAPE.blank({**scalars, "weight": 64.0}) * np.uint32(2)
    words[25:] = [104856, 2 * 104856, 0, 104856 + 1, 104856 - 1]
    mean = decode(SHAPE, words, 2)
    assert mean.weight == 128
    assert mean.groups["delta"].tolist() == [0.0, 0.5, -0.5]
    assert mean.groups["statistic"] == pytest.approx([2 / 104856, -2 / 104856], rel=1e-15)
    assert mean.groups["delta"].dtype == np.float64


def test_noised_numbers_come_last():
    shape = Shape(SHAPE.groups, SHAPE.metrics, 20, 10, 64.0, 7)
    assert (shape.length, shape.noised_at) == (SHAPE.length + 7, SHAPE.length)
    assert Shape.from_json(shape.to_json()) == shape != SHAPE
    words = SHAPE.blank({**dict.fromkeys(SHAPE.scalars, 0.0), "weight": 1.0})
    longer = np.concatenate([words, np.full(7, 12345, np.uint32)])
    assert decode(shape, longer, 1).weight == 1.0


def test_its_text():
    assert SHAPE.to_json() == TEXT
    assert Shape.from_json(TEXT) == SHAPE
    assert Shape((Group("x", 1, 1),), (), 12, 2, 1).to_json() == '[[["x",1,1.0]],[],12,2,1.0,0]'


@pytest.mark.parametrize(
    "text",
    [
        TEXT + " ",
        TEXT.replace(",64.0", ",64"),
        TEXT.replace(",0.5", ",0.50"),
        TEXT.replace("20,10", "20,10.0"),
        TEXT.replace("20,10", "true,10"),
        TEXT.replace('["delta",3,0.5]', '["delta",3,0.5,1]'),
        TEXT.replace('["delta",3,0.5]', '["delta",3]'),
        TEXT.replace('["delta",3', '[7,3'),
        TEXT.replace('"delta"', "null"),
        TEXT.replace('["train.examples","train.loss"]', '"ab"'),
        TEXT.replace('["train.examples","train.loss"]', "{}"),
        TEXT.replace(",64.0", ",NaN"),
        TEXT.replace(",64.0", ",Infinity"),
        TEXT.replace(",64.0", ",1e400"),
        TEXT.replace(",64.0", ""),
        TEXT.replace(",3,", ",-3,"),
        TEXT.replace(",3,", f",{'9' * 5000},"),
        "{}",
        "7",
        "null",
        "",
        "[" * 100_000,
    ],
)  # fmt: skip
def test_other_texts_are_refused(text):
    with pytest.raises(ShapeError):
        Shape.from_json(text)


@pytest.mark.parametrize(("change", "rule"), [
    ({"bits": 14}, "bits = 14: words have 12, 16, 20, 24, 28, 32 bits"),
    ({"bits": 8}, "bits = 8"),
    ({"bits": 36}, "bits = 36"),
    ({"bits": 20.0}, r"bits = 20\.0"),
    ({"capacity": 1}, "capacity = 1: a sum of fewer than two hides nothing"),
    ({"capacity": 0}, "capacity = 0"),
    ({"capacity": True}, "capacity = True"),
    ({"bits": 12, "capacity": 16}, "a cohort of 16 leaves each coordinate 254 levels, fewer than the 256 that rounding "
                                   r"needs\. Use 16 bits, or a cohort of at most 15\."),
    ({"bits": 32, "capacity": 1 << 24}, r"Use a cohort of at most 16777215\."),
    ({"weight_scale": 0.0}, r"weight_scale = 0\.0 is not a number from 2\^-20 to 2\^42"),
    ({"weight_scale": float("nan")}, "weight_scale = nan"),
    ({"groups": (Group("x", 3, 0.0),)}, r"group 'x': range = 0\.0 is not a number from 2\^-100 to 2\^100"),
    ({"groups": (Group("x", 3, -1.0),)}, "range = -1.0"),
    ({"groups": (Group("x", 3, float("inf")),)}, "range = inf"),
    ({"groups": (Group("x", 0, 1.0),)}, "length = 0"),
    ({"groups": (Group("", 3, 1.0),)}, "names are text that is not empty"),
    ({"groups": (Group("x", 3, 1.0), Group("x", 3, 1.0))}, r"group names \['x'\] stand twice"),
    ({"metrics": ("a", "a")}, r"scalar names \['a'\] stand twice"),
    ({"metrics": ("weight",)}, "'weight'"),
    ({"metrics": ("clipped.delta",)}, r"'clipped\.delta'"),
    ({"metrics": (3,)}, "names are text"),
    ({"noised": -1}, "noised = -1"),
    ({"noised": 2.0}, r"noised = 2\.0"),
])  # fmt: skip
def test_a_shape_that_cannot_work_is_refused(change, rule):
    good = {"groups": SHAPE.groups, "metrics": SHAPE.metrics, "bits": 20, "capacity": 10, "weight_scale": 64.0}
    with pytest.raises(ShapeError, match=rule):
        Shape(**{**good, **change})


def test_no_weight_no_mean():
    words = SHAPE.blank(dict.fromkeys(SHAPE.scalars, 0.0))
    with pytest.raises(UpdateError, match="sum to 0"):
        decode(SHAPE, words, 1)


def test_vectors_of_another_shape_are_a_mistake_of_the_caller():
    words = SHAPE.blank(dict.fromkeys(SHAPE.scalars, 1.0))
    for wrong, count in ((words[1:], 1), (words.astype(np.uint64), 1), (words, 0), (words, 11)):
        with pytest.raises(ValueError):
            decode(SHAPE, wrong, count)


def test_decoding_takes_the_result_and_a_few_chunks():
    size = 1_000_000
    shape = Shape((Group("x", size, 1.0),), (), 20, 10)
    words = shape.blank({"weight": 1.0, "clipped.x": 0.0})
    tracemalloc.start()
    try:
        decode(shape, words, 1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.2 * 8 * size
