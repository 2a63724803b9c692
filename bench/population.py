"""MNIST with a node for each writer: two populations, clerks and students, whose hands differ."""

from __future__ import annotations

import numpy as np
import torch
from fedward_common.update import Kind, Layout, Vectors

from bench import writers
from bench.writers import ByWriter, dataset, load

STAFF = 0
"""Value of "hsf" for the employees of the census bureau; the others are students."""


class Population(ByWriter):
    """A writer a node."""

    def __init__(self) -> None:
        _, _, writer = load(str(writers.file()), "train")
        super().__init__(len(np.unique(writer)))

    def by_population(self, vectors: Vectors) -> tuple[float, float]:
        """Accuracy in percent on unseen writers: staff, students."""
        model = self.model()
        Layout.of(model).load(model, vectors["model"], Kind.TRAINABLE)
        with np.load(writers.file()) as file:
            x, y, staff = file["test_x"], file["test_y"], file["test_hsf"] == STAFF
        return self._accuracy(model, dataset(x[staff], y[staff])), self._accuracy(model, dataset(x[~staff], y[~staff]))

    @staticmethod
    def _accuracy(model: torch.nn.Module, images: torch.utils.data.TensorDataset) -> float:
        x, y = images.tensors
        with torch.no_grad():
            return 100 * float((model(x).argmax(1) == y).double().mean())
