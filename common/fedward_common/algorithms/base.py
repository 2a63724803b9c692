"""The contract of an algorithm: one class with both halves, pure functions over explicit state.

A newcomer adds one file here and one line in `registry.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict

from fedward_common.update import Extent, Kind, Layout, Update, Vector, Vectors

if TYPE_CHECKING:
    from torch import nn

    from fedward_common.algorithms.local_options import LocalOptions
    from fedward_common.algorithms.node_half import Local

MODEL = "model"
"""Name of the vector of trainable tensors, in broadcasts and in the server's state."""
STATISTIC = "statistic"
"""Name of the vector of float buffers, likewise; absent when the model has none."""
DELTA = "delta"
"""Name of the update group y_i - w over trainable tensors."""


class AlgorithmOptions(BaseModel):
    """An algorithm's own settings: the `[algorithm]` table of a run. Subclasses give `name` as a Literal."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str

    def check(self, local: LocalOptions) -> str | None:
        """Why these settings cannot work with that local training (with the way out), or None."""
        return None

    def check_privacy(self, unit: str) -> str | None:
        """Why these settings have no sound privacy by that unit ("record" | "patient" | "site"), or None.

        By record and by patient the gradients of the steps of `train` are private, and what follows from them; by site
        the group "delta" is, and a run may have no other."""
        return None


def only_by_site(name: str, unit: str, why: str) -> str | None:
    """For `check_privacy`: None by site, else that `why` leaves an algorithm without privacy by record or patient."""
    if unit == "site":
        return None
    return (
        f"algorithm.name = '{name}' with privacy.unit = '{unit}': {why}. Choose privacy.unit = 'site' or another "
        "algorithm (fedavg, fedper, ditto), or remove [privacy]."
    )


def parts_by_site(name: str, kept: str) -> str:
    """Why an algorithm whose server has a counterpart of what nodes keep has no privacy by site."""
    return (
        f"algorithm.name = '{name}' with privacy.unit = 'site': a node's {kept} from its whole update, the server's "
        "from the clipped ones, and their means would part. Choose fedavg, fedprox or a server optimiser, or remove "
        "[privacy]."
    )


@dataclass(frozen=True)
class ServerState:
    """All that the server carries from round to round. `vectors` holds "model", "statistic" (if any) and
    what the algorithm adds (control variates, moments). `round`: rounds finished."""

    vectors: Vectors
    round: int = 0

    def with_vectors(self, **changes: Vector) -> ServerState:
        """A copy with some vectors replaced or added."""
        return replace(self, vectors={**self.vectors, **changes})

    @property
    def model(self) -> Vector:
        """The global model w: flat vector of the trainable tensors."""
        return self.vectors[MODEL]


@dataclass(frozen=True)
class Cohort:
    """Counts of a round. enrolled: N, all nodes that take part in the run. replied: |S|, updates in the
    sum."""

    round: int
    enrolled: int
    selected: int
    replied: int


def chunks(length: int) -> Iterator[slice]:
    """Slices that cover a vector: server maths in float64 then needs a small buffer, not a second model."""
    for start in range(0, length, _CHUNK):
        yield slice(start, min(start + _CHUNK, length))


_CHUNK = 1 << 17


def moved(vector: Vector, change: Vector, rate: float = 1.0) -> Vector:
    """vector + rate · change, computed in float64, as a new vector of `vector`'s dtype."""
    out = np.empty_like(vector)
    for part in chunks(len(vector)):
        out[part] = vector[part].astype(np.float64) + rate * change[part]
    return out


def moved_statistic(vector: Vector, change: Vector) -> Vector:
    """vector + change for float buffers, where a sum that cancels ends at zero.

    A running variance that every node brought to 0 has the change -vector, and the rounding of a weighted
    mean may leave it at -1e-17 of its old size: negative. What is under 2⁻⁴⁰ of the old value is such
    rounding."""
    out = np.empty_like(vector)
    for part in chunks(len(vector)):
        old = vector[part].astype(np.float64)
        new = old + change[part]
        new[np.abs(new) <= np.abs(old) * 2.0**-40] = 0.0
        out[part] = new
    return out


O = TypeVar("O", bound=AlgorithmOptions)  # noqa: E741


