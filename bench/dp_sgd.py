"""What DP-SGD costs on a node: CPU of a local step by record, by patient and with ghost clipping, over a plain step;
and Opacus' own engine with the same model, batch and optimiser beside it.

    OMP_NUM_THREADS=1 nice -n 0 python -m bench.dp_sgd

CPU is process time, the smallest of several turns. Batches are Poisson samples of 64 expected records out of 1280.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from fedward_common.algorithms.local_options import LocalOptions
from fedward_common.algorithms.node_half import Local
from fedward_common.algorithms.training import train
from fedward_common.privacy.sampled import SampledSteps
from fedward_common.task import Data
from fedward_common.update import Kind, Layout
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bench import figures
from bench.distributed_noise import milliseconds
from bench.figures import Figure

RECORDS, RATE, PATIENTS = 1280, 0.05, 320


class Perceptron:
    """A hidden layer of `width` on 784 inputs."""

    def __init__(self, width: int) -> None:
        self.width = width

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(784, self.width), nn.ReLU(), nn.Linear(self.width, 10))

    def data(self, config: Any) -> Data:
        generator = torch.Generator().manual_seed(0)
        x = torch.rand(RECORDS, 784, generator=generator)
        y = torch.randint(0, 10, (RECORDS,), generator=generator)
        return Data(TensorDataset(x, y), groups=np.arange(RECORDS) % PATIENTS)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def losses(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, float]:
        return {}


def ours(task: Perceptron, steps: int, private: SampledSteps | None) -> Callable[[], object]:
    """`steps` local steps of the project's loop."""
    model = task.model()
    layout = Layout.of(model)
    options = LocalOptions(lr=0.1, batch_size=64, steps=steps)
    local = Local(task, model, task.data({}), layout, options, 1, 0, private=private)
    start = {"model": layout.pack(model.state_dict(), Kind.TRAINABLE)}
    return lambda: train(local, start)


def by_opacus(task: Perceptron, steps: int) -> Callable[[], object]:
    """As many of Opacus' engine, Poisson sampling on."""
    model = task.model()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(task.data({}).train, batch_size=64)
    model, optimiser, loader = PrivacyEngine().make_private(
        module=model, optimizer=optimiser, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
    )

    def run() -> None:
        done = 0
        while done < steps:
            for batch in loader:
                optimiser.zero_grad()
                task.loss(model, batch).backward()
                optimiser.step()
                done += 1
                if done == steps:
                    break

    return run


def rows(width: int, steps: int, turns: int) -> Iterator[Figure]:
    """For one size of model."""
    task = Perceptron(width)
    size = sum(parameter.numel() for parameter in task.model().parameters())
    what = f"CPU of a local step, {size:,} parameters, 64 records"

    def step(work: Callable[[], object]) -> float:
        work()  # the noise's table, and torch's own warming up
        return milliseconds(work, turns) / steps

    plain, peer = step(ours(task, steps, None)), step(by_opacus(task, steps))
    yield Figure(f"{what}, plain", plain, "ms")
    for name, by_patient, ghost in (
        ("by record", False, False),
        ("by record, ghost clipping", False, True),
        ("by patient (four records each)", True, False),
    ):
        private = SampledSteps(by_patient, 1.0, RATE, 1.0, steps, ghost)
        found = step(ours(task, steps, private))
        yield Figure(f"{what}, {name} (beside it Opacus' engine by record)", found, "ms", peer=peer, ratio=found / peer)
        yield Figure(f"{what}, {name}, over plain", found / plain, "times")


def main() -> None:
    """Measure and write bench/results/dp_sgd.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 1260])
    parser.add_argument("--results", type=Path, default=figures.RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="opacus")
    found = (figure for width in options.widths for figure in rows(width, options.steps, options.turns))
    figures.write("dp_sgd", found, options.results)


if __name__ == "__main__":
    main()
