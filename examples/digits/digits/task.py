"""Digits: a small network on 8x8 images from a site's own file."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from fedward_common.task import Data
from torch import nn
from torch.utils.data import TensorDataset

Pair = tuple[torch.Tensor, torch.Tensor]


class Digits:
    metric_names = ("accuracy",)

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def data(self, config: Mapping[str, Any]) -> Data:
        with np.load(config["path"]) as file:
            return Data(train=dataset(file["train_x"], file["train_y"]), test=dataset(file["test_x"], file["test_y"]))

    def loss(self, model: nn.Module, batch: Pair) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y)

    def metrics(self, model: nn.Module, batch: Pair) -> dict[str, torch.Tensor]:
        x, y = batch
        return {"accuracy": (model(x).argmax(1) == y).float().mean()}


def dataset(x: np.ndarray, y: np.ndarray) -> TensorDataset:
    return TensorDataset(torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.int64))
