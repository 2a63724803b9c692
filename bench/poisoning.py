"""Poisoning: what each rule of [aggregation] keeps of the accuracy when a fifth of the nodes send bad updates. Run by
the in-process engine: the rules, the round engine and the node's code of a real run.

    nice -n 19 python -m bench.poisoning

The liars' work is bad, not their guards: what a node sends has gone through its own norm bound, as when its task or its
data are bad. One row has lying guards.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from fedward_common.algorithms.base import DELTA
from fedward_common.algorithms.fedavg import FedAvg
from fedward_common.algorithms.node_half import Local
from fedward_common.algorithms.registry import ALGORITHMS
from fedward_common.config import RunConfig, parse_config
from fedward_common.messages import Purpose, Reply, Request
from fedward_common.task import Data
from fedward_common.update import Update, Vectors
from fedward_server.events import read_events
from fedward_server.paths import RunPaths
from fedward_server.simulation import Faults, simulate
from torch.utils.data import TensorDataset

from bench import fashion, figures
from bench.convergence import memory_folder
from bench.figures import Figure

NODES, LIARS = 20, 4
ROUNDS = 30
LAST = 3
"""Evaluations, one every other round, over which an accuracy is averaged."""
BOUND = 0.35
"""C of the norm bound: the median norm of honest updates in the fifth round; three times as much in the first."""

RULES: Mapping[str, Mapping[str, Any]] = {
    "mean": {"rule": "mean"},
    "krum": {"rule": "krum", "byzantine": LIARS},
    "multi_krum": {"rule": "multi_krum", "byzantine": LIARS},
    "bulyan": {"rule": "bulyan", "byzantine": LIARS},
    "median": {"rule": "median"},
    "trimmed_mean": {"rule": "trimmed_mean", "trim": LIARS},
    "geometric_median": {"rule": "geometric_median"},
    "norm_bound": {"rule": "norm_bound", "bound": BOUND},
    "norm_bound, secure": {"rule": "norm_bound", "bound": BOUND},
}
ATTACKS: Mapping[str, float] = {"scaled ×100": 100.0, "sign flipped": -1.0, "flipped ×10": -10.0}
"""What a liar multiplies its update with."""
LABELS = "labels flipped"
"""The other attack: class y is called 9 − y."""
FALLS = ("flipped ×10",)
"""Attacks under which the mean of a fifth of liars points away from the optimum: 0.8 − 0.2 · 10 < 0."""


@dataclass(frozen=True)
class Case:
    """attack: None for the clean run."""

    part: str
    attack: str | None
    rule: str

    def config(self, rounds: int) -> RunConfig:
        """Ten local steps a round, all nodes in every round."""
        return parse_config(
            {
                "name": "poisoning",
                "task": "bench.poisoning:Images",
                "rounds": rounds,
                "algorithm": {"name": "fedavg"},
                "aggregation": dict(RULES[self.rule]),
                "local": {"lr": 0.1, "batch_size": 32, "steps": 10},
                "secure_sum": {"enabled": self.rule.endswith("secure")},
                "evaluation": {"every": 2, "central": True},
            }
        )


def owners(part: str, y: npt.NDArray[np.uint8], seed: int = 0) -> list[npt.NDArray[np.int64]]:
    """The training images of each node. dirichlet: each class is shared out by Dirichlet(0.5)."""
    rng = np.random.default_rng(seed)
    if part == "iid":
        return list(np.array_split(rng.permutation(len(y)), NODES))
    shares: list[list[npt.NDArray[np.int64]]] = [[] for _ in range(NODES)]
    for label in np.unique(y):
        rows = rng.permutation(np.flatnonzero(y == label))
        cuts = (np.cumsum(rng.dirichlet(np.full(NODES, 0.5)))[:-1] * len(rows)).astype(int)
        for mine, more in zip(shares, np.split(rows, cuts), strict=True):
            mine.append(more)
    return [np.concatenate(mine) for mine in shares]


class Images(fashion.LogisticFashion):
    """Logistic regression; the first nodes lie. Beside each image stands what its node multiplies its update with."""

    def __init__(self, part: str) -> None:
        parts = owners(part, fashion.labels("train"))
        super().__init__(np.concatenate(parts)[None])
        self._cuts = np.cumsum([0, *map(len, parts)])
        self.attack: str | None = None

    def data(self, config: Mapping[str, Any]) -> Data:
        """config: "partition" i."""
        mine = slice(*self._cuts[config["partition"] :][:2])
        y, factor = self._y[mine], 1.0
        if config["partition"] < LIARS and self.attack is not None:
            y, factor = (9 - y, 1.0) if self.attack == LABELS else (y, ATTACKS[self.attack])
        return Data(TensorDataset(self._x[mine], y, torch.full((len(y),), factor)))

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model: torch.nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).float().mean()}


class Poisoned(FedAvg):
    """FedAvg, with liars."""

    def client(self, local: Local, message: Vectors, state: Vectors) -> tuple[Update, Vectors]:
        update, state = super().client(local, message, state)
        factor = np.float32(local.data.train[0][2])
        return dataclasses.replace(update, groups={**update.groups, DELTA: factor * update.groups[DELTA]}), state


class LyingGuards(Faults):
    """What the liars' nodes send is multiplied on the wire, after their own bound."""

    def __init__(self, factor: float) -> None:
        self._factor = np.float32(factor)

    def answers(self, name: str, request: Request, reply: Reply) -> Reply:
        if request.purpose is not Purpose.TRAIN or int(name.removeprefix("node-")) >= LIARS:
            return reply
        return dataclasses.replace(reply, vectors={key: self._factor * x for key, x in reply.vectors.items()})


