"""FedNP: an estimate of the global data distribution, passed between nodes, regularises the last layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from fedward_common.algorithms.base import (
    DELTA,
    AlgorithmOptions,
    Cohort,
    ServerState,
    SumAlgorithm,
    moved,
)
from fedward_common.algorithms.fedavg import ServerLR, advanced, changes
from fedward_common.algorithms.node_half import Hook, Local
from fedward_common.algorithms.representation import REPRESENTATION, represent
from fedward_common.errors import TaskError, UpdateError
from fedward_common.update import Extent, Kind, Layout, TensorSpec, Update, Vector, Vectors

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fedward_common.algorithms.gaussian import Gaussian
    from fedward_common.batches import Batch

NATURAL = "natural"
"""Σ over all nodes of their natural parameters (η, λ), in the server's state and in broadcasts."""
NODE_NATURAL = "natural_k"
DELTA_NATURAL = "delta_natural"
HEAD = "head"
"""f and the natural-parameter network, flat: the node's own, never sent."""


class FedNPOptions(AlgorithmOptions):
    """`[algorithm] name = "fednp"`."""

    name: Literal["fednp"] = "fednp"
    kl_weight: float = Field(default=0.01, ge=0, description="weight λ of the two divergences")
    dimension: int = Field(default=10, ge=1, le=1000, description="coordinates of the latent variable z")
    layer: str | None = Field(
        default=None, description="weight of the classifier; default the model's last tensor with two axes"
    )
    min_variance: float = Field(
        default=0.01, gt=0, description="added to the variances of the weights that z predicts; 5e-6: as the authors"
    )
    server_lr: ServerLR = 1.0

    def check_privacy(self, unit: str) -> str | None:
        why = (
            "a node's natural parameters follow from its records beside the change of the model"
            if unit == "site"
            else "the natural parameters are computed from all records, without noise"
        )
        return (
            f"algorithm.name = 'fednp' with privacy.unit = '{unit}': {why}. Choose fedavg, fedprox or a server "
            "optimiser, or remove [privacy]."
        )


