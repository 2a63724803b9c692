"""Test accuracy under secure aggregation against the plain run with the same seed: FedAvg and SCAFFOLD on
Fashion-MNIST, twenty nodes with one class each. Run by the in-process engine: the algorithms, the round engine, the
protocol and the node's code of a real run.

    python -m bench.secagg_accuracy
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from fedward_common.config import RunConfig, parse_config
from fedward_server.paths import RunPaths
from fedward_server.simulation import simulate

from bench import fashion, figures
from bench.convergence import WINDOW, Watch
from bench.figures import Figure

ALGORITHMS = {"fedavg": "FedAvg", "scaffold": "SCAFFOLD"}


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


@cache
def _task(nodes: int) -> fashion.PerceptronFashion:
    return fashion.PerceptronFashion(fashion.make_partitions(fashion.labels("train"), nodes)["single_class"])


def accuracy(algorithm: str, seed: int, nodes: int, rounds: int, secure: bool) -> float:
    """On the test images, in percent: the mean of the last five rounds."""
    with tempfile.TemporaryDirectory() as folder:
        paths = RunPaths(Path(folder) / "run")
        watch = Watch(paths.events, rounds)
        outcome = simulate(settings(algorithm, seed, rounds, secure), _task(nodes), nodes, paths, log=watch)
    if outcome.status != "finished" or watch.failures:
        raise RuntimeError(f"{algorithm}: {outcome.reason or 'nodes failed'}")
    return 100 * statistics.fmean(watch.accuracies[-WINDOW:])


def accuracy_figures(algorithm: str, seeds: range, nodes: int, rounds: int) -> Iterator[Figure]:
    """Of one algorithm."""
    found = [[accuracy(algorithm, seed, nodes, rounds, secure) for seed in seeds] for secure in (True, False)]
    what = f"{ALGORITHMS[algorithm]}, {nodes} nodes, {rounds} rounds, {len(seeds)} seeds"
    apart = max(abs(secure - plain) for secure, plain in zip(*found, strict=True))
    yield Figure(f"{what}: largest difference to the plain run with the same seed", apart, "points", "<= 0.2")
    secure, plain = map(statistics.fmean, found)
    yield Figure(f"{what}: accuracy (beside it the plain run's)", secure, "%", peer=plain, ratio=secure / plain)


def main() -> None:
    """Measure and write bench/results/secagg_accuracy.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=figures.RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = [
        figure
        for name in ALGORITHMS
        for figure in accuracy_figures(name, range(options.seeds), options.nodes, options.rounds)
    ]
    figures.write("secagg_accuracy", found, options.results)


if __name__ == "__main__":
    main()
