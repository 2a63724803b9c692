"""Federated averaging, and the half that other algorithms share with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field

from fedward_common.algorithms.base import (
    DELTA,
    MODEL,
    STATISTIC,
    AlgorithmOptions,
    Cohort,
    ServerState,
    SumAlgorithm,
    moved,
    moved_statistic,
)
from fedward_common.algorithms.node_half import Hook, Local, Trained
from fedward_common.update import Update, Vector, Vectors

ServerLR = Annotated[float, Field(gt=0, description="server learning rate η_g")]


class AveragingOptions(AlgorithmOptions):
    """Options of every algorithm whose server half is FedAvg's."""

    server_lr: ServerLR = 1.0


class FedAvgOptions(AveragingOptions):
    """`[algorithm] name = "fedavg"`."""

    name: Literal["fedavg"] = "fedavg"


O = TypeVar("O", bound=AlgorithmOptions)  # noqa: E741
A = TypeVar("A", bound=AveragingOptions)


class LocalSGD(SumAlgorithm[O]):
    """Nodes run local SGD and send Δ_i = y_i − w, weighted by their number of examples n_i."""

    def hooks(self, local: Local, message: Vectors) -> Sequence[Hook]:
        """What is added to the local steps; nothing here."""
        return ()

    def client(self, local: Local, message: Vectors, state: Vectors) -> tuple[Update, Vectors]:
        from fedward_common.algorithms.training import train

        trained = train(local, message, self.hooks(local, message))
        return Update(changes(trained, message), float(local.examples), trained.metrics), {}


class Averaging(LocalSGD[A]):
    """FedAvg's server half: w ← w + η_g Σ n_i Δ_i / Σ n_i."""

    def server(self, server: ServerState, mean: Update, cohort: Cohort) -> ServerState:
        return advanced(server, mean, moved(server.model, mean.groups[DELTA], self.options.server_lr))


class FedAvg(Averaging[FedAvgOptions]):
    """McMahan et al. 2017, with a server learning rate."""

    Options = FedAvgOptions
    neutral: ClassVar[Mapping[str, Any]] = {}


def changes(trained: Trained, message: Vectors) -> dict[str, Vector]:
    """The groups "delta" and, if the model has float buffers, "statistic": what training changed."""
    groups = {DELTA: trained.vectors[MODEL] - message[MODEL]}
    if STATISTIC in trained.vectors:
        groups[STATISTIC] = trained.vectors[STATISTIC] - message[STATISTIC]
    return groups


def advanced(server: ServerState, mean: Update, model: Vector, **vectors: Vector) -> ServerState:
    """The state after a round: the new model and other new vectors, float buffers averaged plainly."""
    new = {MODEL: model, **vectors}
    if STATISTIC in server.vectors:
        new[STATISTIC] = moved_statistic(server.vectors[STATISTIC], mean.groups[STATISTIC])
    return ServerState({**server.vectors, **new}, server.round + 1)
