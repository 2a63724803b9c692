"""A public data set that every node mixes into its own: the `[task.shared]` table (Zhao et al. 2018, section 4,
"Federated Learning with Non-IID Data").

A node's training set is its n_i examples and m_i = round(n_i s / (1 − s)) of the public ones, drawn once a run by seed
and node; so a pass sees public examples in a share of s, whatever n_i. The paper's α, the part of the public set that a
node gets, is m_i over its size.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from fedward_common.errors import TaskError

if TYPE_CHECKING:
    from torch.utils.data import Dataset, TensorDataset

    from fedward_common.task import Data


class SharedOptions(BaseModel):
    """The `[task.shared]` table: public examples in local training."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    share: float = Field(
        gt=0, lt=1, description="share of a node's training examples that come from the task's shared_data()"
    )

    def count(self, own: int) -> int:
        """m_i: public examples beside `own` private ones."""
        return round(own * self.share / (1 - self.share))


def check_shared(task: object) -> None:
    """Raise `TaskError` if the task has no public data set."""
    if not callable(getattr(task, "shared_data", None)):
        raise TaskError(
            f"[task.shared] needs shared_data(config) -> Dataset in {type(task).__name__}, the same public data set on "
            "every node: add it, or remove the table."
        )


def check_public(dataset: object) -> Dataset[Any]:
    """What shared_data() returned, if it is a map-style dataset. Raises `TaskError`."""
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise TaskError(
            f"shared_data() returned {type(dataset).__name__}: return a map-style dataset (with __len__ and "
            "__getitem__)."
        )
    return dataset  # type: ignore[return-value]


def mixed(data: Data, public: Dataset[Any], options: SharedOptions, seed: int) -> Data:
    """`data` with the node's draw from `public` after its own training examples. Raises `TaskError` if there are too
    few public ones. Groups stay those of the node's own examples: with privacy by patient there is no mixing."""
    import torch
    from torch.utils.data import ConcatDataset, Subset, TensorDataset

    from fedward_common import batches
    from fedward_common.task import Data

    own, there = batches.length(data.train), batches.length(public)
    wanted = options.count(own)
    if wanted > there:
        raise TaskError(
            f"task.shared.share = {options.share:g}: beside this node's {own} examples that is {wanted} public ones, "
            f"but shared_data() has {there}. Lower share to {_fits(own, there):g} or less, or give a larger public set."
        )
    drawn = torch.randperm(there, generator=torch.Generator().manual_seed(seed))[:wanted]
    chosen: Dataset[Any] = Subset(public, drawn.tolist())
    train: Dataset[Any]
    if data.collate is None:
        chosen = batches.flattened(chosen)
    if data.collate is None and type(data.train) is type(chosen) is TensorDataset:
        train = _joined(data.train, chosen)
    else:
        train = ConcatDataset([data.train, chosen])
    return Data(train, data.test, data.collate, data.groups)


def _fits(own: int, there: int) -> float:
    """A share that `there` public examples are enough for, in whole thousandths."""
    return int(1000 * there / (own + there)) / 1000


def _joined(own: TensorDataset, public: TensorDataset) -> TensorDataset:
    import torch
    from torch.utils.data import TensorDataset

    mine, theirs = ([(tuple(x.shape[1:]), x.dtype) for x in part.tensors] for part in (own, public))
    if mine != theirs:
        # torch.cat would change dtypes in silence.
        raise TaskError(
            f"shared_data() has examples of shapes and dtypes {theirs}, data() of {mine}: make them the same."
        )
    pairs = zip(own.tensors, public.tensors, strict=True)
    return TensorDataset(*(torch.cat([a, b.to(a.device)]) for a, b in pairs))
