"""A run's privacy report: what was released, to whom, what it cost and rests on, and what that means for one person.

Made from three things that a run leaves: its ledger, its configuration and its events. The ledger alone says what was
spent. It is checked first: its chain, that it is this run's, and that it has every round that the events tell of, so
that one cut off at its end gives no report either. Pure: reads and writes nothing.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from fedward_common.config import RunConfig
from fedward_common.errors import FedwardError
from fedward_common.privacy import ledger as ledgers
from fedward_common.privacy import wording
from fedward_common.privacy.accounting import Claim, Sampled, spent
from fedward_common.privacy.amplification import Drawn, unseen
from fedward_common.privacy.events import Event, Relation, from_json
from fedward_common.privacy.ledger import Release, Unit
from fedward_common.privacy.meaning import Meaning
from fedward_common.privacy.options import PrivacyOptions
from fedward_common.privacy.wording import Recipient

FORMAT = 1
"""Of the JSON: a later one may have more fields, a higher number other ones."""
_SHOWN, _SHOWN_SAMPLED = 40, 10
"""Rounds, at most, whose ε is given: each asks an accountant, which takes half a second for sampled noise."""
_NOBODY = 1


class ReportError(FedwardError):
    """No report can be made that could be believed."""


@dataclass(frozen=True)
class Spent:
    """ε of all releases up to a round: against those who know who took part, and those who see models only."""

    round: int
    epsilon: float
    unseen: float


@dataclass(frozen=True)
class Released:
    """An event, how often, in which rounds it came first and last, and in words."""

    event: Mapping[str, Any]
    count: int
    first: int
    last: int
    words: str


@dataclass(frozen=True)
class Lost:
    """An attempt at a round that was accounted, though no model came of it."""

    round: int
    attempt: int
    time: str
    why: str


@dataclass(frozen=True)
class Person:
    """What the numbers mean for `who`, against `whom`."""

    who: str
    whom: str
    meaning: Meaning
    words: tuple[str, ...]


@dataclass(frozen=True)
class PrivacyReport:
    """See the module.

    unit, mechanism, clip, delta, budget: as configured. noise: who adds it. noise_multiplier: z, None before a round.
    sites: enrolled; cohort: drawn for a round, None for all. rounds: with a model; of: planned. claim: against those
    who know who took part; unseen: against those who see models only, for the reason in `sampling`. left: of the
    budget. hidden: what a unit is. accepted: decisions by which somebody went on with a damaged ledger.
    """

    run: str
    name: str
    status: str
    reason: str
    made: str
    unit: str
    mechanism: str | None
    noise: str
    clip: float
    noise_multiplier: float | None
    delta: float
    sites: int
    cohort: int | None
    rounds: int
    of: int
    claim: Claim
    unseen: Claim
    sampling: str
    budget: float | None
    left: float | None
    spent: tuple[Spent, ...]
    released: tuple[Released, ...]
    lost: tuple[Lost, ...]
    recipients: tuple[Recipient, ...]
    persons: tuple[Person, ...]
    hidden: str
    uncovered: tuple[str, ...]
    lines: int
    head: str
    accepted: tuple[str, ...]

    def to_json(self) -> str:
        """An object of these fields and `format`; an infinite number is null."""
        return json.dumps(_finite({"format": FORMAT, **asdict(self)}), ensure_ascii=False, indent=1, allow_nan=False)


def make(
    run: str,
    config: RunConfig,
    events: Iterable[Mapping[str, Any]],
    ledger: ledgers.Report,
    now: datetime | None = None,
) -> PrivacyReport:
    """The report of a run, whether it has ended or not.

    events: of its event log, in order. ledger: of `ledger.verify`. Raises `ReportError` if the run has no [privacy] or
    the ledger is not whole; `EventError`, `AccountingError` for events that no accountant knows.
    """
    options = config.privacy
    if options is None:
        raise ReportError(
            f"run {run}: has no [privacy], so nothing was accounted and what its models reveal is not bounded. Add "
            "[privacy] to the next run."
        )
    story = _Story.of(events)
    _check(run, options, story, ledger)
    course = _Course(ledger.releases, story, Unit(options.unit))
    known, models_only = course.claims(course.all, options.delta)
    budget = options.budget
    return PrivacyReport(
        run=run,
        name=config.name,
        status=story.status,
        reason=story.reason,
        made=(now or datetime.now(UTC)).isoformat(timespec="seconds"),
        unit=options.unit,
        mechanism=options.mechanism,
        noise=wording.noise(options),
        clip=options.clip,
        noise_multiplier=story.noise_multiplier if options.noise_multiplier is None else options.noise_multiplier,
        delta=options.delta,
        sites=story.sites,
        cohort=config.cohort.size,
        rounds=len(story.rounds),
        of=config.rounds,
        claim=known,
        unseen=models_only,
        sampling=course.sampling(config, known, models_only),
        budget=budget,
        left=None if budget is None else max(0.0, budget - known.epsilon),
        spent=course.over_rounds(options.delta),
        released=course.released(),
        lost=course.lost(),
        recipients=wording.recipients(config, story.colluders),
        persons=_persons(course, options, story.colluders, known, models_only),
        hidden=wording.hidden(Unit(options.unit)),
        uncovered=wording.uncovered(config),
        lines=ledger.lines,
        head="" if ledger.last is None else str(ledger.last.head),
        accepted=tuple(f"{one.time[:19]}, {one.who}: {one.why}" for one in ledger.accepted),
    )


@dataclass(frozen=True)
class _Story:
    """What the event log tells. rounds: the event of each round that gave a model. failed: reasons, by round."""

    status: str
    reason: str
    sites: int
    rounds: Mapping[int, Mapping[str, Any]]
    failed: Mapping[int, list[str]]

    @classmethod
    def of(cls, events: Iterable[Mapping[str, Any]]) -> _Story:
        status, reason, sites = "not started", "", 0
        rounds: dict[int, Mapping[str, Any]] = {}
        failed: dict[int, list[str]] = defaultdict(list)
        for event in events:
            kind = event["event"]
            if kind == "run_started":
                status, reason, sites = "under way", "", len(event["nodes"])
            elif kind == "round":
                rounds[int(event["round"])] = event
            elif kind == "round_failed":
                failed[int(event["round"])].append(str(event["reason"]))
            elif kind == "run_finished":
                status, reason = str(event["status"]), str(event.get("reason") or "")
        return cls(status, reason, sites, rounds, failed)

    @property
    def colluders(self) -> int:
        """Sites that may collude, in the round that allows the fewest."""
        told = [int(event.get("secure_sum", {}).get("colluders_survived", 0)) for event in self.rounds.values()]
        return min(told, default=0)

    @property
    def noise_multiplier(self) -> float | None:
        told = [event["privacy"]["noise_multiplier"] for event in self.rounds.values() if "privacy" in event]
        return float(told[-1]) if told else None


def _check(run: str, options: PrivacyOptions, story: _Story, ledger: ledgers.Report) -> None:
    way_out = "Restore it from a backup that has all its lines: no report is made of what cannot be believed."
    if ledger.problems:
        raise ReportError(f"run {run}: its ledger is damaged: {ledgers.told(ledger.problems)} {way_out}")
    strangers = sorted({release.run for release in ledger.releases} - {run})
    if strangers or (ledger.lines and ledger.owner != run):
        raise ReportError(f"run {run}: the ledger is that of {strangers[0] if strangers else ledger.owner}. {way_out}")
    units = sorted({release.unit.value for release in ledger.releases} - {options.unit})
    if units:
        raise ReportError(
            f"run {run}: privacy.unit = {options.unit!r}, but the ledger has releases by {', '.join(units)}. {way_out}"
        )
    missing = sorted(set(story.rounds) - {release.round for release in ledger.releases})
    if missing:
        raise ReportError(
            f"run {run}: its ledger lacks {len(missing)} rounds that its events tell of, the first of them round "
            f"{missing[0]}: it was cut off. {way_out}"
        )


class _Course:
    """The releases in the order of their rounds."""

    def __init__(self, releases: Sequence[Release], story: _Story, unit: Unit) -> None:
        self._story = story
        self._unit = unit
        self._by_round: dict[int, list[Release]] = defaultdict(list)
        for release in releases:
            self._by_round[release.round].append(release)
        self._rounds = sorted(self._by_round)
        self._drawn = {number: self._of_round(number) for number in self._rounds}
        self.all: Counter[Drawn] = sum(self._drawn.values(), Counter())

    def _of_round(self, number: int) -> Counter[Drawn]:
        found: Counter[Drawn] = Counter()
        for release in self._by_round[number]:
            size, population = self._draw(number)
            found[Drawn(from_json(release.event), size, population)] += release.count
        return found

    def _draw(self, number: int) -> tuple[int, int]:
        """Of how many available sites how many were drawn; (1, 1), which counts whole, where the theorem for drawn
        cohorts does not hold: attempts at one round have the same lot, and failing may have depended on the draw."""
        event = self._story.rounds.get(number)
        if self._unit is not Unit.SITE or event is None or "available" not in event:
            return _NOBODY, _NOBODY
        if len(self._by_round[number]) > 1 or number in self._story.failed:
            return _NOBODY, _NOBODY
        return len(event["cohort"]), int(event["available"])

    @staticmethod
    def claims(counts: Counter[Drawn], delta: float, relation: Relation | None = None) -> tuple[Claim, Claim]:
        """Against those who know who took part, and against those who see models only."""
        events: Counter[Event] = Counter()
        for drawn, count in counts.items():
            events[drawn.event] += count
        return spent(list(events.items()), delta, relation), unseen(list(counts.items()), delta, relation)

    def over_rounds(self, delta: float) -> tuple[Spent, ...]:
        sampled = any(isinstance(drawn.event, Sampled) for drawn in self.all)
        shown = {self._rounds[i] for i in _spread(len(self._rounds), _SHOWN_SAMPLED if sampled else _SHOWN)}
        total: Counter[Drawn] = Counter()
        found = []
        for number in self._rounds:
            total += self._drawn[number]
            if number in shown:
                known, models_only = self.claims(total, delta)
                found.append(Spent(number, known.epsilon, models_only.epsilon))
        return tuple(found)

    def released(self) -> tuple[Released, ...]:
        counts: Counter[str] = Counter()
        where: dict[str, list[int]] = defaultdict(list)
        for number in self._rounds:
            for release in self._by_round[number]:
                counts[release.event] += release.count
                where[release.event].append(number)
        return tuple(
            Released(json.loads(text), count, where[text][0], where[text][-1], from_json(text).rests_on)
            for text, count in counts.items()
        )

    def lost(self) -> tuple[Lost, ...]:
        found = []
        for number in self._rounds:
            releases = self._by_round[number]
            reasons = "; ".join(dict.fromkeys(self._story.failed.get(number, ())))
            why = reasons or "no reason is told: it is under way, or the server's process ended in it"
            # The last attempt is the one that the round's model came of.
            for release in releases[: len(releases) - (number in self._story.rounds)]:
                found.append(Lost(number, release.attempt, release.time.isoformat(timespec="seconds"), why))
        return tuple(found)

    def sampling(self, config: RunConfig, known: Claim, models_only: Claim) -> str:
        """Why the two ε are the same, or are not."""
        draws = {(drawn.size, drawn.population) for drawn in self.all}
        whole = sum(count for drawn, count in self.all.items() if drawn.size == drawn.population)
        rates = sorted({size / population for size, population in draws if size < population})
        return wording.sampling(config, known, models_only, rates, whole)


def _persons(
    course: _Course, options: PrivacyOptions, colluders: int, known: Claim, models_only: Claim
) -> tuple[Person, ...]:
    """For the unit; and for a patient of a site, whose data move its update from one to another, not to nothing."""
    found = []
    unit = Unit(options.unit)
    about: list[tuple[str, tuple[Claim, Claim]]] = [(wording.ONE[unit], (known, models_only))]
    if unit is Unit.SITE:
        about.insert(0, (wording.PATIENT_OF_A_SITE, course.claims(course.all, options.delta, Relation.REPLACE_ONE)))
    for who, claims in about:
        views = zip(wording.views(options, colluders), claims, strict=True)
        for whom, claim in list(views)[: 1 + (claims[1].epsilon < claims[0].epsilon)]:
            meaning = Meaning.of(claim.epsilon, claim.delta)
            found.append(Person(who, whom, meaning, wording.explained(meaning)))
    return tuple(found)


def _spread(count: int, most: int) -> list[int]:
    """Indices from first to last, evenly apart, not more than `most`."""
    if count <= most:
        return list(range(count))
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value
