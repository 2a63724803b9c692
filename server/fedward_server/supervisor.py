"""`fedward server up`: SuperLink and service as children of one process that restarts them and stops them for good."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import selectors
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

import httpx
import psutil
from cryptography import x509
from fedward_common.errors import FedwardError
from fedward_common.files import Locked, lock_file

from fedward_server import child as child_script
from fedward_server.logs import STYLE_VARIABLE, SUPERLINK_ROUTINE, Style, part_line
from fedward_server.paths import STATE_VARIABLE, ServerPaths
from fedward_server.readiness import SUPEREXEC, running_below
from fedward_server.settings import load_settings

FIRST_DELAY, LONGEST_DELAY, STEADY = 0.5, 30.0, 60.0
"""Seconds: the first wait before a restart, the longest, and the time up after which the wait starts anew."""

GRACE = 5.0
"""Seconds that children have to stop after SIGTERM."""

HEAD_START = 1.0
"""Seconds of them before the processes that the SuperLink started are killed."""

_PR_SET_CHILD_SUBREAPER = 36
_LONGEST_LINE = 65536

Probe = Callable[[], Mapping[str, str]]
"""Names the parts that do not answer yet, with the reason; empty: all do."""


class SupervisorError(FedwardError):
    """`up` was refused."""


@dataclass(frozen=True)
class Part:
    """A child to keep alive. companion: a program that the part starts and cannot do without, though it does not
    notice its end; the part is restarted when it is gone. routine: lines of its output that are not passed on."""

    name: str
    command: Sequence[str]
    companion: str | None = None
    routine: re.Pattern[str] | None = None


class _Child:
    """One part and its process, if any."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.process: subprocess.Popen[bytes] | None = None
        self.delay = FIRST_DELAY
        self.started = 0.0
        self.due = 0.0
        self.companion_seen = False
        self.companion_gone: float | None = None

    def next_delay(self, now: float) -> float:
        """The wait before a restart; doubles with each crash in a row."""
        if now - self.started >= STEADY:
            self.delay = FIRST_DELAY
        delay, self.delay = self.delay, min(LONGEST_DELAY, self.delay * 2)
        return delay


class _Lines:
    """Cuts a pipe's bytes into lines, routine ones left out."""

    def __init__(self, part: Part) -> None:
        self.name = part.name
        self._routine = part.routine
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            whole, self._rest = [*whole, self._rest], b""
        return self._text(whole)

    def end(self) -> list[str]:
        rest, self._rest = self._rest, b""
        return self._text([rest] if rest else [])

    def _text(self, lines: list[bytes]) -> list[str]:
        text = [line.decode(errors="replace") for line in lines]
        return [line for line in text if self._routine is None or not self._routine.search(line)]


