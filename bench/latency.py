"""Seconds a round: two nodes, 1M float32 parameters, no training, no evaluation; TLS, node authentication and SQLite
on. Beside it, in the same run, stock flower-superlink, flower-supernode and FedAvg.start.

    python -m bench.latency
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedward_common.config import RunConfig, parse_config
from fedward_server.events import read_events
from fedward_server.paths import RunPaths

from bench import figures
from bench.federation import Federation, federation, stock_command
from bench.figures import Figure

NODES = 2
TARGET = 0.6


def settings(rounds: int) -> RunConfig:
    """FedAvg on all nodes."""
    return parse_config(
        {
            "name": "latency",
            "task": "bench.nodes:NoTraining",
            "rounds": rounds,
            "algorithm": {"name": "fedavg"},
            "local": {"lr": 0.1, "steps": 1},
            "cohort": {"min_nodes": NODES, "quorum": NODES},
            "evaluation": {"every": 0},
            "secure_sum": {"enabled": False},
        }
    )


def fedward_seconds(rounds: int, parameters: int) -> list[float]:
    """Seconds from the end of each round to the end of the next, checkpoint included."""
    config = settings(rounds)
    with federation(NODES) as here:
        for key in here.keys:
            here.start_nodes([key], config, parameters)
        root = here.folder / "run"
        told = {"root": str(root), "config": config.model_dump(mode="json"), "parameters": parameters}
        here.wait(here.start_run("rounds", told), 120 + 10 * rounds)
        events = [event for event, _ in read_events(RunPaths(root).events)]
        ended = [datetime.fromisoformat(e["time"]).timestamp() for e in events if e["event"] == "round"]
        _check(here, len(ended) == rounds, str(events[-1:]))
    return _gaps(ended)


def stock_seconds(rounds: int, parameters: int) -> list[float]:
    """The same of stock Flower."""
    with federation(NODES, stock_command) as here:
        for number, key in enumerate(here.keys):
            start_supernode(here, number, key)
        told = {"root": str(here.folder), "nodes": NODES, "parameters": parameters, "rounds": rounds, "seconds": 300}
        here.wait(here.start_run("stock", told), 120 + 30 * rounds)
        result = here.folder / "stock.json"
        _check(here, result.exists(), "no result")
        content: dict[str, Any] = json.loads(result.read_text())
        _check(here, content["counts"] == [NODES] * rounds, str(content))
    return _gaps(content["ended"])


def start_supernode(here: Federation, number: int, key: Path) -> None:
    """Flower's own node."""
    command = [
        str(Path(sys.executable).parent / "flower-supernode"),
        "--superlink", here.fleet,
        "--root-certificates", str(here.paths.public_ca),
        "--auth-supernode-private-key", str(key),
        "--host", "127.0.0.1",
        "--port", str(here.free_port()),
    ]  # fmt: skip
    here.start(command, f"supernode-{number}.log", FLWR_HOME=str(here.folder / f"home-{number}"))


def _check(here: Federation, good: bool, what: str) -> None:
    if not good:
        logs = [path.read_text(errors="replace")[-2000:] for path in here.folder.glob("*.log")]
        raise RuntimeError("\n".join([what, *logs]))


def _gaps(ended: list[float]) -> list[float]:
    return [after - before for before, after in pairwise(ended)]


def main() -> None:
    """Measure and write bench/results/latency.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=31, help="of Fedward; the first only warms up")
    parser.add_argument("--stock-rounds", type=int, default=8)
    parser.add_argument("--parameters", type=int, default=1_000_000)
    options = parser.parse_args()
    measures: dict[str, tuple[Callable[[int, int], list[float]], int]] = {
        "fedward": (fedward_seconds, options.rounds),
        "stock": (stock_seconds, options.stock_rounds),
    }
    seconds = {name: measure(rounds, options.parameters) for name, (measure, rounds) in measures.items()}
    ours, stock = (statistics.median(seconds[name]) for name in ("fedward", "stock"))
    what = f"round, two nodes, {options.parameters:,} parameters, no training"
    figures.write(
        "latency",
        [
            Figure(f"{what}: median", ours, "s", f"<= {TARGET}", peer=stock, ratio=ours / stock),
            Figure("stock Flower's round over Fedward's", stock / ours, "times", ">= 10"),
            Figure(f"{what}: slowest", max(seconds["fedward"]), "s", peer=max(seconds["stock"])),
        ],
    )


if __name__ == "__main__":
    main()
