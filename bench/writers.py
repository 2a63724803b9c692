"""MNIST by real writer: each node holds the digits of a group of people, who are its patients."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from fedward_common.task import Data
from torch import nn
from torch.utils.data import TensorDataset

FILE = Path(os.environ.get("FEDWARD_MNIST_WRITERS", "mnist_writers.npz"))
"""Arrays train_x, train_y, train_writer and test_… of other writers; see examples/mnist_writers."""


class ByWriter:
    """A small CNN. Data.groups names the writer of each image."""

    def __init__(self, nodes: int) -> None:
        if not FILE.exists():
            raise SystemExit(f"{FILE}: not there. Set FEDWARD_MNIST_WRITERS to the file that examples/mnist_writers describes.")
        self._nodes = nodes
        with np.load(FILE) as file:
            self._train = _pair(file["train_x"], file["train_y"])
            self._test = _pair(file["test_x"], file["test_y"])
            self._writer = file["train_writer"]

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 5, stride=2), nn.ReLU(),
            nn.Flatten(), nn.Linear(256, 10),
        )  # fmt: skip

    def data(self, config: Mapping[str, Any]) -> Data:
        """config: "partition" i."""
        mine = np.isin(self._writer, np.unique(self._writer)[config["partition"] :: self._nodes])
        rows = torch.from_numpy(np.flatnonzero(mine))
        x, y = self._train
        return Data(TensorDataset(x[rows], y[rows]), groups=self._writer[mine])

    def central_data(self, config: Mapping[str, Any]) -> Data:
        """The digits of writers whom no node has."""
        return Data(TensorDataset(*self._test))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        x, y = batch
        return {"accuracy": (model(x).argmax(1) == y).float().mean()}


def _pair(x: np.ndarray, y: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(x[:, None].astype(np.float32) / 255), torch.from_numpy(y.astype(np.int64))
