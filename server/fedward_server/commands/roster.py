"""`fedward server roster …`: have the roster signed on another machine, and publish it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from fedward_common.files import write_atomic
from fedward_common.roster import read_roster

from fedward_server.authority import open_server
from fedward_server.commands.options import Directory, console, server_paths
from fedward_server.publication import export_roster, install_roster, waiting_roster

app = typer.Typer(no_args_is_help=True, help="The roster, where its key lives on another machine.")


@app.command()
def export(
    output: Annotated[Path, typer.Option("--output", "-o", help="where to write it")] = Path("pending-roster.json"),
    directory: Directory = None,
) -> None:
    """Write the roster that waits for the authority's signature."""
    paths = server_paths(directory)
    settings, store = open_server(paths)
    roster = export_roster(paths, settings, store)
    store.close()
    if roster is None:
        console.print("Nothing waits: the public roster is up to date.")
        return
    write_atomic(output, (roster.model_dump_json(indent=2) + "\n").encode(), mode=0o644)
    console.print(f"Roster version {roster.version} written to {output}. SHA-256 {roster.sha256()}")
    console.print(f"Next, where the authority's key is: fedward authority sign {output.name}")


@app.command()
def install(
    signed: Annotated[Path, typer.Argument(help="what 'fedward authority sign' wrote")],
    directory: Directory = None,
) -> None:
    """Check a signed roster and publish it; nodes learn of it with their next run."""
    paths = server_paths(directory)
    settings, store = open_server(paths)
    roster = install_roster(paths, settings, store, read_roster(signed))
    waiting = waiting_roster(paths, settings, store)
    store.close()
    console.print(f"Roster version {roster.version} is public.")
    if waiting is not None:
        console.print(waits(waiting.version))


def waits(version: int) -> str:
    """What an admin reads while a signature is outstanding."""
    return f"Roster version {version} waits for the authority's signature: fedward server roster export"
