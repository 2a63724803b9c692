"""The round engine: from a configuration and a transport to a trained model, one checkpoint a round.

Where the run stands is one frozen `Checkpoint`: a round makes the next one from it, writes it, and only then tells
of it. A process that dies at any moment is followed by one with a higher epoch that goes on from the newest
checkpoint; the round in flight is tried again under a new `Stamp`, so that no node takes the lost attempt for the
one that counted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fedward_common.algorithms.base import MODEL, STATISTIC, Cohort, ServerState, SumAlgorithm
from fedward_common.config import RunConfig
from fedward_common.errors import FedwardError
from fedward_common.messages import Failure, Purpose, Request, Stamp
from fedward_common.secagg.graph import MIN_COHORT
from fedward_common.update import Layout, Vectors, all_finite

from fedward_server import evaluation
from fedward_server.aggregation import averages
from fedward_server.checkpoint import Checkpoint, CheckpointError, Checkpoints, Standing
from fedward_server.collecting import BudgetSpent, Collector, Gathered, RoundFailed
from fedward_server.evaluation import Central, Evaluation, Means
from fedward_server.events import EventLog, read_events
from fedward_server.fencing import Fenced
from fedward_server.paths import RunPaths
from fedward_server.preparation import GRACE, Preparation, StopRequested
from fedward_server.selection import Members, Secret, Seeded, Selection, draw
from fedward_server.transport import Clock, Transport

_ATTEMPTS = 2**20  # more than there can be attempts at one round in one epoch
_FAREWELL = 10.0  # seconds for the nodes to answer FINISH; one that does not hear it loses nothing


@dataclass(frozen=True)
class Outcome:
    """How a run ended. status: finished | early_stopped | budget_spent | stopped | failed (reason says
    why)."""

    status: str
    reason: str
    state: ServerState
    best_round: int | None


@dataclass
class Rounds:
    """One run. run id: the name of `paths.root`.

    initial: vectors "model", "statistic" and "counter" (if any) of the initial model. epoch: higher than that of any
    process that ran these rounds before. prepare_settings: gives JSON values that go with each PREPARE (the roster, as
    it is then).
    """

    config: RunConfig
    algorithm: SumAlgorithm[Any]
    layout: Layout
    initial: Vectors
    transport: Transport
    collector: Collector
    paths: RunPaths
    epoch: int
    log: EventLog
    central: Central | None = None
    should_stop: Callable[[], bool] = lambda: False
    prepare_settings: Callable[[], Mapping[str, Any]] = dict
    clock: Clock = field(default_factory=Clock)
    grace: float = GRACE

    def __post_init__(self) -> None:
        self._run = self.paths.root.name
        self._checkpoints = Checkpoints(self.paths, self.config.rounds, self.epoch)
        # Models of a run with [privacy] say less to those who cannot tell from a public seed who took part.
        self._lot = Seeded(self.config.seed) if self.config.privacy is None else Secret.kept(self.paths.lot)
        layout = {"layout": self.layout.digest()}
        self._preparation = Preparation(
            self.transport,
            Members.of(self.config),
            lambda: Request(Purpose.PREPARE, self._run, settings={**self.prepare_settings(), **layout}),
            self.clock,
            self.log,
            self._stopped,
            self.collector.hear,
        )

    def run(self) -> Outcome:
        """Run until the last round, an early stop, a stop or a failure; goes on from a checkpoint if there is one.

        Raises `Fenced` when a newer process has taken the run over; whatever the transport raises goes through.
        """
        started = self.clock.now()
        try:
            now = self._resumed()
        except CheckpointError as error:
            return self._tell_end(None, "failed", str(error), started)
        status, reason = "finished", ""
        try:
            now = self._begin(now)
            while now.round < self.config.rounds:
                if evaluation.has_stalled(now.standing, self.config.evaluation):
                    status = "early_stopped"
                    reason = f"{now.standing.metric} has not improved in {now.standing.stale} evaluations"
                    break
                if self._stopped():
                    raise StopRequested
                now = self._next_round(now)
            if now.round:
                now = self._evaluate_last(now)
        except StopRequested:
            status, reason = "stopped", f"asked to stop after round {now.round if now else 0}"
        except BudgetSpent as spent:
            status, reason = "budget_spent", str(spent)
        except Fenced:
            raise
        except FedwardError as error:
            status, reason = "failed", str(error)
        self._farewell(now, status)
        return self._tell_end(now, status, reason, started)

    def _stopped(self) -> bool:
        return self.paths.stop.exists() or self.should_stop()

    def _resumed(self) -> Checkpoint | None:
        found = self._checkpoints.newest()
        if found is None:
            return None
        if found.layout != self.layout:
            raise CheckpointError(
                f"run {self._run}: its checkpoint holds a model of another layout than the task's. "
                "Start a new run, or bring the task's model back."
            )
        self._tell_again(found)
        return found

    def _tell_again(self, checkpoint: Checkpoint) -> None:
        """Announce the last round if the process died between its checkpoint and its event."""
        if checkpoint.event is None:
            return
        told = [e["round"] for e, _ in read_events(self.paths.events) if e["event"] == "round"]
        if checkpoint.round not in told:
            self.log.append("round", **checkpoint.event)

    def _begin(self, resumed: Checkpoint | None) -> Checkpoint:
        """Wait for nodes; fix who is enrolled (N) in a checkpoint of round 0."""
        if resumed is None:
            # min_nodes is asked for once: later a round closes by its quorum, though a node is gone for good.
            self._wait(max(self.config.cohort.min_nodes, self._quorum), self._preparation.members.expected)
            now = self._round_zero()
        else:
            now = resumed
            self._keep_to(now.enrolled)
            if now.round < self.config.rounds:
                self._wait(self._quorum, now.present)
        self.log.append(
            "run_started",
            run=self._run,
            name=self.config.name,
            algorithm=self.config.algorithm.name,
            rounds=self.config.rounds,
            nodes=list(now.enrolled),
            resumed_from=None if resumed is None else resumed.round,
            epoch=self.epoch,
        )
        return now

    def _round_zero(self) -> Checkpoint:
        # N stays as it is here. Control variates are means over all N nodes, so N must not move under them: named
        # nodes count even if they are not there yet; a node that nobody named and that comes later stays outside.
        enrolled = tuple(sorted(self.config.cohort.nodes or self._preparation.trainable()))
        state = self.algorithm.initial(self.layout, self.initial)
        first = Checkpoint(self._run, self.epoch, self.layout, state, enrolled, self._present())
        self._checkpoints.write(first)
        self._keep_to(enrolled)
        return first

    def _keep_to(self, enrolled: tuple[str, ...]) -> None:
        self._preparation.members = replace(self._preparation.members, named=enrolled)

    def _present(self) -> tuple[str, ...]:
        return tuple(sorted(self._preparation.ready))

    @property
    def _quorum(self) -> int:
        """Nodes without which no round can close, whatever its cohort."""
        least = MIN_COHORT if self.config.secure_sum.enabled else 1
        return max(self.config.cohort.quorum or 1, self.config.aggregation.least, least)

    def _wait(self, needed: int, expected: tuple[str, ...]) -> None:
        self._preparation.wait(needed, expected, self.config.cohort.wait, self.grace)

    def _next_round(self, now: Checkpoint) -> Checkpoint:
        """Try the next round until it succeeds. Raises `RoundFailed` after `max_failed_rounds` failures in a row."""
        for tried in range(self.config.cohort.max_failed_rounds):
            if tried:
                self.clock.sleep(min(2.0**tried, 30.0))
                if self._stopped():
                    raise StopRequested
            began = self.clock.now()
            try:
                following = self._attempt(now, Stamp(now.round + 1, self.epoch * _ATTEMPTS + tried))
            except RoundFailed as error:
                last = error
                self.log.append(
                    "round_failed",
                    round=now.round + 1,
                    reason=str(error),
                    failures=_texts(error.failures),
                    seconds=round(self.clock.now() - began, 3),
                )
                continue
            self._checkpoints.write(following)
            self.log.append("round", **(following.event or {}))
            return following
        raise RoundFailed(
            f"{self.config.cohort.max_failed_rounds} attempts at round {now.round + 1} in a row failed; "
            f"the last: {last}",
            last.failures,
        )

    def _attempt(self, now: Checkpoint, stamp: Stamp) -> Checkpoint:
        """One attempt at a round, evaluation included: the next checkpoint, not yet written. Raises `RoundFailed`."""
        began, moved = self.clock.now(), self.transport.bytes_moved()
        selection = self._select(now, stamp.round)
        gathered = self._train(now, selection, stamp)
        state = self._step(now, selection, gathered, stamp.round)
        included = {**now.included, **dict.fromkeys(gathered.replies, stamp)}
        judged = self._evaluate(state, stamp, included)
        standing = self._judged(now, gathered.of_broadcast, stamp.round, judged.main)
        down, up = (after - before for after, before in zip(self.transport.bytes_moved(), moved, strict=True))
        event = {
            "round": stamp.round,
            "of": self.config.rounds,
            "cohort": list(selection.cohort),
            "available": selection.available,
            "replies": sorted(gathered.replies),
            "failures": _texts({**selection.passed_over, **gathered.failures}),
            "weight": gathered.mean.weight,
            "train": averages(gathered.mean.metrics),
            "evaluate": judged.nodes,
            "holdout": judged.holdout,
            "central": judged.central,
            "bytes_down": down,
            "bytes_up": up,
            "seconds": round(self.clock.now() - began, 3),
            **gathered.told,
        }
        if gathered.of_broadcast is not None:
            event["round_before"] = {"round": now.round, "evaluate": gathered.of_broadcast}
        if judged.failures:
            event["evaluate_failures"] = _texts(judged.failures)
        index = {name: i for i, name in enumerate(now.enrolled)}
        return replace(
            now,
            epoch=self.epoch,
            state=state,
            present=self._present(),
            included=included,
            cohorts=(*now.cohorts, tuple(index[name] for name in selection.cohort)),
            standing=standing,
            event=event,
            scales=gathered.scales,
        )

    def _judged(self, now: Checkpoint, of_broadcast: Means, round_: int, of_new: Means) -> Standing:
        """The standing with what is known of the model that was broadcast, or else of the new one."""
        options = self.config.evaluation
        if of_broadcast is not None:
            return evaluation.judge(now.standing, options, now.round, of_broadcast)
        if self.config.secure_sum.enabled and options.every > 0:
            return now.standing  # the next round brings the nodes' figures
        return evaluation.judge(now.standing, options, round_, of_new)

    def _select(self, now: Checkpoint, round_: int) -> Selection:
        self._preparation.look()
        if len(self._preparation.trainable()) < self._quorum:
            self._wait(self._quorum, now.present)
        unavailable = self._preparation.unavailable(now.enrolled)
        selection = draw(now.enrolled, unavailable, self.config.cohort.size, self._lot, round_)
        if not selection.cohort:
            raise RoundFailed("no node of the run can be asked", selection.passed_over)
        return selection

    def _train(self, now: Checkpoint, selection: Selection, stamp: Stamp) -> Gathered:
        """The cohort's mean update."""
        broadcast = self.algorithm.broadcast(now.state)
        requests = {
            name: Request(Purpose.TRAIN, self._run, stamp.round, stamp.attempt, broadcast, now.included.get(name))
            for name in selection.cohort
        }
        quorum = self.config.quorum_of(len(selection.cohort))
        preparation = self._preparation
        try:
            return self.collector.train(now, requests, preparation.requests(), preparation.note, quorum)
        except RoundFailed as error:
            raise RoundFailed(str(error), {**selection.passed_over, **error.failures}) from error

    def _step(self, now: Checkpoint, selection: Selection, gathered: Gathered, round_: int) -> ServerState:
        counts = Cohort(round_, len(now.enrolled), len(selection.cohort), len(gathered.replies))
        state = self.algorithm.server(now.state, gathered.mean, counts)
        broken = [name for name, vector in state.vectors.items() if not all_finite(vector)]
        if broken:
            raise RoundFailed(f"the server's step made values in {broken} that are not finite", gathered.failures)
        return state

    def _evaluate(self, state: ServerState, stamp: Stamp, included: Mapping[str, Stamp]) -> Evaluation:
        options = self.config.evaluation
        done = Evaluation()
        if evaluation.due(options, stamp.round, self.config.rounds):
            nodes, holdout = self._preparation.trainable(), self._preparation.held_out()
            requests = self._evaluations(state, stamp, {*nodes, *holdout}, included)
            done = self.collector.evaluate(requests, holdout, self.config.cohort.deadline)
        if self.central is not None and options.central and stamp.round % max(1, options.every) == 0:
            done = replace(done, central=averages(self.central(_model(state))))
        return done

    def _evaluations(
        self, state: ServerState, stamp: Stamp, names: Collection[str], included: Mapping[str, Stamp]
    ) -> dict[str, Request]:
        """included: what a node keeps for itself (a head, a model of its own) is judged as of then."""
        settings, vectors = {"seconds": self.config.cohort.deadline}, _model(state)
        return {
            name: Request(
                Purpose.EVALUATE, self._run, stamp.round, stamp.attempt, vectors, included.get(name), settings
            )
            for name in sorted(names)
        }

    def _evaluate_last(self, now: Checkpoint) -> Checkpoint:
        """The nodes' figures for a last model that no round starts from."""
        options, last = self.config.evaluation, now.event or {}
        if not evaluation.due(options, now.round, self.config.rounds) or last.get("evaluate"):
            return now
        self._preparation.look()
        stamp = Stamp(now.round, self.epoch * _ATTEMPTS + _ATTEMPTS - 1)
        requests = self._evaluations(now.state, stamp, self._preparation.trainable(), now.included)
        means = self.collector.evaluate_last(requests, self.config.cohort.deadline)
        if means is None:
            return now
        standing = evaluation.judge(now.standing, options, now.round, means)
        done = replace(now, standing=standing, event={**last, "evaluate": means}, epoch=self.epoch)
        self._checkpoints.write(done)
        self.log.append("evaluation", round=now.round, evaluate=means)
        return done

    def _farewell(self, now: Checkpoint | None, status: str) -> None:
        """Tell every node that the run is over, and what of its work was in a sum."""
        self._preparation.look()
        round_ = 0 if now is None else now.round
        included = {} if now is None else now.included
        requests = {
            name: Request(
                Purpose.FINISH,
                self._run,
                round_,
                self.epoch * _ATTEMPTS,
                included=included.get(name),
                settings={"status": status},
            )
            for name in sorted(self._preparation.online())
        }
        for _ in self.transport.exchange(requests, _FAREWELL):
            pass

    def _tell_end(self, now: Checkpoint | None, status: str, reason: str, started: float) -> Outcome:
        best = None if now is None else now.standing.best_round
        self.log.append(
            "run_finished",
            status=status,
            reason=reason,
            round=0 if now is None else now.round,
            best_round=best,
            seconds=round(self.clock.now() - started, 3),
        )
        return Outcome(status, reason, ServerState(self.initial) if now is None else now.state, best)


def _model(state: ServerState) -> Vectors:
    return {name: state.vectors[name] for name in (MODEL, STATISTIC) if name in state.vectors}


def _texts(failures: Mapping[str, Failure]) -> dict[str, str]:
    return {name: str(failures[name]) for name in sorted(failures)}
