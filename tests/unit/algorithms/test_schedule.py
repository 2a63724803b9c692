"""Learning rates that move: the formulas at points worked out by hand, and that training and mass follow them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from fedward_common.algorithms.local_options import LocalOptions, mass
from pydantic import ValidationError
from small_federation import Federation, Quadratic, configure

NODE = {"n0": {"a": [[0.5]], "b": [[2.0]]}}


def rates(schedule, counts, by="round"):
    options = LocalOptions(lr=2.0, steps=1, schedule={**schedule, "by": by})
    return [options.rate(1 + count, 0) if by == "round" else options.rate(7, count) for count in counts]


@pytest.mark.parametrize("by", ["round", "step"])
@pytest.mark.parametrize(("schedule", "expected"), [
    # Smith 2017, triangular with L = 4 between 0.2 and 2: up in four counts, down in four, and again.
    (
        {"shape": "cyclical", "half_cycle": 4, "floor": 0.1},
        {0: 0.2, 1: 0.65, 2: 1.1, 4: 2.0, 6: 1.1, 8: 0.2, 10: 1.1, 12: 2.0},
    ),
    ({"shape": "cosine", "period": 4, "floor": 0.5}, {0: 2.0, 2: 1.5, 4: 1.0, 9: 1.0, 1: 1 + (1 + math.sqrt(0.5)) / 2}),
    ({"shape": "step", "every": 3, "ratio": 0.5}, {0: 2.0, 2: 2.0, 3: 1.0, 5: 1.0, 6: 0.5}),
])  # fmt: skip
def test_rates(schedule, expected, by):
    assert rates(schedule, expected, by) == pytest.approx(list(expected.values()))


@pytest.mark.parametrize("by", ["round", "step"])
def test_steps_are_as_long_as_the_schedule_says(by):
    """On a/2 (w − b)² each step multiplies the distance to b by 1 − η a."""
    schedule = {"shape": "step", "every": 1, "ratio": 0.5, "by": by}
    fed = Federation(configure("fedavg", {"lr": 0.8, "steps": 2, "schedule": schedule}), Quadratic(), NODE)
    fed.round()
    first = (1 - 0.4) * (1 - (0.4 if by == "round" else 0.2))
    assert fed.state.model[0] == pytest.approx(2 * (1 - first))
    fed.round()
    second = (1 - 0.2) ** 2 if by == "round" else first
    assert fed.state.model[0] == pytest.approx(2 * (1 - first * second))


@pytest.mark.parametrize("by", ["round", "step"])
def test_scaffolds_mass_follows_the_schedule(by):
    """Trap: learning-rate decay not reflected in 1/(K η): c_i would be too small by what the rate fell."""
    schedule = {"shape": "step", "every": 1, "ratio": 0.25, "by": by}
    local = {"lr": 0.1, "steps": 3, "momentum": 0.5, "schedule": schedule}
    fed = Federation(configure("scaffold", local), Quadratic(), NODE)
    for round_ in (1, 2):
        before, c = fed.state.model.copy(), fed.state.vectors["c"].copy()
        fed.round()
        factors = [0.25 ** (round_ - 1)] * 3 if by == "round" else [1, 0.25, 0.0625]
        weight = total = 0.0
        for factor in factors:
            weight = 0.5 * weight + 1
            total += 0.1 * factor * weight
        assert mass(fed.config.local, round_) == pytest.approx(total)
        # One node: c_i = c, so that c_i⁺ = −Δ/m.
        np.testing.assert_allclose(fed.state.vectors["c"] - c, -c - (fed.state.model - before) / total, rtol=1e-9)


@pytest.mark.parametrize("bad", [
    {"shape": "cosine"},
    {"shape": "cosine", "period": 0},
    {"shape": "cosine", "period": 3, "floor": 0.0},
    {"shape": "step", "every": 2, "ratio": 1.0},
    {"shape": "saw", "period": 3},
    {"shape": "cyclical", "half_cycle": 2, "by": "epoch"},
])  # fmt: skip
def test_refused(bad):
    with pytest.raises(ValidationError, match="schedule"):
        LocalOptions(lr=0.1, steps=1, schedule=bad)