class Supervisor:
    """Runs parts until SIGTERM or SIGINT. Call `run` from the main thread."""

    def __init__(
        self,
        parts: Sequence[Part],
        environment: Mapping[str, str],
        probe: Probe,
        style: Style = "human",
        out: TextIO | None = None,
        grace: float = GRACE,
    ) -> None:
        self._children = [_Child(part) for part in parts]
        self._environment = dict(environment)
        self._probe = probe
        self._style: Style = style
        self._out = out or sys.stdout
        self._grace = grace
        self._selector = selectors.DefaultSelector()
        self._signals = 0
        self._missing: Mapping[str, str] | None = None
        self._announced: bool | None = None

    def run(self) -> int:
        """Start the parts and keep them alive; 0 after a stop that was asked for."""
        # Orphans of a crashed part (SuperExec runs in a session of its own) become our children: none gets lost.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        former_fd = signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        former = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        self._selector.register(wake_read, selectors.EVENT_READ, None)
        threading.Thread(target=self._watch_readiness, name="readiness", daemon=True).start()
        looked = 0.0
        try:
            while not self._signals:
                now = time.monotonic()
                for one in self._children:
                    if one.process is None and now >= one.due:
                        self._start(one)
                self._forward(0.2)
                self._collect_ended()
                if now - looked >= 1.0:
                    looked = now
                    self._check_companions(now)
                self._announce()
            self._say("stopping")
            self._stop()
            self._say("stopped")
            return 0
        finally:
            self._kill_all()
            for number, handler in former.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(former_fd)
            self._selector.close()
            os.close(wake_read)
            os.close(wake_write)

    def _on_signal(self, number: int, frame: object) -> None:
        self._signals += 1

    def _say(self, text: str) -> None:
        self._print(part_line("supervisor", text, self._style))

    def _print(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            print(line, file=self._out, flush=True)

    def _start(self, one: _Child) -> None:
        command = [sys.executable, "-I", "-S", child_script.__file__, str(os.getpid()), *one.part.command]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=self._environment, start_new_session=True,
        )
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self._selector.register(process.stdout, selectors.EVENT_READ, _Lines(one.part))
        one.process, one.started = process, time.monotonic()
        one.companion_seen, one.companion_gone = False, None
        self._say(f"{one.part.name} started (pid {process.pid})")

    def _forward(self, timeout: float) -> None:
        for key, _ in self._selector.select(timeout):
            lines = key.data
            if lines is None:
                os.read(key.fd, 4096)
                continue
            try:
                data = os.read(key.fd, 65536)
            except BlockingIOError:
                continue
            for line in lines.feed(data) if data else lines.end():
                self._print(part_line(lines.name, line, self._style))
            if not data:
                self._close_pipe(key.fileobj)

    def _close_pipe(self, pipe: object) -> None:
        self._selector.unregister(pipe)  # type: ignore[arg-type]
        pipe.close()  # type: ignore[attr-defined]

    def _collect_ended(self) -> None:
        """Reap whatever ended: parts (to be restarted) and adopted orphans."""
        ours = {one.process.pid: one for one in self._children if one.process is not None}
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            one = ours.get(ended.si_pid)
            if one is None or one.process is None:
                os.waitpid(ended.si_pid, os.WNOHANG)
                continue
            code = one.process.wait()
            one.process = None
            if self._signals:
                continue
            now = time.monotonic()
            delay = one.next_delay(now)
            one.due = now + delay
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            self._say(f"{one.part.name} ended by itself ({how}); restarting in {delay:g} s")
            self._kill_orphans()

    def _check_companions(self, now: float) -> None:
        for one in self._children:
            if one.process is None or one.part.companion is None:
                continue
            if running_below(one.process.pid, one.part.companion):
                one.companion_seen, one.companion_gone = True, None
            elif one.companion_seen and one.companion_gone is None:
                one.companion_gone = now
            elif one.companion_gone is not None and now - one.companion_gone >= 2.0:
                self._say(f"{one.part.companion} is gone: restarting {one.part.name}")
                one.companion_seen, one.companion_gone = False, None
                one.process.kill()

    def _kill_orphans(self) -> None:
        """Kill what a crashed part left behind: children of ours that are no part."""
        parts = {one.process.pid for one in self._children if one.process is not None}
        for process in psutil.Process().children():
            if process.pid not in parts:
                _kill_tree(process)

    def _watch_readiness(self) -> None:
        while not self._signals:
            self._missing = self._probe()
            # Quick until ready, then often enough to tell of a lost part.
            time.sleep(0.3 if self._missing else 2.0)

    def _announce(self) -> None:
        missing = self._missing
        if missing is None or self._announced == (not missing):
            return
        if not missing:
            self._say("ready")
            self._announced = True
        elif self._announced:
            self._say("not ready: " + "; ".join(f"{part}: {reason}" for part, reason in missing.items()))
            self._announced = False

    def _stop(self) -> None:
        for one in self._children:
            if one.process is not None:
                one.process.terminate()
        began = time.monotonic()
        signals, lonely = self._signals, False
        while time.monotonic() < began + self._grace and self._signals == signals:
            self._forward(0.05)
            self._collect_ended()
            if not lonely and time.monotonic() > began + HEAD_START:
                lonely = True
                self._kill_below_parts()
            if all(one.process is None for one in self._children):
                break
        slow = [one.part.name for one in self._children if one.process is not None]
        if slow:
            self._say(f"killing {', '.join(slow)}: still alive after {self._grace:g} s")
        self._kill_all()
        self._forward(0)

    def _kill_below_parts(self) -> None:
        """A SuperLink waits for the connections of its ServerApps, which do not end by themselves. They lose
        nothing but the round in flight: checkpoints are written atomically."""
        for one in self._children:
            if one.process is not None and one.part.companion is not None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    for process in psutil.Process(one.process.pid).children():
                        _kill_tree(process)

    def _kill_all(self) -> None:
        """Kill every descendant, again until none is left (one may be forking)."""
        for _ in range(5):
            family = psutil.Process().children(recursive=True)
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(family, timeout=0.5)
            self._collect_ended()
            if not family:
                return


