"""The server's half under any means."""

from __future__ import annotations

import numpy as np
import pytest
from fedward_common.algorithms.base import Cohort
from fedward_common.update import Update
from hypothesis import given, settings
from hypothesis import strategies as st
from small_federation import Federation

from .cases import NAMES, config, task
from .engine import NODES

pytestmark = pytest.mark.parametrize("name", NAMES)

numbers = st.floats(-1e6, 1e6, width=32)


def test_it_stays_finite_and_counts_rounds(name):
    fed = Federation(config(name), task(name), NODES)
    lengths = {group: fed.layout.extent(extent)[0] for group, extent in fed.algorithm.sends(fed.layout).items()}

    @settings(max_examples=15, deadline=None)
    @given(st.lists(numbers, min_size=5, max_size=5), st.integers(1, 4))
    def under_any_mean(means, rounds):
        state = fed.state
        groups = {group: np.resize(means, length).astype(np.float64) for group, length in lengths.items()}
        for _ in range(rounds):
            state = fed.algorithm.server(state, Update(groups, 2.0), Cohort(state.round + 1, 4, 3, 2))
        assert state.round == rounds
        for vectors in (state.vectors, fed.algorithm.broadcast(state)):
            assert all(np.isfinite(vector).all() for vector in vectors.values())

    under_any_mean()
