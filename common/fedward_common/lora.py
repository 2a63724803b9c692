"""Low-rank adapters: the `[lora]` table of a run, and what it does to the task's model.

A target layer of weight W then computes x Wᵀ + (α/r) x Aᵀ Bᵀ, with A of shape (r, in), B of shape (out, r) and B = 0
at first (Hu et al. 2022, ICLR, "LoRA: Low-Rank Adaptation of Large Language Models"). All other parameters are frozen:
they are the same on every side and never travel.

The mean of the nodes' B times the mean of their A is not the mean of their products, so A is frozen too by default
(FFA-LoRA: Sun et al. 2024, ICLR, "Improving LoRA in Privacy-preserving Federated Learning"): W + (α/r) mean(B_i) A is
then exactly the mean of the nodes' weights. With privacy it also keeps noise on B from being multiplied by noise on A.
"""

from __future__ import annotations

import fnmatch
import hashlib
import math
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from fedward_common.errors import TaskError
from fedward_common.update import Kind

if TYPE_CHECKING:
    import torch
    from torch import nn

SHARED, PRIVATE = "shared", "private"
"""Names of the adapters: B of the shared one in layer x is the tensor "x.lora_B.shared.weight"."""

OFFLINE: Mapping[str, str] = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1"}
"""Environment in which peft and what it imports ask nobody outside."""


class LoraOptions(BaseModel):
    """Adapters in linear layers; everything else is frozen."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    targets: tuple[str, ...] = Field(
        min_length=1,
        description="linear layers to adapt: shell patterns over a layer's whole name or the last part of it",
    )
    rank: int = Field(default=8, ge=1, description="r")
    alpha: float = Field(default=16.0, gt=0, description="α: what an adapter adds is scaled by α/r")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="of an adapter's input, in training")
    freeze_a: bool = Field(
        default=True, description="A stays as it was drawn, so that the mean of B is exact; false: A and B travel"
    )
    private: bool = Field(
        default=False, description="a second adapter beside the shared one, trained with it, that never leaves the node"
    )
    train: tuple[str, ...] = Field(
        default=(), description="other parameters to train in full, such as a new head: shell patterns over their names"
    )

    @property
    def kinds(self) -> Mapping[str, Kind]:
        """What of the adapters is of another kind than it looks."""
        return {f"*.lora_[AB].{PRIVATE}.weight": Kind.PRIVATE} if self.private else {}


def adapt(model: nn.Module, options: LoraOptions, seed: int) -> None:
    """Put the adapters into `model`, in place, and freeze what they do not train.

    A is drawn uniformly from [−1/√in, 1/√in) by `seed`, adapter and layer. Raises `TaskError`: peft is missing, a
    pattern matches nothing, or a layer that it matches cannot be adapted."""
    peft = _peft()
    names = _targets(model, options)
    for adapter in (SHARED, PRIVATE)[: 1 + options.private]:
        wanted = peft.LoraConfig(
            r=options.rank,
            lora_alpha=options.alpha,
            lora_dropout=options.dropout,
            # A list would match the ends of names.
            target_modules="|".join(map(re.escape, names)),
        )
        with warnings.catch_warnings():
            # About a second adapter, and about GPT-2's transposed weights, which peft sees for itself.
            warnings.simplefilter("ignore")
            peft.inject_adapter_in_model(wanted, model, adapter)
    for name in names:
        layer: Any = model.get_submodule(name)
        layer.set_adapter(list(layer.lora_A))
        for adapter, down in layer.lora_A.items():
            _draw(down.weight, f"{seed}/{adapter}/{name}")
            down.requires_grad_(adapter == PRIVATE or not options.freeze_a)
    _train_too(model, options.train, names)
    _leave_fast_path(model)


def _peft() -> Any:
    with _offline():
        try:
            import peft
        except ModuleNotFoundError as error:
            raise TaskError(
                f"[lora] needs peft, but {error.name!r} is not installed here: pip install 'fedward[lora]' "
                "(on the server and on every node)."
            ) from error
    return peft


@contextmanager
def _offline() -> Iterator[None]:
    """`OFFLINE` for a first import, which reads it once."""
    before = {name: os.environ.get(name) for name in OFFLINE}
    os.environ.update(OFFLINE)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _targets(model: nn.Module, options: LoraOptions) -> list[str]:
    """Names of the layers to adapt, in the model's order."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D  # GPT-2's linear layer, whose weight is transposed

    linear = {name: part for name, part in model.named_modules() if name and isinstance(part, nn.Linear | Conv1D)}
    found: set[str] = set()
    for pattern in options.targets:
        matches = {name for name in linear if _fits(name, pattern)}
        if not matches:
            raise TaskError(
                f"lora.targets: {pattern!r} matches no linear layer of the task's model. Its linear layers are "
                f"{list(linear)}."
            )
        found |= matches
    bypassed = {
        f"{name}.out_proj".removeprefix(".")
        for name, part in model.named_modules()
        if isinstance(part, nn.MultiheadAttention)
    }
    places = Counter(id(part) for _, part in model.named_modules(remove_duplicate=False))
    for name in sorted(found):
        rows, columns = linear[name].weight.shape
        if name in bypassed:
            raise TaskError(
                f"lora.targets: {name!r} belongs to an nn.MultiheadAttention, which multiplies by its weight and never "
                "calls it, so an adapter there would do nothing. Leave it out, or build attention from linear layers "
                "that are called."
            )
        if places[id(linear[name])] > 1:
            raise TaskError(
                f"lora.targets: the layer {name!r} stands in the model under several names, and an adapter would be "
                "put into one of them. Leave it out, or call one name from both places."
            )
        if options.rank > min(rows, columns):
            raise TaskError(
                f"lora.rank = {options.rank} is more than the layer {name!r} of {rows} × {columns} has. Lower it to "
                f"{min(rows, columns)} or less, or leave the layer out of lora.targets."
            )
    return [name for name in linear if name in found]


def _fits(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name.rpartition(".")[2], pattern)


def _draw(weight: torch.Tensor, key: str) -> None:
    """Fill A from SHAKE-256 of `key`: the same bits on every machine and with every PyTorch, since a node whose frozen
    tensors differ cannot take part."""
    import numpy as np
    import torch

    words = np.frombuffer(hashlib.shake_256(key.encode()).digest(4 * weight.numel()), "<u4")
    uniform = (words / 2.0**31 - 1) / math.sqrt(weight.shape[1])
    with torch.no_grad():
        weight.copy_(torch.from_numpy(uniform).reshape(weight.shape))


def _train_too(model: nn.Module, patterns: Iterable[str], adapted: Iterable[str]) -> None:
    own = tuple(f"{name}.lora_" for name in adapted)
    others = {name: p for name, p in model.named_parameters() if not name.startswith(own)}
    for pattern in patterns:
        matches = fnmatch.filter(others, pattern)
        if not matches:
            raise TaskError(
                f"lora.train: {pattern!r} matches no parameter beside the adapters. Those are {list(others)}."
            )
        for name in matches:
            others[name].requires_grad_(True)


def _leave_fast_path(model: nn.Module) -> None:
    """PyTorch's encoder layers have a fused path for evaluation that reads the weights of their linear layers, and so
    passes by the adapters in them. It is taken only where these two attributes allow it."""
    from peft.tuners.lora import LoraLayer
    from torch import nn

    for module in model.modules():
        if not any(isinstance(part, LoraLayer) for part in module.modules()):
            continue
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
