"""FedBN: batch norm is personal."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from fedward_common.algorithms.base import only_by_site
from fedward_common.algorithms.fedavg import Averaging, AveragingOptions
from fedward_common.errors import TaskError
from fedward_common.update import Kind

if TYPE_CHECKING:
    from torch import nn


class FedBNOptions(AveragingOptions):
    """`[algorithm] name = "fedbn"`."""

    name: Literal["fedbn"] = "fedbn"

    def check_privacy(self, unit: str) -> str | None:
        return only_by_site(self.name, unit, "batch norm mixes the records of a batch, so none has a gradient to clip")


class FedBN(Averaging[FedBNOptions]):
    """Li, Jiang, Zhang, Kamp, Dou 2021 (ICLR), Alg. 1: FedAvg over all tensors but those of batch-norm layers, whose
    parameters, running statistics and counters stay on the node."""

    Options = FedBNOptions

    def kinds(self, model: nn.Module) -> Mapping[str, Kind]:
        from torch.nn.modules.batchnorm import _BatchNorm

        layers = [(name, module) for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
        own = [f"{name}.{tensor}" if name else tensor for name, module in layers for tensor in module.state_dict()]
        if not own:
            raise TaskError(
                "algorithm.name = 'fedbn': the model has no batch-norm layer with tensors, so nothing would be "
                "personal. Choose fedper with algorithm.head for other layers, or fedavg."
            )
        return {glob.escape(name): Kind.PRIVATE for name in own}
