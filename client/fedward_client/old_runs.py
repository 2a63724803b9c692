"""What a node keeps of a run (control variates, private tensors) goes some time after the run was last at work here:
a node that was away when it ended never hears of that."""

from __future__ import annotations

import shutil
import time
from collections.abc import Collection
from pathlib import Path

_DAY = 86400.0


def forget(runs: Path, open_runs: Collection[str], days: float) -> list[str]:
    """Delete the folders of runs in which nothing was written for `days`, except those of `open_runs`; their ids."""
    if not runs.is_dir():
        return []
    oldest = time.time() - days * _DAY
    old = [folder for folder in runs.iterdir() if folder.name not in open_runs and _written(folder) < oldest]
    for folder in old:
        shutil.rmtree(folder)
    return sorted(folder.name for folder in old)


def _written(folder: Path) -> float:
    """When something in the folder was written last."""
    return max(path.lstat().st_mtime for path in (folder, *folder.rglob("*")))
