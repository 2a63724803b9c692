"""Fashion-MNIST for many nodes: the partition file that all compared algorithms share, and two models."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from fedward_common.task import Data
from torch import nn
from torch.utils.data import TensorDataset

FOLDER = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package dataset-fashion-mnist puts the files."""
PARTITIONS = Path(__file__).parent / "partitions" / "fashion-mnist-1000.npz"

NODES = 1000
PARTS = ("single_class", "iid")
Rows = npt.NDArray[np.uint16]


def partition(part: str) -> Rows:
    """The training images of each node, [1000, 60]: read from the file, which is made if it is not there."""
    if not PARTITIONS.exists():
        PARTITIONS.parent.mkdir(parents=True, exist_ok=True)
        parts = make_partitions(labels("train"))
        np.savez_compressed(PARTITIONS, single_class=parts["single_class"], iid=parts["iid"])
    with np.load(PARTITIONS) as file:
        rows: Rows = file[part]
    return rows


def make_partitions(y: npt.NDArray[np.uint8], nodes: int = NODES, seed: int = 0) -> dict[str, Rows]:
    """single_class: the images of each node are of one class. iid: drawn from all. Each image has one owner."""
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(len(y))
    by_class = shuffled[np.argsort(y[shuffled], kind="stable")].reshape(nodes, -1)
    parts = {"single_class": by_class[rng.permutation(nodes)], "iid": rng.permutation(len(y)).reshape(nodes, -1)}
    return {name: rows.astype(np.uint16) for name, rows in parts.items()}


def images(split: str) -> npt.NDArray[np.uint8]:
    """[n, 784]; split: "train" | "t10k"."""
    return _idx(FOLDER / f"{split}-images-idx3-ubyte.gz", 16).reshape(-1, 784)


def labels(split: str) -> npt.NDArray[np.uint8]:
    """[n]."""
    return _idx(FOLDER / f"{split}-labels-idx1-ubyte.gz", 8)


def _idx(path: Path, header: int) -> npt.NDArray[np.uint8]:
    if not path.exists():
        raise SystemExit(f"{path}: not there. apt-get install dataset-fashion-mnist")
    return np.frombuffer(gzip.decompress(path.read_bytes()), dtype=np.uint8, offset=header)


class LogisticFashion:
    """Logistic regression on pixels in [0, 1]. A node's data are a slice of one tensor, not a copy."""

    def __init__(self, rows: Rows) -> None:
        """rows: the training images of each node, [nodes, images]."""
        self._each = rows.shape[1]
        order = rows.reshape(-1)
        self._x = _scaled(images("train")[order])
        self._y = torch.from_numpy(labels("train")[order].astype(np.int64))

    def model(self) -> nn.Module:
        return nn.Linear(784, 10)

    def data(self, config: Mapping[str, Any]) -> Data:
        """config: "partition" i."""
        mine = slice(config["partition"] * self._each, (config["partition"] + 1) * self._each)
        return Data(TensorDataset(self._x[mine], self._y[mine]))

    def central_data(self, config: Mapping[str, Any]) -> Data:
        return Data(TensorDataset(_scaled(images("t10k")), torch.from_numpy(labels("t10k").astype(np.int64))))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        x, y = batch
        return {"accuracy": (model(x).argmax(1) == y).float().mean()}


class PerceptronFashion(LogisticFashion):
    """The same with a hidden layer of 64."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def _scaled(pixels: npt.NDArray[np.uint8]) -> torch.Tensor:
    return torch.from_numpy(pixels.astype(np.float32) / np.float32(255))
