"""What nodes send and what the server reads, where a run hides each site's contribution to a sum.

A sum is over updates of L2 norm ≤ C, each counted once: how many there are is public, whose data are behind one of them
is what the noise hides. Nothing else that depends on data is in it: no weight, no metric, no count of what was clipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Protocol

from fedward_common.algorithms.base import DELTA
from fedward_common.config import RunConfig
from fedward_common.errors import ConfigError, UpdateError
from fedward_common.pipeline import Bounded, Quantize
from fedward_common.privacy import distributed, noise
from fedward_common.privacy.calibration import noise_multiplier
from fedward_common.privacy.clip import LARGEST_CLIP, SMALLEST_CLIP, clip
from fedward_common.privacy.events import DiscreteGaussian, Event, Skellam
from fedward_common.privacy.options import PrivacyOptions
from fedward_common.privacy.rotation import padded_length, rotation_seed
from fedward_common.privacy.spare import SpareNoise, split
from fedward_common.secagg.graph import MIN_COHORT
from fedward_common.secagg.masks import Keystream
from fedward_common.summand import WEIGHT, Group, Shape, Words, decode
from fedward_common.update import Update, Vector

_MORE = 10
"""How many times as many nodes as `min_nodes` may come before a run with a target ends a round early."""
WITHIN = "within"
"""The metric of a sum that counts updates whose norm is at most C."""
_CLIP_RATE = 0.2
_COUNT_SPREAD, _COUNT_GRID = 10.0, 64
"""The count's noise in units of the updates', which costs 0.5 % of z; and steps of its grid to one node."""
_LAWS: dict[str, Callable[[float], noise.Law]] = {
    "skellam": noise.Skellam,
    "discrete-gaussian": noise.DiscreteGaussian,
}
_LARGEST_SIGMA = 0.9 * math.sqrt(noise.LARGEST_VARIANCE)


@dataclass(frozen=True)
class Stamped:
    """Of which round a vector is: the random rotation is another in each."""

    run: str
    round: int
    attempt: int

    @property
    def rotation(self) -> bytes:
        return rotation_seed(self.run, self.round, self.attempt)


class SiteMechanism(Protocol):
    """One round's mechanism, the same on nodes and server."""

    @property
    def shape(self) -> Shape:
        """The form of the round's summands."""

    @property
    def event(self) -> Event:
        """What the round costs a site."""

    @property
    def spare(self) -> SpareNoise | None:
        """The part of nodes' noise that comes off the sum again, if there is one."""

    def words(self, update: Vector, of: Stamped, spare_key: bytes = b"") -> Words:
        """A node's summand: `update` clipped, and noised if that is the node's part. spare_key: of its spare noise, if
        there is some. Raises `UpdateError`."""

    def mean(self, total: Words, count: int, of: Stamped) -> Update:
        """The noisy mean of `count` updates, float64, from the sum of their words; `WITHIN` among its metrics if the
        clip adapts."""

    def surplus(self, count: int, taken_off: int) -> float:
        """How much more variance than was asked for is in a sum of `count` summands, of which so many lost their spare
        noise: 0.25 is a quarter more."""


@dataclass(frozen=True)
class Distributed:
    """Each node adds its share of the noise before it masks: `distributed.Mechanism`. The noise that `honest` nodes
    bring is what is asked for; what the others bring comes on top of it, unless it is spare and comes off."""

    mechanism: distributed.Mechanism
    spare: SpareNoise | None = None

    @property
    def shape(self) -> Shape:
        return Shape((), (), self.mechanism.bits, self.mechanism.summands, noised=self.mechanism.padded)

    @property
    def event(self) -> Event:
        made, spare = self.mechanism, self.spare
        if isinstance(made.law, noise.DiscreteGaussian):
            sigma = math.sqrt(made.law.variance)
            return DiscreteGaussian(made.l2, sigma, made.honest, made.padded, made.truncation(made.honest))
        if spare is None:
            return Skellam(made.l2, made.l1, made.variance(made.honest), made.truncation(made.honest))
        return Skellam(made.l2, made.l1, spare.variance, made.truncation(spare.draws))

    def words(self, update: Vector, of: Stamped, spare_key: bytes = b"") -> Words:
        shape = self.shape
        words = shape.blank(dict.fromkeys(shape.scalars, 0.0) | {WEIGHT: 1.0})
        drawn = None if self.spare is None else self.spare.draw(spare_key)
        words[shape.noised_at :] = self.mechanism.encode(update, of.rotation, drawn)
        return words

    def mean(self, total: Words, count: int, of: Stamped) -> Update:
        shape = self.shape
        decode(shape, total, count)  # its check words
        words = distributed.without_carries(total, shape.bits, count, shape.noised_at)
        mean = self.mechanism.decode(words[shape.noised_at :], count, of.rotation) / count
        return Update({DELTA: mean}, float(count), {})

    def surplus(self, count: int, taken_off: int) -> float:
        made, spare = self.mechanism, self.spare
        left = made.variance(count) if spare is None else spare.left(count, taken_off)
        return left / made.variance(made.honest) - 1


