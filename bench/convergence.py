"""Rounds to a test accuracy: FedAvg against SCAFFOLD where every node holds one class, and on IID data; and the three
quadratics. Run by the in-process engine: the algorithms, the round engine and the node's code of a real run.

    nice -n 15 python -m bench.convergence
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from fedward_common.config import RunConfig, parse_config
from fedward_common.task import Data
from fedward_server.events import Event, EventLog
from fedward_server.paths import RunPaths
from fedward_server.simulation import simulate
from torch import nn
from torch.utils.data import TensorDataset

from bench import fashion, figures
from bench.figures import Figure

GOAL = 0.79
WINDOW = 5
RATES = (0.1, 0.2, 0.3)
SEEDS = (0, 1, 2)
ALGORITHMS = ("fedavg", "scaffold")
MOST = 400
"""Rounds after which a run is given up."""


@dataclass(frozen=True)
class Case:
    """What is compared over learning rates: an algorithm on a partition."""

    algorithm: str
    part: str


@dataclass
class Tuning:
    """The search for a case's best learning rate: median over seeds of the rounds that it needs.

    A run is stopped as soon as it is longer than the best median so far, and a learning rate is given up when two of
    its seeds were: its median cannot be the better one then.
    """

    rounds: dict[float, dict[int, int | None]] = field(default_factory=lambda: {rate: {} for rate in RATES})
    """Learning rate -> seed -> rounds, None if stopped."""

    def median(self, rate: float) -> float | None:
        """None if the rate was given up or is not done."""
        done = [count if count is not None else MOST + 1 for count in self.rounds[rate].values()]
        middle = statistics.median(done) if len(done) == len(SEEDS) else MOST + 1
        return middle if middle <= MOST else None

    def best(self) -> float | None:
        """The smallest median so far."""
        return min((m for rate in RATES if (m := self.median(rate)) is not None), default=None)

    def limit(self) -> int:
        """Rounds that a run may take."""
        best = self.best()
        return MOST if best is None else int(best)

    def hopeless(self, rate: float) -> bool:
        """Whether enough of its seeds were stopped."""
        return sum(count is None for count in self.rounds[rate].values()) > len(SEEDS) // 2


class Watch(EventLog):
    """Keeps a run's test accuracies in memory and knows when the goal is reached."""

    def __init__(self, path: Path, limit: int) -> None:
        super().__init__(path)
        self._limit = limit
        self.accuracies: list[float] = []
        self.failures = 0

    def append(self, kind: str, **fields: Any) -> Event:
        if kind == "round":
            self.accuracies.append(fields["central"]["accuracy"])
            self.failures += len(fields["failures"])
        return {"event": kind, **fields}

    def reached(self) -> bool:
        """Whether the mean of the last five rounds is at the goal."""
        return len(self.accuracies) >= WINDOW and statistics.fmean(self.accuracies[-WINDOW:]) >= GOAL

    def over(self) -> bool:
        return self.reached() or len(self.accuracies) >= self._limit


@cache
def _task(part: str) -> fashion.LogisticFashion:
    return fashion.LogisticFashion(fashion.partition(part))


def settings(case: Case, rate: float, seed: int) -> RunConfig:
    """1000 nodes, 50 a round, ten epochs of five steps (60 examples in batches of 12)."""
    return parse_config(
        {
            "name": "convergence",
            "task": "bench.fashion:LogisticFashion",
            "rounds": MOST,
            "seed": seed,
            "algorithm": {"name": case.algorithm},
            "local": {"lr": rate, "batch_size": 12, "steps": 50},
            "cohort": {"size": 50},
            "secure_sum": {"enabled": False},
            "evaluation": {"every": 0, "central": True},
        }
    )