class Algorithm(ABC, Generic[O]):
    """Both halves of a federated algorithm. Instances hold options only, never state."""

    Options: ClassVar[type[AlgorithmOptions]]
    uniform: ClassVar[bool] = False
    """True: every update counts the same. False: weighted by the node's number of examples."""
    mirrored: ClassVar[bool] = False
    """True: the server holds a counterpart of what nodes keep (c of the c_i), so that a node which lost it may not go
    on as if it were new."""
    neutral: ClassVar[Mapping[str, Any] | None] = None
    """Options at which one round from the initial state does what FedAvg does, None if there are none."""

    def __init__(self, options: O) -> None:
        self.options = options

    @property
    def asks(self) -> Mapping[str, str]:
        """The optional methods of a task that this algorithm calls, each with an example; a task without them is
        refused (`registry.layout_of`: by `fedward plan`, by the server and when a node prepares)."""
        return {}

    def kinds(self, model: nn.Module) -> Mapping[str, Kind]:
        """Tensors of the task's model that this algorithm treats as another kind, by name or shell pattern; they go
        before the task's own `tensor_kinds`."""
        return {}

    def check_layout(self, layout: Layout) -> str | None:
        """Why this algorithm cannot work with a model of that layout (with the way out), or None."""
        return None

    def initial(self, layout: Layout, vectors: Vectors) -> ServerState:
        """Round 0 from the initial model ("model", "statistic"); algorithms add their own vectors."""
        return ServerState(vectors=dict(vectors))

    def broadcast(self, server: ServerState) -> Vectors:
        """What every node of the cohort receives; "model" and "statistic" by default."""
        return {name: server.vectors[name] for name in (MODEL, STATISTIC) if name in server.vectors}

    def keeps(self, layout: Layout) -> Mapping[str, Extent]:
        """The vectors that a node keeps between rounds (c_i, h_i, its personal model …)."""
        return {}

    def begin(self, layout: Layout, message: Vectors) -> Vectors:
        """What a node keeps before its first training of a run: zeros. message: that training's broadcast, and as
        "private" the node's private tensors."""
        extents = {name: layout.extent(extent) for name, extent in self.keeps(layout).items()}
        return {name: np.zeros(length, dtype) for name, (length, dtype) in extents.items()}

    def sends(self, layout: Layout) -> Mapping[str, Extent]:
        """The groups of this algorithm's updates, each with its length and dtype."""
        groups: dict[str, Extent] = {DELTA: Kind.TRAINABLE}
        if layout.size(Kind.STATISTIC):
            groups[STATISTIC] = Kind.STATISTIC
        return groups

    @abstractmethod
    def client(self, local: Local, message: Vectors, state: Vectors) -> tuple[Update, Vectors]:
        """A node's round: from the broadcast and the node's kept vectors to its update and its new kept
        vectors.

        The new state is committed only when the server says that the update was in the sum. The returned
        update's weight is 1 if `uniform`, else the number of examples, or a part of it. Group "statistic" holds the
        change of the float buffers, as "delta" holds the change of the parameters."""

    def personal(self, local: Local, message: Vectors, state: Vectors) -> Vectors:
        """The model ("model", "statistic" if any) that a node with these kept vectors would use itself: what its own
        evaluations judge. The broadcast model by default. `local.model` holds the node's private tensors, which may
        be changed for this evaluation."""
        return message


class SumAlgorithm(Algorithm[O]):
    """The server needs a (weighted) mean only: runs under secure aggregation by construction."""

    def summed(self, layout: Layout, local: LocalOptions) -> Mapping[str, Extent]:
        """The groups of `sends` that a secure sum has to carry: what follows from the others' mean need not travel
        (nor be released a second time). Where there is such a group, every node must do all its steps."""
        return self.sends(layout)

    def completed(self, server: ServerState, mean: Update, local: LocalOptions) -> Update:
        """The mean of `summed` with the groups that follow from it."""
        return mean

    @abstractmethod
    def server(self, server: ServerState, mean: Update, cohort: Cohort) -> ServerState:
        """The next server state (with `round` + 1) from the weighted mean of the cohort's updates.

        mean.groups: float64 means Σw_i x_i / Σw_i; the result keeps the dtypes of `server.vectors`.
        """
