"""What a site wants to know: its own model, the federated one and the pooled upper bound, side by side."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from digits.task import Digits
from fedward_common.config import RunConfig
from fedward_common.local import LocalRunner
from fedward_common.update import Kind
from fedward_common.work import Work
from safetensors.torch import load_file
from torch import nn

CLOSE = 1.5
"""Points that the federated model may be behind the pooled one on held-out digits."""


@dataclass(frozen=True)
class Scores:
    """Accuracies of one site in percent: on its own test digits and on held-out digits of everyone."""

    site: str
    examples: int
    own: dict[str, float]
    heldout: dict[str, float]


def compare(config: RunConfig, data: Path, model: Path) -> list[Scores]:
    """Scores of each site in `data` for the federated `model` and the two others, trained here."""
    federated = Digits().model()
    federated.load_state_dict(load_file(model))
    pooled = train_alone(config, data / "pooled.npz")
    everyone = arrays(data / "heldout.npz", "x", "y")
    scores = []
    for file in sorted(data.glob("site-*.npz")):
        models = {"alone": train_alone(config, file), "federated": federated, "pooled": pooled}
        own = arrays(file, "test_x", "test_y")
        scores.append(
            Scores(
                file.stem,
                len(arrays(file, "train_x", "train_y")[1]),
                {name: accuracy(found, *own) for name, found in models.items()},
                {name: accuracy(found, *everyone) for name, found in models.items()},
            )
        )
    return scores


def train_alone(config: RunConfig, file: Path) -> nn.Module:
    """The same model, trained on one file for as many steps as a node takes in the whole run."""
    steps = (config.local.steps or 1) * config.rounds
    local = config.local.model_copy(update={"steps": steps})
    alone = RunConfig(name=config.name, task=config.task, rounds=1, seed=config.seed, local=local,
                      algorithm={"name": "fedavg"})  # fmt: skip
    runner = LocalRunner(alone, Digits(), file.stem, {"path": str(file)})
    start = runner.do(Work("initial")).vectors
    delta = runner.do(Work("train", 1, start)).vectors["delta"]
    model = Digits().model()
    runner.layout.load(model, start["model"] + delta, Kind.TRAINABLE)
    return model


def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """Percent of `x` that `model` labels as `y`."""
    with torch.no_grad():
        return 100 * float((model(x).argmax(1) == y).float().mean())


def arrays(file: Path, x: str, y: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Two arrays of an .npz file as tensors."""
    with np.load(file) as content:
        return torch.tensor(content[x], dtype=torch.float32), torch.tensor(content[y])


def verdict(scores: list[Scores]) -> list[str]:
    """What falls short, in words; empty if the federation did what it is for."""
    problems = []
    federated, pooled = scores[0].heldout["federated"], scores[0].heldout["pooled"]
    if federated < pooled - CLOSE:
        problems.append(
            f"the federated model has {federated:.1f} % on held-out digits, more than {CLOSE} points below the pooled "
            f"model's {pooled:.1f} %"
        )
    problems += [
        f"{score.site} is no better off: {federated:.1f} % federated, {score.heldout['alone']:.1f} % alone"
        for score in scores
        if federated <= score.heldout["alone"]
    ]
    return problems
