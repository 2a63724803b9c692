"""What the road into a secure sum costs: CPU time at 1M coordinates, and what ranges chosen from the last mean do to a
round's mean. FedAvg of an MLP on digits whose labels are spread unevenly (Dirichlet), for several headrooms.

    python -m bench.road
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from fedward_common import ranges
from fedward_common.pipeline import Flat, build
from fedward_common.ranges import Scale, Scales, following
from fedward_common.summand import CLIPPED, Group, Shape, Words, decode
from fedward_common.update import Update
from sklearn.datasets import load_digits
from torch import nn

from bench import figures
from bench.figures import Figure

Round = tuple[list[npt.NDArray[np.float32]], list[float]]
"""The nodes' changes of the model, and their weights."""


class Keystream:
    """AES-128-CTR under a fixed key: the same figures every time."""

    def __init__(self) -> None:
        self._encryptor = Cipher(algorithms.AES(bytes(16)), modes.CTR(bytes(16))).encryptor()

    def words(self, count: int) -> npt.NDArray[np.uint32]:
        return np.frombuffer(self._encryptor.update(bytes(4 * count)), np.uint32)


def spread(labels: npt.NDArray[np.int64], nodes: int, rng: np.random.Generator) -> list[npt.NDArray[np.int64]]:
    """Indices of each node's examples: every label divided by Dirichlet(0.1). Nodes without examples are left out."""
    parts: list[list[int]] = [[] for _ in range(nodes)]
    for label in range(10):
        indices = rng.permutation(np.flatnonzero(labels == label))
        cuts = (np.cumsum(rng.dirichlet([0.1] * nodes))[:-1] * len(indices)).astype(int)
        for part, some in zip(parts, np.split(indices, cuts), strict=True):
            part.extend(some)
    return [np.array(part) for part in parts if part]


def training(nodes: int, rounds: int) -> Iterator[Round]:
    """FedAvg in float64 means: 20 steps of SGD a node and round, batches of 32, rate 0.3."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    images, labels = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    parts = spread(labels, nodes, rng)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    parameters = list(model.parameters())
    vector = nn.utils.parameters_to_vector(parameters).detach()
    for _ in range(rounds):
        changes = []
        for part in parts:
            nn.utils.vector_to_parameters(vector.clone(), parameters)  # they become views of it
            optimiser = torch.optim.SGD(parameters, 0.3)
            for _ in range(20):
                batch = rng.choice(part, min(32, len(part)), replace=False)
                optimiser.zero_grad()
                nn.functional.cross_entropy(model(inputs[batch]), targets[batch]).backward()
                optimiser.step()
            changes.append((nn.utils.parameters_to_vector(parameters).detach() - vector).numpy())
        weights = [float(len(part)) for part in parts]
        yield changes, weights
        vector = vector + torch.tensor(np.average(changes, axis=0, weights=weights), dtype=torch.float32)


def secure_mean(shape: Shape, one: Round) -> Update:
    """The mean by way of the road, without masks."""
    total = np.zeros(shape.length, np.uint32)

    def add(words: Words) -> bytes:
        np.add(total, words, out=total)
        return b""

    road = build(shape, Keystream(), add)
    for change, weight in zip(*one, strict=True):
        road(Flat(Update({"delta": change}, weight)))
    return decode(shape, total, len(one[0]))


def errors(history: list[Round], bits: int, headroom: float) -> tuple[list[float], list[float]]:
    """Of each round: the mean's L2 error relative to it, and the share of coordinates clipped."""
    wrong, clipped = [], []
    with mock.patch.object(ranges, "HEADROOM", headroom):
        scales = Scales({"delta": Scale(8.0, headroom)}, 64.0)
        for changes, weights in history:
            size = changes[0].size
            shape = Shape(scales.shape_groups({"delta": size}), (), bits, len(changes), scales.weight)
            mean = secure_mean(shape, (changes, weights))
            exact = np.average(np.array(changes, np.float64), axis=0, weights=weights)
            wrong.append(float(np.linalg.norm(mean.groups["delta"] - exact) / np.linalg.norm(exact)))
            clipped.append(mean.metrics[CLIPPED + "delta"] / (size * len(changes)))
            scales = following(scales, mean, len(changes))
    return wrong, clipped


def ratio(one: Round) -> float:
    """The largest coordinate of one node over the largest of the mean, both weighted."""
    changes, weights = np.array(one[0], np.float64), np.array(one[1])
    weighted = changes * (weights / weights.mean())[:, None]
    return float(np.abs(weighted).max() / np.abs(weighted.mean(axis=0)).max())


def times(size: int, repeats: int) -> tuple[float, float]:
    """CPU milliseconds of one node's road without masks, and of the decoding of a sum: the least of `repeats`."""
    update = Update({"delta": np.random.default_rng(0).normal(0, 0.1, size).astype(np.float32)}, 37.0)
    shape = Shape((Group("delta", size, 1.0),), (), 20, 10, 64.0)
    held: list[Words] = []
    road = build(shape, Keystream(), lambda words: held.append(words) or b"")
    encoding, decoding = [], []
    for _ in range(repeats):
        start = time.process_time()
        road(Flat(update))
        middle = time.process_time()
        decode(shape, held.pop(), 1)
        encoding.append(middle - start)
        decoding.append(time.process_time() - middle)
    return 1e3 * min(encoding), 1e3 * min(decoding)


def main() -> None:
    """Measure and write bench/results/road.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[10, 30, 100])
    parser.add_argument("--headrooms", type=float, nargs="+", default=[16.0, 32.0, 64.0])
    parser.add_argument("--bits", type=int, nargs="+", default=[16, 20])
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    encoding, decoding = times(1_000_000, 20)
    found = [
        Figure("road without masks, 1M float32 coordinates", encoding, "ms CPU", "<= 10"),
        Figure("decoding of a sum of 1M coordinates", decoding, "ms CPU"),
    ]
    for nodes in options.nodes:
        history = list(training(nodes, options.rounds))
        ratios = [ratio(one) for one in history]
        middle = statistics.median(ratios)
        found.append(Figure(f"{nodes} nodes: a round's largest coordinate over its mean's, median", middle, ""))
        found.append(Figure(f"{nodes} nodes: a round's largest coordinate over its mean's, largest", max(ratios), ""))
        for bits, headroom in itertools.product(options.bits, options.headrooms):
            wrong, clipped = errors(history, bits, headroom)
            case = f"{nodes} nodes, {bits} bits, headroom {headroom:g}: "
            found.append(Figure(case + "error of a mean, median", statistics.median(wrong), ""))
            found.append(Figure(case + "error of a mean after the first round, largest", max(wrong[1:]), ""))
            found.append(Figure(case + "share clipped, largest", max(clipped), ""))
    figures.write("road", found)


if __name__ == "__main__":
    main()