def rounds_needed(case: Case, rate: float, seed: int, limit: int) -> tuple[int | None, float]:
    """Rounds to the goal (None if more than `limit`), and seconds a round."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=memory_folder()) as folder:
        paths = RunPaths(Path(folder) / "run")
        watch = Watch(paths.events, limit)
        began = time.monotonic()
        outcome = simulate(
            settings(case, rate, seed),
            _task(case.part),
            fashion.NODES,
            paths,
            keep=fashion.NODES,
            log=watch,
            should_stop=watch.over,
        )
        seconds = time.monotonic() - began
    if outcome.status == "failed" or watch.failures:
        raise RuntimeError(f"{case} η = {rate}: {outcome.reason or 'nodes failed'}")
    count = len(watch.accuracies)
    return (count if watch.reached() else None), seconds / count


def memory_folder() -> str | None:
    """Where files that nobody needs later are quickest written."""
    # Checkpoints are written and forgotten: no need to wait for a disk.
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def tune(cases: Iterable[Case], processes: int) -> dict[Case, Tuning]:
    """Search all cases at once, a run a process."""
    found = {case: Tuning() for case in cases}
    jobs = [(case, rate, seed) for rate in RATES for seed in SEEDS for case in found]
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        running: dict[Future[tuple[int | None, float]], tuple[Case, float, int]] = {}
        while jobs or running:
            while jobs and len(running) < processes:
                case, rate, seed = job = jobs.pop(0)
                if not found[case].hopeless(rate):
                    running[pool.submit(rounds_needed, case, rate, seed, found[case].limit())] = job
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                case, rate, seed = running.pop(future)
                count, seconds = future.result()
                found[case].rounds[rate][seed] = count
                text = "stopped" if count is None else f"{count} rounds"
                print(f"{case.algorithm} {case.part} η={rate} seed {seed}: {text}, {seconds:.2f} s each", flush=True)
    return found


def fashion_figures(processes: int) -> Iterator[Figure]:
    """Rounds by case and learning rate, and the comparisons."""
    found = tune([Case(name, part) for part in fashion.PARTS for name in ALGORITHMS], processes)
    best = {}
    for case, tuning in found.items():
        best[case] = tuning.best()
        for rate in RATES:
            name = f"{case.algorithm}, {case.part}: median rounds to {GOAL} at η = {rate} (none: stopped as worse)"
            yield Figure(name, tuning.median(rate), "rounds")
    fedavg, scaffold = (best[Case(name, "single_class")] for name in ALGORITHMS)
    yield Figure("FedAvg, single class, best η: rounds to 0.79", fedavg, "rounds", "<= 180")
    ratio = _ratio(scaffold, fedavg)
    yield Figure("SCAFFOLD's rounds over FedAvg's, single class, best η each", ratio, "", "<= 0.40")
    yield against("SCAFFOLD, single class, best η: rounds to 0.79", scaffold, fedavg)
    iid_fedavg, iid_scaffold = (best[Case(name, "iid")] for name in ALGORITHMS)
    yield Figure("FedAvg, IID, best η: rounds to 0.79", iid_fedavg, "rounds")
    # No gain is to be had on IID data; no loss either, but one round of nine is 11 %.
    yield Figure("SCAFFOLD's rounds over FedAvg's, IID, best η each", _ratio(iid_scaffold, iid_fedavg), "", "<= 1.10")
    yield against("SCAFFOLD, IID, best η: rounds to 0.79", iid_scaffold, iid_fedavg)


def against(name: str, rounds: float | None, peer: float | None) -> Figure:
    """Rounds beside a peer's."""
    return Figure(name, rounds, "rounds", peer=peer, ratio=_ratio(rounds, peer))


def _ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one / other


class Quadratic:
    """f_i(w) = a_i/2 (w − b_i)², in float64."""

    def model(self) -> nn.Module:
        model = nn.Module()
        model.w = nn.Parameter(torch.tensor([3.0], dtype=torch.float64))
        return model

    def data(self, config: Mapping[str, Any]) -> Data:
        return Data(TensorDataset(*(torch.tensor([config[name]], dtype=torch.float64) for name in ("a", "b"))))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        a, b = batch
        loss: torch.Tensor = (0.5 * a * (model.w - b) ** 2).mean()
        return loss

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, float]:
        return {}


QUADRATICS = {"n0": {"a": 0.2, "b": -1.6}, "n1": {"a": 0.4, "b": 0.0}, "n2": {"a": 1.0, "b": 1.6}}


def distance(algorithm: Mapping[str, Any], rounds: int = 200) -> float:
    """|w − w*| after 200 rounds of 50 steps at η = 0.1 over the three quadratics."""
    config = parse_config(
        {
            "name": "quadratics",
            "task": "bench.convergence:Quadratic",
            "rounds": rounds,
            "algorithm": dict(algorithm),
            "local": {"lr": 0.1, "steps": 50},
            "secure_sum": {"enabled": False},
            "evaluation": {"every": 0},
        }
    )
    with tempfile.TemporaryDirectory(dir=memory_folder()) as folder:
        outcome = simulate(config, Quadratic(), QUADRATICS, RunPaths(Path(folder) / "run"))
    if outcome.status != "finished":
        raise RuntimeError(outcome.reason)
    total = sum(node["a"] for node in QUADRATICS.values())
    optimum = sum(node["a"] * node["b"] for node in QUADRATICS.values()) / total
    return abs(float(outcome.state.model[0]) - optimum)


def quadratic_figures() -> Iterator[Figure]:
    """Where the algorithms end."""
    stall = distance({"name": "fedavg"})
    yield Figure("FedAvg distance from optimum", stall, "")
    for option in ("I", "II"):
        name = f"SCAFFOLD distance, option {option}"
        yield Figure(name, distance({"name": "scaffold", "option": option}), "", "< 1e-9", None, stall)


def main() -> None:
    """Measure and write bench/results/convergence.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", choices=("quadratics", "fashion"))
    options = parser.parse_args()
    pieces: dict[str, Callable[[], Iterator[Figure]]] = {
        "quadratics": quadratic_figures,
        "fashion": lambda: fashion_figures(options.processes),
    }
    name = "convergence" if options.only is None else f"convergence-{options.only}"
    figures.write(name, [f for key, make in pieces.items() if options.only in (None, key) for f in make()])


if __name__ == "__main__":
    main()
