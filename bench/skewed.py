"""Images for nodes with unequal data: who owns which training image is in one file that all algorithms share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from fedward_common.task import Data
from torch import nn
from torch.utils.data import TensorDataset

from bench import fashion, writers

PARTITIONS = Path(__file__).parent / "partitions" / "skewed.npz"
TEST_SHARE = 0.2
"""Of a node's own images, where its own accuracy is asked for."""

Owners = npt.NDArray[np.uint8]
Images = tuple[npt.NDArray[np.uint8], npt.NDArray[Any]]


def dirichlet(y: npt.NDArray[Any], nodes: int, alpha: float, rng: np.random.Generator, least: int = 10) -> Owners:
    """Each class is shared out by Dirichlet(α) weights, anew until every node has `least` images (Li et al. 2022,
    NIID-Bench)."""
    while True:
        owner = np.empty(len(y), np.uint8)
        for label in np.unique(y):
            rows = rng.permutation(np.flatnonzero(y == label))
            cuts = (np.cumsum(rng.dirichlet(np.full(nodes, alpha)))[:-1] * len(rows)).astype(int)
            for node, part in enumerate(np.split(rows, cuts)):
                owner[part] = node
        if np.bincount(owner, minlength=nodes).min() >= least:
            return owner


def two_classes(y: npt.NDArray[Any], nodes: int, rng: np.random.Generator) -> Owners:
    """Node i has class i mod 10 and another one; the images of a class are shared out evenly among those that have it
    (Li et al. 2022, #C = 2)."""
    holders: dict[int, list[int]] = {label: [] for label in range(10)}
    for node in range(nodes):
        first = node % 10
        for label in (first, int(rng.choice([label for label in range(10) if label != first]))):
            holders[label].append(node)
    owner = np.empty(len(y), np.uint8)
    for label, those in holders.items():
        rows = rng.permutation(np.flatnonzero(y == label))
        for node, part in zip(those, np.array_split(rows, len(those)), strict=True):
            owner[part] = node
    return owner


_MADE: Mapping[str, Callable[[npt.NDArray[Any], np.random.Generator], Owners]] = {
    "dirichlet-10": lambda y, rng: dirichlet(y, 10, 0.5, rng),
    "dirichlet-100": lambda y, rng: dirichlet(y, 100, 0.5, rng),
    "two_classes-10": lambda y, rng: two_classes(y, 10, rng),
    "two_classes-100": lambda y, rng: two_classes(y, 100, rng),
}


def owners(data: str, part: str) -> Owners:
    """The node that owns each training image of "fashion" or "mnist", [60000]: from the file, or made and kept."""
    name = f"{data}-{part}"
    kept = dict(np.load(PARTITIONS)) if PARTITIONS.exists() else {}
    if name not in kept:
        kept[name] = _MADE[part](load(data, "train")[1], np.random.default_rng(0))
        np.savez_compressed(PARTITIONS, **kept)
    found: Owners = kept[name]
    return found


def load(data: str, split: str) -> Images:
    """Pixels [n, 784] and labels [n]; split: "train" | "test"."""
    if data == "fashion":
        split = {"train": "train", "test": "t10k"}[split]
        return fashion.images(split), fashion.labels(split)
    x, y, _ = writers.load(str(writers.file()), split)
    return x.reshape(-1, 784), y


def logistic() -> nn.Module:
    """Logistic regression."""
    return nn.Linear(784, 10)


def perceptron() -> nn.Module:
    """One hidden layer of 64; the head is "2.*"."""
    return nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def small_cnn() -> nn.Module:
    """NIID-Bench's "simple-cnn": 44 426 parameters; pooled before the ReLU, which is the same and quicker."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        nn.Conv2d(1, 6, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(6, 16, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(), nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


class Skewed:
    """Classification of 28 × 28 pixels. A node's `test` is a part of its own images where `own_test`, else None."""

    metric_names = ("accuracy",)

    def __init__(self, data: str, part: str, model: Callable[[], nn.Module], own_test: bool = False) -> None:
        self._data = data
        self._make = model
        self._own_test = own_test
        x, y = load(data, "train")
        self._x, self._y = _tensors(x, y)
        self._owners = torch.from_numpy(owners(data, part).astype(np.int64))

    def model(self) -> nn.Module:
        return self._make()

    def data(self, config: Mapping[str, Any]) -> Data:
        """config: "partition" i."""
        rows = torch.nonzero(self._owners == config["partition"]).flatten()
        if not self._own_test:
            return Data(TensorDataset(self._x[rows], self._y[rows]))
        # Rows stand in the order of the file, which is one of no meaning.
        cut = len(rows) - int(TEST_SHARE * len(rows))
        train, test = rows[:cut], rows[cut:]
        return Data(TensorDataset(self._x[train], self._y[train]), TensorDataset(self._x[test], self._y[test]))

    def central_data(self, config: Mapping[str, Any]) -> Data:
        return Data(TensorDataset(*_tensors(*load(self._data, "test"))))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        x, y = batch
        return {"accuracy": (model(x).argmax(1) == y).float().mean()}

    def representation(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """What the last layer gets."""
        assert isinstance(model, nn.Sequential)
        features: torch.Tensor = model[:-1](batch[0])
        return features

    def logits(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """[batch, 10]."""
        return model(batch[0])  # type: ignore[no-any-return]

    def labels(self, dataset: TensorDataset) -> torch.Tensor:
        """[n]."""
        return dataset.tensors[1]


def _tensors(x: npt.NDArray[np.uint8], y: npt.NDArray[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(x.astype(np.float32) / np.float32(255)), torch.from_numpy(y.astype(np.int64))
