"""What privacy costs in accuracy: every unit and mechanism against ε, and algorithms under it.

    nice -n 10 python -m bench.privacy

Fashion-MNIST over a hundred nodes (logistic regression), all of them in every round; MNIST by writer, where a writer is
a patient and nobody in the test set was trained on. Run by the in-process engine: the protocol, the mechanisms and the
node's code of a real run. `--only` runs a part.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from fedward_common.config import RunConfig, parse_config
from fedward_common.task import Task
from fedward_server.paths import RunPaths
from fedward_server.simulation import simulate

from bench import fashion, figures, writers
from bench.convergence import Watch
from bench.figures import Figure

DELTA = 1e-5
EPSILONS = (2.0, 8.0)
LAST = 3
"""Rounds over which accuracy is averaged."""

MECHANISMS: Mapping[str, Mapping[str, Any]] = {
    "site, distributed": {"unit": "site", "mechanism": "distributed", "clip": 0.3},
    "site, central": {"unit": "site", "mechanism": "central", "clip": 0.3},
    "site, central, adaptive clip": {"unit": "site", "mechanism": "central", "clip": 0.1, "clip_quantile": 0.5},
    "record": {"unit": "record", "clip": 1.0, "sampling_rate": 0.05},
}
ALGORITHMS: Mapping[str, Mapping[str, Any]] = {
    "FedAvg": {"name": "fedavg"},
    "FedProx": {"name": "fedprox", "mu": 0.1},
    "SCAFFOLD": {"name": "scaffold"},
}


@dataclass(frozen=True)
class Run:
    """One training. part: of Fashion-MNIST ("iid", "single_class"), or "writers". epsilon: of all rounds together,
    None without privacy."""

    part: str
    nodes: int
    rounds: int
    lr: float
    algorithm: str = "FedAvg"
    mechanism: str | None = None
    epsilon: float | None = None
    seed: int = 0
    privacy: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def config(self) -> RunConfig:
        """All nodes in every round; a tenth may drop out, a tenth may collude."""
        tables: dict[str, Any] = {
            "name": "privacy",
            "task": "bench:Task",
            "rounds": self.rounds,
            "seed": self.seed,
            "algorithm": dict(ALGORITHMS[self.algorithm]),
            "local": {"lr": self.lr, "batch_size": 64, "steps": 20},
            "cohort": {"min_nodes": self.nodes, "size": self.nodes},
            "evaluation": {"every": 0, "central": True},
            "secure_sum": {"enabled": self.epsilon is not None, "dropout": 0.1, "corrupt": 0.1},
        }
        if self.epsilon is not None:
            tables["privacy"] = {**self.privacy, "target_epsilon": self.epsilon, "delta": DELTA}
        return parse_config(tables)

    @property
    def what(self) -> str:
        """For people."""
        data = "MNIST by writer" if self.part == "writers" else f"Fashion-MNIST, {self.part.replace('_', ' ')}"
        spent = "no privacy" if self.epsilon is None else f"{self.mechanism}, ε = {self.epsilon:g}"
        return f"{data}, {self.nodes} nodes, {self.rounds} rounds, {self.algorithm}, η = {self.lr:g}, {spent}"


@cache
def _task(part: str, nodes: int) -> Task:
    if part == "writers":
        return writers.ByWriter(nodes)
    return fashion.LogisticFashion(fashion.make_partitions(fashion.labels("train"), nodes)[part])


def accuracy(run: Run) -> float:
    """On test data that no node has, in percent: the mean of the last rounds. Raises RuntimeError if nodes failed."""
    torch.set_num_threads(1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        paths = RunPaths(Path(folder) / "run")
        watch = Watch(paths.events, run.rounds)
        outcome = simulate(run.config(), _task(run.part, run.nodes), run.nodes, paths, log=watch)
    if outcome.status != "finished" or watch.failures:
        raise RuntimeError(f"{run.what}: {outcome.reason or 'nodes failed'}")
    found = 100 * statistics.fmean(watch.accuracies[-LAST:])
    print(f"{run.what}: {found:.2f} % in {time.monotonic() - began:.0f} s", flush=True)
    return found


def _private(run: Run, mechanism: str, epsilon: float, lr: float, options: Mapping[str, Any]) -> Run:
    return Run(run.part, run.nodes, run.rounds, lr, run.algorithm, mechanism, epsilon, run.seed, options)


def by_epsilon(nodes: int, rounds: int) -> list[Run]:
    """Every mechanism at every ε, on IID data."""
    plain = Run("iid", nodes, rounds, 0.1)
    rates = {"record": 0.5}
    return [plain] + [
        _private(plain, name, epsilon, rates.get(name, 0.02), options)
        for name, options in MECHANISMS.items()
        for epsilon in EPSILONS
    ]


def by_algorithm(nodes: int, rounds: int) -> list[Run]:
    """Every algorithm with each node holding one class: without privacy, by record, and by site where it may."""
    runs = []
    for algorithm in ALGORITHMS:
        plain = Run("single_class", nodes, rounds, 0.05, algorithm)
        runs += [plain, _private(plain, "record", 8.0, 0.2, MECHANISMS["record"])]
        if algorithm != "SCAFFOLD":
            runs.append(_private(plain, "site, distributed", 8.0, 0.02, MECHANISMS["site, distributed"]))
    return runs


def by_writer(nodes: int, rounds: int) -> list[Run]:
    """A writer as a patient, and as so many records."""
    plain = Run("writers", nodes, rounds, 0.2)
    record = {"unit": "record", "clip": 1.0, "sampling_rate": 0.02}
    patient = {"unit": "patient", "clip": 10.0, "sampling_rate": 0.1}
    return [plain] + [
        _private(plain, options["unit"], epsilon, lr, options)
        for options, lr in ((record, 0.5), (patient, 0.02))
        for epsilon in EPSILONS
    ]


def measured(runs: Iterable[Run], processes: int) -> Iterator[tuple[Run, float]]:
    """Each run with its accuracy."""
    runs = list(runs)
    if processes == 1:
        yield from ((run, accuracy(run)) for run in runs)
        return
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        yield from zip(runs, pool.map(accuracy, runs), strict=True)


def rows(found: Iterable[tuple[Run, float]]) -> Iterator[Figure]:
    """Accuracies; beside each private one that without privacy. Distributed noise is held against central."""
    plain: dict[tuple[str, str], float] = {}
    by_key: dict[tuple[str, str, str, float], float] = {}
    for run, value in found:
        name = f"{run.what}: test accuracy"
        if run.epsilon is None or run.mechanism is None:
            plain[run.part, run.algorithm] = value
            yield Figure(name, value, "%")
            continue
        peer = plain[run.part, run.algorithm]
        by_key[run.part, run.algorithm, run.mechanism, run.epsilon] = value
        yield Figure(name, value, "%", peer=peer, ratio=value / peer)
    for (part, algorithm, mechanism, epsilon), value in by_key.items():
        central = by_key.get((part, algorithm, "site, central", epsilon))
        if mechanism == "site, distributed" and central is not None:
            what = f"central noise's accuracy less distributed noise's, {part}, {algorithm}, ε = {epsilon:g}"
            yield Figure(what, central - value, "points", "<= 1")


def main() -> None:
    """Measure and write bench/results/privacy.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--groups", type=int, default=10, help="nodes that the writers are shared out to")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--only", choices=("epsilon", "algorithm", "writer"))
    parser.add_argument("--results", type=Path, default=figures.RESULTS)
    options = parser.parse_args()
    pieces = {
        "epsilon": lambda: by_epsilon(options.nodes, options.rounds),
        "algorithm": lambda: by_algorithm(options.nodes, options.rounds),
        "writer": lambda: by_writer(options.groups, options.rounds),
    }
    runs = [run for name, make in pieces.items() if options.only in (None, name) for run in make()]
    name = "privacy" if options.only is None else f"privacy-{options.only}"
    figures.write(name, rows(measured(runs, options.processes)), options.results)


if __name__ == "__main__":
    main()
