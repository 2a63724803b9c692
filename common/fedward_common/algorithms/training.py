"""The one local training loop that all algorithms share, with hooks instead of copies."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import closing, contextmanager

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedward_common import batches
from fedward_common.algorithms.base import MODEL, STATISTIC
from fedward_common.algorithms.local_options import LocalOptions
from fedward_common.algorithms.node_half import Hook, Local, Trained, gradients
from fedward_common.errors import TaskError
from fedward_common.update import Kind, Vector, Vectors

Gradients = Callable[[Local, Sequence[nn.Parameter], dict[str, float]], Generator[None, None, None]]
"""Makes a generator that leaves one gradient after another in the parameters; the metrics are complete once it is
closed."""


def train(
    local: Local,
    start: Vectors,
    hooks: Sequence[Hook] = (),
    *,
    moves: Collection[Kind] = (Kind.TRAINABLE, Kind.PRIVATE),
    steps: int | None = None,
    source: Gradients | None = None,
) -> Trained:
    """Run local SGD from `start` ("model", "statistic" if the model has float buffers).

    moves: kinds of the parameters that are trained; the others stay. steps: instead of what `local` plans. source:
    makes the gradients instead of the task's loss over a batch; not with privacy by record or patient.

    Each pass over the data takes a new seeded permutation and drops nothing; `steps` longer than a pass
    go on with the next one. With a limit of time (`local.seconds`, `options.max_seconds`) it stops after
    the step in which time ran out, so at least one step is done. A single example cannot feed batch norm:
    where batches of one cannot be avoided (one example, or batch_size 1), batch-norm layers use their
    running statistics and leave them alone. Deterministic: Python's, NumPy's and PyTorch's global
    generators are seeded from `local.seed`. Raises `TaskError` if the task's loss is not a scalar with a
    gradient."""
    options, model = local.options, local.model
    limits = [limit for limit in (local.seconds, options.max_seconds) if limit is not None]
    deadline = time.monotonic() + min(limits) if limits else math.inf
    seed_all(local.seed, local.device)
    tensors_of = _Tensors(local, moves)
    tensors_of.load(start)
    parameters, corrected = tensors_of.optimised, tensors_of.trainable
    if not parameters:
        wanted = " or ".join(kind.value for kind in moves)
        raise TaskError(f"the model has no {wanted} parameter with requires_grad=True, so these steps move nothing.")
    optimiser = SGD(parameters, options, local.round)
    metrics: dict[str, float] = {}
    done, planned = 0, steps or _planned(local)
    with _still(tensors_of.left), closing(_gradients(local, parameters, metrics, hooks, source)) as ready:
        for _ in ready:
            with torch.no_grad():
                if options.max_grad_norm is not None:
                    nn.utils.clip_grad_norm_(parameters, options.max_grad_norm)
                for hook in hooks:
                    hook.before_step(model, corrected)
                optimiser.step()
                for hook in hooks:
                    hook.after_step(model, corrected)
            done += 1
            if done == planned or time.monotonic() >= deadline:
                break
    with torch.no_grad():
        for hook in hooks:
            hook.at_end(model, corrected)
    for parameter in parameters:
        parameter.grad = None

    local.progress.steps += done
    local.progress.complete &= done == planned
    return Trained(
        vectors=tensors_of.vectors(),
        steps=done,
        mass=optimiser.mass,
        complete=done == planned,
        metrics=metrics,
    )


def _planned(local: Local) -> int:
    """K."""
    if local.private is not None:
        return local.private.steps
    options = local.options
    return options.steps or (options.epochs or 1) * batches.epoch_length(local.in_pass, options.batch_size)


def _gradients(
    local: Local,
    parameters: Sequence[nn.Parameter],
    metrics: dict[str, float],
    hooks: Sequence[Hook],
    source: Gradients | None,
) -> Generator[None, None, None]:
    if local.private is not None:
        if source is not None or any(type(hook).loss is not Hook.loss for hook in hooks):
            # Refused when the run is submitted (`check_privacy`); this is for an algorithm that forgot to.
            raise TaskError("this algorithm's steps have no privacy by record or by patient")
        from fedward_common.privacy.dp_sgd import private_steps

        return private_steps(local, parameters, local.private)
    if source is not None:
        return source(local, parameters, metrics)
    return _plain_steps(local, parameters, metrics, hooks)


def _plain_steps(
    local: Local, parameters: Sequence[nn.Parameter], metrics: dict[str, float], hooks: Sequence[Hook]
) -> Generator[None, None, None]:
    model, count, size = local.model, local.in_pass, local.options.batch_size
    read = batches.reader(local.data.train, local.data.collate, local.device)
    train_mode(model, count, size)
    seen = LossSums()
    adding = [hook for hook in hooks if type(hook).loss is not Hook.loss]
    try:
        for indices in batches.shuffled(count, size, torch.Generator().manual_seed(local.seed)):
            batch = read(indices)
            loss = whole = checked_loss(local.task.loss(model, batch))
            for hook in adding:
                whole = hook.loss(model, batch, whole)
            backward(whole, parameters)
            seen.add(loss, len(indices))
            yield
    finally:
        metrics |= seen.sums()


class LossSums:
    """The sums over examples that training reports; losses are not looked at before its end."""

    def __init__(self) -> None:
        self._losses: list[torch.Tensor] = []
        self._sizes: list[int] = []

    def add(self, loss: torch.Tensor, size: int) -> None:
        """A batch of `size` examples with that mean loss."""
        self._losses.append(loss.detach())
        self._sizes.append(size)

    def sums(self) -> dict[str, float]:
        """"examples" and "loss", none before the first batch."""
        if not self._losses:
            return {}
        sizes = torch.tensor(self._sizes, dtype=torch.float64)
        sums = torch.stack(self._losses).to("cpu", torch.float64) * sizes
        return {"examples": float(sum(self._sizes)), "loss": float(sums.sum())}


def gradient(local: Local, at: Vectors) -> Vector:
    """∇f_i(w): the mean gradient over all local training data at `at`, flat, in the layout's trainable
    order.

    Taken in training mode, as the steps take theirs, in batches of `batch_size` in the data's order;
    without weight decay and clipping. Leaves the model's buffers as they were. Raises `TaskError` as
    `train` does."""
    model, count = local.model, local.in_pass
    seed_all(local.seed, local.device)
    tensors_of = _Tensors(local)
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    tensors_of.load(at)
    read = batches.reader(local.data.train, local.data.collate, local.device)
    train_mode(model, count, local.options.batch_size)
    total: list[torch.Tensor] | None = None
    for indices in batches.split(torch.arange(count), local.options.batch_size):
        loss = checked_loss(local.task.loss(model, read(indices)))
        backward(loss * (len(indices) / count), tensors_of.trainable)
        grads = gradients(tensors_of.trainable)
        if total is None:
            total = grads
        else:
            torch._foreach_add_(total, grads)
    assert total is not None  # data is never empty
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    for parameter in model.parameters():
        parameter.grad = None
    named = dict(zip(tensors_of.trainable_names, total, strict=True))
    return local.layout.pack(named, Kind.TRAINABLE)


def checked_loss(loss: object, needs_grad: bool = True) -> torch.Tensor:
    """`loss` if it is what a task must return, else a `TaskError`."""
    if not isinstance(loss, torch.Tensor):
        raise TaskError(
            f"loss() returned {type(loss).__name__}: return a tensor, the mean loss over the batch "
            "(no .item(), no float())."
        )
    if loss.dim() != 0:
        raise TaskError(
            f"loss() returned a tensor of shape {tuple(loss.shape)}: return a scalar, the mean loss over the "
            "batch (.mean(), or reduction='mean')."
        )
    if needs_grad and not loss.requires_grad:
        raise TaskError(
            "loss() returned a tensor without a gradient: compute it from model(x) with gradient recording "
            "on (no .detach(), no torch.no_grad())."
        )
    return loss


def seed_all(seed: int, device: str) -> None:
    """Seed every global generator that task code may draw from: dropout, augmentation, a random split."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # Not torch.manual_seed: on a machine without a GPU it formats a stack trace for each call, 0.1 ms.
    torch.default_generator.manual_seed(seed)
    if device.startswith("cuda"):
        torch.cuda.manual_seed_all(seed)


