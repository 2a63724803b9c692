"""What a round makes of its cohort's updates, by the run's `[aggregation]` rule: the "mean" that the algorithm's server
half is given.

The mean and the bounded mean fold each update in as it comes; memory does not grow with the cohort. The other rules
keep the updates until the round is over: as many model copies as there are replies. Each group of an update ("delta",
"statistic") is a vector of its own to a rule: a node that passes by its parameters may still lie about its buffers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from fedward_common.aggregation_options import (
    AggregationOptions,
    Bulyan,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    NormBound,
    TrimmedMean,
)
from fedward_common.errors import UpdateError
from fedward_common.norm_bound import SCALED, bounded
from fedward_common.update import Update, Vector

from fedward_server import robust
from fedward_server.aggregation import MetricSums, StreamingSum

Told = Mapping[str, Any]


class Combiner(Protocol):
    """Takes a round's updates, in whatever order they come, and gives what stands for them all."""

    def add(self, name: str, update: Update) -> None:
        """Take a node's update, which has passed the gate. Raises `UpdateError`; then nothing was taken."""

    def combined(self) -> tuple[Update, Told]:
        """The update of the cohort, and what the rule did, for the round's event. Metrics are plain sums. Raises
        `UpdateError` if the updates do not allow it."""


def combiner(rule: AggregationOptions, lengths: Mapping[str, int], capacity: int) -> Combiner:
    """For a round of at most `capacity` updates with groups of these lengths."""
    if rule.single_updates:
        return Kept(rule)
    total = StreamingSum(lengths, capacity)
    return Bounded(rule, total) if isinstance(rule, NormBound) else Folded(total)


@dataclass(frozen=True)
class Folded:
    """The weighted mean."""

    total: StreamingSum

    def add(self, name: str, update: Update) -> None:
        self.total.add(update)

    def combined(self) -> tuple[Update, Told]:
        return self.total.mean(), {}


@dataclass(frozen=True)
class Bounded:
    """The mean of updates of bounded norm, each node counted once. Nodes bound their own; here it is done again, for
    one that does not."""

    rule: NormBound
    total: StreamingSum
    over: list[str] = field(default_factory=list)
    """Nodes whose update came over the bound."""

    def add(self, name: str, update: Update) -> None:
        within, over = bounded(update, self.rule.bound)
        self.total.add(replace(within, weight=1.0))
        if over:
            self.over.append(name)

    def combined(self) -> tuple[Update, Told]:
        mean = self.total.mean()
        return told_bounded(self.rule, mean, {"over": sorted(self.over)})


def told_bounded(rule: NormBound, mean: Update, more: Told) -> tuple[Update, Told]:
    """`mean` without the count of scaled updates, which is told instead."""
    metrics = dict(mean.metrics)
    scaled = round(metrics.pop(SCALED, 0.0))
    return replace(mean, metrics=metrics), {**_head(rule), "bound": rule.bound, "scaled": scaled, **more}


@dataclass(frozen=True)
class Kept:
    """A rule that looks at the updates side by side."""

    rule: AggregationOptions
    updates: dict[str, Update] = field(default_factory=dict)
    _metrics: MetricSums = field(default_factory=MetricSums)

    def add(self, name: str, update: Update) -> None:
        self._metrics.add(update.metrics)
        self.updates[name] = replace(update, metrics={})

    def combined(self) -> tuple[Update, Told]:
        n = len(self.updates)
        if n < self.rule.least:
            raise UpdateError(f"{n} updates came, but {self.rule.need}")
        names = sorted(self.updates)
        groups, told = {}, {}
        for group in self.updates[names[0]].groups:
            vectors = [self.updates[name].groups[group] for name in names]
            groups[group], told[group] = apply(self.rule, names, vectors)
        return (
            Update(groups, float(n), self._metrics.total()),
            {**_head(self.rule), "updates": n, **{group: did for group, did in told.items() if did}},
        )


def apply(rule: AggregationOptions, names: list[str], vectors: list[Vector]) -> tuple[Vector, Told]:
    """The rule's vector for those of the named nodes, as float64, and what it did."""
    match rule:
        case Krum():
            chosen = robust.krum(vectors, rule.byzantine)
            return robust.mean([vectors[i] for i in chosen]), _chosen(names, chosen)
        case MultiKrum():
            chosen = robust.krum(vectors, rule.byzantine, rule.kept(len(vectors)))
            return robust.mean([vectors[i] for i in chosen]), _chosen(names, chosen)
        case Bulyan():
            chosen, vector = robust.bulyan(vectors, rule.byzantine)
            return vector, _chosen(names, chosen)
        case Median():
            return robust.median(vectors), {}
        case TrimmedMean():
            cut = rule.cut(len(vectors))
            return robust.trimmed_mean(vectors, cut), {"trimmed": cut}
        case GeometricMedian():
            found = robust.geometric_median(vectors, rule.iterations, rule.tolerance, rule.smoothing)
            shares = dict(zip(names, found.shares.tolist(), strict=True))
            return found.vector, {"iterations": found.iterations, "converged": found.converged, "shares": shares}
    raise TypeError(f"{rule!r} is no rule of single updates")


def _head(rule: AggregationOptions) -> dict[str, Any]:
    return {"rule": rule.rule}


def _chosen(names: list[str], chosen: list[int]) -> Told:
    return {
        "selected": [names[i] for i in chosen],
        "left_out": [name for i, name in enumerate(names) if i not in set(chosen)],
    }
