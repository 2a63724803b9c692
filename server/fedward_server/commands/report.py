"""`fedward report`: what a run with [privacy] released, to whom, and what that means for one person."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from fedward_server.commands.run import CredentialOption

_LABEL = len("privacy report")
"""Columns of a label, as other commands have them."""


def report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="a run's id, its beginning, or a simulated run's folder")],
    out: Annotated[Path, typer.Option("--out", "-o", help="folder to write privacy-report.html and .json to")] = Path(),
    credential: CredentialOption = None,
) -> None:
    """Report what a run with [privacy] released and what it means for one person, as HTML and JSON."""
    from fedward_common.files import write_atomic

    from fedward_server.paths import RunPaths

    if not out.is_dir():
        raise typer.BadParameter(f"{out.absolute()} is no folder", param_hint="--out")
    found = _simulated(Path(run)) if Path(run).is_dir() else _of_server(run, credential)
    files = RunPaths(out.absolute())
    text = json.dumps(found["report"], ensure_ascii=False, indent=1)
    write_atomic(files.report, found["page"].encode(), mode=0o644)
    write_atomic(files.report_json, text.encode(), mode=0o644)
    _summarise(found["report"])
    typer.echo(f"{'report':<{_LABEL}} {files.report}\n{'':<{_LABEL}} {files.report_json}")


def _of_server(run: str, credential: Path | None) -> dict[str, Any]:
    from fedward_server.client_api import RunClient

    with RunClient.open(credential) as client:
        return client.privacy_report(client.find(run))


def _simulated(folder: Path) -> dict[str, Any]:
    from fedward_common.privacy.report_page import page

    from fedward_server.paths import RunPaths
    from fedward_server.privacy_report import read

    found = read(RunPaths(folder.resolve()))
    return {"report": json.loads(found.to_json()), "page": page(found)}


def _summarise(report: Mapping[str, Any]) -> None:
    from fedward_common.privacy.wording import percent
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from fedward_server.live import clean

    known, unseen = report["claim"]["epsilon"], report["unseen"]["epsilon"]
    budget = "" if report["budget"] is None else f", budget {report['budget']:g}"
    lines = [
        ("run", f"{report['name']}: {report['status'].replace('_', ' ')}, {report['rounds']} rounds"),
        ("ε", f"{_number(known)} by {report['unit']} at δ = {report['delta']:g}{budget}"),
        ("", f"{_number(unseen)} for those who see models and do not know who took part"),
        ("noise", report["noise"]),
        ("draw", report["sampling"]),
    ]
    if report["lost"]:
        lines.append(("attempts", f"{len(report['lost'])} gave no model and are counted"))
    facts = Table(box=None, show_header=False, pad_edge=False)
    for label, text in lines:
        facts.add_row(Text(label.ljust(_LABEL)), Text(clean(text)))
    bounds = Table(box=None, pad_edge=False, header_style="dim")
    for header in ("for", "right", "found", "against"):
        bounds.add_column(header, no_wrap=header != "against")
    for person in report["persons"]:
        meaning = person["meaning"]
        row = (person["who"], percent(meaning["right"]), percent(meaning["found"]), person["whom"])
        bounds.add_row(*(Text(clean(cell)) for cell in row))
    lead = "The best test of whether data were used, at most: right guesses, and found at 1 % false alarms"
    Console(highlight=False).print(facts, "", lead, bounds, "", sep="\n")


def _number(value: float | None) -> str:
    return "∞" if value is None else f"{value:.4g}"
