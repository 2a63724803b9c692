from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from fedward_server.fencing import Fenced, check, end_owner, read_owner, start_mark, take_over
from fedward_server.paths import RunPaths

HOLDER = """
import sys, time
from pathlib import Path
from fedward_server.fencing import take_over
from fedward_server.paths import RunPaths
ownership = take_over(RunPaths(Path(sys.argv[1])), int(sys.argv[2]))
print("owned", flush=True)
time.sleep(600)
"""

Start = Callable[[int], "subprocess.Popen[str]"]


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "run")


@pytest.fixture
def start(paths: RunPaths) -> Iterator[Start]:
    """Starts a process that takes the run over and holds it."""
    started = []

    def begin(epoch: int) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(paths.root), str(epoch)], stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "owned\n"
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()


def test_the_first_owner(paths: RunPaths) -> None:
    ownership = take_over(paths, 1)
    ownership.check()
    owner = read_owner(paths)
    assert owner is not None and (owner.epoch, owner.pid) == (1, os.getpid())
    ownership.release()


def test_a_higher_epoch_ends_the_former_owner(paths: RunPaths, start: Start) -> None:
    former = start(1)
    later = start(2)
    assert former.wait() != 0
    assert later.poll() is None
    with pytest.raises(Fenced, match="epoch 2 does"):
        check(paths, 1)
    check(paths, 2)


def test_a_lower_epoch_is_refused_and_ends_nobody(paths: RunPaths, start: Start) -> None:
    holder = start(3)
    with pytest.raises(Fenced, match="epoch 2 is older than epoch 3"):
        take_over(paths, 2)
    assert holder.poll() is None
    check(paths, 3)


def test_the_same_epoch_passes_to_the_newer_process(paths: RunPaths, start: Start) -> None:
    former = start(1)
    take_over(paths, 1).release()
    former.wait()
    check(paths, 1)


@pytest.mark.parametrize("change", [{"created": "another-boot:1"}, {"command": "0" * 64}])
def test_a_process_that_reuses_the_pid_is_left_alone(paths: RunPaths, change: dict[str, object]) -> None:
    stranger = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        process = psutil.Process(stranger.pid)
        while process.cmdline()[1:2] != ["-c"]:
            pass
        command = hashlib.sha256("\0".join(process.cmdline()[:2]).encode()).hexdigest()
        paths.root.mkdir()
        owner = {"epoch": 1, "pid": stranger.pid, "created": start_mark(stranger.pid), "command": command}
        paths.owner.write_text(json.dumps({**owner, **change}))
        assert not end_owner(paths)
        take_over(paths, 2).release()
        assert stranger.poll() is None
        # The same record without the change does name that process.
        paths.owner.write_text(json.dumps(owner))
        assert end_owner(paths)
        stranger.wait()
    finally:
        stranger.kill()
        stranger.wait()


def test_children_of_the_former_owner_end_with_it(paths: RunPaths) -> None:
    source = HOLDER.replace(
        'print("owned"',
        "import subprocess\n"
        'child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])\n'
        "print(child.pid",
    )
    former = subprocess.Popen([sys.executable, "-c", source, str(paths.root), "1"], stdout=subprocess.PIPE, text=True)
    assert former.stdout is not None
    child = psutil.Process(int(former.stdout.readline()))
    take_over(paths, 2).release()
    former.wait()
    psutil.wait_procs([child], timeout=20)
    assert not child.is_running()


def test_a_lock_held_by_an_unknown_process_is_an_error_not_a_second_writer(paths: RunPaths, start: Start) -> None:
    start(1)
    owner = json.loads(paths.owner.read_text())
    paths.owner.write_text(json.dumps({**owner, "pid": 2**22 - 1}))
    with pytest.raises(Fenced, match="still held"):
        take_over(paths, 2, patience=0.2)


def test_nobody_owns_a_new_run(paths: RunPaths) -> None:
    with pytest.raises(Fenced, match="nobody does"):
        check(paths, 1)
    assert not end_owner(paths)
