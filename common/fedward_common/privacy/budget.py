"""What a data set may still give away: limits on ε, asked before a release is written into the ledger.

A release counts for its data set whoever asked, in whatever run, before or after a restart. Units are never mixed:
each has an ε of its own, that of all releases by that unit together. A limit L is a promise of (L, δ) by a unit,
whatever else was released of the same data set, so what was released by **coarser** units (record < patient < site)
counts too. Data sets that differ in one record differ in one patient, whose data are exchanged: with neighbours "with
and without one patient" that is two steps, and P ≤ e^ε·R + δ with R ≤ e^ε·Q + δ make P ≤ e^2ε·Q + (1 + e^ε)δ (group
privacy). With m units of the data set from this one on, basic composition gives

    ε_unit(δ/m) + Σ_coarser 2·ε_coarser(δ') ≤ L,    δ' = δ/m / (1 + e^{L/2}):

every 2·ε_coarser ≤ L, hence every (1 + e^ε)δ' ≤ δ/m. For one unit alone it is ε_unit(δ) ≤ L. Releases by **finer**
units do not count for a coarser one, since they promise it nothing: a patient may have thousands of records. A limit by
site is one on the releases by site; a site that wants no others must refuse them.

What is asked next may depend on what was released. Stopping at a limit is sound then for accountants that add up (RDP:
Feldman & Zrnic 2021, "Individual Privacy Accounting via a Rényi Filter"; Gaussians: Koskela, Tobaben & Honkela 2023,
"Individual Privacy Accounting with Gaussian Differential Privacy"), for others if the events are fixed beforehand, as
a run's configuration fixes them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from fedward_common.errors import ConfigError
from fedward_common.privacy.ledger import Release, Unit

Epsilon = Callable[[Sequence[tuple[str, int]], float], float]
"""(event's canonical JSON, how often) of all that is composed, δ → ε."""

YEAR = timedelta(days=365)
_SLACK = 1 + 1e-9
"""Sums of floats: what ends exactly at the limit may be past it by its last digits."""
_COARSER: Mapping[Unit, tuple[Unit, ...]] = {
    Unit.RECORD: (Unit.PATIENT, Unit.SITE),
    Unit.PATIENT: (Unit.SITE,),
    Unit.SITE: (),
}


@dataclass(frozen=True)
class Limits:
    """Largest ε of one data set at `delta`, None for no limit: in one run, in all, and in any 365 days. Raises
    `ConfigError`."""

    max_epsilon_per_run: float | None = None
    max_epsilon_per_dataset: float | None = None
    max_epsilon_per_year: float | None = None
    delta: float = 1e-5

    def __post_init__(self) -> None:
        for name, limit in self.by_rule().items():
            if limit is not None and not 0 <= limit < math.inf:
                raise ConfigError(f"{name} = {limit!r}: must be a number from 0 on. Without a limit, leave it out.")
        if not 0 < self.delta < 1:
            raise ConfigError(f"delta = {self.delta!r}: must lie between 0 and 1. Take 1e-5, or less.")

    def by_rule(self) -> Mapping[str, float | None]:
        """Each limit under its name."""
        names = ("max_epsilon_per_run", "max_epsilon_per_dataset", "max_epsilon_per_year")
        return {name: getattr(self, name) for name in names}


def would_exceed(releases: Iterable[Release], candidate: Release, limits: Limits, epsilon: Epsilon) -> str | None:
    """The limit that `candidate` would break after `releases`, in words; None if it breaks none.

    Exactly at a limit is allowed. An ε that is no number from 0 on (accountants have reported such) breaks every limit.
    Ask under the lock of the ledger (`Ledger.append(…, rule=…)`), so that no two releases take the same rest.
    """
    same = [release for release in releases if release.dataset == candidate.dataset]
    since = candidate.time - YEAR
    counted: dict[str, tuple[str, Callable[[Release], bool]]] = {
        "max_epsilon_per_run": (f"run {candidate.run}", lambda release: release.run == candidate.run),
        "max_epsilon_per_dataset": ("all runs", lambda release: True),
        # Without an end: a clock that was set back makes nothing be forgotten.
        "max_epsilon_per_year": ("365 days", lambda release: release.time >= since),
    }
    for rule, limit in limits.by_rule().items():
        if limit is None:
            continue
        where, counts = counted[rule]
        before = [release for release in same if counts(release)]
        after = [*before, candidate]
        for unit in _concerned(after, candidate.unit):
            total = _total(after, unit, limit, limits.delta, epsilon)
            if not 0 <= total <= limit * _SLACK:  # the comparison is false for NaN
                spent = _total(before, unit, limit, limits.delta, epsilon)
                return (
                    f"{rule} = {limit:g}: round {candidate.round} of run {candidate.run} would bring data set "
                    f"{candidate.dataset!r} to ε = {total:.6g} by {unit} at δ = {limits.delta:g} in {where}; "
                    f"{spent:.6g} is spent, {max(0.0, limit - spent):.6g} left"
                )
    return None


def accounted(events: Sequence[tuple[str, int]], delta: float) -> float:
    """The `Epsilon` of the accountants. Raises `EventError` and `AccountingError`."""
    # Not before it is asked: a guard without [privacy] needs no accountants.
    from fedward_common.privacy.accounting import spent
    from fedward_common.privacy.events import from_json

    return spent([(from_json(event), count) for event, count in events], delta).epsilon


def composed(releases: Iterable[Release]) -> list[tuple[str, int]]:
    """The events of `releases`, equal ones together, as an accountant takes them."""
    counts: Counter[str] = Counter()
    for release in releases:
        counts[release.event] += release.count
    return list(counts.items())


def _concerned(releases: Sequence[Release], unit: Unit) -> list[Unit]:
    """Units whose ε a release by `unit` changes: its own, and finer ones that something was released by."""
    used = {release.unit for release in releases}
    return [other for other in Unit if other is unit or (other in used and unit in _COARSER[other])]


def _total(releases: Sequence[Release], unit: Unit, limit: float, delta: float, epsilon: Epsilon) -> float:
    """ε at `delta` by `unit`, coarser units counted; see the module's text."""
    by_unit = {other: [release for release in releases if release.unit is other] for other in (unit, *_COARSER[unit])}
    own, *coarser = (composed(found) for found in by_unit.values())
    coarser = [events for events in coarser if events]
    share = delta / (1 + len(coarser))
    total = epsilon(own, share) if own else 0.0
    for events in coarser:
        # Past e^700 there are no floats, and limits that mean nothing.
        total += 2 * epsilon(events, share / (1 + math.exp(min(limit / 2, 700.0))))
    return total
