"""`fedward new`, `fedward plan`, `fedward simulate`: a data scientist's work before any node is involved."""

from __future__ import annotations

import getpass
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from fedward_common.config import RunConfig
    from rich.console import Console

    from fedward_server.plan import Forecast

RunFile = Annotated[Path, typer.Argument(help="the run's TOML, beside the task's package", metavar="run.toml")]
Nodes = Annotated[int | None, typer.Option("--nodes", min=1, max=10_000, help="how many nodes")]
DataFile = Annotated[
    Path | None,
    typer.Option("--data", help="TOML with one table a node: what its [data] table would say", metavar="nodes.toml"),
]


def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="lower-case letters, digits, hyphens")],
    folder: Annotated[Path, typer.Option("--in", help="where to make the project's folder")] = Path("."),
) -> None:
    """Write a task project that runs at once: sample data, model, configuration, bundle settings."""
    from fedward_server.project import create

    root = folder / name
    files = create(name, folder, _publisher())
    for file in files:
        typer.echo(f"  {file}")
    typer.echo(f"\nRun it:  cd {root} && fedward simulate run.toml --nodes 20")


def plan(
    run: Annotated[Path | None, typer.Argument(help="the run's TOML", metavar="run.toml")] = None,
    keys: Annotated[bool, typer.Option("--keys", help="list all configuration keys instead")] = False,
    nodes: Nodes = None,
    data: DataFile = None,
) -> None:
    """Check a run and forecast its bytes and seconds a round. Exit code 1 if anything is refused."""
    from rich.console import Console

    console = Console()
    if keys:
        _print_keys(console)
        return
    if run is None:
        raise typer.BadParameter("give the run's TOML, or --keys")

    from fedward_common.config import load_config

    from fedward_server.plan import bundle_digest, forecast, open_task, refusals
    from fedward_server.scenario import scenario

    config = load_config(run)
    problems = refusals(config, run.resolve().parent)
    if problems:
        console.print(f"{config.name}: refused", style="bold red", markup=False)
        for problem in problems:
            console.print(f"- {problem}", style="red", markup=False)
        raise typer.Exit(1)
    task = open_task(config, run.resolve().parent)
    tables = scenario(config, nodes, data).trained
    sample = next(iter(tables.values()), None)
    cost = forecast(config, task, len(tables), sample if _readable(task, sample) else None)
    _print_forecast(console, config, cost)
    console.print(f"bundle       {bundle_digest(run.resolve().parent)}")


def simulate(
    run: RunFile,
    nodes: Nodes = None,
    data: DataFile = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="run directory; default runs/NAME-N beside run.toml")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="events as JSON lines")] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto")] = "cpu",
) -> None:
    """Run a whole federation in this process: the very algorithm, round and pipeline code that nodes run."""
    from fedward_common.config import load_config

    from fedward_server.rehearsal import rehearse
    from fedward_server.scenario import scenario

    config = load_config(run)
    project = run.resolve().parent
    ended = rehearse(config, project, scenario(config, nodes, data).nodes, out, device, as_json)
    if not as_json:
        typer.echo(f"run directory  {ended.paths.root}")
        typer.echo(f"model          {ended.model or 'none: no round was finished'}")
        if ended.paths.report.exists():
            typer.echo(f"privacy report {ended.paths.report}")
    if ended.status == "failed":
        raise typer.Exit(1)


def _publisher() -> str:
    """A name that Flower accepts as a bundle's publisher."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = ""
    return re.sub(r"[^A-Za-z0-9-]", "", user) or "local"


def _readable(task: Any, table: Any) -> bool:
    """Whether this machine has the data; a node's data is on the node, so its absence is no error."""
    if table is None:
        return False
    try:
        task.data(table)
    except (OSError, KeyError):
        return False
    return True


