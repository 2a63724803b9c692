"""`fedward node …`: what a site admin types."""

from __future__ import annotations

import json
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer
from rich.syntax import Syntax
from rich.table import Table

from fedward_client.commands.ledger import app as ledgers
from fedward_client.commands.options import DEFAULT, Folder, out
from fedward_client.commands.roster import app as rosters
from fedward_client.paths import NodePaths

app = typer.Typer(help="Run this site's node.", no_args_is_help=True)
bundles = typer.Typer(help="Read and approve what data scientists want to run here.", no_args_is_help=True)
journals = typer.Typer(help="What left this node; works offline, with or without a guard.", no_args_is_help=True)
app.add_typer(bundles, name="bundle")
app.add_typer(rosters, name="roster")
app.add_typer(ledgers, name="ledger")
app.add_typer(journals, name="journal")


@app.command()
def join(
    server: Annotated[str, typer.Argument(help="https://host:port of the server")],
    token: Annotated[str, typer.Option(help="the one-off token that the server admin handed out")],
    authority: Annotated[
        str | None,
        typer.Option(
            metavar="PUBLIC_KEY",
            help="public key (or its file) of the enrolment authority, if it told you; else the server names one",
        ),
    ] = None,
    directory: Folder = DEFAULT,
) -> None:
    """Enrol this machine: check the server against the token, make keys here, register them."""
    from fedward_common.files import write_atomic
    from fedward_common.signing import read_public

    from fedward_client.enrol import is_listed
    from fedward_client.enrol import join as enrol
    from fedward_client.policy import default_policy_toml

    named = read_public(authority) if authority is not None else None
    joined = enrol(server, token, directory.resolve(), authority=named)
    paths = NodePaths(directory.resolve())
    if not paths.policy.exists():
        write_atomic(paths.policy, default_policy_toml().encode())
    out.print(f"[green]Joined[/] as [bold]{joined.name}[/]. State and keys: {directory}")
    out.print(f"Policy (strict by default): {paths.policy}")
    if not is_listed(paths):
        out.print("The enrolment authority has still to sign this node's entry; runs come here once it has.")
    out.print(f"Start it with: fedward node up --dir {directory} --config node.toml")


@app.command()
def up(
    directory: Folder = DEFAULT,
    config: Annotated[Path | None, typer.Option(help="node.toml with the [data] table of this site")] = None,
) -> None:
    """Serve runs until stopped (SIGTERM or Ctrl-C)."""
    from fedward_common.files import Locked, lock_file

    from fedward_client.guard import Guard
    from fedward_client.link import LinkRefused
    from fedward_client.logs import configure
    from fedward_client.membership import Membership
    from fedward_client.settings import load_settings

    paths = NodePaths(directory.resolve())
    member, settings = Membership.open(paths), load_settings(config)
    configure(settings.node.log)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        with lock_file(paths.lock):
            Guard(member, settings, member.policy).run(stop)
    except Locked as locked:
        out.print(f"[red]{locked}[/]\nOne guard a state directory: stop the other one first.")
        raise typer.Exit(1) from locked
    except LinkRefused as refused:
        out.print(f"[red]The server refuses this node:[/] {member.why_refused() or refused}")
        raise typer.Exit(3) from refused


@app.command()
def status(directory: Folder = DEFAULT) -> None:
    """Who this node is and what it is doing."""
    from fedward_client.journal_lines import tail
    from fedward_client.membership import Membership
    from fedward_client.status import StatusFile

    paths = NodePaths(directory.resolve())
    member = Membership.open(paths)
    now = StatusFile(paths.status).read()
    table = Table(show_header=False, box=None)
    table.add_row("name", member.name)
    table.add_row("node id", member.node_id)
    table.add_row("public key", member.own_key)
    table.add_row("server", member.server)
    roster, pending = member.newest(), len(member.pending())
    waiting = f", {pending} members wait for approval ('fedward node roster show')" if pending else ""
    unsigned = "" if member.listed() else ", without this node: the authority has still to sign its entry"
    table.add_row("roster", f"version {roster.version}, {len(roster.nodes)} nodes{waiting}{unsigned}")
    table.add_row("guard", "never started" if now is None else _guard(now))
    out.print(table)
    for entry in tail(paths.journal, 5):
        where = f"run {entry['run'][:8]} round {entry['round']}"
        out.print(f"  {entry['time']} {where} {entry['purpose']}: {entry['outcome']}")