@dataclass(frozen=True)
class Central:
    """The server adds discrete Gaussian noise to the sum of whole numbers that it has unmasked.

    bound: C. spread: z, the standard deviation of the noise over the most that a node moves the sum: C and what
    rounding adds. Coordinates are whole numbers of steps 2R/L; R is C, or more where the noise would otherwise be of
    more steps than its table holds. Raises `ConfigError` where no table holds it.

    counts: whether updates within C are counted, for `next_clip`. The count has noise of its own, of `_COUNT_SPREAD`
    times z: one site moves it by at most one.
    """

    length: int
    bits: int
    summands: int
    bound: float
    spread: float
    counts: bool = False
    spare: ClassVar[None] = None

    @property
    def shape(self) -> Shape:
        counted = (WITHIN,) if self.counts else ()
        levels = Shape((), (), self.bits, self.summands).levels
        # The largest C in steps whose noise has a table: (C + √d)·z ≤ σ.
        steps = _LARGEST_SIGMA / self.spread - math.sqrt(self.length)
        if steps <= 0:
            raise ConfigError(
                f"noise multiplier {self.spread:g} for {self.length:,} coordinates: the noise would be beyond its "
                "table. Use mechanism = 'distributed', or less noise."
            )
        widened = max(1.0, levels / 2 / steps)
        return Shape((Group(DELTA, self.length, self.bound * widened),), counted, self.bits, self.summands)

    @property
    def event(self) -> Event:
        released, l2 = self.length, self._l2
        if self.counts:
            # Two discrete Gaussians, of the sum and of the count, have the Rényi divergences of one whose sensitivity
            # in units of its noise is theirs in quadrature.
            share = (_COUNT_GRID * self.spread) ** 2 / self._count_law.variance
            released, l2 = self.length + 1, l2 * math.sqrt(1 + share)
        return DiscreteGaussian(l2, math.sqrt(self._law.variance), 1, released, noise.Noise.truncation(released))

    def words(self, update: Vector, of: Stamped, spare_key: bytes = b"") -> Words:
        clipped, was_over = clip({DELTA: update.reshape(-1)}, self.bound)
        scalars = dict.fromkeys(self.shape.scalars[1:], 0.0)
        if self.counts:
            scalars[WITHIN] = 0.0 if was_over else 1.0
        return Quantize(self.shape, Keystream())(Bounded(Update(clipped, 1.0, scalars)))

    def mean(self, total: Words, count: int, of: Stamped) -> Update:
        found = decode(self.shape, total, count)
        mean: Vector = found.groups[DELTA]
        mean += noise.Noise.of(self._law).draw(self.length) * (self._step / count)
        metrics: dict[str, float] = {}
        if self.counts:
            drawn = noise.Noise.of(self._count_law).draw(1)
            metrics[WITHIN] = (found.metrics[WITHIN] + float(drawn[0]) / _COUNT_GRID) / count
        return Update({DELTA: mean}, float(count), metrics)

    def surplus(self, count: int, taken_off: int) -> float:
        return 0.0

    @property
    def _law(self) -> noise.DiscreteGaussian:
        return noise.DiscreteGaussian((self.spread * self._l2) ** 2)

    @property
    def _count_law(self) -> noise.DiscreteGaussian:
        """In steps of 1/`_COUNT_GRID`, so that a little noise is a discrete Gaussian, too."""
        return noise.DiscreteGaussian((_COUNT_GRID * _COUNT_SPREAD * self.spread) ** 2)

    @property
    def _step(self) -> float:
        shape = self.shape
        return 2 * shape.groups[0].range / shape.levels

    @property
    def _norm(self) -> float:
        """C in steps."""
        return self.bound / self._step

    @property
    def _l2(self) -> float:
        """The most that one node moves the sum, in steps: rounding moves each coordinate by less than one."""
        return self._norm + math.sqrt(self.length)


