"""Test accuracy under secure aggregation against the plain run with the same seed: FedAvg and SCAFFOLD on
Fashion-MNIST, twenty nodes with one class each. Run by the in-process engine: the algorithms, the round engine, the
protocol and the node's code of a real run.

    nice -n 10 python -m bench.secagg_accuracy

Two models: logistic regression, and a perceptron, whose training is chaotic: under SCAFFOLD with one class a node the
plain run differs by points from itself with one bit of one initial weight changed. That difference stands beside the
secure run's as its peer: nothing that rounds can be nearer to the plain run than the plain run is to itself.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from fedward_common.algorithms.base import MODEL
from fedward_common.config import RunConfig, parse_config
from fedward_common.local import LocalRunner
from fedward_common.update import Vectors
from fedward_common.work import Work
from fedward_server.paths import RunPaths
from fedward_server.simulation import simulate

from bench import fashion, figures
from bench.convergence import WINDOW, Watch
from bench.figures import Figure

ALGORITHMS = {"fedavg": "FedAvg", "scaffold": "SCAFFOLD"}
_INNER = 400
"""A pixel in the middle of the images, first row of weights."""
MODELS = {"logistic regression": fashion.LogisticFashion, "perceptron": fashion.PerceptronFashion}


def settings(algorithm: str, seed: int, rounds: int, secure: bool) -> RunConfig:
    """All nodes in every round, 50 steps of 32 examples each."""
    return parse_config(
        {
            "name": "accuracy",
            "task": "bench.fashion:PerceptronFashion",
            "rounds": rounds,
            "seed": seed,
            "algorithm": {"name": algorithm},
            "local": {"lr": 0.05, "batch_size": 32, "steps": 50},
            "secure_sum": {"enabled": secure},
            "evaluation": {"every": 0, "central": True},
        }
    )


@dataclass(frozen=True)
class Setting:
    """What is compared."""

    algorithm: str
    model: str
    nodes: int
    rounds: int

    @property
    def what(self) -> str:
        """For people."""
        return f"{ALGORITHMS[self.algorithm]}, {self.model}, {self.nodes} nodes, {self.rounds} rounds"


@cache
def _task(model: str, nodes: int) -> fashion.LogisticFashion:
    return MODELS[model](fashion.make_partitions(fashion.labels("train"), nodes)["single_class"])


def initial(config: RunConfig, task: fashion.LogisticFashion, one_bit: bool) -> Vectors:
    """The first model; with `one_bit`, the next larger number in one weight of an inner pixel."""
    vectors = dict(LocalRunner(config, task, "server", {}).do(Work("initial")).vectors)
    model = vectors[MODEL].copy()
    if one_bit:
        model[_INNER] = np.nextafter(model[_INNER], np.float32(1))
    return {MODEL: model}


def accuracy(of: Setting, seed: int, secure: bool = False, one_bit: bool = False) -> float:
    """On the test images, in percent: the mean of the last five rounds."""
    config, task = settings(of.algorithm, seed, of.rounds, secure), _task(of.model, of.nodes)
    with tempfile.TemporaryDirectory() as folder:
        paths = RunPaths(Path(folder) / "run")
        watch = Watch(paths.events, of.rounds)
        outcome = simulate(config, task, of.nodes, paths, initial=initial(config, task, one_bit), log=watch)
    if outcome.status != "finished" or watch.failures:
        raise RuntimeError(f"{of.what}: {outcome.reason or 'nodes failed'}")
    return 100 * statistics.fmean(watch.accuracies[-WINDOW:])


def accuracy_figures(of: Setting, seeds: range) -> Iterator[Figure]:
    """Of one algorithm and model."""
    plain = [accuracy(of, seed) for seed in seeds]
    secure = [accuracy(of, seed, secure=True) for seed in seeds]
    itself = [accuracy(of, seed, one_bit=True) for seed in seeds]
    what = f"{of.what}, {len(seeds)} seeds"
    apart, chaos = (max(abs(one - two) for one, two in zip(plain, other, strict=True)) for other in (secure, itself))
    name = "largest difference to the plain run, same seed (beside it the plain run's to itself, one bit changed)"
    yield Figure(f"{what}: {name}", apart, "points", "<= 0.2", peer=chaos, ratio=apart / chaos if chaos else None)
    mean, peer = statistics.fmean(secure), statistics.fmean(plain)
    yield Figure(f"{what}: accuracy (beside it the plain run's)", mean, "%", peer=peer, ratio=mean / peer)


def main() -> None:
    """Measure and write bench/results/secagg_accuracy.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=figures.RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = (
        figure
        for model in MODELS
        for name in ALGORITHMS
        for figure in accuracy_figures(Setting(name, model, options.nodes, options.rounds), range(options.seeds))
    )
    figures.write("secagg_accuracy", found, options.results)


if __name__ == "__main__":
    main()
