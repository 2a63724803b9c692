"""`fedward node ledger …`: what was released of this site's data, what that cost, and whether the ledger is whole."""

from __future__ import annotations

import getpass
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from fedward_client.commands.options import DEFAULT, Folder, out
from fedward_client.paths import NodePaths

if TYPE_CHECKING:
    from fedward_common.privacy.ledger import Accepted, Release, Report

app = typer.Typer(
    help="What was released of this site's data and what it cost; works offline, with or without a guard.",
    no_args_is_help=True,
)

Config = Annotated[Path | None, typer.Option(help="node.toml, if it says where the ledger's anchor lies")]
_MOST = 20
"""Problems shown; the first ones tell where it began."""


@app.command()
def show(
    directory: Folder = DEFAULT,
    delta: Annotated[float, typer.Option(help="δ at which ε is given")] = 1e-5,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object a row; an infinite ε is null")] = False,
) -> None:
    """Each data set with its releases and their ε so far, the units apart."""
    from fedward_common.errors import ConfigError
    from fedward_common.privacy import budget, ledger

    if not 0 < delta < 1:
        raise ConfigError(f"--delta = {delta}: must lie between 0 and 1. Take 1e-5, or less.")
    report = ledger.verify(NodePaths(directory.resolve()).ledger)
    groups: dict[tuple[str, str], list[Release]] = defaultdict(list)
    for release in report.releases:
        groups[release.dataset, release.unit.value].append(release)
    table = Table("data set", "unit", box=None)
    for name in ("runs", "releases", f"ε (δ = {delta:g})"):
        table.add_column(name, justify="right")
    for (dataset, unit), releases in sorted(groups.items()):
        runs, epsilon = len({release.run for release in releases}), budget.accounted(budget.composed(releases), delta)
        if as_json:
            row = {"dataset": dataset, "unit": unit, "runs": runs, "releases": len(releases)}
            typer.echo(json.dumps({**row, "epsilon": epsilon if math.isfinite(epsilon) else None, "delta": delta}))
        table.add_row(_plain(dataset), unit, f"{runs:,}", f"{len(releases):,}", f"{epsilon:.4g}")
    if as_json:
        return
    out.print(table if groups else "Nothing was released.")
    _print_decisions(report.accepted)
    if report.last is not None:
        out.print(f"head: {report.last.head}", soft_wrap=True)
    if report.problems:
        out.print("[red]The ledger is damaged, and lines may be missing here:[/] see 'fedward node ledger verify'.")


@app.command()
def verify(
    directory: Folder = DEFAULT,
    config: Config = None,
    head: Annotated[str | None, typer.Option(help="NUMBER:HASH of a line that you remember from 'show'")] = None,
) -> None:
    """Check the chain, and that the ledger holds its anchor and the head that the server named. Exits with 1 if
    something is wrong."""
    from fedward_common.chain import Head
    from fedward_common.privacy.anchor import Anchor, check, local, named

    path = NodePaths(directory.resolve()).ledger
    from_server = named(path)
    anchors: dict[str, Anchor | None] = {**local(_place(path, config)), **from_server}
    if head is not None:
        anchors["the remembered head"] = Anchor(Head.parse(head))
    report = check(path, anchors)
    _print_facts(report)
    for what, anchor in from_server.items():
        out.print(f"{what}: {anchor.head}", soft_wrap=True)
    _print_problems("wrong", report.problems)
    if report.problems:
        raise typer.Exit(1)
    out.print("[green]The ledger is intact.[/]" if report.lines else "The ledger is empty.")


@app.command()
def accept(
    why: Annotated[str, typer.Option(help="for those who read the ledger: what happened to it")],
    expected: Annotated[
        list[str] | None, typer.Option(metavar="NUMBER:HASH", help="head that a server expects, as the guard tells it")
    ] = None,
    who: Annotated[str, typer.Option(help="who decides; default: the user of this machine")] = "",
    directory: Folder = DEFAULT,
    config: Config = None,
) -> None:
    """Go on with a damaged, cut off or lost ledger as it is, or with one that lacks what the server named. Releases
    that it no longer holds count no more."""
    from fedward_common.chain import Head
    from fedward_common.files import lock_file
    from fedward_common.privacy import anchor as anchors
    from fedward_common.privacy.ledger import LedgerError

    from fedward_client.enrol import Enrolled

    paths = NodePaths(directory.resolve())
    owner = Enrolled.load(paths).node_id
    place = _place(paths.ledger, config)
    known: dict[str, anchors.Anchor | None] = {
        f"the expected head {text}": anchors.Anchor(Head.parse(text)) for text in expected or []
    }
    problems: list[str] = []
    with lock_file(paths.lock):
        for remembered in (partial(anchors.local, place), partial(anchors.named, paths.ledger)):
            try:
                known |= remembered()
            except LedgerError as error:
                problems.append(str(error))
        report = anchors.check(paths.ledger, known)
        problems += report.problems
        if report.lines and report.owner != owner:
            problems.append(f"it is the ledger of {report.owner}")
        if not problems:
            raise LedgerError("The ledger is intact and holds every head that is expected: there is nothing to accept.")
        head = anchors.accept(paths.ledger, owner, who or getpass.getuser(), why, anchors.lost(report))
        anchors.write_anchor(place, head)
        anchors.forget_broken(anchors.server_place(paths.ledger))
    _print_problems("accepted", problems)
    out.print(f"head: {head}", soft_wrap=True)


def _place(path: Path, config: Path | None) -> Path:
    """Where the anchor of the ledger at `path` lies, as the guard sees it."""
    from fedward_common.privacy.anchor import default_place

    from fedward_client.settings import load_settings

    return load_settings(config).node.ledger_anchor or default_place(path)


def _print_facts(report: Report) -> None:
    if report.last is None:
        return
    table = Table(show_header=False, box=None)
    table.add_row("node", _plain(report.owner))
    table.add_row("lines", f"{report.lines:,}, with {len(report.releases):,} releases")
    if report.torn or report.torn_end:
        end = f", {report.torn_end} bytes at the end still open" if report.torn_end else ""
        table.add_row("torn lines", f"{report.torn} left by a crash and sealed by the line behind{end}")
    if report.settled:
        table.add_row("accepted", f"{len(report.settled)} problems, see below")
    out.print(table)
    _print_decisions(report.accepted)
    out.print(f"head: {report.last.head}", soft_wrap=True)


def _print_problems(title: str, problems: Sequence[str]) -> None:
    for problem in problems[:_MOST]:
        out.print(Text(f"{title}: ", "red") + _plain(problem), soft_wrap=True)
    if len(problems) > _MOST:
        out.print(f"and {len(problems) - _MOST} more")


def _print_decisions(accepted: Sequence[Accepted]) -> None:
    for one in accepted:
        heads = ", ".join(map(str, one.expected)) or "none"
        text = f"accepted on {one.time[:19]} by {one.who}: {one.why} (heads no longer in it: {heads})"
        out.print(_plain(text), soft_wrap=True)


def _plain(text: str) -> Text:
    from fedward_client.journal_show import plain

    return plain(text)