def _guard(now: dict[str, object]) -> str:
    import psutil

    alive = psutil.pid_exists(int(str(now["pid"])))
    state = str(now["state"]) if alive or now["state"] in ("stopped", "refused") else "not running (killed)"
    reason = f": {now['reason']}" if "reason" in now else ""
    return f"{state}{reason} (since {now['time']}, {len(list(now['runs']))} runs)"  # type: ignore[call-overload]


@app.command()
def leave(directory: Folder = DEFAULT) -> None:
    """Leave the federation: the server forgets this node's keys; state and journal stay here."""
    from fedward_client.enrol import leave as go

    go(NodePaths(directory.resolve()))
    out.print("Left the federation. A new token is needed to come back.")


@app.command("rotate-key")
def rotate_key(directory: Folder = DEFAULT) -> None:
    """Replace this node's keys; its name, id, state and journal stay."""
    from fedward_client.enrol import rotate_key as rotate

    rotate(NodePaths(directory.resolve()))
    out.print("New keys in use. Restart the guard ('fedward node up') if it was running.")


@bundles.command("list")
def list_bundles(directory: Folder = DEFAULT) -> None:
    """All bundles that were offered to this node."""
    from fedward_client.approval import Approvals

    table = Table("bundle", "app", "state", "missing dependencies")
    for item in Approvals(NodePaths(directory.resolve())).list():
        table.add_row(item.sha256[:12], item.app, item.state, ", ".join(item.missing))
    out.print(table)


@bundles.command("show")
def show_bundle(
    bundle: Annotated[str, typer.Argument(help="hash or its beginning")], directory: Folder = DEFAULT
) -> None:
    """The bundle's files, and how it differs from the last approved one of the same app."""
    from fedward_client.approval import Approvals

    approvals = Approvals(NodePaths(directory.resolve()))
    item = approvals.find(bundle)
    out.print(f"[bold]{item.app}[/] {item.sha256}\nstate: {item.state}\nunpacked for reading: {item.folder}")
    difference = approvals.difference(item.sha256)
    syntax = Syntax(difference, "diff") if sys.stdout.isatty() else difference
    out.print(syntax if difference else "No difference to the last approved bundle of this app.")


@bundles.command("approve")
def approve_bundle(
    bundle: Annotated[str, typer.Argument(help="hash or its beginning")], directory: Folder = DEFAULT
) -> None:
    """Allow a bundle to run here. Read it first: it will see this site's data."""
    from fedward_client.approval import Approvals

    item = Approvals(NodePaths(directory.resolve())).approve(bundle)
    out.print(f"[green]Approved[/] {item.app} {item.sha256[:12]}. Runs that wait for it start within seconds.")


@journals.command("show")
def show_journal(
    directory: Folder = DEFAULT,
    last: Annotated[int, typer.Option(min=1, help="how many messages")] = 20,
    run: Annotated[str, typer.Option(help="only this run: its id or the beginning of it")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="the lines as they are, with all they say")] = False,
) -> None:
    """The messages that left this node, and the journal's head."""
    from fedward_client.journal_show import messages, print_head, print_messages

    entries, end = messages(NodePaths(directory.resolve()).journal, last, run)
    if as_json:
        for entry in entries:
            typer.echo(json.dumps(entry))
        return
    print_messages(out, entries)
    if end is not None:
        print_head(out, end)


@journals.command("verify")
def verify_journal(
    directory: Folder = DEFAULT,
    head: Annotated[str | None, typer.Option(help="NUMBER:HASH of a line that you remember from 'show'")] = None,
) -> None:
    """Check the chain, and the sum of all bytes against the link's own total. Exits with 1 if something is wrong."""
    from fedward_common.chain import Head

    from fedward_client.journal_show import print_report
    from fedward_client.journal_verify import verify

    paths = NodePaths(directory.resolve())
    report = verify(paths.journal, paths.sent, Head.parse(head) if head else None)
    print_report(out, report)
    if report.problems:
        raise typer.Exit(1)
