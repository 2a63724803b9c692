"""Model and data: scikit-learn's handwritten digits, a small network."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional


class Net(nn.Module):
    """64 pixels, 32 hidden units, 10 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(64, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.relu(self.fc1(x)))


Data = tuple[torch.Tensor, torch.Tensor]


def load_data(partition: int, partitions: int) -> tuple[Data, Data]:
    """One node's digits, a fifth of them for tests. Partitions differ in size: node i has i + 1 shares."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    ends = np.cumsum(np.arange(1, partitions + 1))
    start, stop = (len(order) * (ends[partition] - partition - 1)) // ends[-1], len(order) * ends[partition] // ends[-1]
    mine = order[start:stop]
    x = torch.tensor(digits.data[mine] / 16, dtype=torch.float32)
    y = torch.tensor(digits.target[mine])
    cut = len(mine) // 5
    return (x[cut:], y[cut:]), (x[:cut], y[:cut])


def train(net: Net, data: Data, lr: float, proximal_mu: float, seed: int) -> float:
    """One epoch of SGD; the mean loss. proximal_mu: FedProx's, 0 without it."""
    start = [parameter.detach().clone() for parameter in net.parameters()]
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    x, y = data
    total = 0.0
    for batch in torch.randperm(len(y), generator=torch.Generator().manual_seed(seed)).split(32):
        optimizer.zero_grad()
        loss = functional.cross_entropy(net(x[batch]), y[batch])
        total += loss.item() * len(batch)
        if proximal_mu:
            moved = sum(((p - s) ** 2).sum() for p, s in zip(net.parameters(), start, strict=True))
            loss = loss + proximal_mu / 2 * moved
        loss.backward()
        optimizer.step()
    return total / len(y)


@torch.no_grad()
def test(net: Net, data: Data) -> tuple[float, float]:
    """Mean loss and accuracy."""
    x, y = data
    out = net(x)
    return functional.cross_entropy(out, y).item(), (out.argmax(1) == y).float().mean().item()
