"""Scripts that run as the first process of network, mount and process namespaces of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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


def result_of(script: Path, root: Path) -> Any:
    """What the last line that the script prints says in JSON; the test is skipped where there are no namespaces."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    done = subprocess.run(
        [*NAMESPACES, sys.executable, str(script), str(root)], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])
