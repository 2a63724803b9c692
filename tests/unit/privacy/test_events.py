"""Events as data: one valid text each, and numbers that no mechanism has refused."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from fedward_common.privacy.events import (
    DiscreteGaussian,
    EventError,
    FixedSizeGaussian,
    Gaussian,
    Relation,
    SampledGaussian,
    Skellam,
    from_json,
    to_json,
)
from fedward_common.privacy.ledger import Release, Unit

EVENTS = {
    Gaussian(1.5): '{"kind":"gaussian","noise_multiplier":1.5}',
    SampledGaussian(0.01, 1.1): '{"kind":"sampled-gaussian","noise_multiplier":1.1,"sampling_rate":0.01}',
    FixedSizeGaussian(1000, 100, 4.0): (
        '{"kind":"fixed-size-gaussian","noise_multiplier":4.0,"population":1000,"size":100}'
    ),
    Skellam(3.0, 9.0, 100.0, 1e-12): '{"gap":1e-12,"kind":"skellam","l1":9.0,"l2":3.0,"variance":100.0}',
    DiscreteGaussian(3.0, 10.0, 100, 1 << 20): (
        '{"dimension":1048576,"gap":0.0,"kind":"discrete-gaussian","l2":3.0,"nodes":100,"sigma":10.0}'
    ),
}


@pytest.mark.parametrize(("event", "text"), EVENTS.items(), ids=lambda value: getattr(value, "kind", ""))
def test_the_text_by_hand_and_back(event, text):
    assert to_json(event) == text
    assert from_json(text) == event
    assert type(from_json(text)) is type(event)


@pytest.mark.parametrize("text", EVENTS.values(), ids=list)
def test_a_ledger_takes_the_text(text):
    assert Release("r", 1, 0, "train", "d", Unit.SITE, "s", text).event == text


def test_equal_events_have_equal_text():
    assert to_json(Gaussian(4)) == to_json(Gaussian(4.0))
    assert to_json(SampledGaussian(-0.0, 1)) == to_json(SampledGaussian(0, 1))
    assert len({Gaussian(4), Gaussian(4.0)}) == 1


@pytest.mark.parametrize(
    "text",
    [
        '{"kind":"gaussian", "noise_multiplier":1.5}',
        '{"noise_multiplier":1.5,"kind":"gaussian"}',
        '{"kind":"gaussian","noise_multiplier":1}',
        '{"kind":"gaussian","noise_multiplier":1.50}',
        '{"kind":"gaussian","kind":"gaussian","noise_multiplier":1.5}',
    ],
)
def test_other_spellings_are_refused(text):
    with pytest.raises(EventError, match="one valid form"):
        from_json(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not the JSON of an event"),
        ("[" * 100_000, "not the JSON of an event"),
        ("[1]", "an object with a 'kind'"),
        ('{"kind":"gdp","mu":1.0}', "kind = 'gdp': events are gaussian, sampled-gaussian"),
        ('{"kind":["gaussian"]}', "kind ="),
        ('{"kind":"gaussian"}', r"has noise_multiplier, not \[\]"),
        ('{"kind":"gaussian","mu":1.0,"noise_multiplier":1.5}', r"not \['mu', 'noise_multiplier'\]"),
        ('{"kind":"gaussian","noise_multiplier":NaN}', "noise_multiplier = nan"),
        ('{"kind":"gaussian","noise_multiplier":"1"}', "noise_multiplier = '1' is not a number"),
        ('{"kind":"gaussian","noise_multiplier":true}', "noise_multiplier = True is not a number"),
        ('{"kind":"gaussian","noise_multiplier":null}', "noise_multiplier = None is not a number"),
        ('{"kind":"gaussian","noise_multiplier":1' + 400 * "0" + "}", "larger than any float"),
        ('{"kind":"fixed-size-gaussian","noise_multiplier":1.0,"population":9.0,"size":1}', "population = 9.0"),
    ],
    ids=range(13),
)
def test_text_that_is_no_event_is_refused(text, says):
    with pytest.raises(EventError, match=says):
        from_json(text)


WRONG = {
    "noise_multiplier": (0, 0.0, -1.0, math.nan, math.inf, 1e-7, 1e10, True, "1", None),
    "sampling_rate": (-0.1, 1.1, math.nan, math.inf, False),
    "population": (0, -3, 10.0, True, 99, 1 << 41),
    "size": (0, 1001, 10.0),
    "l2": (0.0, -1.0, math.nan, math.inf),
    "l1": (0.0, 2.9, math.nan, math.inf),
    "variance": (0.0, -1.0, math.nan, math.inf),
    "gap": (-1e-9, 1.1, math.nan),
    "sigma": (0.4, 0.0, -1.0, math.nan, math.inf),
    "nodes": (0, 2.0, 1 << 30),
    "dimension": (0, 2.0, 1 << 41),
}


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.kind)
def test_numbers_that_no_mechanism_has_are_refused(event):
    """The text has the field and the value."""
    for field in dataclasses.fields(event):
        for value in WRONG[field.name]:
            with pytest.raises(EventError) as refused:
                dataclasses.replace(event, **{field.name: value})
            assert event.kind in str(refused.value)
            assert field.name in str(refused.value)
            assert str(value) in str(refused.value)


def test_the_ends_of_what_is_allowed():
    SampledGaussian(0.0, 1.0), SampledGaussian(1.0, 1.0)
    FixedSizeGaussian(1, 1, 1.0)
    Skellam(1e-60, 1e60, 1e-60, 1.0)
    DiscreteGaussian(1.0, 0.5, 1, 1), DiscreteGaussian(1e60, 1e60, 1 << 20, 1 << 40)


def test_only_sampling_of_a_fixed_size_is_about_replacing():
    replace = [event.kind for event in EVENTS if event.relation is Relation.REPLACE_ONE]
    assert replace == ["fixed-size-gaussian"]
    assert json.loads(json.dumps(Relation.REPLACE_ONE)) == "replace-one"
