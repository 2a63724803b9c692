"""`fedward authority …`: the key that signs the roster, on a machine of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from fedward_common.files import write_atomic
from fedward_common.members import Change
from fedward_common.signing import key_id, public_text
from rich.table import Table

from fedward_server.commands.options import console
from fedward_server.roster_authority import RosterAuthority, read_unsigned

app = typer.Typer(
    no_args_is_help=True, help="Sign the roster on a machine apart from the server.", add_completion=False
)

Folder = Annotated[Path, typer.Option("--dir", help="the authority's directory")]
DEFAULT = Path("fedward-authority")


@app.command("init")
def init_command(directory: Folder = DEFAULT) -> None:
    """Make the key, once, and print its public half for 'fedward server init' and for nodes that join."""
    authority = RosterAuthority.create(directory.resolve())
    public = authority.public_key()
    # Plain and alone on standard output, so that it can be piped and copied.
    typer.echo(public_text(public))
    typer.echo(f"Key {key_id(public)} is in {directory} (readable by you only). Keep a copy offline.", err=True)
    typer.echo(f"Next, on the server: fedward server init --name … --authority {public_text(public)}", err=True)


@app.command()
def sign(
    roster: Annotated[Path, typer.Argument(help="what 'fedward server roster export' wrote")],
    output: Annotated[Path, typer.Option("--output", "-o", help="where to write it, signed")] = Path(
        "signed-roster.json"
    ),
    yes: Annotated[bool, typer.Option("--yes", help="sign without asking")] = False,
    directory: Folder = DEFAULT,
) -> None:
    """Show what changes against the last signed roster, ask, and sign."""
    authority = RosterAuthority.open(directory.resolve())
    unsigned = read_unsigned(roster)
    last, differences = authority.last(), authority.differences(unsigned)
    before = "the first that is signed here" if last is None else f"after version {last.version}"
    console.print(f"Roster of {unsigned.federation}, version {unsigned.version}, {before}")
    console.print(f"SHA-256 {unsigned.sha256()}")
    console.print(changes_table(differences) if differences else "Nothing changes but the version.")
    if not yes:
        typer.confirm("Sign it?", abort=True)
    write_atomic(output, json.dumps(authority.sign(unsigned)).encode(), mode=0o644)
    console.print(f"Signed: {output}. On the server: fedward server roster install {output.name}")


def changes_table(differences: list[Change]) -> Table:
    """A line for each change, with whole keys: a short id is for finding a key, not for trusting it."""
    table = Table("Change", "Member", box=None)
    table.add_column("Name", overflow="fold")
    table.add_column("Public key", no_wrap=True)
    for change in differences:
        table.add_row(change.what.value, change.member.kind.value, change.member.name, change.member.key)
        if change.was is not None:
            table.add_row("  before", "", "", change.was.key)
    return table