class FedNP(SumAlgorithm[FedNPOptions]):
    """Wu et al. 2023 (AAAI), "FedNP: Towards Non-IID Federated Learning via Federated Neural Propagation", Alg. 1 and
    Eq. 47. Every node counts the same.

    Latent z ~ p(z) = N(0, I), global estimate q(z) ∝ p(z) Π_k q_k(z), q_k with natural parameters η_k = z_{m,k} /
    z_{s,k}, λ_k = 1 / z_{s,k}. The server broadcasts Σ_j (η_j, λ_j) over all N nodes.
    Cavity: z_{s,−k} = (1 + Σ_{j≠k} λ_j)^{−1}, z_{m,−k} = z_{s,−k} Σ_{j≠k} η_j.
    Steps on f_i(y) + kl_weight · (KL[p(θ|z) ‖ p(θ̂)] + KL[q(z) ‖ p(z)]), q(z) the Gaussian with the moments of
    σ(f(X) z) q_{−k}(z), p(θ|z) a natural-parameter network's output for it, θ̂ the classifier's weight.
    At the end q_k = q / q_{−k} with f(X_k) of all local data; sends Δ_i and the change of (η_k, λ_k).
    What of this the paper, and what its program says: docs/algorithms/representation.md.
    """

    Options = FedNPOptions
    uniform = True
    mirrored = True
    neutral: ClassVar[Mapping[str, Any]] = {"kl_weight": 0.0}
    asks = REPRESENTATION

    def check_layout(self, layout: Layout) -> str | None:
        if self._classifiers(layout):
            return None
        if self.options.layer is None:
            return (
                "algorithm.name = 'fednp' needs a last layer, a trainable or private tensor with two axes, [outputs, "
                "features]; the model has none. Choose another algorithm."
            )
        known = [spec.name for spec in _matrices(layout)]
        return (
            f"algorithm.layer = {self.options.layer!r} is no trainable or private tensor with two axes: name one of "
            f"{known}."
        )

    def initial(self, layout: Layout, vectors: Vectors) -> ServerState:
        return ServerState({**vectors, NATURAL: np.zeros(2 * self.options.dimension)})

    def broadcast(self, server: ServerState) -> Vectors:
        return {**super().broadcast(server), NATURAL: server.vectors[NATURAL]}

    def keeps(self, layout: Layout) -> Mapping[str, Extent]:
        head = sum(math.prod(shape) for shape in self._head_shapes(layout).values())
        return {HEAD: head, NODE_NATURAL: 2 * self.options.dimension}

    def begin(self, layout: Layout, message: Vectors) -> Vectors:
        # The same on every node: what the nodes pass to each other is about one and the same z.
        random = np.random.default_rng(0)
        shapes = self._head_shapes(layout)
        bounds = {name: 1 / math.sqrt(shapes["f.weight"][0]) if name.startswith("f.") else 0.05 for name in shapes}
        parts = [random.uniform(-bounds[name], bounds[name], math.prod(shape)) for name, shape in shapes.items()]
        return {HEAD: np.concatenate(parts), NODE_NATURAL: np.zeros(2 * self.options.dimension)}

    def sends(self, layout: Layout) -> Mapping[str, Extent]:
        return {**super().sends(layout), DELTA_NATURAL: 2 * self.options.dimension}

    def client(self, local: Local, message: Vectors, state: Vectors) -> tuple[Update, Vectors]:
        from fedward_common.algorithms.training import train

        old = state[NODE_NATURAL]
        if not self.options.kl_weight:
            trained = train(local, message)
            groups = {**changes(trained, message), DELTA_NATURAL: np.zeros_like(old)}
            return Update(groups, 1.0, trained.metrics), state
        layer, shapes = self._classifiers(local.layout)[-1].name, self._head_shapes(local.layout)
        cavity = cavity_of(message[NATURAL] - old, local.device)
        propagation = _Propagation(self.options, local, layer, shapes, state[HEAD], cavity)
        trained = train(local, message, (propagation,))
        new = propagation.natural()
        groups = {**changes(trained, message), DELTA_NATURAL: new - old}
        return Update(groups, 1.0, trained.metrics), {HEAD: propagation.head(), NODE_NATURAL: new}

    def server(self, server: ServerState, mean: Update, cohort: Cohort) -> ServerState:
        return advanced(
            server,
            mean,
            moved(server.model, mean.groups[DELTA], self.options.server_lr),
            **{NATURAL: moved(server.vectors[NATURAL], mean.groups[DELTA_NATURAL], cohort.replied)},
        )

    def _classifiers(self, layout: Layout) -> list[TensorSpec]:
        """The tensors that may be θ̂; the last one is."""
        wanted = self.options.layer
        return [spec for spec in _matrices(layout) if wanted is None or spec.name == wanted]

    def _head_shapes(self, layout: Layout) -> dict[str, tuple[int, ...]]:
        classifier = self._classifiers(layout)[-1]
        d, features = self.options.dimension, classifier.shape[1]
        return {
            "f.weight": (features, d),
            "f.bias": (d,),
            "hidden.weight": (d, d),
            "hidden.bias": (d,),
            "output.weight": (d, classifier.size),
            "output.bias": (classifier.size,),
        }


def _matrices(layout: Layout) -> list[TensorSpec]:
    kinds = (Kind.TRAINABLE, Kind.PRIVATE)
    return [spec for spec in layout.tensors if spec.kind in kinds and len(spec.shape) == 2]


def cavity_of(others: Vector, device: str) -> Gaussian:
    """p(z) times the factors of all other nodes, from the sum of their natural parameters (η, λ)."""
    import torch

    from fedward_common.algorithms.gaussian import Gaussian

    linear, precision = np.split(others, 2)
    precision = 1 + precision
    if not (precision > 0).all():
        raise UpdateError(
            f"the other nodes' precision of z is {precision.min():.3g}, but no node's can be negative: the server's "
            "sum is not the sum of what the nodes keep. Start the run anew."
        )
    return Gaussian(torch.tensor(linear / precision, device=device), torch.tensor(1 / precision, device=device))


