"""Fashion-MNIST: a small CNN; each node reads its part of the idx files."""

import gzip
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from fedward_common.task import Data
from torch import nn
from torch.utils.data import TensorDataset

DEBIAN = "/usr/share/datasets/fashion-mnist"  # package dataset-fashion-mnist
Pair = tuple[torch.Tensor, torch.Tensor]


class Fashion:
    metric_names = ("accuracy",)

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 5, stride=2), nn.ReLU(),
            nn.Flatten(), nn.Linear(256, 10),
        )  # fmt: skip

    def data(self, config: Mapping[str, Any]) -> Data:
        """[data]: partition, partitions; optional path (folder of the idx.gz files), alpha, seed."""
        folder = Path(config.get("path", DEBIAN))
        return Data(train=part(folder, "train", config), test=part(folder, "t10k", config))

    def loss(self, model: nn.Module, batch: Pair) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y)

    def metrics(self, model: nn.Module, batch: Pair) -> dict[str, torch.Tensor]:
        x, y = batch
        return {"accuracy": (model(x).argmax(1) == y).float().mean()}


def part(folder: Path, split: str, config: Mapping[str, Any]) -> TensorDataset:
    """This node's images: each class shared out by a Dirichlet draw, the same one for training and test."""
    x, y = read(folder / f"{split}-images-idx3-ubyte.gz", 16), read(folder / f"{split}-labels-idx1-ubyte.gz", 8)
    nodes, rng = config["partitions"], np.random.default_rng(config.get("seed", 0))
    shares = rng.dirichlet([config.get("alpha", 0.5)] * nodes, size=10)
    owner = np.empty(len(y), dtype=np.int64)
    for label in range(10):
        owner[y == label] = rng.choice(nodes, size=(y == label).sum(), p=shares[label])
    mine = owner == config["partition"]
    images = torch.tensor(x.reshape(-1, 1, 28, 28)[mine], dtype=torch.float32) / 255
    return TensorDataset(images, torch.tensor(y[mine], dtype=torch.int64))


@cache  # a simulation has many nodes in one process
def read(path: Path, header: int) -> np.ndarray:
    return np.frombuffer(gzip.decompress(path.read_bytes()), dtype=np.uint8, offset=header)
