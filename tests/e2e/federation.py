"""A whole federation of real processes for tests: the commands that a person would type."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent
ENVIRONMENT = {
    **os.environ,
    "PATH": f"{BIN}:{os.environ['PATH']}",
    "OMP_NUM_THREADS": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
}
TOY = Path(__file__).parent / "toy"


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, outside the range from which the kernel takes ports for clients."""
    ports: list[int] = []
    while len(ports) < count:
        port = random.randrange(15000, 30000)
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("0.0.0.0", port))
            if port not in ports:
                ports.append(port)
    return ports


def until(what: str, condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """The first true value of `condition`, which is asked ten times a second."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        time.sleep(0.1)
    raise AssertionError(f"not within {seconds} s: {what}")


def fedward(*arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    command = [str(BIN / "fedward"), *map(str, arguments)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False)
    if check and done.returncode:
        raise AssertionError(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    return done


@dataclass
class Process:
    """A command that runs in the background; its output goes to a file."""

    command: list[str]
    log: Path
    popen: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as file:
            self.popen = subprocess.Popen(
                self.command, env=ENVIRONMENT, stdout=file, stderr=file, start_new_session=True
            )

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def kill(self) -> None:
        """kill -9, of this process alone."""
        assert self.popen is not None
        self.popen.kill()
        self.popen.wait()

    def stop(self) -> int:
        """SIGTERM, and wait."""
        assert self.popen is not None
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(timeout=20)


@dataclass
class Federation:
    """One server and its nodes below `root`. authority: public key of one that signs the roster elsewhere. names: the
    server's, for its certificate; nodes use the first."""

    root: Path
    authority: str = ""
    names: tuple[str, ...] = ("localhost",)
    server: Process = field(init=False)
    nodes: dict[str, Process] = field(default_factory=dict)

    def __post_init__(self) -> None:
        fleet, service, control = free_ports(3)
        self.state = self.root / "server"
        fedward(
            "server", "init", "--dir", self.state, "--name", self.names[0],
            *(word for name in self.names[1:] for word in ("--san", name)),
            "--fleet-port", str(fleet), "--service-port", str(service), "--control-port", str(control),
            *(("--authority", self.authority) if self.authority else ()),
        )  # fmt: skip
        self.credential = self.state / "credential.json"
        command = [str(BIN / "fedward"), "server", "up", "--dir", str(self.state)]
        self.server = Process(command, self.root / "server.log")

    def up(self) -> None:
        """Start the server and wait until it says that it is ready."""
        seen = self.server.log.stat().st_size if self.server.log.exists() else 0
        self.server.start()
        until("server ready", lambda: "ready" in self.server.text()[seen:], 90)

    def join(self, name: str, data: dict[str, Any], policy: str = "", tags: tuple[str, ...] = ()) -> Path:
        """Enrol a node; returns its state directory."""
        extra = [part for tag in tags for part in ("--tag", tag)]
        text = fedward("server", "invite", name, "--dir", self.state, *extra).stdout
        # Exactly what the server admin hands over, with the directory added.
        line = next(line for line in text.splitlines() if line.startswith("fedward node join"))
        folder = self.root / name
        fedward(*shlex.split(line)[1:], "--dir", folder)
        self.join_data(name, data)
        (folder / "policy.toml").write_text(policy or "approved_bundles_only = false\nrequire_secure_sum = false\n")
        return folder

    def join_data(self, name: str, data: dict[str, Any]) -> None:
        """Write the node's `node.toml`."""
        lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in data.items())
        (self.root / f"{name}.toml").write_text(f'[node]\ndevice = "cpu"\n\n[data]\n{lines}')

    def start_node(self, name: str) -> Process:
        """`fedward node up`."""
        command = [
            str(BIN / "fedward"), "node", "up", "--dir", str(self.root / name),
            "--config", str(self.root / f"{name}.toml"),
        ]  # fmt: skip
        process = self.nodes.setdefault(name, Process(command, self.root / f"{name}.log"))
        seen = process.log.stat().st_size if process.log.exists() else 0
        process.start()
        until(f"{name} connected", lambda: "connected" in process.text()[seen:], 120)
        return process

    def submit(self, config: str, project: Path = TOY) -> str:
        """`fedward run start --detach`; returns the run's id."""
        folder = self.root / "project"
        if not folder.exists():
            subprocess.run(["cp", "-r", str(project), str(folder)], check=True)
        (folder / "run.toml").write_text(config)
        before = set(self._runs())
        fedward("run", "start", folder / "run.toml", "--detach", "--credential", self.credential)
        return until("run submitted", lambda: next(iter(set(self._runs()) - before), None))

    def _runs(self) -> list[str]:
        folder = self.state / "runs"
        return [path.name for path in folder.iterdir()] if folder.exists() else []

    def events(self, run: str, kind: str | None = None) -> list[dict[str, Any]]:
        """The run's events so far."""
        path = self.state / "runs" / run / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        found = [json.loads(line) for line in lines]
        return [event for event in found if kind is None or event["event"] == kind]

    def finished(self, run: str, seconds: float = 120.0) -> dict[str, Any]:
        """Wait for the end of a run; returns its last event."""
        return until("run finished", lambda: self.events(run, "run_finished"), seconds)[-1]

    def model(self, run: str, which: str = "last") -> bytes:
        """`fedward run model`; the file lies beside the project's `run.toml`."""
        path = self.root / "project" / f"{which}.safetensors"
        fedward("run", "model", run, "-o", path, "--which", which, "--credential", self.credential)
        return path.read_bytes()

    def close(self) -> None:
        """Stop everything."""
        for process in self.nodes.values():
            if process.popen is not None and process.popen.poll() is None:
                process.stop()
        if self.server.popen is not None and self.server.popen.poll() is None:
            self.server.stop()
