"""A node's side of the conversation, without policy, processes or network.

Used by the guard (which adds policy, journal and workers), by the simulator and by the stock ClientApp.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from fedward_common.aggregation_options import NormBound
from fedward_common.algorithms.base import SumAlgorithm
from fedward_common.algorithms.registry import build
from fedward_common.config import RunConfig
from fedward_common.errors import UpdateError
from fedward_common.messages import Failure, Purpose, Reason, Reply, Request, Stamp
from fedward_common.norm_bound import SCALED, bounded
from fedward_common.update import Kind, Layout, Update, Vectors, check_metrics, check_update, check_vector
from fedward_common.work import PRIVATE, Done, Work


class Refused(Exception):
    """Raised below `Participant.handle` to answer with a failure."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


class StateStore(Protocol):
    """What a node keeps for one run between rounds. Writes are atomic; a pending state replaces an older
    one."""

    def committed(self) -> tuple[Stamp | None, Vectors]:
        """The last committed training and the kept vectors after it ({} before the first)."""

    def pending(self) -> tuple[Stamp, Vectors] | None:
        """The training whose inclusion is not known yet."""

    def save_pending(self, stamp: Stamp, vectors: Vectors) -> None:
        """Keep the state after a training until the server says whether it was in the sum."""

    def commit_pending(self) -> None:
        """The pending state becomes the committed one."""

    def drop_pending(self) -> None:
        """The pending state is forgotten."""


class MemoryStore:
    """A `StateStore` that lives as long as the process: for simulation and tests."""

    def __init__(self) -> None:
        self._committed: tuple[Stamp | None, Vectors] = (None, {})
        self._pending: tuple[Stamp, Vectors] | None = None

    def committed(self) -> tuple[Stamp | None, Vectors]:
        return self._committed

    def pending(self) -> tuple[Stamp, Vectors] | None:
        return self._pending

    def save_pending(self, stamp: Stamp, vectors: Vectors) -> None:
        self._pending = (stamp, vectors)

    def commit_pending(self) -> None:
        assert self._pending is not None
        self._committed, self._pending = self._pending, None

    def drop_pending(self) -> None:
        self._pending = None


def settle(store: StateStore, included: Stamp | None) -> None:
    """Commit or drop the pending state by what the server says was the node's last training in a sum.

    Safe to repeat, whatever was lost or crashed in between: the same `included` finds the work done.
    Raises `Refused(STATE_DIVERGED)` if the server names a training that this node knows nothing of: its
    control variates would no longer match the server's."""
    pending = store.pending()
    committed, _ = store.committed()
    if pending is not None and pending[0] == included:
        store.commit_pending()
    elif committed == included:
        if pending is not None:
            store.drop_pending()
    else:
        rule = f"server says last included was {included}, this node committed {committed}"
        raise Refused(Failure(Reason.STATE_DIVERGED, rule))


@dataclass(frozen=True)
class Prepared:
    """What a node knows of its task: the model's layout, the names of its metrics."""

    layout: Layout
    metric_names: tuple[str, ...]


