"""Task code at work on one node: builds the model, loads the data, trains and evaluates.

The same class runs in a worker process (under the guard), in the in-process simulator and in a stock Flower
ClientApp. It knows nothing of policies, keys or links.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedward_common.config import RunConfig
from fedward_common.task import Task
from fedward_common.update import Layout, Vectors


@dataclass(frozen=True)
class Work:
    """One piece of work. op: "prepare" | "train" | "evaluate" | "initial".

    state: the node's kept vectors (train only). split: "test" | "train" | "central" (evaluate only).
    seconds: time limit.
    """

    op: str
    round: int = 0
    vectors: Vectors = field(default_factory=dict)
    state: Vectors = field(default_factory=dict)
    split: str = "test"
    seconds: float | None = None


@dataclass(frozen=True)
class Done:
    """The result of a `Work`. prepare: info["layout"] (JSON text). initial: vectors "model", "statistic", "counter".
    train: vectors = update groups, state, weight, metrics sums, info steps/complete. evaluate: metrics sums."""

    vectors: Vectors = field(default_factory=dict)
    state: Vectors = field(default_factory=dict)
    weight: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)


class LocalRunner:
    """Runs `Work` for one node of one run."""

    def __init__(
        self, config: RunConfig, task: Task, node: str, data_config: Mapping[str, Any], device: str = "cpu"
    ) -> None:
        raise NotImplementedError

    @property
    def layout(self) -> Layout:
        """Layout of the task's model."""
        raise NotImplementedError

    def do(self, work: Work) -> Done:
        """Do one piece of work. Raises `TaskError` (the task lacks something) or whatever the task's code raises."""
        raise NotImplementedError
