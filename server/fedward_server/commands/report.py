"""`fedward report`: what a run with [privacy] released, to whom, and what that means for one person."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from fedward_server.commands.run import CredentialOption


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
    typer.echo(f"report        {files.report}\n              {files.report_json}")


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

    from fedward_server.live import clean

    console = Console(highlight=False)

    def line(label: str, text: str, style: str = "") -> None:
        console.print(f"{label:<13} {clean(text)}", markup=False, style=style)

    known, unseen = report["claim"]["epsilon"], report["unseen"]["epsilon"]
    budget = "" if report["budget"] is None else f", budget {report['budget']:g}"
    line("run", f"{report['name']}: {report['status'].replace('_', ' ')}, {report['rounds']} rounds", "bold")
    line("ε", f"{_number(known)} by {report['unit']} at δ = {report['delta']:g}{budget}, {report['noise']}")
    line("", f"{_number(unseen)} for those who see models and do not know who took part")
    if unseen == known:
        line("", report["sampling"])
    if report["lost"]:
        line("attempts", f"{len(report['lost'])} gave no model and are counted")
    for person in report["persons"]:
        right, true = percent(person["meaning"]["right"]), percent(person["meaning"]["found"])
        line("means", f"for {person['who']}: the best test whether its data were used is right in at most {right} of")
        line("", f"cases, and at 1 % false alarms finds at most {true}; against {person['whom']}")


def _number(value: float | None) -> str:
    return "∞" if value is None else f"{value:.4g}"
