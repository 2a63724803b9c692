import pytest
from fedward_common.algorithms import registry

from .world import Toy, World, config


@pytest.fixture(autouse=True)
def _toy(monkeypatch):
    monkeypatch.setitem(registry.ALGORITHMS, "toy", Toy)


@pytest.fixture
def world(tmp_path):
    """world(nodes=4, **config tables): a new federation."""
    made = 0

    def make(nodes=4, **tables):
        nonlocal made
        made += 1
        return World(tmp_path / str(made), config(**tables), nodes)

    return make
