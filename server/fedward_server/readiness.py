"""Do all parts of the server answer? The one set of checks behind `/ready` and the supervisor's word "ready"."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import psutil
from fedward_common.errors import FedwardError

SUPEREXEC = "flower-superexec"


def running_below(pid: int, program: str) -> bool:
    """Whether a descendant of `pid` runs `program` (the name of its executable or script)."""
    try:
        family = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return False
    for process in family:
        with contextlib.suppress(psutil.Error):
            named = any(Path(word).name == program for word in process.cmdline()[:2])
            if named and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def check_fleet(port: int, ca: Path, timeout: float = 2.0) -> str | None:
    """Why the SuperLink's Fleet API does not answer under the CA on this machine; None if it does."""
    try:
        context = ssl.create_default_context(cafile=str(ca))
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection(("127.0.0.1", port), timeout) as plain,
            context.wrap_socket(plain, server_hostname="localhost"),
        ):
            return None
    except OSError as error:
        return f"no TLS answer on port {port}: {error}"


def check_parts(fleet_port: int, ca: Path, ping: Callable[[], object], supervisor: int) -> dict[str, str]:
    """The parts that are not ready, each with the reason; {} when all are.

    ping: asks the Control API for a sign of life; raises `FedwardError`. supervisor: the process whose descendants
    the SuperLink and its SuperExec are. The service itself answers by calling this.
    """
    missing: dict[str, str] = {}
    reason = check_fleet(fleet_port, ca)
    if reason is not None:
        missing["fleet"] = reason
    try:
        ping()
    except FedwardError as error:
        missing["control"] = str(error)
    if not running_below(supervisor, SUPEREXEC):
        # SuperExec dies alone when the certificate's SANs lack localhost: no run could start then.
        missing["superexec"] = "its process is not running; no run can start"
    return missing
