"""Nothing calls home: a whole federation sends not one packet to anyone but itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).parent / "closed_network.py"
# The process namespace ends with its first process, whatever happens: nothing is left to clean up.
NAMESPACES = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]


def why_not() -> str | None:
    """Why no network namespace can be had here."""
    lacking = [name for name in ("ip", "unshare", "mount") if shutil.which(name) is None]
    if lacking:
        return f"needs {', '.join(lacking)}"
    if os.geteuid() != 0:
        return "needs root, for a network namespace with a cable in it"
    cable = "ip link add out0 type veth peer name far0"
    tried = subprocess.run([*NAMESPACES, "sh", "-c", cable], capture_output=True, text=True, check=False)
    return f"no network namespace: {tried.stderr.strip()}" if tried.returncode else None


def test_not_one_packet_leaves(tmp_path: Path) -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    done = subprocess.run(
        [*NAMESPACES, sys.executable, str(SCRIPT), str(tmp_path)],
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])

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
