"""Algorithms on skewed data: accuracy, rounds to an accuracy, and what single nodes and groups get of it.

    nice -n 15 python -m bench.noniid --only rounds      (hours for all; each part writes its own file)

Run by the in-process engine: the algorithms, the round engine and the node's code of a real run. The data of all
compared algorithms are shared out by the same files in bench/partitions. With `--work DIR` a part that was ended goes
on where it was. Curves are drawn into docs/results.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fedward_client.state import FileStore
from fedward_common.config import RunConfig, parse_config
from fedward_common.messages import Purpose, Reply, Request
from fedward_common.node import MemoryStore, StateStore
from fedward_common.task import Task
from fedward_common.update import Vectors
from fedward_server.events import read_events
from fedward_server.paths import RunPaths
from fedward_server.simulation import Faults, simulate

from bench import convergence, curves, fashion, figures, skewed
from bench.convergence import Case, against
from bench.curves import Curve
from bench.figures import Figure
from bench.population import Population

PARTS = ("rounds", "cnn-dirichlet", "cnn-two-classes", "cnn-mnist", "stable", "personal", "writers")
LAST = 5
"""Rounds over which a final accuracy is averaged."""

ALGORITHMS: Mapping[str, Mapping[str, Any]] = {
    "FedAvg": {"name": "fedavg"},
    "FedProx": {"name": "fedprox", "mu": 0.01},
    "SCAFFOLD": {"name": "scaffold"},
    "FedNova": {"name": "fednova"},
    "FedDC": {"name": "feddc", "alpha": 0.1},
    "FedDyn": {"name": "feddyn", "alpha": 0.1},
    "MOON": {"name": "moon"},
    "FedNP": {"name": "fednp"},
    "Per-FedAvg": {"name": "perfedavg"},
    "FedRep": {"name": "fedrep", "head": ["2.*"], "head_steps": 10},
    "FedPer": {"name": "fedper", "head": ["2.*"]},
    "FedPHP": {"name": "fedphp"},
    "Ditto": {"name": "ditto"},
    "FedAvgM": {"name": "fedavgm"},
    "FedAdam": {"name": "fedadam"},
    "FedYogi": {"name": "fedyogi"},
    "FedAdagrad": {"name": "fedadagrad"},
    "adaptive weights": {"name": "fedadaptive", "classes": 10},
}
"""As the figures name them, with settings chosen before anything was measured."""


@dataclass(frozen=True)
class Run:
    """One training. data: "fashion" | "mnist" | "writers". part: of `bench.skewed`. evaluated: of how many rounds each
    the models are evaluated, on the test images and by each node on its own."""

    algorithm: str
    data: str
    part: str
    model: str
    nodes: int
    size: int
    rounds: int
    local: Mapping[str, Any] = field(hash=False)
    evaluated: int = 1
    own: bool = False
    seed: int = 0

    def config(self) -> RunConfig:
        """In the open: what a secure sum changes is measured elsewhere."""
        return parse_config(
            {
                "name": "noniid",
                "task": "bench.skewed:Skewed",
                "rounds": self.rounds,
                "seed": self.seed,
                "algorithm": dict(ALGORITHMS[self.algorithm]),
                "local": dict(self.local),
                "cohort": {"size": self.size},
                "secure_sum": {"enabled": False},
                "evaluation": {"every": self.evaluated if self.own else 0, "central": True},
            }
        )

    def task(self) -> Task:
        """Data are loaded once a process."""
        return _task(self.data, self.part, self.model, self.own)

    @property
    def key(self) -> str:
        """Names the run's folder; made of all that decides its result."""
        told = json.dumps([self.config().model_dump(mode="json"), self.data, self.part, self.model], sort_keys=True)
        digest = hashlib.sha256(told.encode()).hexdigest()[:12]
        return f"{self.algorithm}-{self.data}-{self.part}-{digest}".lower().replace(" ", "-")


@cache
def _task(data: str, part: str, model: str, own: bool) -> Task:
    if data == "writers":
        return Population()
    models = {"perceptron": skewed.perceptron, "logistic": skewed.logistic, "cnn": skewed.small_cnn}
    return skewed.Skewed(data, part, models[model], own)


@dataclass(frozen=True)
class Trained:
    """What a run gave. own: accuracy of each node on its own images with the model that it would use, in percent.
    model: the last one's vectors."""

    curve: Curve
    own: Mapping[str, float]
    model: Vectors

    @property
    def accuracy(self) -> float:
        """Percent, mean of the last rounds that were evaluated."""
        return statistics.fmean(self.curve.accuracies[-LAST:])


