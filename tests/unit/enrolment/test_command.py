"""The `fedward server` command line, as typed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from fedward_client.enrol import join
from fedward_common.cli import build
from fedward_common.credential import Credential
from fedward_common.errors import ConfigError
from fedward_common.signing import key_id
from fedward_server.commands import server as commands
from fedward_server.commands.server import parse_ttl
from fedward_server.paths import ServerPaths
from fedward_server.store import Store, audit_lines

from enrolment.site import FakeControl, Site

Command = Callable[..., Result]


@pytest.fixture
def fedward(tmp_path: Path) -> Command:
    def invoke(*words: str) -> Result:
        return CliRunner().invoke(build(), ["server", *words, "--dir", str(tmp_path / "server")])

    return invoke


@pytest.fixture
def made(fedward: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServerPaths:
    assert fedward("init", "--name", "localhost", "--san", "10.0.0.1").exit_code == 0
    control = FakeControl()
    control.down = True
    monkeypatch.setattr(commands, "_control", lambda *_: control)
    return ServerPaths(tmp_path / "server")


def test_init_says_what_to_do_next(fedward: Command, tmp_path: Path) -> None:
    first = fedward("init", "--name", "localhost")
    assert first.exit_code == 0 and "fedward server invite" in first.output
    assert "PRIVATE" not in first.output
    second = fedward("init", "--name", "other.example.org")
    assert second.exit_code == 0
    assert "nothing has been changed" in second.output and "differ" in second.output


def test_init_explains_what_is_wrong(fedward: Command, tmp_path: Path) -> None:
    result = fedward("init", "--name", "https://x")
    assert result.exit_code == 1 and "without scheme and port" in result.output
    assert not (tmp_path / "server").exists()


def test_commands_need_a_server(fedward: Command) -> None:
    for words in (("invite", "a"), ("status",), ("node", "list"), ("node", "revoke", "a"), ("renew",)):
        result = fedward(*words)
        assert result.exit_code == 1 and "fedward server init" in result.output, words


def test_invite_prints_the_join_command(fedward: Command, made: ServerPaths) -> None:
    result = fedward("invite", "hospital-a", "--ttl", "30m", "--tag", "eu")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("fedward node join https://localhost:8443 --token 'FW1")
    assert "Good for one node named 'hospital-a' until" in result.stderr
    bad = fedward("invite", "Hospital A")
    assert bad.exit_code == 1 and "lower-case letters" in bad.output


def test_status_and_lists(fedward: Command, made: ServerPaths) -> None:
    result = fedward("status")
    assert result.exit_code == 0
    assert "0 nodes, 1 data scientists" in result.output and "10.0.0.1" in result.output
    assert fedward("node", "list").exit_code == 0
    assert fedward("renew").exit_code == 0


def test_a_data_scientist_is_added(fedward: Command, made: ServerPaths, tmp_path: Path) -> None:
    assert fedward("scientist", "add", "bob", "-o", str(tmp_path / "bob.json")).exit_code == 0
    credential = Credential.load(tmp_path / "bob.json")
    store = Store(made.database)
    with store.transaction() as session:
        added = [line.detail for line in audit_lines(session) if line.action == "scientist_added"]
    store.close()
    assert added[-1] == {"name": "bob", "key": key_id(credential.key)}
    assert fedward("scientist", "add", "bob", "-o", str(tmp_path / "b2.json")).exit_code == 1
    assert json.loads((tmp_path / "bob.json").read_text())["version"] == 1


def test_invited_listed_revoked(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the printed command to a revoked node, against the running service."""

    def fedward(*words: str) -> Result:
        return CliRunner().invoke(build(), ["server", *words, "--dir", str(site.paths.root)])

    monkeypatch.setattr(commands, "_control", lambda *_: site.control)
    words = fedward("invite", "hospital-a", "--tag", "eu").stdout.split()
    join(words[3], words[5].strip("'"), site.root / "node")
    listed = fedward("node", "list").output
    assert "hospital-a" in listed and "online" in listed and "eu" in listed
    assert "yes, all parts ready" in fedward("status").output
    assert "its link is cut" in fedward("node", "revoke", "hospital-a").output
    assert "hospital-a" not in fedward("node", "list").output
    assert "revoked" in fedward("node", "list", "--all").output
    again = fedward("node", "revoke", "hospital-a")
    assert again.exit_code == 1 and "no enrolled node" in again.output


def test_up_is_the_supervisor(fedward: Command, made: ServerPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedward_server.supervisor.up", lambda paths: 7 if paths == made else 0)
    assert fedward("up").exit_code == 7


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("30m", 1800), ("2D", 172800), (" 1h ", 3600)])
def test_times_to_live(text: str, seconds: int) -> None:
    assert parse_ttl(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "1", "-1h", "0m", "31d", "1.5h", "1 h", "1w", "٣h"])
def test_times_to_live_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="Write 30m, 1h or 2d"):
        parse_ttl(text)


