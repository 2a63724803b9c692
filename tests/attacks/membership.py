"""Membership inference on scikit-learn's digits, offline: was this example in the training set?

The attacker has the model, the example, and models that it trained on other examples of the same kind. It says yes
where the model is surer of the example's label than those are (Watson et al. 2022, "On the Importance of Difficulty
Calibration in Membership Inference Attacks"). Clean digits give too little away to see a defence at work: of 200
examples 30 % have a random label here, and 60 passes over them make a model learn some of these by heart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from fedward_common.config import parse_config
from fedward_common.local import LocalRunner
from fedward_common.task import Data
from fedward_common.update import Kind
from fedward_common.work import Work
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

EXAMPLES, RANDOM_LABELS, EPOCHS, BATCH = 200, 60, 60, 50
DELTA = 1e-3
REFERENCES = 2
"""Models that the attacker trains for comparison."""


class Digits:
    """One set of examples to train on."""

    def __init__(self, examples: TensorDataset) -> None:
        self.examples = examples

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def data(self, config: Mapping[str, Any]) -> Data:
        return Data(self.examples)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, float]:
        return {}


def train(task: Digits, seed: int, lr: float = 1.0, privacy: Mapping[str, Any] | None = None) -> nn.Module:
    """As one node trains in the only round of a run."""
    config = parse_config(
        {
            "name": "t", "task": "t:Digits", "rounds": 1, "seed": seed, "algorithm": {"name": "fedavg"},
            "local": {"lr": lr, "epochs": EPOCHS, "batch_size": BATCH}, "evaluation": {"every": 0},
            **({"privacy": privacy} if privacy else {}),
        }
    )  # fmt: skip
    runner = LocalRunner(config, task, "node", {})
    first = runner.do(Work("initial")).vectors
    moved = runner.do(Work("train", 1, first)).vectors["delta"]
    model = task.model()
    runner.layout.load(model, first["model"] + moved, Kind.TRAINABLE)
    return model


def train_private(task: Digits, seed: int, **noise: float) -> nn.Module:
    """As many steps of DP-SGD by record. noise: target_epsilon, at `DELTA`, or noise_multiplier."""
    privacy = {"unit": "record", "clip": 2.0, "sampling_rate": BATCH / EXAMPLES, "delta": DELTA, **noise}
    return train(task, seed, 2.0, privacy)


@dataclass(frozen=True)
class Found:
    """What an attacker gets right, and what the model is good for.

    auc: probability that a member scores above another example. caught: share of the members above all but 1 % of the
    others. accuracy: on the others; with 30 % of their labels random it is 0.73 at most.
    """

    auc: float
    caught: float
    accuracy: float

    @classmethod
    def mean(cls, found: Iterable[Found]) -> Found:
        return cls(*np.mean([(one.auc, one.caught, one.accuracy) for one in found], axis=0).tolist())


def attacked(how: Callable[[Digits, int], nn.Module], seed: int) -> Found:
    """Train `how` on members that are drawn by `seed`, and attack the model."""
    members, others, *foreign = _drawn(seed)
    model = how(Digits(members), seed)
    references = [train(Digits(part), 1000 * seed + i) for i, part in enumerate(foreign, 1)]

    def scores(part: TensorDataset) -> Any:
        return _sureness(model, part) - np.mean([_sureness(reference, part) for reference in references], axis=0)

    inside, outside = scores(members), scores(others)
    wins = np.mean(inside[:, None] > outside) + np.mean(inside[:, None] == outside) / 2
    images, labels = others.tensors
    accuracy = np.mean((model(images).argmax(1) == labels).numpy())
    return Found(float(wins), float(np.mean(inside > np.quantile(outside, 0.99))), float(accuracy))


def _drawn(seed: int) -> list[TensorDataset]:
    """Members, others, and one set for each reference."""
    digits, rng = load_digits(), np.random.default_rng(seed)
    parts = []
    for chosen in rng.permutation(len(digits.data))[: (2 + REFERENCES) * EXAMPLES].reshape(-1, EXAMPLES):
        labels = digits.target[chosen]
        labels[:RANDOM_LABELS] = rng.integers(0, 10, RANDOM_LABELS)
        images = torch.tensor(digits.data[chosen] / 16, dtype=torch.float32)
        parts.append(TensorDataset(images, torch.tensor(labels)))
    return parts


def _sureness(model: nn.Module, part: TensorDataset) -> Any:
    """The probability that `model` gives each example's label."""
    images, labels = part.tensors
    with torch.no_grad():
        return model(images).softmax(1)[torch.arange(len(labels)), labels].double().numpy()
