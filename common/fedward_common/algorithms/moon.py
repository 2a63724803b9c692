"""MOON: local models learn representations nearer to the global model's than to their own of before."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from fedward_common.algorithms.base import (
    MODEL,
    STATISTIC,
)
from fedward_common.algorithms.fedavg import Averaging, AveragingOptions, changes
from fedward_common.algorithms.node_half import Hook, Local
from fedward_common.algorithms.representation import REPRESENTATION, represent
from fedward_common.errors import TaskError
from fedward_common.update import Extent, Kind, Layout, Update, Vectors

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fedward_common.batches import Batch

PREVIOUS = "previous"
"""The trainable tensors of the node's own model after its last training that was in a sum."""
PREVIOUS_STATISTIC = "previous_statistic"
"""The float buffers of that model, if it has any."""

_EPS = 1e-8
"""Smallest norm to divide by, as in PyTorch's cosine similarity."""


class MoonOptions(AveragingOptions):
    """`[algorithm] name = "moon"`."""

    name: Literal["moon"] = "moon"
    mu: float = Field(default=1.0, ge=0, description="weight μ of the model-contrastive loss")
    temperature: float = Field(default=0.5, gt=0, description="τ, by which similarities are divided")

    def check_privacy(self, unit: str) -> str | None:
        if unit == "site":
            return None
        return (
            f"algorithm.name = 'moon' with privacy.unit = '{unit}': private steps take the task's loss of single "
            "records, and the contrastive loss is not part of it. Choose fedavg or fedprox, or privacy.unit = 'site'."
        )


class Moon(Averaging[MoonOptions]):
    """Li, He, Song 2021 (CVPR), "Model-Contrastive Federated Learning", Alg. 1, Eq. 3 and 4.

    Local steps on f_i(y) + μ · mean over the batch of −log(e^{s(z, z_glob)/τ} / (e^{s(z, z_glob)/τ} +
    e^{s(z, z_prev)/τ})), s the cosine similarity. z, z_glob, z_prev are the batch's representations by y, by w and by
    the node's own previous model; the latter two are frozen, in evaluation mode. In a node's first training the
    previous model is w: the term is log 2 and has no gradient. w ← w + η_g Σ n_i Δ_i / Σ n_i."""

    Options = MoonOptions
    neutral: ClassVar[Mapping[str, Any]] = {"mu": 0.0}
    asks = REPRESENTATION

    def keeps(self, layout: Layout) -> Mapping[str, Extent]:
        kept: dict[str, Extent] = {PREVIOUS: Kind.TRAINABLE}
        if layout.size(Kind.STATISTIC):
            kept[PREVIOUS_STATISTIC] = Kind.STATISTIC
        return kept

    def begin(self, layout: Layout, message: Vectors) -> Vectors:
        return _as_previous(message)

    def client(self, local: Local, message: Vectors, state: Vectors) -> tuple[Update, Vectors]:
        from fedward_common.algorithms.training import train

        hooks: tuple[Hook, ...] = ()
        if self.options.mu:
            previous = {_KEPT_AS[name]: vector for name, vector in state.items()}
            hooks = (_Contrast(self.options, local, _frozen(local, message), _frozen(local, previous)),)
        trained = train(local, message, hooks)
        update = Update(changes(trained, message), float(local.examples), trained.metrics)
        return update, _as_previous(trained.vectors)


_KEPT_AS = {PREVIOUS: MODEL, PREVIOUS_STATISTIC: STATISTIC}


def _as_previous(vectors: Vectors) -> Vectors:
    return {kept: vectors[name] for kept, name in _KEPT_AS.items() if name in vectors}


def _frozen(local: Local, vectors: Vectors) -> nn.Module:
    """A copy of the model with `vectors` in it. Its private tensors are those of the round's start: the private state
    is committed together with the previous model, so they are that model's own."""
    model = deepcopy(local.model).requires_grad_(False).eval()
    for name, kind in ((MODEL, Kind.TRAINABLE), (STATISTIC, Kind.STATISTIC)):
        if name in vectors:
            local.layout.load(model, vectors[name], kind)
    return model


class _Contrast(Hook):
    def __init__(self, options: MoonOptions, local: Local, global_: nn.Module, previous: nn.Module) -> None:
        self._options = options
        self._local = local
        self._frozen = (global_, previous)

    def loss(self, model: nn.Module, batch: Batch, loss: torch.Tensor) -> torch.Tensor:
        import torch
        from torch.nn import functional as F

        z = represent(self._local, model, batch)
        if not z.requires_grad:
            raise TaskError(
                "representation() returned a tensor without a gradient, so the contrastive loss would train nothing: "
                "compute it from trained layers of the model (no .detach(), no torch.no_grad())."
            )
        with torch.no_grad():
            z_global, z_previous = (represent(self._local, frozen, batch) for frozen in self._frozen)
        unit = partial(F.normalize, dim=1, eps=_EPS)
        # s(z, z_glob) − s(z, z_prev), so that equal frozen models give no gradient, to the last bit.
        nearer = (unit(z) * (unit(z_global) - unit(z_previous))).sum(1)
        # −log(e^a / (e^a + e^b)) = −log σ(a − b), without e^a, which overflows for a small τ.
        return loss - self._options.mu * F.logsigmoid(nearer / self._options.temperature).mean()