def mechanism(config: RunConfig, length: int, n: int, bound: float | None = None) -> SiteMechanism:
    """The mechanism of a round of `n` nodes for updates of `length` coordinates. bound: C of this round, where it
    adapts. Raises `ConfigError`, and `NoProtection` for a cohort too small for a secure sum."""
    options = config.privacy
    if options is None:
        raise ConfigError("the run has no [privacy]")
    if bound is not None and options.clip_quantile is not None:
        options = options.model_copy(update={"clip": bound})
    return _made(config, options, length, n, multiplier(config, length))


def next_clip(options: PrivacyOptions, bound: float, within: float) -> float:
    """C of the next round from the noisy share of this round's updates that were within it: C·e^{−η(b̃ − γ)}, η = 0.2.
    (Andrew, Thakkar, McMahan, Ramaswamy 2021, "Differentially Private Learning with Adaptive Clipping", section 2.)"""
    assert options.clip_quantile is not None
    moved = bound * math.exp(-_CLIP_RATE * (min(max(within, 0.0), 1.0) - options.clip_quantile))
    return min(max(moved, SMALLEST_CLIP), LARGEST_CLIP)


def multiplier(config: RunConfig, length: int) -> float:
    """z: as given, or from target_epsilon for all rounds with `planned` nodes each. Raises `ConfigError`."""
    options = config.privacy
    assert options is not None
    if options.noise_multiplier is not None:
        return options.noise_multiplier
    return _calibrated(config.model_dump_json(), length)


def planned(config: RunConfig) -> int:
    """Nodes that a round of this run is expected to have."""
    return max(MIN_COHORT, config.cohort.size or len(config.cohort.nodes) or config.cohort.min_nodes)


@lru_cache(maxsize=8)
def _calibrated(text: str, length: int) -> float:
    config = RunConfig.model_validate_json(text)
    options = config.privacy
    assert options is not None
    target = options.target_epsilon
    assert target is not None

    def needed(n: int) -> float:
        def events(z: float) -> list[tuple[Event, int]]:
            return [(_made(config, options, length, n, z).event, config.rounds)]

        return noise_multiplier(target, options.delta, events)

    # A larger cohort leaves fewer levels to each node, which costs a little: rounds of more nodes are to fit too.
    most = planned(config)
    if not (config.cohort.size or config.cohort.nodes):
        most *= _MORE
    return max(needed(planned(config)), needed(most))


def _made(config: RunConfig, options: PrivacyOptions, length: int, n: int, z: float) -> SiteMechanism:
    parameters = config.secure_sum.parameters(n)
    bits = config.secure_sum.bits
    if options.mechanism == "central":
        return Central(length, bits, n, options.clip, z, options.clip_quantile is not None)
    honest = parameters.survivors - parameters.colluders
    made = distributed.plan(
        dimension=length, bits=bits, summands=n, honest=honest, clip=options.clip, noise_multiplier=z,
        law=_LAWS[options.noise],
    )  # fmt: skip
    if options.noise_on_dropout == "surplus":
        return Distributed(made)
    return Distributed(made, split(made, parameters, Distributed(made).shape.noised_at))


def flat(update: Update) -> Vector:
    """The one group of an update. Raises `UpdateError` for a model with float buffers."""
    if set(update.groups) != {DELTA}:
        raise UpdateError(
            f"the update has groups {sorted(update.groups)}: with [privacy] a model may have no float buffers (running "
            "means of batch norm), which no norm bounds together with parameters. Use GroupNorm or LayerNorm."
        )
    return update.groups[DELTA]


def padded(config: RunConfig, length: int) -> int:
    """Coordinates that travel."""
    options = config.privacy
    return padded_length(length) if options is not None and options.mechanism == "distributed" else length
