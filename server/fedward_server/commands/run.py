"""`fedward run …`: start, watch and stop runs; fetch their models."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from fedward_server.client_api import RunClient

app = typer.Typer(no_args_is_help=True, help="Start, watch and stop runs; fetch their models.", add_completion=False)

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="a run's id, or enough of its beginning")]
CredentialOption = Annotated[
    Path | None,
    typer.Option("--credential", help="credential file; else $FEDWARD_CREDENTIAL, ./fedward-server/credential.json"),
]
Json = Annotated[bool, typer.Option("--json", help="JSON instead of a table")]


@app.command()
def start(
    run: Annotated[Path, typer.Argument(metavar="run.toml", help="the run's TOML, beside the task's package")],
    detach: Annotated[bool, typer.Option("--detach", "-d", help="print the run's id and return")] = False,
    as_json: Json = False,
    credential: CredentialOption = None,
) -> None:
    """Start a run on enrolled nodes and watch it. Ctrl-C detaches; the run goes on."""
    from fedward_common.config import load_config
    from fedward_common.errors import ConfigError

    from fedward_server.plan import refusals

    config = load_config(run)
    project = run.resolve().parent
    problems = refusals(config, project)
    if problems:
        raise ConfigError("\n".join(problems))
    with _client(credential) as client:
        run_id = client.start(config, project)
        if detach:
            typer.echo(json.dumps({"run": run_id}) if as_json else run_id)
            return
        if not as_json:
            typer.echo(f"run {run_id}")
        _watch(client, run_id, as_json)


@app.command("list")
def list_runs(as_json: Json = False, credential: CredentialOption = None) -> None:
    """All runs, and the queue."""
    with _client(credential) as client:
        runs = client.runs()
    if as_json:
        typer.echo(json.dumps(runs))
        return
    rows = [
        (
            run["id"][:8],
            run["name"],
            f"queued ({run['position']})" if run.get("position") else run["status"],
            f"{run['round']}/{run['rounds']}",
            run["algorithm"],
            run["scientist"],
            _when(run["created"]),
        )
        for run in runs
    ]
    _table(("run", "name", "status", "round", "algorithm", "by", "submitted"), rows, "no runs yet")


@app.command()
def show(run: RunArgument, as_json: Json = False, credential: CredentialOption = None) -> None:
    """One run: status, reason, configuration."""
    with _client(credential) as client:
        found = client.run(client.find(run))
    if as_json:
        typer.echo(json.dumps(found))
        return
    for key, value in found.items():
        if key == "config":
            typer.echo("config")
            typer.echo("\n".join(f"  {line}" for line in json.dumps(value, indent=2).splitlines()[1:-1]))
        elif value not in (None, ""):
            shown = _when(value) if key in ("created", "started", "ended") else _plain(value)
            typer.echo(f"{key:<10} {shown}")


@app.command()
def watch(run: RunArgument, as_json: Json = False, credential: CredentialOption = None) -> None:
    """Watch a run from its beginning until it ends. Ctrl-C detaches; the run goes on."""
    with _client(credential) as client:
        _watch(client, client.find(run), as_json)


@app.command()
def stop(run: RunArgument, credential: CredentialOption = None) -> None:
    """End a run after the round in flight; its model stays."""
    with _client(credential) as client:
        run_id = client.find(run)
        found = client.stop(run_id)
    after = "" if found["status"] == "stopped" else "; it ends after the round in flight"
    typer.echo(f"run {run_id[:8]}: {found['status']}{after}")


@app.command()
def resume(run: RunArgument, credential: CredentialOption = None) -> None:
    """Let a stopped or failed run go on from its last finished round."""
    with _client(credential) as client:
        run_id = client.find(run)
        found = client.resume(run_id)
    typer.echo(f"run {run_id[:8]}: {found['status']}, goes on after round {found['round']}")


@app.command()
def model(
    run: RunArgument,
    out: Annotated[Path, typer.Option("--out", "-o", help="safetensors file to write")],
    which: Annotated[str, typer.Option(metavar="last|best|N", help="last round, best round, or round N")] = "last",
    credential: CredentialOption = None,
) -> None:
    """Fetch a run's model."""
    if which not in ("last", "best") and not which.isdecimal():
        raise typer.BadParameter("must be last, best or a round's number", param_hint="--which")
    if not out.absolute().parent.is_dir():
        raise typer.BadParameter(f"{out.absolute().parent} is no folder", param_hint="--out")
    with _client(credential) as client:
        size = client.model(client.find(run), which, out)
    typer.echo(f"{out}: {size:,} bytes")


@app.command()
def nodes(as_json: Json = False, credential: CredentialOption = None) -> None:
    """The enrolled nodes that runs can name."""
    with _client(credential) as client:
        found = client.nodes()
    if as_json:
        typer.echo(json.dumps(found))
        return
    rows = [(node["name"], node["link"], " ".join(node["tags"]), _when(node["enrolled"])) for node in found]
    _table(("node", "link", "tags", "enrolled"), rows, "no nodes yet; the server admin invites them")


def _client(credential: Path | None) -> RunClient:
    from fedward_server.client_api import RunClient

    return RunClient.open(credential)


def _watch(client: RunClient, run_id: str, as_json: bool) -> None:
    """Show a run until it ends; exit code 1 if it failed."""
    from fedward_server.live import follow, open_display

    def notice(text: str) -> None:
        # Standard error, so that JSON lines stay JSON lines.
        print(text, file=sys.stderr)

    try:
        with open_display(as_json) as display:
            follow(client.events(run_id, notice), display)
        found = client.run(run_id)
    except KeyboardInterrupt:
        notice(f"\nDetached; the run goes on. Come back: fedward run watch {run_id[:8]}")
        raise typer.Exit(0) from None
    if not as_json:
        reason = f": {_plain(found['reason'])}" if found.get("reason") else ""
        typer.echo(f"run {run_id[:8]} {found['status']}{reason}")
        if found.get("round"):
            typer.echo(f"Its model: fedward run model {run_id[:8]} -o model.safetensors")
    if found["status"] == "failed":
        raise typer.Exit(1)


def _table(headers: tuple[str, ...], rows: Sequence[tuple[str, ...]], empty: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not rows:
        typer.echo(empty)
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for header in headers:
        table.add_column(header)
    for row in rows:
        table.add_row(*(Text(_plain(cell)) for cell in row))
    Console().print(table)


def _when(seconds: Any) -> str:
    if not isinstance(seconds, int | float):
        return str(seconds)
    return datetime.fromtimestamp(seconds, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _plain(value: object) -> str:
    from fedward_server.live import clean

    return clean(value)
