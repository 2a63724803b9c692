"""Gradient inversion on scikit-learn's digits, offline: what a server gets out of a node's update, and out of a sum.

The gradient of a first layer for one image x is g·xᵀ for its weights and g for its bias, so that x is the quotient
(Phong et al. 2018, "Privacy-preserving deep learning via additively homomorphic encryption", section 3).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from fedward_common.config import RunConfig, parse_config
from fedward_common.local import LocalRunner
from fedward_common.pipeline import Clip, Flat, Quantize, Road
from fedward_common.privacy import site
from fedward_common.secagg.masks import Keystream
from fedward_common.secagg.packing import PackedSum, pack, unpack
from fedward_common.summand import Group, Shape, decode
from fedward_common.task import Data
from fedward_common.update import Kind, Layout, Update
from fedward_common.work import Work
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from .cohort import Cohort

NODES, BITS, SEEDS = 10, 20, range(8)
CONFIG = parse_config(
    {
        "name": "t", "task": "t:Digits", "rounds": 1, "algorithm": {"name": "fedavg"},
        "local": {"lr": 0.1, "steps": 1, "batch_size": 1},
    }
)  # fmt: skip
Array = np.ndarray[Any, np.dtype[np.float64]]


class Digits:
    """One image to train on."""

    def __init__(self, image: Array, label: int) -> None:
        self.images = torch.tensor(image[None], dtype=torch.float32)
        self.labels = torch.tensor([label])

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 32), nn.Sigmoid(), nn.Linear(32, 10))

    def data(self, config: Any) -> Data:
        return Data(TensorDataset(self.images, self.labels))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, float]:
        return {}


def updates(seed: int) -> tuple[Layout, list[Array], list[Update]]:
    """The images of ten nodes, and the update that each makes of its own in one step."""
    digits = load_digits()
    chosen = np.random.default_rng(seed).choice(len(digits.data), NODES, replace=False)
    images, found = [digits.data[i] / 16 for i in chosen], []
    torch.manual_seed(seed)
    initial = None
    for i, image in zip(chosen, images, strict=True):
        runner = LocalRunner(CONFIG, Digits(image, int(digits.target[i])), "node", {})
        if initial is None:
            initial = runner.do(Work("initial")).vectors
        done = runner.do(Work("train", 1, initial))
        found.append(Update(done.vectors, done.weight, done.metrics))
    return runner.layout, images, found


def inverted(layout: Layout, delta: Array) -> Array:
    """The image that one update of the first layer is of, by its row with the largest gradient."""
    tensors = layout.unpack(delta.astype(np.float32), Kind.TRAINABLE)
    weights, bias = tensors["0.weight"].double().numpy(), tensors["0.bias"].double().numpy()
    row = int(np.abs(bias).argmax())
    image: Array = np.clip(weights[row] / bias[row], 0, 1)
    return image


def error(found: Array, image: Array) -> float:
    return float(np.mean((found - image) ** 2))


def secure_round(seed: int, found: list[Update]) -> tuple[Shape, Any, Any, Any]:
    """The shape of the vectors; the first node's summand, before masking and as it arrives; the sum."""
    length = found[0].groups["delta"].size
    shape = Shape((Group("delta", length, 0.25),), tuple(found[0].metrics), BITS, NODES)
    cohort = Cohort(NODES, length=shape.length, seed=seed)
    road = Road.of(Clip(shape)).then(Quantize(shape, Keystream()))
    clients = {i: cohort.client(i) for i in range(1, NODES + 1)}
    server = cohort.server()
    for i, client in clients.items():
        server.deal(i, client.deal())
    seen = {}
    for i, delivery in server.close_dealing().items():
        words = road(Flat(found[i - 1]))
        bare = pack(words, BITS)
        clients[i].mask(delivery, words)
        seen[i] = bare, pack(words, BITS)
        server.masked(i, seen[i][1])
    survivors = server.close_masking()
    for i, client in clients.items():
        server.signed(i, client.agree(survivors))
    request = server.close_agreement()
    for i, client in clients.items():
        server.revealed(i, client.unmask(request))
    return shape, *seen[1], server.unmask()


def dequantised(shape: Shape, packed: Any) -> Array:
    """The coordinates of a packed vector, read as one node's summand."""
    ((group, words),) = shape.parts(unpack(packed, shape.length, BITS))
    values: Array = (words.astype(np.float64) - shape.levels // 2) * (2 * group.range / shape.levels)
    return values


def private_mean(seed: int, found: list[Update], kind: str) -> Array:
    """The mean that a server gets from the same ten where each site is hidden with z = 1; nothing of an update is lost
    to the clip, a power of two (so that few seeds need a table of noise of their own)."""
    longest = max(float(np.linalg.norm(update.groups["delta"])) for update in found)
    clip = 2.0 ** math.ceil(math.log2(longest))
    privacy = {"unit": "site", "mechanism": kind, "clip": clip, "noise_multiplier": 1.0}
    tables = {**CONFIG.model_dump(mode="json"), "evaluation": {"every": 0}, "secure_sum": {"bits": BITS}}
    config = RunConfig.model_validate({**tables, "algorithm": {"name": "fedavg"}, "privacy": privacy})
    made = site.mechanism(config, found[0].groups["delta"].size, NODES)
    of = site.Stamped("run", seed, 0)
    total = PackedSum(made.shape.length, BITS)
    for update in found:
        total.add(pack(made.words(site.flat(update), of), BITS))
    return made.mean(total.total(), NODES, of).groups["delta"]


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    """Median over the seeds of each attack's mean squared error."""
    kinds = ("plain", "quantised", "masked", "mean", "distributed", "central")
    seen: dict[str, list[float]] = {kind: [] for kind in kinds}
    for seed in SEEDS:
        layout, images, found = updates(seed)
        seen["plain"].append(error(inverted(layout, found[0].groups["delta"]), images[0]))
        shape, bare, masked, words = secure_round(seed, found)
        seen["quantised"].append(error(inverted(layout, dequantised(shape, bare)), images[0]))
        seen["masked"].append(error(inverted(layout, dequantised(shape, masked)), images[0]))
        mean = inverted(layout, decode(shape, words, NODES).groups["delta"])
        seen["mean"].append(min(error(mean, image) for image in images))
        for kind in ("distributed", "central"):
            noisy = inverted(layout, private_mean(seed, found, kind))
            seen[kind].append(min(error(noisy, image) for image in images))
    return {name: float(np.median(values)) for name, values in seen.items()}


def test_a_plain_update_gives_the_image_back(errors: dict[str, float]) -> None:
    assert errors["plain"] < 1e-6


def test_a_masked_vector_does_not(errors: dict[str, float]) -> None:
    """Predicting the mean image would score 0.075. It is the masks that prevent it, not quantisation."""
    assert errors["quantised"] < 1e-3
    assert errors["masked"] > 0.15


def test_the_mean_of_ten_is_near_one_of_them(errors: dict[str, float]) -> None:
    """What a secure sum alone still tells: an image like one of the ten. It takes noise to prevent that."""
    assert 1e-6 < errors["mean"] <= 0.045


@pytest.mark.parametrize("kind", ["distributed", "central"])
def test_the_mean_of_ten_with_noise_is_near_none_of_them(errors: dict[str, float], kind: str) -> None:
    """Against the mean image (0.075) this would hold without noise, too; against the nearest member it does not."""
    assert errors[kind] >= 0.12 > errors["mean"]
