"""What a run by record or by patient asks of each local step, and what a round of such steps costs.

In every step each unit of a site (a record, or a patient with all records) takes part by its own coin; the clipped
gradients of those that do are summed and noised (`dp_sgd`). All that leaves the site follows from these noisy sums and
from what was public before, so it costs nothing more: the update, control variates, counts of coordinates that the
quantiser clipped, partial work. Coins are tossed on the node and shown to nobody, so sampling amplifies against the
server too. The rate is the same on every node: so is ε, and neither needs to know how many units a site has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from fedward_common.algorithms.local_options import LocalOptions
from fedward_common.config import RunConfig
from fedward_common.errors import ConfigError
from fedward_common.privacy.calibration import noise_multiplier
from fedward_common.privacy.events import Event, SampledGaussian


@dataclass(frozen=True)
class SampledSteps:
    """The local steps of one round. by_patient: the unit is a patient, not a record. clip: C, of the L2 norm of a
    unit's gradient. sampling_rate: q. noise_multiplier: z = σ/C of a step's noise. steps: K. ghost: clip without
    holding each record's gradient."""

    by_patient: bool
    clip: float
    sampling_rate: float
    noise_multiplier: float
    steps: int
    ghost: bool

    @property
    def event(self) -> Event:
        """What one step costs a unit; a round is `steps` of them."""
        return SampledGaussian(self.sampling_rate, self.noise_multiplier)


def sampled_steps(config: RunConfig) -> SampledSteps:
    """The steps of a run whose unit is a record or a patient. Raises `ConfigError` for a target that no noise meets."""
    options = config.privacy
    if options is None or options.sampling_rate is None:
        raise ConfigError("the run has no [privacy] by record or by patient")
    z = options.noise_multiplier
    return SampledSteps(
        by_patient=options.unit == "patient",
        clip=options.clip,
        sampling_rate=options.sampling_rate,
        noise_multiplier=_calibrated(config.model_dump_json()) if z is None else z,
        steps=steps(config.local, options.sampling_rate),
        ghost=options.ghost_clipping,
    )


def steps(local: LocalOptions, rate: float) -> int:
    """K, the same on every node. A pass over the data is 1/q steps, in which each unit is expected once."""
    return local.steps or (local.epochs or 1) * math.ceil(1 / rate)


@lru_cache(maxsize=8)
def _calibrated(text: str) -> float:
    config = RunConfig.model_validate_json(text)
    options = config.privacy
    assert options is not None and options.target_epsilon is not None and options.sampling_rate is not None
    rate, total = options.sampling_rate, config.rounds * steps(config.local, options.sampling_rate)

    def events(z: float) -> list[tuple[Event, int]]:
        return [(SampledGaussian(rate, z), total)]

    return noise_multiplier(options.target_epsilon, options.delta, events)
