"""MNIST by real writer: each node holds the digits of a group of people."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from fedward_common.task import Data
from torch import nn
from torch.utils.data import TensorDataset

Pair = tuple[torch.Tensor, torch.Tensor]


class Writers:
    metric_names = ("accuracy",)

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 5, stride=2), nn.ReLU(),
            nn.Flatten(), nn.Linear(256, 10),
        )  # fmt: skip

    def data(self, config: Mapping[str, Any]) -> Data:
        """[data]: path (npz), partition, partitions; split = "test" for the writers that nobody trains on."""
        split = config.get("split", "train")
        images, labels, writer = load(config["path"], split)
        group = np.unique(writer)[config["partition"] :: config["partitions"]]
        mine = np.isin(writer, group)
        x, y = images[mine], labels[mine]
        last = np.arange(len(y)) % 5 == 4
        # groups: for privacy by patient, where a writer is one.
        return Data(dataset(x[~last], y[~last]), dataset(x[last], y[last]), groups=writer[mine][~last])

    def loss(self, model: nn.Module, batch: Pair) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y)

    def metrics(self, model: nn.Module, batch: Pair) -> dict[str, torch.Tensor]:
        x, y = batch
        return {"accuracy": (model(x).argmax(1) == y).float().mean()}


@cache  # a simulation has many nodes in one process
def load(path: str, split: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    with np.load(path) as file:
        return file[f"{split}_x"], file[f"{split}_y"], file[f"{split}_writer"]


def dataset(x: np.ndarray, y: np.ndarray) -> TensorDataset:
    return TensorDataset(torch.tensor(x[:, None], dtype=torch.float32) / 255, torch.tensor(y, dtype=torch.int64))
