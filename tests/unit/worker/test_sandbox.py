"""What task code can reach: tried from inside a real worker, and by a script under the bare sandbox."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fedward_common.messages import Reason
from fedward_common.worker import sandbox
from fedward_common.worker.parent import Worker, WorkerFailed

from .conftest import PREPARE, environment, tell, with_data

needs_landlock = pytest.mark.skipif(sandbox.available() < 1, reason="this kernel has no Landlock")


@pytest.fixture
def listener() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def hostile(setup, tmp_path, listener, monkeypatch):
    """A setup whose task tries everything, and the names of what it could reach."""
    monkeypatch.setenv("FEDWARD_TOKEN", "secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    key = tmp_path / "state" / "keys" / "identity.key"
    key.parent.mkdir()
    key.write_text("secret")
    readable = tmp_path / "data" / "table.csv"
    readable.write_text("1")
    tell(setup, "escape")
    return with_data(
        setup, key=str(key), outside=str(tmp_path / "outside"), port=listener, readable=str(readable)
    )  # fmt: skip


@needs_landlock
def test_task_code_reaches_nothing_that_it_should_not(hostile) -> None:
    with Worker(hostile) as worker:
        assert worker.do(PREPARE, 60).info["layout"]


def test_the_same_attempts_go_through_without_the_sandbox(hostile) -> None:
    # Shows that the attempts above are real ones.
    with Worker(replace(hostile, sandboxed=False)) as worker, pytest.raises(WorkerFailed) as failed:
        worker.do(PREPARE, 60)
    for name in ("read key", "list state", "write outside", "write bundle", "tcp", "udp", "unix",
                 "parent command", "processes", "signal parent", "child reads key"):  # fmt: skip
        assert name in failed.value.detail
    assert ", environment" not in failed.value.detail


@needs_landlock
def test_the_network_opens_only_where_it_is_allowed(hostile) -> None:
    with Worker(replace(hostile, network=True)) as worker, pytest.raises(WorkerFailed) as failed:
        worker.do(PREPARE, 60)
    message = failed.value.detail.rsplit("went through: ", 1)[1]
    assert {"tcp", "udp"} <= set(message.strip().split(", "))
    assert "key" not in message and "outside" not in message


@needs_landlock
def test_a_data_folder_that_holds_the_keys_is_refused(setup, tmp_path) -> None:
    with pytest.raises(WorkerFailed, match="private to the node") as failed, \
            Worker(replace(setup, read=(tmp_path,))) as worker:  # fmt: skip
        worker.start()
    assert failed.value.reason is Reason.INTERNAL


@needs_landlock
def test_a_data_folder_that_is_not_there_is_named(setup, tmp_path) -> None:
    with pytest.raises(WorkerFailed, match="cannot be opened"), \
            Worker(replace(setup, read=(tmp_path / "typo",))) as worker:  # fmt: skip
        worker.start()


def test_private_paths_are_compared_after_links_are_followed(tmp_path) -> None:
    (tmp_path / "real" / "keys").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(sandbox.SandboxError, match="keys"):
        sandbox.check_private([tmp_path / "link"], [tmp_path / "real" / "keys"])
    with pytest.raises(sandbox.SandboxError, match="keys"):
        sandbox.check_private([tmp_path / "link" / "keys" / "below"], [tmp_path / "real" / "keys"])
    sandbox.check_private([tmp_path / "real" / "beside"], [tmp_path / "real" / "keys"])


def script(text: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from fedward_common.worker import sandbox\n" + text],
        capture_output=True, text=True, timeout=60, env=environment(**more), check=False,
    )  # fmt: skip


def test_without_landlock_nothing_runs() -> None:
    done = script("sandbox.available = lambda: 0\nsandbox.restrict([], [], False)")
    assert done.returncode == 1
    assert "allow_unsandboxed_worker" in done.stderr


@needs_landlock
def test_a_second_thread_is_refused() -> None:
    done = script(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "sandbox.restrict([], [], False)"
    )
    assert "2 threads" in done.stderr


@needs_landlock
@pytest.mark.parametrize("abi", [1, 2, 3, 4, 5, 6])
def test_older_kernels(abi, tmp_path) -> None:
    if abi > sandbox.available():
        pytest.skip("newer than this kernel")
    done = script(
        f"import os, socket\nsandbox.available = lambda: {abi}\n"
        f"sandbox.restrict(sandbox.system_read(), [*sandbox.system_write(), {str(tmp_path)!r}], False)\n"
        f"open({str(tmp_path / 'inside')!r}, 'w').write('x')\n"
        "for attempt in (lambda: open('/etc/shadow'), lambda: os.listdir('/root'), lambda: socket.socket(),\n"
        f"                lambda: open({str(tmp_path.parent / 'outside')!r}, 'w')):\n"
        "    try: attempt()\n"
        "    except PermissionError: continue\n"
        "    raise AssertionError\n"
        "print('kept')"
    )
    assert done.stdout.strip() == "kept", done.stderr


def test_limits() -> None:
    done = script(
        "import resource\nsandbox.limit_resources()\n"
        "print(resource.getrlimit(resource.RLIMIT_CORE)[0], resource.getrlimit(resource.RLIMIT_FSIZE)[0],\n"
        "      open('/proc/self/oom_score_adj').read())"
    )
    assert done.stdout.split() == ["0", str(sandbox.MAX_FILE), "1000"]


def test_the_guards_memory_is_closed_to_its_own_user() -> None:
    # As another user than root, since root may read anything.
    done = script(
        "import os, sys\n"
        "if os.getuid() == 0: os.setgid(65534); os.setuid(65534)\n"
        "sandbox.hide_memory()\n"
        "guard = os.getpid()\n"
        "if os.fork() == 0:\n"
        "    try: open(f'/proc/{guard}/environ').read(); print('read')\n"
        "    except PermissionError: print('refused')\n"
        "    sys.stdout.flush(); os._exit(0)\n"
        "os.wait()"
    )
    assert done.stdout.strip() == "refused", done.stderr


def test_the_environment_is_a_short_list(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("FEDWARD_STATE", "x")
    monkeypatch.setenv("HTTPS_PROXY", "http://user:password@proxy")
    monkeypatch.setenv("PYTHONPATH", "here")
    found = sandbox.clean_environment(tmp_path, 1)
    assert not any(name.startswith("FEDWARD") or "PROXY" in name for name in found)
    assert found["HOME"] == str(tmp_path)
    assert found["PYTHONPATH"] == os.path.abspath("here")
    assert Path(found["PYTHONPATH"]).is_absolute()
