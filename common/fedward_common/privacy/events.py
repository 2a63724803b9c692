"""What one release of noisy data is, as data: events stand in a ledger, accountants (`accounting`) read them.

A unit is whatever the run hides (a record, a patient, a site); an event does not know which. Repetitions are kept
apart from it, as pairs (event, count). Numbers are checked when an event is made; `EventError` says what is wrong.
What a claim about an event rests on stands with it in words (`rests_on`; `amplified` if sampling is counted), for
reports.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, ClassVar

from fedward_common.errors import FedwardError
from fedward_common.signing import canonical


class EventError(FedwardError):
    """An event with a number that no mechanism has, or text that is not an event's in its one valid form."""


class Relation(StrEnum):
    """Which data sets are neighbours: what a claim of privacy hides."""

    ADD_OR_REMOVE_ONE = "add-or-remove-one"
    """With and without one unit."""
    REPLACE_ONE = "replace-one"
    """One unit exchanged for another; how many there are is public."""


@dataclass(frozen=True)
class Gaussian:
    """f(D) + N(0, σ²I), every unit taking part. Add-or-remove-one.

    noise_multiplier: z = σ/Δ, where adding or removing one unit moves f by at most Δ in L2.
    """

    noise_multiplier: float
    kind: ClassVar[str] = "gaussian"
    relation: ClassVar[Relation] = Relation.ADD_OR_REMOVE_ONE
    rests_on: ClassVar[str] = (
        "Gaussian noise: adding or removing one unit moves what is released by at most the L2 sensitivity that "
        "noise_multiplier counts in."
    )

    def __post_init__(self) -> None:
        _between(self, "noise_multiplier", *_MULTIPLIERS)


@dataclass(frozen=True)
class SampledGaussian:
    """A `Gaussian` over a Poisson sample: each unit takes part if its own coin falls so. Add-or-remove-one.

    sampling_rate: q of the coin, within [0, 1]; it is tossed afresh for each release by the party that adds the noise,
    and whoever sees the release does not see it (else use `Gaussian`). noise_multiplier: z = σ/C, each unit adding at
    most C in L2.
    """

    sampling_rate: float
    noise_multiplier: float
    kind: ClassVar[str] = "sampled-gaussian"
    relation: ClassVar[Relation] = Relation.ADD_OR_REMOVE_ONE
    rests_on: ClassVar[str] = (
        "Gaussian noise over a sample: each unit adds at most the clipping norm that noise_multiplier counts in."
    )
    amplified: ClassVar[str] = (
        "Amplified by Poisson sampling: each unit took part in a release only if its own coin fell so, tossed afresh "
        "by the party that adds the noise and unseen by whoever sees the release. Batches that are shuffled or of a "
        "fixed size are not drawn so, and nothing is claimed against a party that knows who took part."
    )

    def __post_init__(self) -> None:
        _between(self, "sampling_rate", 0.0, 1.0, "A share of the units: batch size / number of units.")
        _between(self, "noise_multiplier", *_MULTIPLIERS)


@dataclass(frozen=True)
class FixedSizeGaussian:
    """A clipped sum + N(0, σ²I) over `size` of `population` units, drawn uniformly without replacement. Replace-one.

    Drawn afresh for each release and hidden from whoever sees it, as in `SampledGaussian`. noise_multiplier: z = σ/C,
    each unit adding at most C in L2: replacing x by −x moves the sum by 2C, so the noise is z/2 sensitivities.
    """

    population: int
    size: int
    noise_multiplier: float
    kind: ClassVar[str] = "fixed-size-gaussian"
    relation: ClassVar[Relation] = Relation.REPLACE_ONE
    rests_on: ClassVar[str] = (
        "Gaussian noise over a sample of fixed size: each unit adds at most the clipping norm C that noise_multiplier "
        "counts in, and replacing one moves the sum by up to 2C."
    )
    amplified: ClassVar[str] = (
        "Amplified by sampling without replacement: who took part in a release was drawn uniformly and afresh from a "
        "population whose size is public, unseen by whoever sees the release. Nothing is claimed against a party that "
        "knows who took part."
    )

    def __post_init__(self) -> None:
        _whole(self, "population", _MANY, "Count the units.")
        _whole(self, "size", _MANY, "Count the units that take part.")
        if self.size > self.population:
            raise EventError(
                f"{self.kind}: size = {self.size} is more than the population of {self.population}: without "
                "replacement at most all take part. Lower size, or correct population."
            )
        least, _, way_out = _MULTIPLIERS
        _between(self, "noise_multiplier", least, 1e7, way_out)  # with more, its divergence is lost in rounding


