"""A node's network is cut, not its process: packets are lost, and nobody is told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_closed_network import NAMESPACES, why_not

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).parent / "cut_network.py"


def test_a_cut_cable_costs_only_its_node_which_comes_back_by_itself(tmp_path: Path) -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    done = subprocess.run(
        [*NAMESPACES, sys.executable, str(SCRIPT), str(tmp_path)],
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    # The others go on without it, long before the deadline of 30 s once it is known to be away.
    assert found["during"] >= 2 and found["failures"], found
    # And it is in a round again, in the same process, without a hand.
    assert not found["ended"] and found["back"] < 60, found
    assert "trying again" in found["log"], found
