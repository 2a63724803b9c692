"""The supervisor with small scripts as parts; it runs in a process of its own, as `up` does."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from fedward_common.files import lock_file
from fedward_server import authority
from fedward_server.paths import STATE_VARIABLE, ServerPaths
from fedward_server.settings import make_settings
from fedward_server.supervisor import (
    LONGEST_DELAY,
    STEADY,
    Part,
    SupervisorError,
    _Child,
    check_initialised,
    end_leftovers,
    environment,
    up,
)

DRIVER = """
import json, os, re, sys
from pathlib import Path
from fedward_server.supervisor import Part, Supervisor
parts = [Part(*one, routine=re.compile("^dull")) for one in json.loads(sys.argv[1])]
style, folder, grace = sys.argv[2], Path(sys.argv[3]), float(sys.argv[4])
probe = lambda: {} if (folder / "answers").exists() else {"part": "silent"}
sys.exit(Supervisor(parts, dict(os.environ), probe, style, grace=grace).run())
"""

STEADY_PART = "import time; print('INFO :      working', flush=True); time.sleep(600)"


class Driver:
    """A supervisor in a process of its own, its output read line by line."""

    def __init__(self, folder: Path, parts: list[tuple[str, ...]], style: str = "human", grace: float = 5.0) -> None:
        self.folder = folder
        commands = []
        for name, source, *companion in parts:
            script = folder / f"{name}.py"
            script.write_text(textwrap.dedent(source))
            commands.append([name, [sys.executable, str(script)], *companion])
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, json.dumps(commands), style, str(folder), str(grace)],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.lines: list[str] = []

    def until(self, text: str) -> str:
        """The next line with `text` in it."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if text in line:
                return self.lines[-1]
        raise AssertionError(f"no line with {text!r} in {self.lines}")

    def stop(self) -> int:
        self.process.terminate()
        self.rest()
        return self.process.wait()

    def rest(self) -> None:
        assert self.process.stdout is not None
        self.lines += [line.rstrip("\n") for line in self.process.stdout]


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[type[Driver]]:
    """Starts drivers and ends what a failed test leaves."""
    started: list[Driver] = []

    class Recorded(Driver):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(tmp_path, *args, **kwargs)  # type: ignore[arg-type]
            started.append(self)

    yield Recorded
    for one in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(one.process.pid).children(recursive=True):
                process.kill()
        one.process.kill()
        one.process.wait()


def pid_in(line: str) -> int:
    return int(line.rsplit("pid ", 1)[1].rstrip(")"))


def test_a_crashed_part_is_started_again(drive: type[Driver]) -> None:
    driver = drive([("first", STEADY_PART), ("second", "import sys; print('falling', flush=True); sys.exit(3)")])
    driver.until("falling")
    driver.until("second ended by itself (exit code 3); restarting in 0.5 s")
    driver.until("falling")
    driver.until("restarting in 1 s")
    assert driver.stop() == 0
    assert sum("first started" in line for line in driver.lines) == 1


def test_a_killed_part_is_started_again_and_its_orphans_are_ended(drive: type[Driver], tmp_path: Path) -> None:
    parent = """
        import subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        print("grandchild pid", child.pid, flush=True)
        time.sleep(600)
    """
    driver = drive([("part", parent)])
    first = pid_in(driver.until("part started"))
    orphan = psutil.Process(int(driver.until("grandchild pid").split()[-1]))
    os.kill(first, signal.SIGKILL)
    driver.until("part ended by itself (signal 9)")
    driver.until("grandchild pid")
    assert not orphan.is_running()
    driver.stop()


def test_a_part_whose_companion_is_gone_is_started_again(drive: type[Driver], tmp_path: Path) -> None:
    (tmp_path / "companion").write_text("import time; time.sleep(600)")
    parent = f"""
        import subprocess, sys, time
        child = subprocess.Popen([sys.executable, {str(tmp_path / "companion")!r}], start_new_session=True)
        print("companion pid", child.pid, flush=True)
        time.sleep(600)
    """
    clock = "import time\nwhile True: print('tick', flush=True); time.sleep(1)"
    driver = drive([("part", parent, "companion"), ("clock", clock)])
    pid = int(driver.until("companion pid").split()[-1])
    driver.until("tick"), driver.until("tick"), driver.until("tick")
    os.kill(pid, signal.SIGKILL)
    driver.until("companion is gone: restarting part")
    driver.until("companion pid")
    driver.stop()


def test_sigterm_stops_parts_in_good_order(drive: type[Driver]) -> None:
    polite = """
        import signal, sys, time
        def leave(*_): print("leaving", flush=True); sys.exit(0)
        signal.signal(signal.SIGTERM, leave)
        print("working", flush=True)
        time.sleep(600)
    """
    driver = drive([("polite", polite)], grace=60.0)
    driver.until("working")
    assert driver.stop() == 0
    assert any("leaving" in line for line in driver.lines)
    assert not any("killing" in line for line in driver.lines)


def test_a_part_that_ignores_sigterm_is_killed_with_all_that_it_started(drive: type[Driver]) -> None:
    stubborn = """
        import signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True)
        print("grandchild pid", child.pid, flush=True)
        time.sleep(600)
    """
    driver = drive([("stubborn", stubborn)], grace=0.5)
    grandchild = psutil.Process(int(driver.until("grandchild pid").split()[-1]))
    assert driver.stop() == 0
    assert any("killing stubborn" in line for line in driver.lines)
    assert not grandchild.is_running()