class _Listening(Faults):
    """Hears what nodes say of their own images."""

    def __init__(self) -> None:
        self.own: dict[str, float] = {}

    def answers(self, name: str, request: Request, reply: Reply) -> Reply | None:
        if request.purpose is Purpose.EVALUATE and reply.metrics.get("examples"):
            self.own[name] = 100 * reply.metrics["accuracy"] / reply.metrics["examples"]
        return reply


def train(run: Run, work: Path | None) -> Trained:
    """Run it; in `work`, what is left of it. Raises `RuntimeError` if nodes or the run failed."""
    torch.set_num_threads(1)
    if work is None:
        with tempfile.TemporaryDirectory(dir=convergence.memory_folder()) as folder:
            return _trained(run, RunPaths(Path(folder) / "run"), lambda name: MemoryStore())
    paths = RunPaths(work / run.key)
    return _trained(run, paths, lambda name: FileStore(paths.root / "nodes" / name))


def _trained(run: Run, paths: RunPaths, store: Callable[[str], StateStore]) -> Trained:
    heard = _Listening()
    outcome = simulate(run.config(), run.task(), run.nodes, paths, keep=run.nodes, faults=heard, store=store)
    if outcome.status != "finished":
        raise RuntimeError(f"{run}: {outcome.reason}")
    accuracies, moved, total = [], [], 0
    for event, _ in read_events(paths.events):
        if event["event"] != "round":
            continue
        if event["failures"]:
            raise RuntimeError(f"{run}: {event['failures']}")
        total += event["bytes_up"] + event["bytes_down"]
        if event["central"]:
            accuracies.append(100 * event["central"]["accuracy"])
            moved.append((event["round"], total))
    kept = paths.root / "own.json"
    if heard.own:
        kept.write_text(json.dumps(heard.own))
    own = json.loads(kept.read_text()) if run.own else {}
    return Trained(Curve(run.algorithm, tuple(accuracies), tuple(moved)), own, outcome.state.vectors)