@cache
def _images(part: str) -> Images:
    return Images(part)


@cache
def accuracy(case: Case, rounds: int, faults: Faults | None = None) -> float:
    """In percent, on the test images, over the last evaluations."""
    torch.set_num_threads(1)
    task = _images(case.part)
    task.attack = case.attack
    with _liars(), tempfile.TemporaryDirectory(dir=memory_folder()) as folder:
        paths = RunPaths(Path(folder) / "run")
        outcome = simulate(case.config(rounds), task, NODES, paths, faults=faults)
        if outcome.status != "finished":
            raise RuntimeError(f"{case}: {outcome.reason}")
        told = [event["central"] for event, _ in read_events(paths.events) if event["event"] == "round"]
        found = [central["accuracy"] for central in told if central]
    return 100 * statistics.fmean(found[-LAST:])


@contextmanager
def _liars() -> Iterator[None]:
    """FedAvg is `Poisoned` meanwhile."""
    honest, ALGORITHMS["fedavg"] = ALGORITHMS["fedavg"], Poisoned
    try:
        yield
    finally:
        ALGORITHMS["fedavg"] = honest


def cases(parts: Iterable[str] = ("iid", "dirichlet")) -> Iterator[Case]:
    """Clean runs first. On Dirichlet data, and under secure aggregation, some of the attacks."""
    for part in parts:
        attacks = [*ATTACKS, LABELS] if part == "iid" else [*FALLS, LABELS]
        for attack in (None, *attacks):
            secure = part == "iid" and attack in (None, *FALLS, LABELS)
            yield from (Case(part, attack, rule) for rule in RULES if secure or not rule.endswith("secure"))


def rows(cases: Iterable[Case], measure: Callable[[Case], float]) -> Iterator[Figure]:
    """A figure a run: its accuracy, beside the clean mean's; and what it lost to the clean run with its own rule."""
    clean: dict[tuple[str, str], float] = {}
    for case in cases:
        found = measure(case)
        name = f"{case.part}, {case.attack or 'clean'}, {case.rule}"
        if case.attack is None:
            clean[case.part, case.rule] = found
        mean = clean[case.part, "mean"]
        yield Figure(f"{name}: accuracy (peer: clean mean)", found, "%", peer=mean, ratio=found / mean)
        if case.attack is not None:
            lost = clean[case.part, case.rule] - found
            yield Figure(f"{name}: points lost to its own clean run", lost, "points", target(case))


def target(case: Case) -> str | None:
    """What theory says: honest updates that are alike, and the mean that points the wrong way. Of data that differ from
    node to node it says little."""
    if case.part != "iid":
        return None
    if case.rule == "mean":
        return ">= 10" if case.attack in FALLS else None
    return "<= 3"


def lying_guards(rounds: int) -> Figure:
    """The server bounds once more what comes from nodes that do not."""
    found = accuracy(Case("iid", None, "norm_bound"), rounds, LyingGuards(ATTACKS["flipped ×10"]))
    clean = accuracy(Case("iid", None, "norm_bound"), rounds)
    name = "iid, guards that flip ×10 after their bound, norm_bound: points lost to its own clean run"
    return Figure(name, clean - found, "points", "<= 3")


def main() -> None:
    """Measure and write bench/results/poisoning.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()

    def all_of_them() -> Iterator[Figure]:
        yield from rows(cases(), lambda case: accuracy(case, options.rounds))
        yield lying_guards(options.rounds)

    figures.write("poisoning" if options.rounds == ROUNDS else f"poisoning-{options.rounds}", all_of_them())


if __name__ == "__main__":
    main()