@dataclass(frozen=True)
class Skellam:
    """f(D) + Skellam noise per coordinate, f in Z^d; the noise may be the sum of many nodes'. Add-or-remove-one.

    l2, l1: adding or removing one unit moves f by at most these, in L2 and in L1, after scaling and rounding.
    variance: μ of what honest nodes added and was left in the sum; a share of variance v is Poisson(v/2) −
    Poisson(v/2), and shares add up to a Skellam again. Reduction modulo 2^b after the sum costs nothing. gap: total
    variation distance between the noise that is drawn (all coordinates of all nodes together: a table cut off, words
    of finite length) and true Skellam noise; it is paid from δ.
    """

    l2: float
    l1: float
    variance: float
    gap: float = 0.0
    kind: ClassVar[str] = "skellam"
    relation: ClassVar[Relation] = Relation.ADD_OR_REMOVE_ONE
    rests_on: ClassVar[str] = (
        "Skellam noise: the variance is that of noise which honest nodes added and nobody took off, and adding or "
        "removing one unit moves the whole numbers by at most l2 and l1. How far the noise drawn is from its law (gap) "
        "is paid from δ."
    )

    def __post_init__(self) -> None:
        for name in ("l2", "l1", "variance"):
            _between(self, name, *_SIZES)
        if self.l1 < self.l2:
            raise EventError(
                f"{self.kind}: l1 = {self.l1!r} is less than l2 = {self.l2!r}: no vector is. A bound in L2 gives "
                "l1 = √dimension · l2; of whole numbers, l2² too."
            )
        _between(self, "gap", 0.0, 1.0, _GAP)


@dataclass(frozen=True)
class DiscreteGaussian:
    """f(D) + the sum of discrete Gaussians of `nodes` nodes, per coordinate, f in Z^d. Add-or-remove-one.

    l2, gap: as in `Skellam`. sigma: of one node's noise, at least ½. nodes: the honest ones whose noise was left in
    the sum. dimension: d. (A sum of discrete Gaussians is not one; what that costs grows with d.)
    """

    l2: float
    sigma: float
    nodes: int
    dimension: int
    gap: float = 0.0
    kind: ClassVar[str] = "discrete-gaussian"
    relation: ClassVar[Relation] = Relation.ADD_OR_REMOVE_ONE
    rests_on: ClassVar[str] = (
        "Discrete Gaussian noise: as many honest nodes added theirs as the event says and nobody took it off, and "
        "adding or removing one unit moves the whole numbers by at most l2. How far the noise drawn is from its law "
        "(gap) is paid from δ."
    )

    def __post_init__(self) -> None:
        _between(self, "l2", *_SIZES)
        _between(self, "sigma", 0.5, _SIZES[1], "The bound is proved from ½ on: scale by more before rounding.")
        _whole(self, "nodes", 1 << 20, "Count those whose noise is in the sum.")
        _whole(self, "dimension", _MANY, "Count the coordinates.")
        _between(self, "gap", 0.0, 1.0, _GAP)


Event = Gaussian | SampledGaussian | FixedSizeGaussian | Skellam | DiscreteGaussian

_MULTIPLIERS = 1e-6, 1e9, "Less noise hides nothing; with more, nothing is left of the data."
_SIZES = 1e-60, 1e60, "A release without noise has no price; one without data needs no event."
_MANY = 1 << 40
_GAP = "A distance of distributions; 0 for noise that is drawn exactly."
_KINDS: dict[str, type[Event]] = {
    event.kind: event for event in (Gaussian, SampledGaussian, FixedSizeGaussian, Skellam, DiscreteGaussian)
}


def to_json(event: Event) -> str:
    """Canonical JSON of an object with its `kind`: equal events give equal text."""
    return canonical({"kind": event.kind} | {field.name: getattr(event, field.name) for field in fields(event)})


def from_json(text: str) -> Event:
    """The inverse of `to_json`; refuses every other spelling. Raises `EventError`."""
    try:
        payload = json.loads(text)
        event = _of(payload)
        same = to_json(event) == text
    except (ValueError, RecursionError) as error:
        raise EventError(f"{text!r:.100}: is not the JSON of an event.") from error
    if not same:
        raise EventError(f"{text!r:.100}: is an event, but not in its one valid form, {to_json(event)}.")
    return event


def _of(payload: Any) -> Event:
    if not isinstance(payload, Mapping):
        raise EventError(f"{payload!r:.100}: an event is an object with a 'kind'.")
    kind = payload.get("kind")
    event = _KINDS.get(kind) if isinstance(kind, str) else None
    if event is None:
        raise EventError(
            f"kind = {kind!r:.100}: events are {', '.join(_KINDS)}. Others may be known to a newer Fedward: update."
        )
    names = {field.name for field in fields(event)}
    if set(payload) != names | {"kind"}:
        raise EventError(f"{kind}: has {', '.join(sorted(names))}, not {sorted(set(payload) - {'kind'})!r:.200}.")
    return event(**{name: payload[name] for name in names})


def _between(event: Any, name: str, least: float, largest: float, way_out: str) -> None:
    _number(event, name)
    value = getattr(event, name)
    if not least <= value <= largest:  # the comparison is false for NaN
        raise EventError(f"{event.kind}: {name} = {value!r} is not a number from {least:g} to {largest:g}. {way_out}")


def _number(event: Any, name: str) -> None:
    """Keeps it as a float, so that equal events have equal text."""
    value = getattr(event, name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise EventError(f"{event.kind}: {name} = {value!r:.100} is not a number.")
    try:
        object.__setattr__(event, name, float(value) + 0.0)  # −0 becomes 0
    except OverflowError:
        raise EventError(f"{event.kind}: {name} = {value!r:.100} is larger than any float.") from None


def _whole(event: Any, name: str, largest: int, way_out: str) -> None:
    value = getattr(event, name)
    if type(value) is not int or not 1 <= value <= largest:
        raise EventError(f"{event.kind}: {name} = {value!r:.100} is not a whole number from 1 to {largest}. {way_out}")
