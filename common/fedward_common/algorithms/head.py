"""Models in two parts: a body that is shared and a head that stays on each node."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

from pydantic import Field

from fedward_common.algorithms.fedavg import Averaging, AveragingOptions
from fedward_common.errors import TaskError
from fedward_common.update import Kind, Layout

if TYPE_CHECKING:
    from torch import nn


class HeadOptions(AveragingOptions):
    """Options of algorithms with a private head."""

    head: tuple[str, ...] = Field(
        default=(), description="tensors of the head, as shell patterns; beside the task's private ones"
    )


H = TypeVar("H", bound=HeadOptions)


class PrivateHead(Averaging[H]):
    """The head is every private tensor: those of `head`, and those that the task declares private."""

    def kinds(self, model: nn.Module) -> Mapping[str, Kind]:
        names = list(model.state_dict())
        unmatched = [p for p in self.options.head if not any(fnmatch.fnmatchcase(name, p) for name in names)]
        if unmatched:
            raise TaskError(f"algorithm.head has patterns that match no tensor: {unmatched}. The tensors are: {names}.")
        return dict.fromkeys(self.options.head, Kind.PRIVATE)

    def check_layout(self, layout: Layout) -> str | None:
        if layout.size(Kind.PRIVATE):
            return None
        return (
            f"algorithm.name = '{self.options.name}': no tensor of the model is private, so there is no head. Name its "
            "tensors in algorithm.head, such as ['head.*'], or declare them 'private' in the task's tensor_kinds. The "
            f"tensors are: {[spec.name for spec in layout.tensors]}."
        )
