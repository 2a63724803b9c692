"""A node's disk does not fill with runs that are long over."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fedward_client import guard as guard_module
from fedward_client import old_runs
from fedward_client.guard import Guard
from fedward_client.link import LinkDown
from fedward_client.paths import NodePaths
from fedward_client.policy import Policy
from fedward_client.settings import NodeOptions, NodeSettings
from fedward_client.state import FileStore
from fedward_common.messages import Stamp

DAY = 86400.0


def run(runs: Path, name: str, days: float) -> Path:
    """A run whose state was written so many days ago."""
    folder = runs / name
    FileStore(folder / "state").save_pending(Stamp(1, 0), {"c": np.ones(3)})
    (folder / "scratch").mkdir()
    before = time.time() - days * DAY
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (before, before))
    return folder


def test_only_what_is_old_and_not_at_work_goes(tmp_path: Path) -> None:
    for name, days in (("old", 31), ("new", 29), ("open", 400)):
        run(tmp_path, name, days)
    assert old_runs.forget(tmp_path, {"open"}, 30.0) == ["old"]
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["new", "open"]


def test_the_last_write_counts_wherever_it_was(tmp_path: Path) -> None:
    folder = run(tmp_path, "a", 100)
    os.utime(folder / "state" / "pending.safetensors")
    assert old_runs.forget(tmp_path, (), 30.0) == []


def test_what_a_link_points_at_stays(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "patients.csv").touch()
    folder = run(tmp_path / "runs", "a", 1)
    (folder / "scratch" / "link").symlink_to(tmp_path / "data")
    before = time.time() - 100 * DAY
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (before, before), follow_symlinks=False)
    assert old_runs.forget(tmp_path / "runs", (), 30.0) == ["a"]
    assert (tmp_path / "data" / "patients.csv").exists()


def test_no_runs_yet(tmp_path: Path) -> None:
    assert old_runs.forget(tmp_path / "runs", (), 30.0) == []


def test_an_idle_guard_cleans_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_module.sandbox, "hide_memory", lambda: None)
    paths = NodePaths(tmp_path / "node")
    for name, days in (("old", 8), ("new", 6)):
        run(paths.runs, name, days)
    stop = threading.Event()

    class Idle:
        """A link on which nothing comes; it goes down at the second look."""

        looks = 0

        def connect(self) -> int:
            return 1

        def receive(self, wait: float) -> None:
            self.looks += 1
            if self.looks > 1:
                stop.set()
                raise LinkDown("done")

        def interrupt(self) -> None:
            return

        close = interrupt

    member = SimpleNamespace(
        paths=paths, name="a", server="s", node_id="n", link=lambda traffic: Idle(),
        listed=lambda: True, pending=lambda: [],
    )  # fmt: skip
    settings = NodeSettings(node=NodeOptions(keep_runs_days=7.0))
    Guard(member, settings, Policy()).run(stop)  # type: ignore[arg-type]
    assert [folder.name for folder in paths.runs.iterdir()] == ["new"]
