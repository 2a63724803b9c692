"""FedPHP: each node inherits its own model from round to round and learns from it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from fedward_common.algorithms.base import only_by_site
from fedward_common.algorithms.fedavg import Averaging, AveragingOptions, changes
from fedward_common.algorithms.kept_model import PARTS, KeptModel, parts_of
from fedward_common.algorithms.node_half import Hook, Local
from fedward_common.algorithms.representation import LOGITS, REPRESENTATION, predict, represent
from fedward_common.update import Extent, Layout, Update, Vector, Vectors

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fedward_common.batches import Batch

_HPM = KeptModel("hpm")
_COUNT = "participations"


class FedPHPOptions(AveragingOptions):
    """`[algorithm] name = "fedphp"`."""

    name: Literal["fedphp"] = "fedphp"
    mu: float = Field(default=0.9, ge=0, lt=1, description="μ: largest momentum of the inherited model")
    participations: int = Field(
        default=10, ge=1, description="T: rounds of a node in which μ_t grows to μ; rounds × cohort size / nodes"
    )
    transfer: Literal["kd", "mmd"] = Field(
        default="kd", description="what is taken over from the inherited model: predictions (kd) or features (mmd)"
    )
    lam: float = Field(default=0.1, ge=0, lt=1, description="λ: weight of the transfer; the task's loss has 1 − λ")
    temperature: float = Field(default=4.0, gt=0, description="softens the inherited model's predictions (kd)")

    def check_privacy(self, unit: str) -> str | None:
        if not self.lam:
            return None
        return only_by_site(self.name, unit, "its transfer looks at the data in steps that no record's clipping bounds")


class FedPHP(Averaging[FedPHPOptions]):
    """Li, Zhan, Shao, Li, Song 2021 (ECML PKDD), with the inherited private model (HPM) p_i:

    y_i: K steps from w on (1 − λ) f_i(y) + λ R(y, p_i); then p_i ← μ_t p_i + (1 − μ_t) y_i, μ_t = μ min(t/T, 1), t the
    rounds in which the node took part before. w ← w + η_g Σ n_i Δ_i / Σ n_i.
    kd: R = −mean Σ_c softmax(z(p_i)/τ)_c log softmax(z(y))_c, z the task's logits. mmd: R = MMD² of the task's features
    under five Gaussian kernels.

    Details are those of the authors' code: the temperature is the teacher's alone, p_i predicts as in evaluation, and
    float buffers are inherited as parameters are. There p_i starts as the run's initial model; here as the broadcast
    of the node's first round."""

    Options = FedPHPOptions
    neutral: ClassVar[Mapping[str, Any]] = {"lam": 0.0}

    @property
    def asks(self) -> Mapping[str, str]:
        if not self.options.lam:
            return {}
        return LOGITS if self.options.transfer == "kd" else REPRESENTATION

    def keeps(self, layout: Layout) -> Mapping[str, Extent]:
        return {**_HPM.extents(layout), _COUNT: 1}

    def begin(self, layout: Layout, message: Vectors) -> Vectors:
        return {**_HPM.kept(layout, message), _COUNT: np.zeros(1)}

    def client(self, local: Local, message: Vectors, state: Vectors) -> tuple[Update, Vectors]:
        from fedward_common.algorithms.training import train

        inherited = _HPM.parts(state)
        hooks = (_Transfer(local, _teacher(local, inherited), self.options),) if self.options.lam else ()
        trained = train(local, message, hooks)
        mu = self.options.mu * min(float(state[_COUNT][0]) / self.options.participations, 1.0)
        own = parts_of(local, trained.vectors)
        heir = {part: _mixed(inherited[part], own[part], mu) for part in inherited}
        kept = {**_HPM.kept(local.layout, heir), _COUNT: state[_COUNT] + 1}
        return Update(changes(trained, message), float(local.examples), trained.metrics), kept

    def personal(self, local: Local, message: Vectors, state: Vectors) -> Vectors:
        """The inherited model."""
        return _HPM.personal(local, state)


def _mixed(old: Vector, new: Vector, mu: float) -> Vector:
    mixed: Vector = (mu * old.astype(np.float64) + (1 - mu) * new).astype(new.dtype)
    return mixed


def _teacher(local: Local, parts: Vectors) -> nn.Module:
    teacher = copy.deepcopy(local.model).eval().requires_grad_(False)
    for part, vector in parts.items():
        local.layout.load(teacher, vector, PARTS[part])
    return teacher


class _Transfer(Hook):
    def __init__(self, local: Local, teacher: nn.Module, options: FedPHPOptions) -> None:
        self._local = local
        self._teacher = teacher
        self._options = options

    def loss(self, model: nn.Module, batch: Batch, loss: torch.Tensor) -> torch.Tensor:
        import torch

        by_logits = self._options.transfer == "kd"
        see = predict if by_logits else represent
        with torch.no_grad():
            theirs = see(self._local, self._teacher, batch)
        own = see(self._local, model, batch)
        distance = distillation(own, theirs, self._options.temperature) if by_logits else mmd(own, theirs)
        return (1 - self._options.lam) * loss + self._options.lam * distance


def distillation(own: torch.Tensor, theirs: torch.Tensor, temperature: float) -> torch.Tensor:
    """Cross-entropy of `own` against the softened predictions `theirs`; both logits, (batch, classes, …)."""
    targets = (theirs / temperature).softmax(dim=1)
    return -(targets * own.log_softmax(dim=1)).sum(dim=1).mean()


def mmd(own: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Squared maximum mean discrepancy (biased estimate) of two batches of features, each (batch, features), under
    Σ_k exp(−d²/(2^k s)), k = −2 … 2, s the mean of d² over pairs, without a gradient."""
    import torch

    both = torch.cat([own, theirs])
    squared = torch.cdist(both, both, compute_mode="donot_use_mm_for_euclid_dist").square()
    count = len(both)
    # With all points equal s would be 0.
    scale = squared.detach().sum() / (count * (count - 1)) + 1e-8
    kernel = sum((-squared / (scale * 2.0**k)).exp() for k in range(-2, 3))
    sign = torch.ones(count, dtype=both.dtype, device=both.device)
    sign[len(own) :] = -1
    value: torch.Tensor = sign @ kernel @ sign / len(own) ** 2
    return value
