"""Every registered algorithm with every rule of `[aggregation]`: it runs, or the refusal says soundly why not."""

from __future__ import annotations

import numpy as np
import pytest
from contract.cases import NAMES, config, task
from fedward_common.aggregation_options import RULES
from fedward_common.algorithms.registry import build, layout_of
from fedward_common.errors import ConfigError
from fedward_server.paths import RunPaths
from fedward_server.simulation import simulate

OPTIONS = {
    "krum": {"byzantine": 1},
    "multi_krum": {"byzantine": 1},
    "bulyan": {"byzantine": 1},
    "median": {},
    "trimmed_mean": {"trim": 1},
    "geometric_median": {},
    "norm_bound": {"bound": 1e6},
}


def test_every_rule_is_here():
    assert set(OPTIONS) | {"mean"} == set(RULES)


def refused(name, rule):
    """The reason, None if there is none."""
    try:
        config(name, aggregation={"rule": rule, **OPTIONS[rule]})
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize("rule", sorted(OPTIONS))
@pytest.mark.parametrize("name", NAMES)
def test_algorithms_that_need_exact_means_are_refused(name, rule):
    algorithm, layout = build(config(name).algorithm), layout_of(config(name).algorithm, task(name), task(name).model())
    reason = refused(name, rule)
    if algorithm.mirrored:
        assert "the two would part" in reason
    elif set(algorithm.sends(layout)) - {"delta", "statistic"}:
        assert "beside the model's change" in reason
    else:
        assert reason is None


@pytest.mark.parametrize("name", NAMES)
def test_the_others_run(name, tmp_path):
    if refused(name, "median"):
        pytest.skip("refused")
    nodes = {f"n{i}": {"n": 8, "seed": i, "test": 5} for i in range(3)}
    outcome = simulate(config(name, rounds=2, aggregation={"rule": "median"}), task(name), nodes, RunPaths(tmp_path))
    assert outcome.status == "finished"
    assert all(np.isfinite(vector).all() for vector in outcome.state.vectors.values())
