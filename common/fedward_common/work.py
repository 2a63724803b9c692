"""What a node's task code is asked to do, and what it answers: all that passes between a guard and its worker.

No PyTorch here, nor in anything else that the guard and the server's service import: a guard that only watches the
link stays small, and a command answers at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedward_common.update import Vectors

PRIVATE = "private"
"""Name, in a node's kept state, of the vector of tensors that never leave it."""


@dataclass(frozen=True)
class Work:
    """One piece of work. op: "prepare" | "count" | "train" | "evaluate" | "initial".

    state: the node's kept vectors (train, and evaluate for private tensors). split: "test" | "train" |
    "central" (evaluate only). seconds: time limit of training."""

    op: str
    round: int = 0
    vectors: Vectors = field(default_factory=dict)
    state: Vectors = field(default_factory=dict)
    split: str = "test"
    seconds: float | None = None


@dataclass(frozen=True)
class Done:
    """The result of a `Work`. prepare: info["layout"] (JSON text), info["metric_names"]. count: metrics "examples" (to
    train on). initial: layout and metric names, and vectors "model", and
    "statistic" and "counter" where the model has such tensors. train: vectors = update groups, state,
    weight, metrics sums, info steps/complete. evaluate: metrics sums."""

    vectors: Vectors = field(default_factory=dict)
    state: Vectors = field(default_factory=dict)
    weight: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