@contextmanager
def _still(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """A block in which no gradients of these are computed."""
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


@contextmanager
def spared(model: nn.Module) -> Iterator[None]:
    """A block in which the model's buffers are copies: what a forward pass moves in them is lost at its end.

    The originals are not touched at all, so that a graph that was recorded before may still be run backward."""
    owned = [(module._buffers, name, buffer) for module in model.modules() for name, buffer in module._buffers.items()]
    for buffers, name, buffer in owned:
        buffers[name] = None if buffer is None else buffer.clone()
    try:
        yield
    finally:
        for buffers, name, buffer in owned:
            buffers[name] = buffer


class _Tensors:
    """A model's tensors by kind, looked up once a round.

    `optimised`: every parameter with a gradient that moves, private ones too; `left`: those that do not. `trainable`:
    those that are sent.
    """

    def __init__(self, local: Local, moves: Collection[Kind] = (Kind.TRAINABLE, Kind.PRIVATE)) -> None:
        self._layout = local.layout
        self._state = local.model.state_dict(keep_vars=True)
        self.trainable_names = [spec.name for spec in local.layout.of_kind(Kind.TRAINABLE)]
        self.trainable: list[nn.Parameter] = [self._state[name] for name in self.trainable_names]
        moved = {id(self._state[spec.name]) for spec in local.layout.tensors if spec.kind in moves}
        learning = [p for p in local.model.parameters() if p.requires_grad]
        self.optimised = [p for p in learning if id(p) in moved]
        self.left = [p for p in learning if id(p) not in moved]
        self._sent = {MODEL: Kind.TRAINABLE}
        if local.layout.size(Kind.STATISTIC):
            self._sent[STATISTIC] = Kind.STATISTIC

    def load(self, vectors: Vectors) -> None:
        for name, kind in self._sent.items():
            self._layout.copy_into(self._state, vectors[name], kind)

    def vectors(self) -> Vectors:
        return {name: self._layout.pack(self._state, kind) for name, kind in self._sent.items()}


class SGD:
    """torch.optim.SGD's arithmetic, bit for bit, without its bookkeeping a step; counts the mass."""

    def __init__(self, parameters: Sequence[torch.Tensor], options: LocalOptions, round_: int) -> None:
        self._parameters: list[torch.Tensor] = list(parameters)
        self._options = options
        self._buffers: list[torch.Tensor] | None = None
        self._weight = 0.0
        self._round = round_
        self._step = 0
        self.mass = 0.0

    def step(self) -> None:
        options = self._options
        moves = gradients(self._parameters)
        if options.weight_decay:
            torch._foreach_add_(moves, self._parameters, alpha=options.weight_decay)
        if options.momentum:
            if self._buffers is None:
                self._buffers = [move.clone() for move in moves]
            else:
                torch._foreach_mul_(self._buffers, options.momentum)
                torch._foreach_add_(self._buffers, moves)
            moves = self._buffers
        rate = options.rate(self._round, self._step)
        torch._foreach_add_(self._parameters, moves, alpha=-rate)
        self._weight = options.momentum * self._weight + 1.0
        self._step += 1
        self.mass += rate * self._weight


def backward(loss: torch.Tensor, parameters: Sequence[nn.Parameter]) -> None:
    """Fresh gradients of `loss` in all of `parameters`: zeros where it does not depend on one, dense
    throughout."""
    for parameter in parameters:
        parameter.grad = None
    loss.backward()  # type: ignore[no-untyped-call]
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()


def train_mode(model: nn.Module, count: int, batch_size: int) -> None:
    """Training mode; batch norm uses its running statistics where batches of one cannot be avoided."""
    model.train()
    if count == 1 or batch_size == 1:
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.eval()
