"""A node's network is cut, not its process: packets are lost, and nobody is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from namespaces import result_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).parent / "cut_network.py"


def test_a_cut_cable_costs_only_its_node_which_comes_back_by_itself(tmp_path: Path) -> None:
    found = result_of(SCRIPT, tmp_path)
    # The others go on without it, long before the deadline of 30 s once it is known to be away.
    assert found["during"] >= 2 and found["failures"], found
    # And it is in a round again, in the same process, without a hand.
    assert not found["ended"] and found["back"] < 60, found
    assert "trying again" in found["log"], found