class Participant:
    """One node in one run: settles state, has the work done, checks the update, answers."""

    def __init__(self, config: RunConfig, store: StateStore, execute: Callable[[Work], Done]) -> None:
        self.config = config
        self._store = store
        self._execute = execute
        self._algorithm: SumAlgorithm[Any] = build(config.algorithm)
        rule = config.aggregation
        self._bound = rule.bound if isinstance(rule, NormBound) else None
        self._prepared: Prepared | None = None
        self._held: Reply | None = None

    def handle(self, request: Request) -> Reply:
        """Answer one request. Never raises `Refused`; what `execute` raises otherwise goes through."""
        started = time.monotonic()
        handler = self._handlers().get(request.purpose)
        try:
            if handler is None:
                rule = f"a run {self._kind} has no {request.purpose.value!r}"
                raise Refused(Failure(Reason.BAD_REQUEST, rule))
            reply = handler(request)
        except Refused as refused:
            reply = self._refuse(request, refused.failure)
        seconds = round(time.monotonic() - started, 4)
        info = {**reply.info, "seconds": seconds}
        return replace(reply, run=request.run, round=request.round, attempt=request.attempt, info=info)

    _kind = "without secure aggregation"

    def protections(self, reply: Reply) -> tuple[str, ...]:
        """What was done to the vectors and metrics in `reply` before they leave, for the node's journal."""
        if reply.vectors and self._bound is not None:
            return ("update-gate", "clip-norm")
        return ("update-gate",) if reply.vectors or reply.metrics else ()

    def expire(self) -> None:
        """Forget what no request can ask for any more."""

    def _handlers(self) -> Mapping[Purpose, Callable[[Request], Reply]]:
        return {
            Purpose.PREPARE: self._prepare,
            Purpose.TRAIN: self._train,
            Purpose.EVALUATE: self._evaluate,
            Purpose.COLLECT: self._collect,
            Purpose.FINISH: self._finish,
        }

    def _refuse(self, request: Request, failure: Failure) -> Reply:
        return Reply(request.purpose, request.run, failure=failure)

    def _prepare(self, request: Request) -> Reply:
        self._prepared = None
        digest = self._known_layout().digest()
        wanted = request.settings.get("layout")
        if wanted is not None and wanted != digest:
            rule = f"model layout here {digest[:12]}, on the server {str(wanted)[:12]}"
            raise Refused(Failure(Reason.LAYOUT_DIFFERS, rule))
        return Reply(Purpose.PREPARE, request.run, info={"layout": digest})

    def _known(self) -> Prepared:
        if self._prepared is None:
            info = self._execute(Work("prepare")).info
            names = tuple(map(str, info.get("metric_names", ())))
            self._prepared = Prepared(Layout.from_json(str(info["layout"])), names)
        return self._prepared

    def _known_layout(self) -> Layout:
        return self._known().layout

    def _settle(self, included: Stamp | None) -> None:
        try:
            settle(self._store, included)
        except Refused:
            if self._algorithm.mirrored:
                raise
            # Nothing here has a counterpart on the server, so a node that lost its state goes on: private
            # tensors as last committed, or as in the new model.
            if self._store.pending() is not None:
                self._store.drop_pending()

    def _train(self, request: Request) -> Reply:
        self._held = None
        update, info = self._trained(request, request.vectors)
        reply = Reply(
            Purpose.TRAIN, request.run, request.round, request.attempt,
            update.groups, update.weight, update.metrics, info=info,
        )
        if request.settings.get("hold"):
            self._held = reply
            return replace(reply, vectors={}, held=True)
        return reply

    def _trained(self, request: Request, broadcast: Vectors) -> tuple[Update, dict[str, Any]]:
        """Train from `broadcast`: the update, through the gate and within the run's norm bound, and what is told of the
        training. The node's new state is on disk, pending."""
        layout = self._known_layout()
        self._settle(request.included)
        _, kept = self._store.committed()
        done = self._execute(Work("train", request.round, broadcast, kept, seconds=request.settings.get("seconds")))
        update = Update(done.vectors, done.weight, done.metrics)
        self._gate(layout, update, done.state)
        # Before the reply: should this process die after it, the state is here to be committed.
        self._store.save_pending(Stamp(request.round, request.attempt), done.state)
        if self.config.uniform:
            update = replace(update, weight=1.0)
        if self._bound is not None:
            update, over = bounded(update, self._bound)
            update = replace(update, metrics={**update.metrics, SCALED: float(over)})
        return update, dict(done.info)

    def _gate(self, layout: Layout, update: Update, state: Vectors) -> None:
        shapes = {group: layout.extent(extent) for group, extent in self._algorithm.sends(layout).items()}
        kept = dict(self._algorithm.keeps(layout))
        if layout.size(Kind.PRIVATE):
            kept[PRIVATE] = Kind.PRIVATE
        try:
            check_update(update, shapes, self.config.cohort.max_weight)
            if self._algorithm.uniform and update.weight != 1:
                raise UpdateError("the weight is not 1, though every node counts the same")
            if set(state) != set(kept):
                raise UpdateError(f"kept vectors are {sorted(state)}, expected {sorted(kept)}")
            for name, extent in kept.items():
                check_vector(f"kept vector {name!r}", state[name], *layout.extent(extent))
        except UpdateError as error:
            raise Refused(Failure(Reason.BAD_UPDATE, str(error))) from error

    def _collect(self, request: Request) -> Reply:
        held = self._held
        if held is None or (held.round, held.attempt) != (request.round, request.attempt):
            raise Refused(Failure(Reason.NOTHING_HELD))
        # Kept until the next training: the server may have to ask again.
        return replace(held, purpose=Purpose.COLLECT)

    def _evaluate(self, request: Request) -> Reply:
        return Reply(Purpose.EVALUATE, request.run, metrics=self._evaluated(request, request.vectors))

    def _evaluated(self, request: Request, model: Vectors) -> Mapping[str, float]:
        """Sums of `model`'s metrics over this node's test data."""
        split = str(request.settings.get("split", "test"))
        seconds = request.settings.get("seconds")
        kept = self._latest(request.included)
        done = self._execute(Work("evaluate", request.round, model, kept, split=split, seconds=seconds))
        try:
            check_metrics(done.metrics)
        except UpdateError as error:
            raise Refused(Failure(Reason.BAD_UPDATE, str(error))) from error
        return done.metrics

    def _latest(self, included: Stamp | None) -> Vectors:
        """The kept vectors to evaluate with. Reads only: an evaluation may not say what was included."""
        pending = self._store.pending()
        if pending is not None and pending[0] == included:
            return pending[1]
        return self._store.committed()[1]

    def _finish(self, request: Request) -> Reply:
        self._settle(request.included)
        self._held = None
        return Reply(Purpose.FINISH, request.run)
