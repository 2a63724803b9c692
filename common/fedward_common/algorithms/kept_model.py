"""A whole model that a node keeps for itself, beside the federation's."""

from __future__ import annotations

from dataclasses import dataclass

from fedward_common.algorithms.base import MODEL, STATISTIC
from fedward_common.algorithms.node_half import Local
from fedward_common.update import Extent, Kind, Layout, Vectors
from fedward_common.work import PRIVATE

PARTS = {MODEL: Kind.TRAINABLE, STATISTIC: Kind.STATISTIC, PRIVATE: Kind.PRIVATE}
"""What a model is made of."""


@dataclass(frozen=True)
class KeptModel:
    """Kept vectors `name`, and where the model has such tensors `name`_statistic and `name`_private: private tensors of
    its own, apart from those that the federation's model has on this node."""

    name: str

    def extents(self, layout: Layout) -> dict[str, Extent]:
        """For `Algorithm.keeps`."""
        return {self._key(part): kind for part, kind in PARTS.items() if layout.size(kind)}

    def kept(self, layout: Layout, parts: Vectors) -> Vectors:
        """A model ("model", "statistic", "private") as kept vectors."""
        return {self._key(part): parts[part] for part, kind in PARTS.items() if layout.size(kind)}

    def parts(self, state: Vectors) -> Vectors:
        """The inverse of `kept`."""
        return {part: state[self._key(part)] for part in PARTS if self._key(part) in state}

    def personal(self, local: Local, state: Vectors) -> Vectors:
        """For `Algorithm.personal`: the kept model is what this node uses."""
        parts = self.parts(state)
        put_private(local, parts)
        return parts

    def _key(self, part: str) -> str:
        return self.name if part == MODEL else f"{self.name}_{part}"


def parts_of(local: Local, sent: Vectors) -> Vectors:
    """A model with the private tensors that `local.model` has now. sent: "model", and "statistic" if any."""
    return {**sent, PRIVATE: local.layout.pack(local.model.state_dict(), Kind.PRIVATE)}


def put_private(local: Local, parts: Vectors) -> None:
    """Give `local.model` that model's private tensors."""
    if PRIVATE in parts:
        local.layout.load(local.model, parts[PRIVATE], Kind.PRIVATE)