class _Propagation(Hook):
    """Adds the two divergences to the loss, and trains the head beside the model as `local` says."""

    def __init__(
        self,
        options: FedNPOptions,
        local: Local,
        layer: str,
        shapes: Mapping[str, tuple[int, ...]],
        head: Vector,
        cavity: Gaussian,
    ) -> None:
        import torch

        from fedward_common.algorithms.training import SGD

        self._options = options
        self._local = local
        self._layer = layer
        self._cavity = cavity
        self._head = {}
        at = 0
        for name, shape in shapes.items():
            size = math.prod(shape)
            part = torch.tensor(head[at : at + size], device=local.device).reshape(shape)
            self._head[name] = part.requires_grad_()
            at += size
        self._optimiser = SGD(list(self._head.values()), local.options, local.round)

    def loss(self, model: nn.Module, batch: Batch, loss: torch.Tensor) -> torch.Tensor:
        import torch

        from fedward_common.algorithms import gaussian
        from fedward_common.algorithms.gaussian import Gaussian

        features = self._features(model, batch).mean(0)
        q = gaussian.tilted(self._cavity, self._f(features))
        prior = Gaussian(torch.zeros_like(q.mean), torch.ones_like(q.variance))
        head = self._head
        hidden = gaussian.sigmoid(gaussian.linear(q, head["hidden.weight"], head["hidden.bias"]))
        mean, variance = gaussian.linear(hidden, head["output.weight"], head["output.bias"])
        predicted = Gaussian(mean, variance + self._options.min_variance)
        local = Gaussian(self._classifier(model).double().reshape(-1), predicted.variance)
        divergences = gaussian.divergence(predicted, local) + gaussian.divergence(q, prior)
        return loss + (self._options.kl_weight * divergences).to(loss.dtype)

    def before_step(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        import torch

        clip = self._local.options.max_grad_norm
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(self._head.values(), clip)
        self._optimiser.step()
        for part in self._head.values():
            part.grad = None

    def natural(self) -> Vector:
        """(η_k, λ_k) of this node's factor, from one pass over its training data with the model as it is, in evaluation
        mode."""
        import torch

        from fedward_common import batches
        from fedward_common.algorithms.gaussian import factor

        local = self._local
        read = batches.reader(local.data.train, local.data.collate, local.device)
        local.model.eval()
        with torch.no_grad():
            sums = [
                self._features(local.model, read(indices)).sum(0)
                for indices in batches.split(torch.arange(local.examples), local.options.batch_size)
            ]
            found = factor(self._cavity, self._f(torch.stack(sums).sum(0) / local.examples))
        vector: Vector = torch.cat(found).cpu().numpy()
        return vector

    def head(self) -> Vector:
        import torch

        flat = torch.cat([part.detach().reshape(-1) for part in self._head.values()])
        vector: Vector = flat.cpu().numpy()
        return vector

    def _features(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        features = represent(self._local, model, batch)
        needed = self._head["f.weight"].shape[0]
        if features.shape[1] != needed:
            raise TaskError(
                f"representation() returned {features.shape[1]} features a record, but the layer {self._layer!r} takes "
                f"{needed}: return what goes into that layer, or name another one in algorithm.layer."
            )
        return features.double()

    def _f(self, features: torch.Tensor) -> torch.Tensor:
        """f(X) in (−1, 1), a scalar, from the mean features of the records X."""
        import torch

        return torch.tanh((features @ self._head["f.weight"] + self._head["f.bias"]).mean())

    def _classifier(self, model: nn.Module) -> nn.Parameter:
        try:
            return model.get_parameter(self._layer)
        except AttributeError:
            raise TaskError(
                f"the tensor {self._layer!r} is no parameter of the model: name the classifier's weight in "
                "algorithm.layer."
            ) from None
