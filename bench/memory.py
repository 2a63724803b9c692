"""Memory of the server while it sums a cohort of 50 updates of 10M float32 parameters: growth of the ServerApp's peak
over what it held before the round, with stock FedAvg beside it; the SuperLink's own peak and its database. And ten
uploads of 40 MB at once: do all arrive?

    python -m bench.memory
"""

from __future__ import annotations

import argparse
import contextlib
import json
import threading
import uuid
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
from fedward_common.config import RunConfig, parse_config
from fedward_server.events import read_events
from fedward_server.paths import RunPaths

from bench import figures
from bench.federation import Federation, federation
from bench.figures import Figure

MIB = 2.0**20


def settings(cohort: int, seconds: float) -> RunConfig:
    """One round of FedAvg on all nodes."""
    return parse_config(
        {
            "name": "memory",
            "task": "bench.nodes:NoTraining",
            "rounds": 1,
            "algorithm": {"name": "fedavg"},
            "local": {"lr": 0.1, "steps": 1},
            "cohort": {"min_nodes": cohort, "quorum": cohort, "deadline": seconds, "max_failed_rounds": 1},
            "evaluation": {"every": 0},
            "secure_sum": {"enabled": False},
        }
    )


@dataclass(frozen=True)
class Growth:
    """Bytes. serverapp: peak over what the process held before the round. superlink: the largest sum over its
    processes without the ServerApp. database: the largest sum of its files. arrived: updates in the sum."""

    serverapp: int
    superlink: int
    database: int
    arrived: int


class Watch:
    """Looks at the SuperLink's memory and files five times a second while the block runs."""

    def __init__(self, here: Federation) -> None:
        self._here = here
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.superlink = 0
        self.database = 0

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.2):
            with contextlib.suppress(psutil.Error):
                self.superlink = max(self.superlink, self._here.superlink.memory_info().rss)
            self.database = max(self.database, database_bytes(self._here))


def database_bytes(here: Federation) -> int:
    """The SuperLink's database with its journal."""
    sizes = []
    for path in here.paths.superlink_database.parent.glob("superlink.db*"):
        with contextlib.suppress(FileNotFoundError):
            sizes.append(path.stat().st_size)
    return sum(sizes)


def fedward_growth(cohort: int, parameters: int, seconds: float) -> Growth:
    """One round of Fedward's."""
    config = settings(cohort, seconds)
    with federation(cohort) as here, Watch(here) as watch:
        here.start_nodes(here.keys, config, parameters)
        root = here.folder / "run"
        told = {"root": str(root), "config": config.model_dump(mode="json"), "parameters": parameters}
        here.wait(here.start_run("rounds", told), seconds + 180)
        memory = _result(here, root / "memory.json")
        rounds = [event for event, _ in read_events(RunPaths(root).events) if event["event"].startswith("round")]
        if not rounds or rounds[0]["event"] != "round":
            raise RuntimeError(f"the round failed: {rounds} {memory}")
        return Growth(memory["peak"] - memory["before"], watch.superlink, watch.database, len(rounds[0]["replies"]))


def stock_growth(cohort: int, parameters: int, seconds: float) -> Growth:
    """One round of Flower's FedAvg in a ServerApp on the same SuperLink."""
    with federation(cohort) as here, Watch(here) as watch:
        here.start_holder("bench.stock_nodes", here.keys)
        told = {"root": str(here.folder), "nodes": cohort, "parameters": parameters, "rounds": 1, "seconds": seconds}
        here.wait(here.start_run("stock", told), seconds + 180)
        result = _result(here, here.folder / "stock.json")
        return Growth(result["peak"] - result["before"], watch.superlink, watch.database, result["counts"][0])


def whole_uploads(nodes: int, parameters: int, seconds: float) -> int:
    """Uploads that arrive whole of `nodes` that start at once."""
    with federation(nodes) as here:
        here.start_nodes(here.keys, settings(nodes, seconds), parameters)
        told = {
            "root": str(here.folder), "run": uuid.uuid4().hex, "nodes": nodes, "parameters": parameters,
            "seconds": seconds,
        }  # fmt: skip
        here.wait(here.start_run("exchange", told), seconds + 180)
        result = _result(here, here.folder / "exchange.json")
        for name, failure in result["failures"].items():
            print(f"{name}: {failure}", flush=True)
        return len(result["whole"])


def _result(here: Federation, path: Path) -> dict[str, Any]:
    if not path.exists():
        raise RuntimeError(f"no {path.name}\n{here.log}")
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def main() -> None:
    """Measure and write bench/results/memory.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=10_000_000)
    parser.add_argument("--cohort", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=600, help="a round's deadline")
    options = parser.parse_args()
    model = 4 * options.parameters
    small = fedward_growth(5, options.parameters, options.seconds)
    print(small, flush=True)
    large = fedward_growth(options.cohort, options.parameters, options.seconds)
    print(large, flush=True)
    whole = whole_uploads(10, options.parameters, options.seconds)
    stock = stock_growth(options.cohort, options.parameters, options.seconds)
    print(stock, flush=True)
    size = f"{options.cohort} × {options.parameters / 1e6:g}M parameters"
    many, few, theirs = (growth.serverapp / model for growth in (large, small, stock))
    figures.write(
        "memory",
        [
            Figure(f"ServerApp's peak growth, {size}", many, "model sizes", "<= 4", peer=theirs, ratio=many / theirs),
            Figure("the same over that of a cohort of 5", many / few, "", "<= 1.2"),
            Figure("the same of a cohort of 5", few, "model sizes"),
            Figure("updates in the sum", large.arrived, "", f">= {options.cohort}", peer=stock.arrived),
            Figure("SuperLink's peak in that round", large.superlink / MIB, "MiB", peer=stock.superlink / MIB),
            Figure("SuperLink's database at its largest", large.database / MIB, "MiB", peer=stock.database / MIB),
            Figure(f"of ten uploads of {model / 1e6:g} MB at once, arrived whole", whole, "", ">= 10"),
        ],
    )


if __name__ == "__main__":
    main()
