"""The `fedward` command itself: what is listed, what is absent, how errors look, how fast it starts."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import click
import pytest
from click.testing import CliRunner
from fedward_common import cli
from fedward_common.errors import ConfigError

HEAVY = ("torch", "flwr", "fastapi", "numpy", "pydantic")


def entry(name: str, value: str, group: str = cli.GROUPS) -> metadata.EntryPoint:
    return metadata.EntryPoint(name, value, group)


def with_entries(monkeypatch: pytest.MonkeyPatch, *entries: metadata.EntryPoint) -> click.Group:
    monkeypatch.setattr(cli, "_found", lambda: {one.name: one for one in entries})
    return cli.build()


def test_help_lists_all_commands() -> None:
    result = CliRunner().invoke(cli.build(), ["--help"])
    assert result.exit_code == 0
    for name in ("new", "plan", "simulate", "run", "server", "node", "version"):
        assert f"  {name} " in result.output


@pytest.mark.parametrize(
    "arguments", [["--help"], ["version"], ["run", "--help"], ["simulate", "--help"], ["new", "--help"]]
)
def test_starting_imports_nothing_heavy(arguments: list[str]) -> None:
    code = f"""
import sys
from fedward_common.cli import build
build().main({arguments!r}, standalone_mode=False)
print("HEAVY", sorted(set(sys.modules) & set({HEAVY!r})))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "HEAVY []"


def test_version() -> None:
    output = CliRunner().invoke(cli.build(), ["version"]).output
    assert f"fedward {metadata.version('fedward')}" in output
    assert f"flwr {metadata.version('flwr')}" in output


def test_our_errors_are_text_in_red_on_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    root = with_entries(monkeypatch, entry("plan", f"{__name__}:refuse", cli.VERBS))
    result = CliRunner().invoke(root, ["plan"], color=True)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == "\x1b[31mrounds = 0: must be at least 1.\x1b[0m\n"


def refuse() -> None:
    raise ConfigError("rounds = 0: must be at least 1.")


def test_a_bug_is_not_disguised(monkeypatch: pytest.MonkeyPatch) -> None:
    root = with_entries(monkeypatch, entry("plan", f"{__name__}:stumble", cli.VERBS))
    with pytest.raises(ZeroDivisionError):
        CliRunner().invoke(root, ["plan"], catch_exceptions=False)


def stumble() -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("arguments", [["server"], ["server", "up", "--name", "x"], ["server", "--help"]])
def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    def lacking(name: str) -> metadata.Distribution:
        if name == "uvicorn":
            raise metadata.PackageNotFoundError(name)
        return original(name)

    original = metadata.distribution
    monkeypatch.setattr(metadata, "distribution", lacking)
    result = CliRunner().invoke(cli.build(), arguments)
    assert result.exit_code == 1
    assert "uvicorn" in result.stderr and "pip install 'fedward[server]'" in result.stderr
    assert "Traceback" not in result.output
    listed = CliRunner().invoke(cli.build(), ["--help"]).output
    assert "not installed: pip install 'fedward[server]'" in listed


def test_a_side_that_is_not_installed_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    root = with_entries(monkeypatch, entry("node", "fedward_client_gone.cli:app"))
    result = CliRunner().invoke(root, ["node", "up"])
    assert result.exit_code == 1
    assert "module 'fedward_client_gone' is missing" in result.stderr
