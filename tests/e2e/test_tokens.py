"""Ways of not getting in, typed by hand: each has its own text on the node, its audit line on the server, and no
trace of membership; and what a node's own directory guards: one guard, one identity through a change of keys."""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from federation import BIN, Federation, Process, fedward, until
from fedward_client.enrol import Enrolled
from fedward_client.paths import NodePaths
from fedward_server.paths import ServerPaths
from fedward_server.store import Store, audit_lines

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """One server for the whole file: no test here changes it for another."""
    made = Federation(tmp_path_factory.mktemp("tokens"))
    try:
        made.up()
        yield made
    finally:
        made.close()


def invited(state: Path, name: str, *extra: str) -> tuple[str, str]:
    """Server address and token of a fresh invitation."""
    line = fedward("server", "invite", name, "--dir", state, *extra).stdout.splitlines()[0]
    words = shlex.split(line)
    return words[words.index("join") + 1], words[words.index("--token") + 1]


def join(url: str, token: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return fedward("node", "join", url, "--token", token, "--dir", folder, check=False)


def refused_lines(federation: Federation) -> list[dict[str, str]]:
    """What the server has noted of refused enrolments."""
    store = Store(ServerPaths(federation.state).database)
    try:
        with store.transaction() as session:
            return [{"actor": one.actor, **one.detail} for one in audit_lines(session) if one.action == "enrol_refused"]
    finally:
        store.close()


def used(federation: Federation) -> tuple[str, str]:
    url, token = invited(federation.state, "used")
    assert join(url, token, federation.root / "first").returncode == 0
    return url, token


def expired(federation: Federation) -> tuple[str, str]:
    invitation = invited(federation.state, "expired", "--ttl", "1s")
    time.sleep(1.1)
    return invitation


def forged(federation: Federation) -> tuple[str, str]:
    url, token = invited(federation.state, "forged")
    head, _, secret = token.rpartition(".")
    return url, f"{head}.{secret[::-1]}"


def foreign(federation: Federation) -> tuple[str, str]:
    other = federation.root / "other-server"
    fedward("server", "init", "--dir", other, "--name", "localhost")
    return invited(federation.state, "foreign")[0], invited(other, "foreign")[1]


def taken(federation: Federation) -> tuple[str, str]:
    first, second = (invited(federation.state, "taken") for _ in range(2))
    assert join(*first, federation.root / "holder").returncode == 0
    return second


@pytest.mark.parametrize(
    ("make", "code", "text"),
    [
        (used, "token_used", "has been used already"),
        (expired, "token_expired", "the token expired at 2"),
        (forged, "token_wrong", "not one of this server's"),
        (foreign, "token_foreign", "the token is of another server"),
        (taken, "name_taken", "'taken' is enrolled already"),
    ],
)
def test_a_token_that_does_not_let_in(
    federation: Federation, make: Callable[[Federation], tuple[str, str]], code: str, text: str
) -> None:
    url, token = make(federation)
    roster = ServerPaths(federation.state).roster.read_bytes()
    before = refused_lines(federation)
    folder = federation.root / f"node-{code}"
    tried = join(url, token, folder)
    said = " ".join((tried.stdout + tried.stderr).split())
    assert tried.returncode == 1
    assert text in said and "Traceback" not in said
    secret = token.rpartition(".")[2]
    assert secret not in said

    new = refused_lines(federation)[len(before) :]
    assert [line["code"] for line in new] == [code]
    assert secret not in str(new)

    # Neither side takes it for a member.
    assert not any((folder / name).exists() for name in ("node.json", "ca.pem", "roster.json"))
    status = fedward("node", "status", "--dir", folder, check=False)
    assert status.returncode == 1 and "not enrolled" in status.stderr
    assert ServerPaths(federation.state).roster.read_bytes() == roster


def test_a_refused_node_gets_in_with_a_good_token(federation: Federation) -> None:
    folder = federation.root / "again"
    assert join(*forged(federation), folder).returncode == 1
    assert join(*invited(federation.state, "again"), folder).returncode == 0
    assert "again" in fedward("node", "status", "--dir", folder).stdout


def test_one_guard_a_directory_and_one_identity_through_new_keys(federation: Federation) -> None:
    folder = federation.join("solo", {})
    paths = NodePaths(folder)
    guard = federation.start_node("solo")

    second = fedward("node", "up", "--dir", folder, check=False)
    assert second.returncode == 1
    assert "stop the other one first" in " ".join((second.stdout + second.stderr).split())
    # Nor may the keys change under a guard that is at work.
    assert fedward("node", "rotate-key", "--dir", folder, check=False).returncode == 1
    assert guard.popen is not None and guard.popen.poll() is None
    assert guard.stop() == 0

    node_id = Enrolled.load(paths).node_id
    old = {path.name: path.read_bytes() for path in paths.keys.iterdir()}
    shadow = federation.root / "shadow"
    subprocess.run(["cp", "-a", str(folder), str(shadow)], check=True)
    fedward("node", "rotate-key", "--dir", folder)
    assert Enrolled.load(paths).node_id == node_id
    new = {path.name: path.read_bytes() for path in paths.keys.iterdir()}
    assert new.keys() == old.keys() and all(new[name] != old[name] for name in old)

    again = federation.start_node("solo")
    assert again.popen is not None and again.popen.poll() is None
    assert node_id in fedward("node", "status", "--dir", folder).stdout
    # Whoever has a copy of the old keys is out.
    command = [str(BIN / "fedward"), "node", "up", "--dir", str(shadow)]
    copy = Process(command, federation.root / "shadow.log")
    copy.start()
    popen = copy.popen
    assert popen is not None
    try:
        until("the copy is refused", lambda: popen.poll() is not None, 60)
    finally:
        if popen.poll() is None:
            copy.kill()
    assert popen.returncode == 3, copy.text()
