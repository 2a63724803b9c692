"""How a round gets its cohort's mean update: in the open, or as a secure sum. The round engine sees no difference."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from fedward_common import ranges, scalar_groups
from fedward_common.aggregation_options import NormBound
from fedward_common.algorithms.base import DELTA, SumAlgorithm
from fedward_common.config import RunConfig
from fedward_common.errors import FedwardError, UpdateError
from fedward_common.messages import Failure, Purpose, Reply, Request
from fedward_common.privacy import site
from fedward_common.privacy.budget import Limits, accounted, composed, would_exceed
from fedward_common.privacy.cost import multiplier, round_cost
from fedward_common.privacy.events import to_json
from fedward_common.privacy.ledger import Ledger, Release, ReleaseRefused
from fedward_common.privacy.options import PrivacyOptions
from fedward_common.ranges import Scales
from fedward_common.roster import Roster
from fedward_common.secagg.graph import NoProtection
from fedward_common.secagg.spare import Spare
from fedward_common.secure import CLIP, EVALUATE, TRAIN, WEIGHING, schema
from fedward_common.summand import CLIPPED, Shape, Words, decode
from fedward_common.update import Kind, Layout, Update

from fedward_server import evaluation
from fedward_server.aggregation import averages
from fedward_server.checkpoint import Checkpoint
from fedward_server.combining import combiner, told_bounded
from fedward_server.evaluation import Evaluation, Means
from fedward_server.gathering import Gathering
from fedward_server.patience import Patience
from fedward_server.secure import Enrolled, SecureSum, SumFailed, Summed
from fedward_server.transport import Clock, Deadline, Transport

_WEIGHING_SECONDS = 120.0
Note = Callable[[str, Reply], None]
Spend = Callable[[int], None]
Read = Callable[[Shape, Words, int], Update]


class RoundFailed(FedwardError):
    """A round ended without a new model. `failures`: the nodes that were asked and why each did not contribute."""

    def __init__(self, reason: str, failures: Mapping[str, Failure]) -> None:
        super().__init__(reason)
        self.failures = failures


@dataclass(frozen=True)
class Gathered:
    """What a cohort gave. replies: who is in the mean. of_broadcast: how good the model that was sent out is on the
    cohort's test data, where that comes with the same sum. told: more for the round's event. scales: of the next
    round's coordinates, under secure aggregation."""

    replies: list[str]
    failures: Mapping[str, Failure]
    mean: Update
    of_broadcast: Means = None
    told: Mapping[str, Any] = field(default_factory=dict)
    scales: Scales | None = None


class Collector(Protocol):
    """Gets means and evaluations from nodes."""

    def hear(self, name: str, reply: Reply) -> None:
        """Take in what rides on a reply to PREPARE."""

    def train(
        self, now: Checkpoint, requests: Mapping[str, Request], others: Mapping[str, Request], note: Note, quorum: int
    ) -> Gathered:
        """The mean of the updates that the named nodes give to their TRAIN requests. Raises `RoundFailed`."""

    def evaluate(self, requests: Mapping[str, Request], holdout: Collection[str], seconds: float) -> Evaluation:
        """How good the model in these EVALUATE requests is; those of `holdout` never train."""

    def evaluate_last(self, requests: Mapping[str, Request], seconds: float) -> Means:
        """The nodes' figures for the run's last model, if no later round brings them."""


