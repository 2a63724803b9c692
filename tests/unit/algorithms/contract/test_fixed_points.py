"""Quadratics whose end is known in closed form, with equal and unequal numbers of local steps."""

from __future__ import annotations

import numpy as np
import pytest
from fedward_common.errors import ConfigError
from small_federation import Federation

from .cases import LOCAL, NAMES, case, config, kind, task
from .engine import NODES
from .quadratics import Setting

pytestmark = pytest.mark.parametrize("name", NAMES)

A = np.array([[0.8, 2.0], [1.2, 1.2], [2.0, 0.8]])
B = np.array([[-1.5, 1.0], [0.3, 0.0], [1.5, -2.0]])
EXAMPLES = np.array([1, 2, 3])
LR, STEPS = 0.2, 4


def quadratics(name: str, b: np.ndarray, momentum: float = 0.0) -> Federation:
    """Three nodes, each with one quadratic, n_i times: whatever the batch, its gradient is the same."""
    made = case(name).quadratics
    if made is None:
        pytest.skip(f"{name} cannot train a quadratic (cases.py)")
    nodes = {f"n{i}": {"a": [A[i].tolist()] * EXAMPLES[i], "b": [b[i].tolist()] * EXAMPLES[i]} for i in range(3)}
    local = {"lr": LR, "steps": STEPS, "momentum": momentum}
    return Federation(config(name, case(name).on_quadratics, local=local), made(), nodes)


def ends_at(name: str, fed: Federation, steps: tuple[int, ...], momentum: float) -> None:
    expected = case(name).fixed_point
    if expected is None:
        pytest.skip(f"no closed form is known for {name} (cases.py)")
    counts = np.ones(3) if kind(name).uniform else EXAMPLES
    setting = Setting(A, B, EXAMPLES, np.array(steps), counts / counts.sum(), LR, momentum)
    for _ in range(case(name).rounds):
        fed.round()
    np.testing.assert_allclose(fed.state.model, expected(setting), rtol=0, atol=1e-6)


def test_a_shared_optimum_is_reached(name):
    """Where all nodes agree there is no drift: every algorithm ends there."""
    fed = quadratics(name, np.tile(B[0], (3, 1)))
    for _ in range(case(name).rounds):
        fed.round()
    np.testing.assert_allclose(fed.state.model, B[0], rtol=0, atol=1e-6)


def test_it_ends_where_theory_says(name):
    ends_at(name, quadratics(name, B), (STEPS,) * 3, 0.0)


def test_it_ends_where_theory_says_with_unequal_steps_and_momentum(name):
    """One node has time for a single step in every round."""
    fed = quadratics(name, B, momentum=0.4)
    fed.hurried = {"n0"}
    ends_at(name, fed, (1, STEPS, STEPS), 0.4)


def test_epochs_are_taken_or_refused_with_the_way_out(name):
    """K_i ∝ n_i: refused when the run is submitted, or trained."""
    local = {key: value for key, value in LOCAL.items() if key != "steps"} | {"epochs": 2}
    try:
        ready = config(name, local=local)
    except ConfigError as error:
        assert "local.epochs = 2" in str(error) and "local.steps" in str(error)
        ready = config(name, case(name).epochs, local=local) if case(name).epochs else None
    if ready is None:
        return
    fed = Federation(ready, task(name), NODES)
    for _ in range(2):
        fed.round()
    assert all(np.isfinite(vector).all() for vector in fed.state.vectors.values())
