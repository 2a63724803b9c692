"""Per-FedAvg: a global model from which a few local steps lead to a good one on each node."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from fedward_common.algorithms.base import only_by_site
from fedward_common.algorithms.fedavg import Averaging, AveragingOptions, changes
from fedward_common.algorithms.local_options import LocalOptions
from fedward_common.algorithms.node_half import Local, Progress, derived, gradients
from fedward_common.errors import TaskError
from fedward_common.update import Update, Vectors

if TYPE_CHECKING:
    import torch
    from torch import nn


class PerFedAvgOptions(AveragingOptions):
    """`[algorithm] name = "perfedavg"`."""

    name: Literal["perfedavg"] = "perfedavg"
    alpha: float = Field(default=0.01, ge=0, description="α: step size of the adaptation (β is local.lr)")
    hessian: bool = Field(default=True, description="false: the first-order variant, without the Hessian's term")
    adapt_steps: int = Field(default=1, ge=0, description="steps of size α by which a node adapts w before it uses it")

    def check_privacy(self, unit: str) -> str | None:
        return only_by_site(
            self.name, unit, "its steps take gradients of gradients over batches, where no record has a part to clip"
        )


class PerFedAvg(Averaging[PerFedAvgOptions]):
    """Fallah, Mokhtari, Ozdaglar 2020 (NeurIPS), Alg. 1: local steps on F_i(w) = f_i(w − α ∇f_i(w)).

    w̃ = w − α ∇f(w; D). w ← w − β (I − α ∇²f(w; D″)) ∇f(w̃; D′), β = `local.lr`, D, D′, D″ independent batches.
    First-order variant (`hessian` = false): w ← w − β ∇f(w̃; D′).

    Updates are weighted by n_i as FedAvg's are, where the paper gives every node the same weight. Momentum, weight
    decay and clipping act on the outer step. Float buffers move with D′ only, the batch that FedAvg would take."""

    Options = PerFedAvgOptions
    neutral: ClassVar[Mapping[str, Any]] = {"alpha": 0.0}

    def client(self, local: Local, message: Vectors, state: Vectors) -> tuple[Update, Vectors]:
        from fedward_common.algorithms.training import train

        trained = train(local, message, source=self._meta_gradients)
        return Update(changes(trained, message), float(local.examples), trained.metrics), {}

    def personal(self, local: Local, message: Vectors, state: Vectors) -> Vectors:
        """w after `adapt_steps` plain SGD steps of size α on this node's training data."""
        from fedward_common.algorithms.training import train

        alpha, steps = self.options.alpha, self.options.adapt_steps
        if not alpha or not steps:
            return message
        adapting = LocalOptions(lr=alpha, steps=steps, batch_size=local.options.batch_size)
        # All steps, however late: a score may not depend on a node's speed.
        return train(replace(local, options=adapting, seconds=None, progress=Progress()), message).vectors

    def _meta_gradients(
        self, local: Local, parameters: Sequence[nn.Parameter], metrics: dict[str, float]
    ) -> Generator[None, None, None]:
        import torch

        from fedward_common import batches
        from fedward_common.algorithms.training import LossSums, backward, checked_loss, spared, train_mode

        model, count, size = local.model, local.in_pass, local.options.batch_size
        read = batches.reader(local.data.train, local.data.collate, local.device)
        train_mode(model, count, size)
        seen = LossSums()

        def loss_over(indices: torch.Tensor) -> torch.Tensor:
            return checked_loss(local.task.loss(model, read(indices)))

        def batches_of(seed: int) -> Any:
            return batches.shuffled(count, size, torch.Generator().manual_seed(seed))

        # D′ takes the order that FedAvg's steps have, so that α = 0 is FedAvg.
        d, d1, d2 = batches_of(derived(local.seed, "D")), batches_of(local.seed), batches_of(derived(local.seed, "D2"))
        try:
            for inner, outer, curved in zip(d, d1, d2, strict=True):
                w = [parameter.detach().clone() for parameter in parameters]
                with spared(model):
                    backward(loss_over(inner), parameters)
                with torch.no_grad():
                    torch._foreach_add_(list(parameters), gradients(parameters), alpha=-self.options.alpha)
                loss = loss_over(outer)
                backward(loss, parameters)
                with torch.no_grad():
                    torch._foreach_copy_(list(parameters), w)
                if self.options.hessian:
                    with spared(model), twice_differentiable():
                        bent = loss_over(curved)
                    product = hessian_product(bent, parameters, gradients(parameters))
                    torch._foreach_add_(gradients(parameters), product, alpha=-self.options.alpha)
                seen.add(loss, len(outer))
                yield
        finally:
            metrics |= seen.sums()


def hessian_product(
    loss: torch.Tensor, at: Sequence[torch.Tensor], vector: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """∇²loss · vector, exact, by a second backward pass through the first; one tensor for each of `at`.

    Raises `TaskError` if an operation in `loss` has no second derivative."""
    import torch

    once = _differentiable_once(loss)
    if once is not None:
        raise TaskError(_NO_SECOND.format(f"{once} is marked with @once_differentiable"))
    try:
        first = torch.autograd.grad(loss, at, create_graph=True, allow_unused=True)
        pairs = [(g, v) for g, v in zip(first, vector, strict=True) if g is not None and g.requires_grad]
        if not pairs:  # linear in all of them
            return [torch.zeros_like(x) for x in at]
        outputs, weights = zip(*pairs, strict=True)
        second = torch.autograd.grad(outputs, at, weights, allow_unused=True)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise TaskError(_NO_SECOND.format(str(error).splitlines()[0])) from error
    return [torch.zeros_like(x) if h is None else h for h, x in zip(second, at, strict=True)]


_NO_SECOND = (
    "algorithm.hessian = true needs second derivatives, which an operation of this model or loss lacks ({}). Replace "
    "it, or set algorithm.hessian = false."
)


def _differentiable_once(loss: torch.Tensor) -> str | None:
    """A custom function in the graph of `loss` of which PyTorch would take the second derivative for 0 in silence."""
    import torch

    mark = torch.autograd.function.once_differentiable(lambda ctx: None).__code__
    waiting: list[Any] = [loss.grad_fn]
    seen: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
        custom: Any = getattr(node, "_forward_cls", None)
        backward = getattr(custom, "backward", None)
        while backward is not None:
            if getattr(backward, "__code__", None) is mark:
                return str(custom.__name__)
            backward = getattr(backward, "__wrapped__", None)
    return None


def twice_differentiable() -> Any:
    """A context in which attention is computed by operations that have second derivatives; its fused kernels lack
    them."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(SDPBackend.MATH)