@dataclass(frozen=True)
class PlainCollector:
    """Combines updates that the server sees."""

    config: RunConfig
    algorithm: SumAlgorithm[Any]
    layout: Layout
    transport: Transport
    clock: Clock

    def hear(self, name: str, reply: Reply) -> None:
        """Nothing rides on plain replies."""

    def train(
        self, now: Checkpoint, requests: Mapping[str, Request], others: Mapping[str, Request], note: Note, quorum: int
    ) -> Gathered:
        sends = self.algorithm.sends(self.layout)
        shapes = {group: self.layout.extent(extent) for group, extent in sends.items()}
        lengths = {group: length for group, (length, _) in shapes.items()}
        combining = combiner(self.config.aggregation, lengths, max(1, len(requests)))
        # A node that lies may not make itself more than one of equals.
        most = 1.0 if self.config.uniform else self.config.cohort.max_weight
        gathering = Gathering(requests, shapes, most, combining)
        gathering.run(self.transport, Deadline(self.clock, self.config.cohort.deadline), others, note)
        if len(gathering.replies) < quorum:
            reason = f"{len(gathering.replies)} of {len(requests)} nodes contributed, the quorum is {quorum}"
            if quorum == self.config.aggregation.least > 1:
                reason += f": {self.config.aggregation.need}"
            raise RoundFailed(reason, gathering.failures)
        try:
            mean, told = combining.combined()
        except UpdateError as error:
            raise RoundFailed(str(error), gathering.failures) from error
        return Gathered(gathering.replies, gathering.failures, mean, told={"aggregation": told} if told else {})

    def evaluate(self, requests: Mapping[str, Request], holdout: Collection[str], seconds: float) -> Evaluation:
        return evaluation.evaluate(self.transport, requests, holdout, seconds)

    def evaluate_last(self, requests: Mapping[str, Request], seconds: float) -> Means:
        """Each round brought its own."""
        return None


