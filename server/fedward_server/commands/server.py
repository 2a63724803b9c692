"""`fedward server …`: set up and run the server; invite and revoke nodes; add data scientists.

All commands but `up` work on the state directory, on the server's own machine, whether the server is up or not.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer
from fedward_common.credential import Credential
from fedward_common.errors import ConfigError, FedwardError
from fedward_common.http import Service, ServiceError, Unreachable
from fedward_common.signing import key_id, public_text, read_public
from rich.table import Table

from fedward_server.authority import (
    add_scientist,
    ca_sha256,
    init,
    open_server,
    remove_scientist,
    server_certificate_end,
    write_server_certificate,
)
from fedward_server.commands.options import Directory, console, server_paths
from fedward_server.commands.roster import app as roster_app
from fedward_server.commands.roster import waits
from fedward_server.enrolment import ControlNode, Enrolment, NodeControl, check_name, invite
from fedward_server.paths import ServerPaths
from fedward_server.publication import (
    ROSTER_NUMBER,
    authority_key,
    key_is_apart,
    signed_roster,
    waiting_roster,
)
from fedward_server.settings import Settings, make_settings
from fedward_server.store import (
    LIVE_RUNS,
    NodeStatus,
    Store,
    active_nodes,
    all_nodes,
    current_number,
    list_runs,
    scientists,
)

app = typer.Typer(no_args_is_help=True, help="Set up and run the server; invite nodes.", add_completion=False)
node_app = typer.Typer(no_args_is_help=True, help="Enrolled nodes.")
scientist_app = typer.Typer(no_args_is_help=True, help="Data scientists: who may start runs.")
app.add_typer(node_app, name="node")
app.add_typer(scientist_app, name="scientist")
app.add_typer(roster_app, name="roster")

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
MAX_TTL = 30 * 86400


def parse_ttl(text: str) -> int:
    """Seconds of '90s', '30m', '1h' or '2d'. Raises `ConfigError`."""
    match = re.fullmatch(r"([0-9]{1,6})([smhd])", text.strip().lower())
    seconds = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 1 <= seconds <= MAX_TTL:
        raise ConfigError(f"--ttl = {text!r}: a whole number with s, m, h or d, up to 30d. Write 30m, 1h or 2d.")
    return seconds


@app.command("init")
def init_command(
    name: Annotated[str, typer.Option(help="host name or address that nodes use to reach this server")],
    san: Annotated[
        list[str] | None, typer.Option(help="another name or address for the certificate; may be repeated")
    ] = None,
    fleet_port: Annotated[int, typer.Option(help="gRPC link of the nodes")] = 9092,
    service_port: Annotated[int, typer.Option(help="enrolment and runs (HTTPS)")] = 8443,
    control_port: Annotated[int, typer.Option(help="Flower's Control API, loopback only")] = 8000,
    authority: Annotated[
        str | None,
        typer.Option(
            metavar="PUBLIC_KEY",
            help="sign the roster elsewhere: the public key that 'fedward authority init' printed, or its file",
        ),
    ] = None,
    directory: Directory = None,
) -> None:
    """Make CA, server certificate, store and a first credential. A second time changes nothing."""
    paths = server_paths(directory)
    elsewhere = read_public(authority) if authority is not None else None
    settings = make_settings(
        name=name,
        sans=san or [],
        fleet_port=fleet_port,
        service_port=service_port,
        control_port=control_port,
    )
    if not init(paths, settings, elsewhere):
        present, store = open_server(paths)
        store.close()
        console.print(f"{paths.root} is a server already ({present.name}); nothing has been changed.")
        asked = public_text(elsewhere) if elsewhere is not None else None
        signer = public_text(authority_key(paths))
        if asked != (signer if key_is_apart(paths) else None):
            console.print(f"Its roster is signed by the key {signer} {_where(paths)}, not as you asked for.")
        if present != settings:
            console.print(f"Its settings differ from what you asked for: see {paths.settings}.")
        return
    console.print(f"Server {settings.name} is ready in {paths.root} (readable by you only).")
    console.print(f"CA SHA-256   {ca_sha256(paths)}")
    console.print(f"Credential   {paths.credential}  (starts runs: keep it like a password)")
    if elsewhere is not None:
        console.print(f"Authority    {key_id(elsewhere)}, not here. Before the first invitation it signs the roster:")
        console.print("Next: 'fedward server roster export', there 'fedward authority sign', here '… roster install'.")
    console.print("Next: 'fedward server up', then 'fedward server invite NAME'.")


@app.command()
def up(directory: Directory = None) -> None:
    """Run the server until SIGTERM or Ctrl-C."""
    from fedward_server.supervisor import up as run_up

    raise typer.Exit(run_up(server_paths(directory)))


@app.command("invite")
def invite_command(
    name: Annotated[str, typer.Argument(help="name of the node that may join")],
    ttl: Annotated[str, typer.Option(help="how long the invitation is good: 30m, 1h, 2d")] = "1h",
    tag: Annotated[list[str] | None, typer.Option(help="a tag for the node; may be repeated")] = None,
    directory: Directory = None,
) -> None:
    """Print the command with which one node joins, once."""
    paths = server_paths(directory)
    seconds = parse_ttl(ttl)
    settings, store = open_server(paths)
    token = invite(paths, store, name, seconds, tag or [])
    store.close()
    # Plain and alone on standard output, so that it can be piped and copied.
    typer.echo(f"fedward node join {settings.url} --token '{token}'")
    end = datetime.now(UTC) + timedelta(seconds=seconds)
    typer.echo(f"Good for one node named {name!r} until {end:%Y-%m-%d %H:%M:%S} UTC.", err=True)


@app.command()
def status(directory: Directory = None) -> None:
    """What this server is and how it stands."""
    paths = server_paths(directory)
    settings, store = open_server(paths)
    with store.transaction() as session:
        nodes, people = active_nodes(session), scientists(session)
        version = current_number(session, ROSTER_NUMBER)
        runs = Counter(run.status for run in list_runs(session))
    signed = signed_roster(paths)
    waiting = waiting_roster(paths, settings, store)
    store.close()
    table = Table(show_header=False, box=None)
    end = server_certificate_end(paths)
    live = ", ".join(f"{runs[status]} {status}" for status in LIVE_RUNS if runs[status]) or "none"
    for key, value in (
        ("Server", f"{settings.url}  (gRPC {settings.fleet_port}, control 127.0.0.1:{settings.control_port})"),
        ("State", str(paths.root)),
        ("CA SHA-256", ca_sha256(paths)),
        ("Certificate", f"until {end:%Y-%m-%d}, for {', '.join(settings.hosts)}"),
        ("Roster", f"version {version}: {len(nodes)} nodes, {len(people)} data scientists"),
        ("Authority", f"{key_id(authority_key(paths))} {_where(paths)}"),
        ("Live runs", live),
        ("Up", _readiness(settings, paths)),
    ):
        table.add_row(key, value)
    console.print(table)
    if waiting is not None:
        console.print(waits(waiting.version))
        console.print(f"Nodes know version {signed.version}." if signed is not None else "Nodes know no roster yet.")


def _where(paths: ServerPaths) -> str:
    return "on another machine" if key_is_apart(paths) else "on this server"


def _tell_what_waits(paths: ServerPaths, settings: Settings, store: Store) -> None:
    waiting = waiting_roster(paths, settings, store)
    if waiting is not None:
        console.print(waits(waiting.version))


def _readiness(settings: Settings, paths: ServerPaths) -> str:
    try:
        with Service(f"https://127.0.0.1:{settings.service_port}", paths.public_ca.read_text()) as service:
            service.get("/ready", timeout=5.0)
    except Unreachable:
        return "no"
    except ServiceError as error:
        return f"not ready: {error}"
    return "yes, all parts ready"


@app.command()
def renew(directory: Directory = None) -> None:
    """Renew the server certificate for another year, with the names that server.toml has now."""
    paths = server_paths(directory)
    settings, store = open_server(paths)
    store.close()
    end = write_server_certificate(paths, settings)
    console.print(f"Certificate for {', '.join(settings.hosts)} until {end:%Y-%m-%d}. Restart the server to use it.")


@node_app.command("list")
def list_nodes(
    everything: Annotated[bool, typer.Option("--all", help="also those revoked and gone")] = False,
    directory: Directory = None,
) -> None:
    """Enrolled nodes and their links."""
    paths = server_paths(directory)
    settings, store = open_server(paths)
    with store.transaction() as session:
        nodes = all_nodes(session) if everything else active_nodes(session)
    store.close()
    links = _links(paths, settings)
    table = Table("Name", "Status", "Link", "Tags", "Since", "Node id", box=None)
    for node in nodes:
        link = links.get(node.flower_id or "") if node.status == NodeStatus.ACTIVE else None
        table.add_row(
            node.name,
            node.status,
            link.status if link is not None else "-",
            " ".join(node.tags),
            f"{datetime.fromtimestamp(node.changed, UTC):%Y-%m-%d %H:%M}",
            node.node_id,
        )
    console.print(table)


def _links(paths: ServerPaths, settings: Settings) -> dict[str, ControlNode]:
    try:
        nodes: Sequence[ControlNode] = _control(paths, settings).list_nodes()
    except FedwardError as error:
        typer.echo(f"The links are not known: {error}", err=True)
        return {}
    return {str(node.flower_id): node for node in nodes}


def _control(paths: ServerPaths, settings: Settings) -> NodeControl:
    from fedward_server.control import Control

    return Control(paths, settings.control_port)


@node_app.command("revoke")
def revoke(name: Annotated[str, typer.Argument(help="name of the node")], directory: Directory = None) -> None:
    """Put a node out at once. Its keys can never come back."""
    paths = server_paths(directory)
    settings, store = open_server(paths)
    cut = Enrolment(paths, settings, store, _control(paths, settings)).revoke(name)
    if cut:
        console.print(f"{name} is revoked and its link is cut.")
    else:
        console.print(f"{name} is revoked. The SuperLink is not up: its link is refused as soon as it is.")
    _tell_what_waits(paths, settings, store)
    store.close()


@scientist_app.command("add")
def scientist_add(
    name: Annotated[str, typer.Argument(help="name of the data scientist")],
    output: Annotated[Path, typer.Option("--output", "-o", help="where to write the credential")],
    directory: Directory = None,
) -> None:
    """Enter a data scientist and write a credential that may start runs."""
    paths = server_paths(directory)
    settings, store = open_server(paths)
    add_scientist(paths, settings, store, check_name(name), output)
    console.print(f"Credential for {name} written to {output}. Hand it over safely: it may start runs.")
    console.print(f"Public key   {public_text(Credential.load(output).key)}  (what sites compare before they approve)")
    _tell_what_waits(paths, settings, store)
    store.close()


@scientist_app.command("list")
def scientist_list(directory: Directory = None) -> None:
    """Show who may start runs."""
    _, store = open_server(server_paths(directory))
    with store.transaction() as session:
        table = Table("name", "public key", "since", box=None)
        for one in scientists(session):
            table.add_row(one.name, one.key, f"{datetime.fromtimestamp(one.created, UTC):%Y-%m-%d %H:%M} UTC")
    console.print(table)
    store.close()


@scientist_app.command("remove")
def scientist_remove(
    name: Annotated[str, typer.Argument(help="name of the data scientist")], directory: Directory = None
) -> None:
    """Put a data scientist out: the credential starts no run any more. Runs under way go on."""
    paths = server_paths(directory)
    settings, store = open_server(paths)
    remove_scientist(paths, settings, store, name)
    console.print(f"{name} may start no more runs. What {name} started goes on: fedward run stop RUN ends it.")
    _tell_what_waits(paths, settings, store)
    store.close()