def _print_keys(console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    from fedward_server.keys import all_keys

    listed: dict[str, Table] = {}
    for key in all_keys():
        if key.table not in listed:
            table = Table(box=None, pad_edge=False, show_header=True, header_style="dim")
            for column in ("key", "type", "default", "description"):
                table.add_column(column, overflow="fold")
            listed[key.table] = table
        listed[key.table].add_row(*map(Text, (key.name, key.type, key.default, key.description)))
    for name, table in listed.items():
        console.print(Text(f"[{name}]" if name else "top level, or [run]", style="bold"))
        console.print(table)
        console.print()


def _print_forecast(console: Console, config: RunConfig, cost: Forecast) -> None:
    from fedward_common.aggregation_options import Mean

    from fedward_server.live import megabytes

    def line(label: str, text: str) -> None:
        console.print(f"{label:<12} {text}", markup=False, highlight=False)

    line("run", f"{config.name}: {config.algorithm.name}, {config.rounds} rounds, {cost.cohort} nodes a round")
    buffers = f" and {cost.buffers:,} buffer values" if cost.buffers else ""
    line("parameters", f"{cost.parameters:,}{buffers}")
    if cost.frozen:
        line("frozen", f"{cost.frozen:,} values, the same on every side: never sent")
    if cost.kept:
        line("private", f"{cost.kept:,} values, which never leave their node")
    if config.lora is not None and not config.lora.freeze_a:
        line("warning", "lora.freeze_a = false: the mean of A times the mean of B is not the mean of the products B A")
    if config.shared is not None:
        line("shared data", f"{100 * config.shared.share:g} % of what a node trains on is the task's public data")
    line("down", f"{megabytes(cost.down)} MB a node, {megabytes(cost.down * cost.cohort)} MB a round")
    line("up", f"{megabytes(cost.up)} MB a node, {megabytes(cost.up * cost.cohort)} MB a round")
    secure = cost.secure
    if secure is None:
        line("secure sum", "off: the server sees each node's update, weight and metrics")
    else:
        graph = "all with all" if secure.complete else f"{secure.holders} neighbours a node (k)"
        lost, colluding = secure.n - secure.survivors, secure.colluders
        survives = f"survives {_count(lost, 'drop-out')} and {_count(colluding, 'colluding node')}"
        line("secure sum", f"{secure.n} nodes, {graph}, threshold {secure.threshold} (t): {survives} a round")
    if not isinstance(config.aggregation, Mean):
        keeps = f": the server keeps {megabytes(cost.up * cost.cohort)} MB a round"
        line("aggregation", f"{config.aggregation}{keeps if config.aggregation.single_updates else ''}")
    private = cost.privacy
    if private is not None and config.privacy is not None:
        options = config.privacy
        where = f"{options.mechanism} noise" if options.mechanism else "noise in each local step"
        line("privacy", f"by {options.unit}, {where}, z = {private.noise_multiplier:.4g}, "
                        f"clip {options.clip:g}, δ = {options.delta:g}")  # fmt: skip
        line("ε", ", ".join(f"{epsilon:.3g} after round {r}" for r, epsilon in private.spent.items()) or "–")
        if options.mechanism == "distributed":
            nobody, most = (f"{100 * surplus:.0f} %" for surplus in private.surplus)
            line("noise", f"variance in a sum {nobody} over what was asked for if nobody drops out, {most} at most "
                          f"(noise_on_dropout = {options.noise_on_dropout!r})")  # fmt: skip
        for assumption in private.assumptions:
            line("", assumption)
        if private.unseen != private.spent:
            told = ", ".join(f"{epsilon:.3g} after round {r}" for r, epsilon in private.unseen.items())
            line("ε, unseen", f"{told}: against those who see models and do not know who took part")
        line("", private.sampling)
        if private.last < config.rounds:
            line("warning", f"the budget of ε = {options.budget:g} ends the run after round {private.last}")
    if config.evaluation.every:
        every = "every round" if config.evaluation.every == 1 else f"every {config.evaluation.every} rounds"
        cost_down = f"{megabytes(cost.evaluation)} MB down a node" if cost.evaluation else "with the next round's sum"
        line("evaluation", f"{cost_down}, {every}")
    if cost.train_seconds is None or cost.step_seconds is None:
        line("training", "not measured: no node's data is here (give --data)")
    else:
        line(
            "training",
            f"{cost.train_seconds:.2g} s a round on a machine like this: "
            f"{cost.steps} steps of {cost.step_seconds * 1000:.2g} ms",
        )
        if cost.train_seconds > config.cohort.deadline:
            line(
                "warning",
                f"that is over cohort.deadline = {config.cohort.deadline:g} s: no reply would be in time",
            )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
