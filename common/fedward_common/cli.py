"""The one command, `fedward`. Its groups and verbs are found by entry points, so each side installs its own.

Nothing is imported before it is asked for: `fedward --help` starts without torch or Flower.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any, NoReturn

import click
import typer

from fedward_common.errors import FedwardError

# Never call home: set before any command can import Flower.
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}

GROUPS = "fedward.commands"
VERBS = "fedward.verbs"

# One line each, so that the list of commands needs no import.
_SUMMARIES = {
    "new": "Write a task project that runs at once.",
    "plan": "Check a run and forecast its bytes and seconds.",
    "simulate": "Run a federation in this process, before any node is involved.",
    "run": "Start, watch and stop runs; fetch their models.",
    "report": "Say what a private run released and what that means for one person.",
    "server": "Set up and run the server; invite and revoke nodes.",
    "authority": "Sign the roster on a machine apart from the server.",
    "node": "Join a federation and run a node.",
    "version": "Print the versions in use.",
}


def main() -> NoReturn:
    """Entry point of the `fedward` script."""
    os.environ.update(QUIET)
    sys.exit(build().main(prog_name="fedward"))


def build() -> click.Group:
    """The command with all groups and verbs that are installed."""
    return _Root(
        name="fedward",
        help="Federated learning for data that must not leave.",
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def complain(error: FedwardError) -> None:
    """Print an error the way every command does: its text, red, on standard error."""
    click.secho(str(error), fg="red", err=True)


class _Root(click.Group):
    """Loads a command when it is called, and turns `FedwardError` into its text and exit code 1."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        names = {*_found(), "version"}
        known = [name for name in _SUMMARIES if name in names]
        return known + sorted(names - set(known))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name == "version":
            return _version
        entry = _found().get(cmd_name)
        if entry is None:
            return None
        lacking = _lacking(entry)
        if lacking:
            return _absent(cmd_name, entry, f"it needs {', '.join(lacking)}")
        return _load(entry)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = []
        for name in self.list_commands(ctx):
            summary = _SUMMARIES.get(name)
            entry = _found().get(name)
            if entry is not None and _lacking(entry):
                summary = f"(not installed: pip install {_install(entry)})"
            elif summary is None:
                command = self.get_command(ctx, name)
                summary = command.get_short_help_str() if command else ""
            rows.append((name, summary))
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except FedwardError as error:
            complain(error)
            ctx.exit(1)


def _found() -> dict[str, metadata.EntryPoint]:
    entries = [*metadata.entry_points(group=GROUPS), *metadata.entry_points(group=VERBS)]
    return {entry.name: entry for entry in entries}


def _load(entry: metadata.EntryPoint) -> click.Command:
    try:
        target = entry.load()
    except ModuleNotFoundError as error:
        # Ours being absent is a missing extra as well; any other import error is a bug and shows itself.
        return _absent(entry.name, entry, f"module {error.name!r} is missing")
    if isinstance(target, click.Command):
        return target
    command = typer.main.get_command(target) if isinstance(target, typer.Typer) else _command_of(target)
    command.name = entry.name
    return command


def _command_of(function: Callable[..., Any]) -> click.Command:
    app = typer.Typer(add_completion=False)
    app.command()(function)
    return typer.main.get_command(app)


def _extra_of(entry: metadata.EntryPoint) -> str:
    """The extra that brings what this entry point imports: the side that it belongs to."""
    side = entry.module.partition(".")[0].removeprefix("fedward_")
    return side if side in ("server", "client") else ""


def _install(entry: metadata.EntryPoint) -> str:
    extra = _extra_of(entry)
    return f"'fedward[{extra}]'" if extra else "'fedward'"


def _lacking(entry: metadata.EntryPoint) -> list[str]:
    """Distributions of the entry point's extra that are not installed. Verbs need none of them."""
    extra = _extra_of(entry)
    if not extra or entry.group == VERBS:
        return []
    lacking = []
    for requirement in metadata.requires("fedward") or []:
        text, _, marker = requirement.partition(";")
        if re.search(rf"""extra\s*==\s*['"]{extra}['"]""", marker):
            name = re.split(r"[^A-Za-z0-9._-]", text.strip(), maxsplit=1)[0]
            try:
                metadata.distribution(name)
            except metadata.PackageNotFoundError:
                lacking.append(name)
    return lacking


def _absent(name: str, entry: metadata.EntryPoint, why: str) -> click.Command:
    def refuse(arguments: tuple[str, ...]) -> None:
        raise FedwardError(
            f"'fedward {name}' is not installed here: {why}. Run: pip install {_install(entry)}"
        )

    return click.Command(
        name,
        callback=refuse,
        params=[click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)],
        help=f"Not installed: pip install {_install(entry)}",
        context_settings={"ignore_unknown_options": True, "help_option_names": []},
    )


@click.command("version")
def _version() -> None:
    """Print the versions in use."""
    for name in ("fedward", "flwr", "torch"):
        try:
            click.echo(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            click.echo(f"{name} not installed")