def _kill_tree(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for one in [*process.children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()


def environment(paths: ServerPaths, style: Style) -> dict[str, str]:
    """What every part finds in its environment."""
    programs = str(Path(sys.executable).parent)
    return {
        **os.environ,
        STATE_VARIABLE: str(paths.root),
        STYLE_VARIABLE: style,
        # SuperExec and ServerApps are found by name.
        "PATH": os.pathsep.join([programs, os.environ.get("PATH", os.defpath)]),
        "PYTHONUNBUFFERED": "1",
        "FLWR_HOME": str(paths.flower_home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
        "OMP_NUM_THREADS": "1",
        # glibc else keeps freed tensors: each freed block raises the size up to which it holds on to memory.
        "MALLOC_MMAP_THRESHOLD_": "1048576",
    }


def end_leftovers(paths: ServerPaths) -> list[int]:
    """Kill processes of an earlier `up` on this state directory that outlived it; their pids.

    Call with the directory's lock held: nothing that belongs to a living supervisor can be there then.
    """
    ours = {"fedward_server.superlink", "fedward_server.service", SUPEREXEC, "flwr-serverapp"}
    doomed = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()[:4]
            if not any(word in ours or Path(word).name in ours for word in words):
                continue
            if process.environ().get(STATE_VARIABLE) == str(paths.root):
                _kill_tree(process)
                doomed.append(process)
    psutil.wait_procs(doomed, timeout=5)
    return [process.pid for process in doomed]


def check_initialised(paths: ServerPaths, now: datetime | None = None) -> None:
    """Raises `SupervisorError` unless `init` has been run here and the server's certificate is valid."""
    wanted = (paths.settings, paths.public_ca, paths.server_certificate, paths.server_key, paths.database)
    missing = [str(path.relative_to(paths.root)) for path in wanted if not path.exists()]
    if missing:
        raise SupervisorError(
            f"{paths.root}: not a server's state directory ({', '.join(missing)} missing). Run 'fedward server init' "
            f"first, or name the directory with {STATE_VARIABLE}."
        )
    certificate = x509.load_pem_x509_certificate(paths.server_certificate.read_bytes())
    until = certificate.not_valid_after_utc
    if until <= (now or datetime.now(UTC)):
        raise SupervisorError(
            f"{paths.server_certificate}: the server's certificate expired on {until:%Y-%m-%d}: no node would connect. "
            "Renew it with 'fedward server renew'."
        )


def service_probe(port: int, ca: Path) -> Probe:
    """Asks the service's `/ready` over TLS."""

    def probe() -> Mapping[str, str]:
        try:
            answer = httpx.get(
                f"https://127.0.0.1:{port}/ready", timeout=10, verify=ssl.create_default_context(cafile=str(ca)),
                trust_env=False,
            )
            content = answer.json()
        except (httpx.HTTPError, ValueError, OSError) as error:
            return {"service": f"{type(error).__name__}: {error}"}
        if answer.status_code == 200:
            return {}
        parts = content.get("parts") if isinstance(content, dict) else None
        return parts if isinstance(parts, dict) and parts else {"service": f"HTTP status {answer.status_code}"}

    return probe


def up(paths: ServerPaths) -> int:
    """Run the server in the foreground until SIGTERM or SIGINT; the exit code.

    Raises `SupervisorError` if another `up` holds the state directory, if `init` has not been run, or if the
    certificate has expired.
    """
    check_initialised(paths)
    settings = load_settings(paths)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock_file(paths.root / "up.lock"))
        except Locked as error:
            raise SupervisorError(
                f"a server runs on {paths.root} already (pid {error.pid}). Stop that one first."
            ) from error
        end_leftovers(paths)
        parts = [
            Part("superlink", [sys.executable, "-P", "-m", "fedward_server.superlink"], SUPEREXEC, SUPERLINK_ROUTINE),
            Part("service", [sys.executable, "-P", "-m", "fedward_server.service"]),
        ]
        return Supervisor(
            parts,
            environment(paths, settings.log),
            service_probe(settings.service_port, paths.public_ca),
            settings.log,
        ).run()