@dataclass(frozen=True)
class SecureCollector:
    """Sums updates that the server does not see. A round's vector also holds the metrics of the model that it was
    sent; held-out nodes have a sum of their own."""

    config: RunConfig
    algorithm: SumAlgorithm[Any]
    layout: Layout
    metric_names: tuple[str, ...]
    secure: SecureSum

    @classmethod
    def over(
        cls,
        transport: Transport,
        clock: Clock,
        run: str,
        config: RunConfig,
        algorithm: SumAlgorithm[Any],
        layout: Layout,
        metric_names: tuple[str, ...],
        roster: Callable[[], Roster],
        ledger: Path,
        envelope: Callable[[], bytes] = lambda: b"",
    ) -> SecureCollector:
        """The collector of one run. ledger: file of what a run with [privacy] has released. envelope: the signed
        roster, as nodes are to be told it."""
        rules = Enrolled(run, config, roster, envelope)
        secure = SecureSum(transport, run, rules, Patience(clock))
        if config.privacy is None:
            return cls(config, algorithm, layout, metric_names, secure)
        made = SiteCollector if config.privacy.unit == "site" else PrivateCollector
        return made(config, algorithm, layout, metric_names, secure, Ledger(ledger, run))

    def hear(self, name: str, reply: Reply) -> None:
        self.secure.hear(name, reply)

    def train(
        self, now: Checkpoint, requests: Mapping[str, Request], others: Mapping[str, Request], note: Note, quorum: int
    ) -> Gathered:
        spend = self._spending(requests)
        summed = self.algorithm.summed(self.layout, self.config.local)
        lengths = scalar_groups.lengths(self.layout, summed)
        scales = now.scales or self._first_scales(requests, lengths, quorum)
        # A model is evaluated with the first training that starts from it.
        evaluates = now.round > 0 and evaluation.due(self.config.evaluation, now.round, self.config.rounds)
        metrics = self._metrics(evaluates) + scalar_groups.names(summed)

        def shape(n: int) -> Shape:
            return Shape(scales.shape_groups(lengths), metrics, self.config.secure_sum.bits, n, scales.weight)

        done = self._sum(requests, shape, self.config.cohort.deadline, quorum, others, note, spend)
        clipped = {name: int(count) for name, count in _named(CLIPPED, done.mean.metrics).items()}
        groups = {**done.mean.groups, **scalar_groups.means(summed, done.mean)}
        mean = Update(groups, done.mean.weight, _named(TRAIN, done.mean.metrics))
        told = {}
        if isinstance(self.config.aggregation, NormBound):
            mean, told["aggregation"] = told_bounded(self.config.aggregation, mean, {})
        return Gathered(
            done.survivors,
            done.failures,
            self.algorithm.completed(now.state, mean, self.config.local),
            averages(_named(EVALUATE, done.mean.metrics)) if evaluates else None,
            {
                "secure_sum": {
                    **done.told,
                    "clipped": clipped,
                    "ranges": {group.name: group.range for group in done.shape.groups},
                },
                **told,
                **self._told(done),
            },
            self._following(scales, done),
        )

    def _metrics(self, evaluates: bool) -> tuple[str, ...]:
        """What is in a round's sum beside the update."""
        return schema(True, evaluates, self.metric_names, isinstance(self.config.aggregation, NormBound))

    def _spending(self, requests: Mapping[str, Request]) -> Spend:
        """What is to be done before the sum of a cohort of n is unmasked."""
        return lambda n: None

    def _told(self, done: Summed) -> Mapping[str, Any]:
        """More for the round's event."""
        return {}

    def _first_scales(self, requests: Mapping[str, Request], lengths: Mapping[str, int], quorum: int) -> Scales:
        """Before any sum: ranges from the configuration; how much a node weighs from a sum of its own."""
        first = dict.fromkeys(lengths, self.config.secure_sum.range)
        if self.config.uniform:
            return ranges.first(first)
        weighing = {
            name: replace(request, purpose=Purpose.EVALUATE, vectors={}, included=None)
            for name, request in requests.items()
        }

        def shape(n: int) -> Shape:
            return Shape((), WEIGHING, self.config.secure_sum.bits, n)

        done = self._sum(weighing, shape, _WEIGHING_SECONDS, quorum, {}, lambda name, reply: None)
        return ranges.first(first, done.mean.metrics[WEIGHING[0]] / len(done.survivors))

    def _following(self, scales: Scales, done: Summed) -> Scales:
        found = ranges.following(scales, done.mean, len(done.survivors))
        return replace(found, weight=1.0) if self.config.uniform else found

    def _sum(
        self,
        requests: Mapping[str, Request],
        shape: Callable[[int], Shape],
        seconds: float,
        quorum: int,
        others: Mapping[str, Request],
        note: Note,
        spend: Spend = lambda n: None,
        read: Read = decode,
        spare: Callable[[int], Spare | None] = lambda n: None,
    ) -> Summed:
        try:
            return self.secure.sum(requests, shape, seconds, quorum, others, note, read, spend, spare)
        except SumFailed as error:
            raise RoundFailed(str(error), error.failures) from error

    def evaluate(self, requests: Mapping[str, Request], holdout: Collection[str], seconds: float) -> Evaluation:
        if not holdout:
            return Evaluation()
        done = self._evaluated({name: requests[name] for name in sorted(holdout)}, seconds)
        if isinstance(done, SumFailed):
            return Evaluation(failures={name: done.failures[name] for name in sorted(done.failures)})
        return Evaluation(holdout=averages(_named(EVALUATE, done.mean.metrics)), failures=done.failures)

    def evaluate_last(self, requests: Mapping[str, Request], seconds: float) -> Means:
        done = self._evaluated(requests, seconds)
        return None if isinstance(done, SumFailed) else averages(_named(EVALUATE, done.mean.metrics))

    def _evaluated(self, requests: Mapping[str, Request], seconds: float) -> Summed | SumFailed:
        def shape(n: int) -> Shape:
            return Shape((), schema(False, True, self.metric_names), self.config.secure_sum.bits, n)

        try:
            return self.secure.sum(requests, shape, seconds, 1)
        except SumFailed as error:
            return error


class BudgetSpent(FedwardError):
    """The next round would cross the run's privacy budget."""


