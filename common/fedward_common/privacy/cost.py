"""What one round of a run with [privacy] costs, whatever its unit: the same on nodes, server and in plans."""

from __future__ import annotations

from dataclasses import dataclass

from fedward_common.config import RunConfig
from fedward_common.errors import ConfigError
from fedward_common.privacy import site
from fedward_common.privacy.events import Event
from fedward_common.privacy.ledger import Unit
from fedward_common.privacy.sampled import sampled_steps
from fedward_common.update import Kind, Layout


@dataclass(frozen=True)
class RoundCost:
    """By `unit`, `event` happens `count` times."""

    unit: Unit
    event: Event
    count: int


def check_layout(layout: Layout) -> None:
    """Raise `ConfigError` for a model with float buffers that are sent: training changes them without noise, and no
    norm bounds them together with parameters."""
    count = layout.size(Kind.STATISTIC)
    if count:
        raise ConfigError(
            f"the model has {count:,} float buffers that would be sent, such as batch norm's running means: with "
            "[privacy] they would leave without noise. Use GroupNorm or LayerNorm; mark constant ones as 'private' in "
            "tensor_kinds."
        )


def round_cost(config: RunConfig, length: int, n: int) -> RoundCost:
    """Of a round of `n` nodes for updates of `length` coordinates. Raises `ConfigError`, and `NoProtection` for a
    cohort too small for a secure sum."""
    if config.privacy is None:
        raise ConfigError("the run has no [privacy]")
    unit = Unit(config.privacy.unit)
    if unit is Unit.SITE:
        return RoundCost(unit, site.mechanism(config, length, n).event, 1)
    steps = sampled_steps(config)
    return RoundCost(unit, steps.event, steps.steps)


def multiplier(config: RunConfig, length: int) -> float:
    """z, as given or from target_epsilon. Raises `ConfigError`."""
    assert config.privacy is not None
    return site.multiplier(config, length) if config.privacy.unit == "site" else sampled_steps(config).noise_multiplier
