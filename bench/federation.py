"""A real SuperLink for benchmarks: TLS and node authentication on, its own authority and database in a temporary
folder, free ports, registered nodes, and every process gone at the end."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from fedward_common.config import RunConfig
from fedward_server.authority import init
from fedward_server.control import Control, ControlError
from fedward_server.paths import ServerPaths
from fedward_server.settings import Settings, make_settings
from fedward_server.superlink import arguments
from fedward_server.supervisor import environment
from flwr.cli.build import build_fab_from_disk

from bench import members

BUNDLES = Path(__file__).parent / "bundles"
_STARTS = 60.0
"""Seconds that a SuperLink may take to answer."""


@dataclass
class Federation:
    """A running SuperLink with `keys` registered. folder: for whatever the benchmark writes."""

    folder: Path
    paths: ServerPaths
    settings: Settings
    superlink: psutil.Process
    control: Control
    keys: list[Path] = field(default_factory=list)
    flower_ids: list[int] = field(default_factory=list)
    _started: list[psutil.Process] = field(default_factory=list)

    @property
    def fleet(self) -> str:
        """Address of the nodes' link."""
        return f"127.0.0.1:{self.settings.fleet_port}"

    @property
    def log(self) -> str:
        """What the SuperLink and the ServerApps said, its end."""
        return (self.folder / "superlink.log").read_text(errors="replace")[-4000:]

    def server_processes(self) -> list[psutil.Process]:
        """The SuperLink and all that it started."""
        return [self.superlink, *self.superlink.children(recursive=True)]

    def serverapp(self) -> psutil.Process | None:
        """The process that runs the ServerApp, while there is one."""
        for process in self.server_processes():
            with contextlib.suppress(psutil.Error):
                if any(Path(word).name == "flwr-serverapp" for word in process.cmdline()[:2]):
                    return process
        return None

    @staticmethod
    def free_port() -> int:
        """A port that nobody listens on."""
        return _free_ports(1)[0]

    def online(self) -> int:
        """Nodes that the SuperLink holds to be online."""
        return sum(node.status == "online" for node in self.control.list_nodes())

    def start_run(self, bundle: str, told: Mapping[str, Any]) -> int:
        """Start the ServerApp of a bundle in `bench/bundles`; Flower's run id."""
        told = {**told, "database": str(self.paths.superlink_database)}
        return self.control.start_run(build_fab_from_disk(BUNDLES / bundle), {"bench": json.dumps(told)})

    def wait(self, run: int, seconds: float) -> None:
        """Until the run has ended. Raises `TimeoutError` with the log's end."""
        until = time.monotonic() + seconds
        while self.control.run_state(run) != "finished":
            if time.monotonic() > until:
                raise TimeoutError(f"run {run} took longer than {seconds:g} s\n{self.log}")
            time.sleep(0.5)

    def start(self, command: Sequence[str], log: str, **variables: str) -> subprocess.Popen[bytes]:
        """Start another process of the benchmark, which ends with the federation."""
        with (self.folder / log).open("ab") as out:
            process = _start(command, {**environment(self.paths, "human"), **variables}, out)
        self._started.append(psutil.Process(process.pid))
        return process

    def enrol(self) -> Path:
        """The members' file of all nodes, which are named by their keys."""
        names = [key.stem for key in self.keys]
        return members.write(self.folder / "members.json", dict(zip(names, self.flower_ids, strict=True)))

    def start_nodes(
        self,
        keys: Sequence[Path],
        config: RunConfig,
        parameters: int,
        members_file: Path | None = None,
        address: str | None = None,
    ) -> subprocess.Popen[bytes]:
        """One process that holds a Fedward node for each key (see `bench.nodes`). members_file: made by `enrol`, for
        secure runs. address: of what stands between the nodes and the server's link."""
        file = write_json(self.folder, config.model_dump(mode="json"))
        told = [file, parameters, *([members_file] if members_file is not None else [])]
        return self.start_holder("bench.nodes", keys, *told, address=address)

    def start_holder(
        self, module: str, keys: Sequence[Path], *arguments: object, address: str | None = None
    ) -> subprocess.Popen[bytes]:
        """One process of `module` that holds a link for each key."""
        names = write_json(self.folder, [str(key) for key in keys])
        command = [sys.executable, "-m", module, address or self.fleet, str(self.paths.public_ca), str(names)]
        paths = [str(Path(__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        return self.start([*command, *map(str, arguments)], "nodes.log", PYTHONPATH=os.pathsep.join(paths))


def write_json(folder: Path, content: Any) -> Path:
    """A new file that holds `content`."""
    path = folder / f"{uuid.uuid4().hex}.json"
    path.write_text(json.dumps(content))
    return path


def fedward_command(paths: ServerPaths, settings: Settings) -> list[str]:
    """The SuperLink as Fedward's supervisor starts it."""
    return [sys.executable, "-m", "fedward_server.superlink"]


def stock_command(paths: ServerPaths, settings: Settings) -> list[str]:
    """Flower's own SuperLink with the same certificates, authentication and kind of database."""
    program = str(Path(sys.executable).parent / "flower-superlink")
    return [program, *arguments(paths, settings.fleet_port, settings.control_port)]


@contextlib.contextmanager
def federation(nodes: int, command: Any = fedward_command) -> Iterator[Federation]:
    """A SuperLink with `nodes` registered keys; stopped and removed at the end. Raises `TimeoutError`."""
    # Told to end, a benchmark still has its processes to end.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    folder = Path(tempfile.mkdtemp(prefix="fedward-bench-"))
    paths = ServerPaths(folder / "server")
    fleet, service, control = _free_ports(3)
    settings = make_settings(name="localhost", fleet_port=fleet, service_port=service, control_port=control)
    init(paths, settings)
    paths.superlink_database.parent.mkdir(mode=0o700)
    with (folder / "superlink.log").open("ab") as log:
        started = _start(command(paths, settings), environment(paths, "human"), log)
    here = Federation(folder, paths, settings, psutil.Process(started.pid), Control(paths, control))
    try:
        _wait_for(here)
        for number in range(nodes):
            private, public = _key_pair(folder / f"node-{number}.key")
            here.flower_ids.append(here.control.register_node(public))
            here.keys.append(private)
        yield here
    finally:
        for process in (*here._started, here.superlink):
            end_tree(process)
        shutil.rmtree(folder, ignore_errors=True)


def end_tree(process: psutil.Process, grace: float = 3.0) -> None:
    """End a process that a benchmark started, and all that came of it."""
    # Asked for before the parent goes: orphans could not be found any more.
    family = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [*process.children(recursive=True), process]
    for stop in (psutil.Process.terminate, psutil.Process.kill):
        for one in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                stop(one)
        _, family = psutil.wait_procs(family, timeout=grace)


def _start(command: Sequence[str], variables: Mapping[str, str], out: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, env=dict(variables), stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
    )


def _wait_for(here: Federation) -> None:
    until = time.monotonic() + _STARTS
    while True:
        try:
            here.control.ping()
            return
        except ControlError as error:
            if time.monotonic() > until or not here.superlink.is_running():
                raise TimeoutError(f"the SuperLink does not answer: {error}\n{here.log}") from error
            time.sleep(0.2)


def _key_pair(path: Path) -> tuple[Path, bytes]:
    """A node's key for the link as a file, and its public half, both in OpenSSH's form."""
    key = ec.generate_private_key(ec.SECP256R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    path.touch(0o600)
    path.write_bytes(private)
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return path, public


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