@dataclass
class Bench:
    """The parts. rounds, processes: of each run, and runs at a time. drawn: where curves go."""

    work: Path | None
    processes: int
    rounds: int | None
    drawn: Path
    only: Sequence[str]

    def _all(self, runs: Iterable[Run]) -> Iterator[tuple[Run, Trained]]:
        runs = [run if self.rounds is None else replace(run, rounds=self.rounds) for run in runs]
        runs = [run for run in runs if not self.only or run.algorithm in self.only]
        if self.processes == 1:
            yield from ((run, train(run, self.work)) for run in runs)
            return
        with ProcessPoolExecutor(self.processes, get_context("spawn")) as pool:
            yield from zip(runs, pool.map(train, runs, [self.work] * len(runs)), strict=True)

    def to_accuracy(self) -> Iterator[Figure]:
        """Rounds to 0.79, one class a node, and on IID data."""
        names = ("fedavg", "scaffold", "feddc")
        cases = [Case(name, part) for part in fashion.PARTS for name in names]
        found = convergence.tune(cases, self.processes)
        best = {case: tuning.best() for case, tuning in found.items()}
        for part in fashion.PARTS:
            fedavg = best[Case("fedavg", part)]
            what = f"rounds to {convergence.GOAL}, {part.replace('_', ' ')}, 1000 nodes, 50 a round"
            single = part == "single_class"
            yield Figure(f"FedAvg: {what}", fedavg, "rounds", "<= 180" if single else None)
            for name, shown, most in (("scaffold", "SCAFFOLD", "<= 0.40"), ("feddc", "FedDC", "<= 0.32")):
                own = best[Case(name, part)]
                yield against(f"{shown}: {what}", own, fedavg)
                ratio = None if own is None or fedavg is None else own / fedavg
                what_of = f"{shown}'s rounds over FedAvg's, {part.replace('_', ' ')}"
                yield Figure(what_of, ratio, "", most if single else "<= 1.10")

    def cnn(self, data: str, part: str, goals: Mapping[str, float]) -> Iterator[Figure]:
        """The small CNN on ten nodes, as in NIID-Bench."""
        local = {"lr": 0.01, "momentum": 0.9, "batch_size": 64}
        # SCAFFOLD needs the same K on every node: ten passes over the mean node's images.
        length = {name: {"steps": 940} if name == "SCAFFOLD" else {"epochs": 10} for name in goals}
        runs = [Run(name, data, part, "cnn", 10, 10, 50, {**local, **length[name]}) for name in goals]
        done = []
        for run, trained in self._all(runs):
            done.append(trained.curve)
            skew = part.removesuffix("-10").replace("_", " ")
            what = f"{run.algorithm}: {data}, {skew}, 10 nodes, {run.rounds} rounds, CNN: test accuracy"
            yield Figure(what, trained.accuracy, "%", f">= {goals[run.algorithm]}")
        curves.draw(done, f"{data}, {part}, small CNN", self.drawn / f"noniid-cnn-{data}-{part}.svg")

    def stable(self) -> Iterator[Figure]:
        """No algorithm may end at chance."""
        for rate in (0.05, 0.1, 0.2):
            local = {"lr": rate, "batch_size": 32, "steps": 50}
            runs = [
                Run(name, "fashion", "dirichlet-100", "perceptron", 100, 10, 40, local, 10) for name in ALGORITHMS
            ]
            for run, trained in self._all(runs):
                what = f"{run.algorithm}: Dirichlet 0.5, 100 nodes, 10 a round, η = {rate:g}: test accuracy"
                yield Figure(what, trained.curve.accuracies[-1], "%", "> 50")

    def personal(self) -> Iterator[Figure]:
        """Each node's accuracy on its own images, two classes a node."""
        local = {"lr": 0.05, "batch_size": 32, "steps": 50}
        runs = [
            Run(name, "fashion", "two_classes-100", "perceptron", 100, 10, 100, local, 10, own=True)
            for name in ("FedAvg", "Per-FedAvg", "FedRep", "FedPer", "FedPHP", "Ditto")
        ]
        plain: Trained | None = None
        for run, trained in self._all(runs):
            own = sorted(trained.own.values())
            plain = plain or trained
            what = f"{run.algorithm}: two classes a node, 100 nodes: accuracy on a node's own images"
            beside = list(plain.own.values())
            for how, of in (("mean of nodes", np.mean), ("tenth percentile of nodes", lambda v: np.percentile(v, 10))):
                value, peer = float(of(own)), float(of(beside))
                yield Figure(f"{what}, {how}", value, "%", peer=peer, ratio=value / peer)
            if trained is not plain:
                gained = statistics.fmean(own) - statistics.fmean(beside)
                yield Figure(f"{run.algorithm}: mean of nodes less FedAvg's", gained, "points", "> 0")

    def writers(self) -> Iterator[Figure]:
        """A writer a node; tested on writers whom no node has."""
        run = Run("FedAvg", "writers", "writer", "cnn", 539, 50, 150, {"lr": 0.1, "batch_size": 20, "steps": 20}, 5)
        for _, trained in self._all([run]):
            task = Population()
            staff, students = task.by_population(trained.model)
            what = "MNIST by writer, 539 nodes, 50 a round: accuracy on unseen writers"
            yield Figure(what, trained.accuracy, "%", ">= 97")
            yield Figure("the same, staff", staff, "%")
            yield Figure("the same, students", students, "%")
            yield Figure("gap between the two populations", abs(staff - students), "points", "<= 1.5")
            curves.draw([trained.curve], "MNIST by writer, unseen writers", self.drawn / "noniid-writers.svg")


def main() -> None:
    """Measure one part and write bench/results/noniid-PART.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", required=True, choices=PARTS)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--work", type=Path, help="keep runs there, and go on with those that were ended")
    parser.add_argument("--rounds", type=int, help="instead of each run's own")
    parser.add_argument("--algorithms", nargs="*", default=(), help="only these")
    parser.add_argument("--results", type=Path, default=figures.RESULTS)
    parser.add_argument("--drawn", type=Path, default=curves.FOLDER)
    options = parser.parse_args()
    bench = Bench(options.work, options.processes, options.rounds, options.drawn, options.algorithms)
    dirichlet = dict.fromkeys(("FedAvg", "FedProx", "SCAFFOLD", "FedNova"), 88.4)
    parts: Mapping[str, Callable[[], Iterator[Figure]]] = {
        "rounds": bench.to_accuracy,
        "cnn-dirichlet": lambda: bench.cnn("fashion", "dirichlet-10", dirichlet),
        "cnn-two-classes": lambda: bench.cnn("fashion", "two_classes-10", {"SCAFFOLD": 78.0}),
        "cnn-mnist": lambda: bench.cnn("mnist", "dirichlet-10", {"FedAvg": 98.9}),
        "stable": bench.stable,
        "personal": bench.personal,
        "writers": bench.writers,
    }
    figures.write(f"noniid-{options.only}", parts[options.only](), options.results)


if __name__ == "__main__":
    main()
