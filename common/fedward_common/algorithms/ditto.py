"""Ditto: beside the global model each node trains one of its own, held near it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field

from fedward_common.algorithms.base import MODEL
from fedward_common.algorithms.fedavg import Averaging, AveragingOptions, changes
from fedward_common.algorithms.hooks import proximal
from fedward_common.algorithms.kept_model import KeptModel, parts_of, put_private
from fedward_common.algorithms.node_half import Local, Progress
from fedward_common.algorithms.phases import Phases
from fedward_common.update import Extent, Layout, Update, Vectors, all_finite

_OWN = KeptModel("v_i")


class DittoOptions(AveragingOptions):
    """`[algorithm] name = "ditto"`."""

    name: Literal["ditto"] = "ditto"
    lam: float = Field(default=1.0, ge=0, description="λ: pull of the personal model v_i to w; 0: trained alone")
    personal_steps: int | None = Field(default=None, ge=1, description="steps on v_i a round; default: as many as on w")


class Ditto(Averaging[DittoOptions]):
    """Li, Hu, Beirami, Smith 2021 (ICML), Alg. 1: w by FedAvg; v_i ← v_i − η (∇f_i(v_i) + λ (v_i − w)), w as it was
    broadcast.

    Each node keeps v_i with its float buffers and private tensors; it starts as the model of the first round in which
    the node takes part. Nothing that leaves the node depends on it: w's training comes first and has the round's own
    seed, so that w is FedAvg's bit for bit."""

    Options = DittoOptions
    neutral: ClassVar[Mapping[str, Any]] = {}

    def keeps(self, layout: Layout) -> Mapping[str, Extent]:
        return _OWN.extents(layout)

    def begin(self, layout: Layout, message: Vectors) -> Vectors:
        return _OWN.kept(layout, message)

    def client(self, local: Local, message: Vectors, state: Vectors) -> tuple[Update, Vectors]:
        from fedward_common.algorithms.training import train

        phases = Phases(local)
        trained = train(phases.next(), message)
        update = Update(changes(trained, message), float(local.examples), trained.metrics)

        left, own = parts_of(local, trained.vectors), _OWN.parts(state)
        put_private(local, own)
        # Nothing of v_i is released, so its steps need no noise; nor may their number be told, which gives n_i away.
        alone = replace(phases.next("personal"), private=None, progress=Progress())
        pull = proximal(local, self.options.lam, message[MODEL])
        after = parts_of(local, train(alone, own, pull, steps=self.options.personal_steps).vectors)
        put_private(local, left)
        if local.private is not None and not all(all_finite(vector) for vector in after.values()):
            # The gate would hold the update back for it, and steps without noise would decide who is in the sum.
            return update, state
        return update, _OWN.kept(local.layout, after)

    def personal(self, local: Local, message: Vectors, state: Vectors) -> Vectors:
        """v_i."""
        return _OWN.personal(local, state)