@dataclass(frozen=True)
class PrivateCollector(SecureCollector):
    """Sums updates that the server does not see, in a run with [privacy]: nothing else is asked for, and every round
    stands in the run's `ledger` before it is unmasked. Nodes noised each of their steps (by record or by patient)."""

    ledger: Ledger

    @property
    def _options(self) -> PrivacyOptions:
        assert self.config.privacy is not None
        return self.config.privacy

    @property
    def _length(self) -> int:
        return self.layout.size(Kind.TRAINABLE)

    def _metrics(self, evaluates: bool) -> tuple[str, ...]:
        return ()

    def _spending(self, requests: Mapping[str, Request]) -> Spend:
        """Raises `BudgetSpent`, and `RoundFailed` for a cohort that is too small."""
        first = next(iter(requests.values()))

        def release(n: int) -> Release:
            cost = round_cost(self.config, self._length, n)
            return Release(
                first.run, first.round, first.attempt, first.purpose.value, first.run, cost.unit, "server",
                to_json(cost.event), cost.count,
            )  # fmt: skip

        def rule(releases: Sequence[Release], n: int) -> str | None:
            limits = Limits(max_epsilon_per_run=self._options.budget, delta=self._options.delta)
            return would_exceed(releases, release(n), limits, accounted)

        # What a smaller cohort would cost is the same but for the last digits: asked here, nobody trains in vain.
        try:
            broken = rule(list(self.ledger.releases()), len(requests))
        except NoProtection as error:
            raise RoundFailed(str(error), {}) from error
        if broken:
            raise BudgetSpent(broken)

        def spend(n: int) -> None:
            try:
                self.ledger.append(release(n), lambda releases: rule(releases, n))
            except ReleaseRefused as refused:
                raise BudgetSpent(str(refused)) from refused

        return spend

    def _told(self, done: Summed) -> Mapping[str, Any]:
        """ε of all rounds so far, and what it is made of."""
        options = self._options
        cost = round_cost(self.config, self._length, int(done.told["cohort"]))
        epsilon = accounted(composed(self.ledger.releases()), options.delta)
        told = {
            "unit": options.unit,
            "mechanism": options.mechanism,
            "epsilon": epsilon if math.isfinite(epsilon) else None,
            "delta": options.delta,
            "budget": options.budget,
            "noise_multiplier": multiplier(self.config, self._length),
            "event": json.loads(to_json(cost.event)),
            "count": cost.count,
        }
        return {"privacy": told}

    def evaluate(self, requests: Mapping[str, Request], holdout: Collection[str], seconds: float) -> Evaluation:
        """Nothing: what a model scores on nodes' data would be a release."""
        return Evaluation()

    def evaluate_last(self, requests: Mapping[str, Request], seconds: float) -> Means:
        return None


@dataclass(frozen=True)
class SiteCollector(PrivateCollector):
    """Sums updates whose sum hides each site's contribution."""

    def train(
        self, now: Checkpoint, requests: Mapping[str, Request], others: Mapping[str, Request], note: Note, quorum: int
    ) -> Gathered:
        spend = self._spending(requests)
        first = next(iter(requests.values()))
        of = site.Stamped(first.run, first.round, first.attempt)
        options = self._options
        bound = now.scales.groups[DELTA].range if now.scales else options.clip
        if options.clip_quantile is not None:
            requests = {
                name: replace(request, settings={**request.settings, CLIP: bound}) for name, request in requests.items()
            }

        def made(n: int) -> site.SiteMechanism:
            return site.mechanism(self.config, self._length, n, bound)

        def read(shape: Shape, words: Words, count: int) -> Update:
            # Shape and words are of the cohort; `count` of them are in the sum.
            return made(shape.capacity).mean(words, count, of)

        def shape(n: int) -> Shape:
            return made(n).shape

        def spare(n: int) -> Spare | None:
            return made(n).spare

        done = self._sum(requests, shape, self.config.cohort.deadline, quorum, others, note, spend, read, spare)
        told = {"secure_sum": done.told, **self._told(done)}
        for_cohort, off = made(int(done.told["cohort"])), int(done.told["spare_parts_off"])
        told["privacy"] = {**told["privacy"], "surplus": for_cohort.surplus(len(done.survivors), off)}
        mean, scales = replace(done.mean, metrics={}), None
        if options.clip_quantile is not None:
            within = done.mean.metrics[site.WITHIN]
            scales = ranges.fixed({DELTA: site.next_clip(options, bound, within)})
            told["privacy"] = {**told["privacy"], "clip": bound, "within_clip": within}
        return Gathered(done.survivors, done.failures, mean, told=told, scales=scales)


def _named(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics whose names begin so, without it."""
    return {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