def test_a_part_that_waits_for_what_it_started_is_not_waited_for(drive: type[Driver], tmp_path: Path) -> None:
    (tmp_path / "companion").write_text(
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    )
    parent = f"""
        import signal, subprocess, sys
        child = subprocess.Popen([sys.executable, {str(tmp_path / "companion")!r}], start_new_session=True)
        signal.signal(signal.SIGTERM, lambda *_: None)
        child.wait()
        print("left alone", flush=True)
    """
    driver = drive([("part", parent, "companion")], grace=60.0)
    driver.until("deaf")
    assert driver.stop() == 0
    assert any("left alone" in line for line in driver.lines)


def test_parts_die_with_a_killed_supervisor(drive: type[Driver]) -> None:
    driver = drive([("part", STEADY_PART)])
    part = psutil.Process(pid_in(driver.until("part started")))
    driver.until("working")
    driver.process.kill()
    driver.process.wait()
    _, alive = psutil.wait_procs([part], timeout=20)
    assert not alive


def test_ready_is_said_once_the_parts_answer_and_unsaid_when_they_do_not(drive: type[Driver], tmp_path: Path) -> None:
    driver = drive([("part", STEADY_PART)])
    driver.until("working")
    assert not any(line.endswith(" ready") for line in driver.lines)
    (tmp_path / "answers").touch()
    driver.until(" ready")
    (tmp_path / "answers").unlink()
    driver.until("not ready: part: silent")
    driver.stop()


def test_json_lines_carry_the_part_and_keep_the_fields_of_entries(drive: type[Driver]) -> None:
    source = """
        import time
        print('WARNING : \\x1b[33mlow\\x1b[0m', flush=True)
        print('{"time": "t", "level": "error", "message": "m", "run": "r1"}', flush=True)
        print('dull routine', flush=True)
        print('unfinished', end='', flush=True)
    """
    driver = drive([("part", source)], style="json")
    driver.until("unfinished")
    driver.stop()
    entries = [json.loads(line) for line in driver.lines]
    assert {"part", "time", "level", "message"} <= set(entries[0])
    printed = [entry for entry in entries if entry["part"] == "part"]
    assert (printed[0]["level"], printed[0]["message"]) == ("warning", "low")
    assert printed[1] == {"part": "part", "time": "t", "level": "error", "message": "m", "run": "r1"}
    assert printed[2]["message"] == "unfinished"


def test_the_wait_before_a_restart_doubles_to_a_limit_and_starts_anew_after_a_steady_minute() -> None:
    child = _Child(Part("part", ["true"]))
    delays = [child.next_delay(now=child.started + 1) for _ in range(9)]
    assert delays[:4] == [0.5, 1, 2, 4]
    assert max(delays) == LONGEST_DELAY
    assert child.next_delay(now=child.started + STEADY) == 0.5


def certificate(paths: ServerPaths, until: datetime) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    made = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(1).not_valid_before(until - timedelta(days=9)).not_valid_after(until)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    paths.server_certificate.parent.mkdir(parents=True, exist_ok=True)
    for path in (paths.settings, paths.public_ca, paths.server_key, paths.database):
        path.touch()
    paths.server_certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))


def test_up_before_init_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SupervisorError, match="server init"):
        check_initialised(ServerPaths(tmp_path))


def test_up_with_an_expired_certificate_is_refused(tmp_path: Path) -> None:
    paths = ServerPaths(tmp_path)
    certificate(paths, datetime(2020, 1, 10, tzinfo=UTC))
    with pytest.raises(SupervisorError, match="expired on 2020-01-10"):
        check_initialised(paths)
    check_initialised(paths, now=datetime(2020, 1, 9, tzinfo=UTC))


def test_leftovers_of_this_state_directory_and_no_others_are_ended(tmp_path: Path) -> None:
    script = tmp_path / "flwr-serverapp"
    script.write_text("import time; time.sleep(600)")
    mine, other = ServerPaths(tmp_path / "a"), ServerPaths(tmp_path / "b")
    started = [
        subprocess.Popen([sys.executable, str(script)], env={**os.environ, STATE_VARIABLE: str(paths.root)})
        for paths in (mine, other)
    ]
    try:
        wait_for_command(started[0].pid, "flwr-serverapp")
        wait_for_command(started[1].pid, "flwr-serverapp")
        assert end_leftovers(mine) == [started[0].pid]
        started[0].wait()
        assert started[1].poll() is None
    finally:
        for process in started:
            process.kill()
            process.wait()


def wait_for_command(pid: int, word: str) -> None:
    while not any(word in part for part in psutil.Process(pid).cmdline()):
        pass


def test_children_get_closed_mouths_and_the_right_programs(tmp_path: Path) -> None:
    found = environment(ServerPaths(tmp_path), "json")
    assert found["FLWR_TELEMETRY_ENABLED"] == "0"
    assert found["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert found[STATE_VARIABLE] == str(tmp_path)
    assert found["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)


def test_a_second_up_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    paths = ServerPaths(tmp_path / "server")
    authority.init(paths, make_settings(name="fl.example.org"))
    with lock_file(paths.root / "up.lock"), pytest.raises(SupervisorError, match=f"already \\(pid {os.getpid()}\\)"):
        up(paths)
