"""Nothing calls home: a whole federation sends not one packet to anyone but itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from namespaces import result_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).parent / "closed_network.py"


def test_not_one_packet_leaves(tmp_path: Path) -> None:
    found = result_of(SCRIPT, tmp_path)

    # It was a real federation, all of whose packets were looked at.
    assert (found["status"], found["rounds"]) == ("finished", 2)
    assert found["model"] > 0 and found["loopback"] > 1000 and found["missed"] == 0
    assert found["before"] == {}
    assert found["federation"] == {}

    # And whoever had tried would have been seen: by address, by name, Flower's own telemetry among them.
    assert found["connect"].get("out0 192.0.2.1", 0) > 0
    assert found["name"].get("out0 198.51.100.53", 0) > 0
    assert found["own"].get("lo 198.51.100.2", 0) > 0
    assert "connect6" not in found or found["connect6"].get("out0 2001:db8:1::1", 0) > 0
    assert found["telemetry"].get("out0 198.51.100.53", 0) > 0
