"""`fedward node roster …`: who belongs to the federation, and who of them counts on this node."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from fedward_common.members import members
from rich.markup import escape
from rich.table import Table

from fedward_client.commands.options import DEFAULT, Folder, out
from fedward_client.paths import NodePaths

if TYPE_CHECKING:
    from fedward_client.membership import Membership

app = typer.Typer(help="See who belongs to the federation, and approve new members.", no_args_is_help=True)

_LAST = 10


@app.command()
def show(directory: Folder = DEFAULT) -> None:
    """The newest roster: each member, whether it counts here, and the last changes."""
    from fedward_client.roster_log import RosterLog, gone

    member = _membership(directory)
    roster, approved = member.newest(), member.approved()
    head = Table(show_header=False, box=None)
    head.add_row("federation", roster.federation)
    head.add_row("version", str(roster.version))
    head.add_row("SHA-256", roster.sha256())
    head.add_row("authority", member.authority)
    head.add_row("approval", "needed for each member" if member.policy.approve_roster_changes else "not needed")
    head.add_row("pinned", _pinned(member))
    out.print(head, soft_wrap=True)
    table = _table("Kind", "Name", "Key id", "Tags", "State")
    tags = {node.node_id: " ".join(node.tags) for node in roster.nodes}
    pending = set(member.pending())
    for one in members(roster):
        state = "pending" if one in pending else "approved" if one in approved else "accepted"
        state = "this node" if member.is_own(one) else state
        table.add_row(one.kind.value, one.name, one.key_id, tags.get(one.node_id, ""), state)
    entries = RosterLog(member.paths.roster_log).entries()
    for entry in gone(entries, members(roster)):
        table.add_row(*(escape(str(entry[field])) for field in ("member", "name", "key")), "", "gone")
    out.print(table)
    if entries:
        out.print("Last changes:")
    for entry in entries[-_LAST:]:
        out.print(f"  {escape(_told(entry))}", soft_wrap=True)
    if member.policy.pinned_roster is None:
        out.print(f'To accept this very roster only, write into policy.toml: pinned_roster = "{roster.sha256()}"',
                  soft_wrap=True)  # fmt: skip


@app.command()
def approve(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]…", help="NAME, or node:NAME, scientist:NAME")
    ] = None,
    everybody: Annotated[bool, typer.Option("--all", help="all members that were not approved yet")] = False,
    directory: Folder = DEFAULT,
) -> None:
    """Let members of the roster count on this node. Compare their keys with what they told you themselves."""
    from fedward_client.member_approval import MemberError, choose

    member = _membership(directory)
    waiting = member.unapproved()
    if everybody == bool(names):
        raise MemberError("Name the members to approve, or give --all. 'fedward node roster show' lists them.")
    chosen = list(waiting) if everybody else choose(waiting, names or [])
    if not chosen:
        out.print("Nobody waits: each member of the roster was approved before.")
        return
    table = _table("Kind", "Name")
    table.add_column("Public key", no_wrap=True)
    for one in chosen:
        table.add_row(one.kind.value, one.name, one.key)
    out.print(table)
    for one in chosen:
        member.approve(one)
    out.print("[green]Approved.[/] They count at once; a running guard needs no restart.")


def _membership(directory: Path) -> Membership:
    from fedward_client.membership import Membership

    return Membership.open(NodePaths(directory.resolve()))


def _pinned(member: Membership) -> str:
    pinned = member.policy.pinned_roster
    if pinned is None:
        return "no"
    return "yes" if pinned == member.newest().sha256() else f"{pinned}: not this one, so that every run is refused"


def _table(*columns: str) -> Table:
    table = Table(box=None)
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


def _told(entry: dict[str, Any]) -> str:
    if entry["change"] == "roster":
        return f"{entry['time']} a roster was refused: {entry['reason']}"
    key = f"{entry['was']} → {entry['key']}" if entry["was"] else entry["key"]
    what = f"{entry['member']} {entry['name']}: {entry['change']} ({key})"
    return f"{entry['time']} version {entry['version']} {what}: {entry['state']}"
