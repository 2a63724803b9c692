"""MNIST by real writer, as in examples/mnist_writers: each node holds the digits of a group of people, its patients."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedward_common.task import Data

sys.path.insert(0, str(Path(__file__).parents[1] / "examples/mnist_writers"))

from writers.task import Writers, dataset, load


def file() -> Path:
    """The digits with their writers. Ends the program if they are not there."""
    path = Path(os.environ.get("FEDWARD_MNIST_WRITERS", "mnist_writers.npz"))
    if not path.exists():
        raise SystemExit(f"{path}: not there. Set FEDWARD_MNIST_WRITERS to the file of examples/mnist_writers.")
    return path


class ByWriter(Writers):
    """The example's task; the test images are of writers whom no node has."""

    def __init__(self, nodes: int) -> None:
        self._file = str(file())
        self._nodes = nodes

    def data(self, config: Mapping[str, Any]) -> Data:
        """config: "partition" i."""
        return super().data({"path": self._file, "partition": config["partition"], "partitions": self._nodes})

    def central_data(self, config: Mapping[str, Any]) -> Data:
        x, y, _ = load(self._file, "test")
        return Data(dataset(x, y))
