"""Runs from submission to their end: checked, queued, started at Flower, followed, resumed, stopped.

The store says where a run stands; the run's directory holds what it was submitted with and what it did. Flower's run
is only the present attempt: when it is gone and the run has not said that it finished, the run is started again with
a higher epoch and goes on from its checkpoint.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from fedward_common.bundle import Bundle
from fedward_common.config import RunConfig
from fedward_common.errors import ConfigError, FedwardError
from fedward_common.files import owner_folder, sync_folder, write_atomic
from fedward_common.manifest import Manifest, ManifestError, open_manifest
from fedward_common.roster import Roster
from sqlalchemy.orm import Session

from fedward_server.events import Event, read_events
from fedward_server.fencing import end_owner, read_owner
from fedward_server.paths import RunPaths, ServerPaths
from fedward_server.privacy_report import write_if_private
from fedward_server.store import LIVE_RUNS, Run, RunStatus, Store, add_audit, get_run, list_runs

log = logging.getLogger(__name__)

TICK = 0.3
"""Seconds between two looks at the runs."""

FOLLOW_EVERY = 1.0
"""Seconds between two questions to Flower about a run; the run's own events are read at every tick."""

MAX_RESTARTS = 5
"""A run is given up after so many restarts in a row without a new round."""

STOP_GRACE = 60.0
"""Seconds beyond a round's deadline that a run has to obey a stop before it is ended by force."""

_SHOWN = 4000
"""Characters of a lost server process's output that go into the log."""

_ENDED = (RunStatus.FINISHED, RunStatus.EARLY_STOPPED, RunStatus.BUDGET_SPENT, RunStatus.STOPPED, RunStatus.FAILED)
_ACTIVE = (RunStatus.STARTING, RunStatus.RUNNING)


class RunError(FedwardError):
    """A request about a run cannot be granted."""


class Unknown(RunError):
    """There is no such run."""


class FlowerControl(Protocol):
    """What is needed of Flower's Control API. Every method raises a `FedwardError` if it does not answer."""

    def ping(self) -> None:
        """Returns if the SuperLink answers."""

    def start_run(self, fab: bytes, config: Mapping[str, str | int]) -> int:
        """Submit a bundle; Flower's run id."""

    def stop_run(self, flower_run: int) -> None:
        """Stop a run."""

    def run_log(self, flower_run: int) -> str:
        """What the server process of a finished run printed; "" if that is not known."""

    def run_state(self, flower_run: int) -> str | None:
        """"pending" | "starting" | "running" | "finished"; None if the SuperLink does not know the run."""


@dataclass(frozen=True)
class Attempt:
    """The present attempt at a run, kept in its directory.

    offset: where the attempt's events begin. round, at_epoch: the last finished round and the epoch at which it was
    first seen; the epochs since then are restarts without progress.
    """

    epoch: int = 0
    offset: int = 0
    round: int = 0
    at_epoch: int = 0

    @classmethod
    def read(cls, paths: RunPaths) -> Attempt:
        """The attempt on disk; a fresh one if there is none."""
        try:
            return cls(**json.loads(_attempt_file(paths).read_text(encoding="utf-8")))
        except FileNotFoundError:
            return cls()

    def write(self, paths: RunPaths) -> None:
        """Keep it."""
        write_atomic(_attempt_file(paths), json.dumps(asdict(self)).encode())


@dataclass(frozen=True)
class RunView:
    """A run as it is shown. position: its place in the queue (1: next), None unless queued."""

    id: str
    name: str
    scientist: str
    status: str
    reason: str
    epoch: int
    position: int | None
    rounds: int
    round: int
    algorithm: str
    created: float
    started: float | None
    ended: float | None


class _Tail:
    """Reads a run's events as they come."""

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.finished: Event | None = None

    def read(self, path: Path) -> None:
        for event, offset in read_events(path, self.offset):
            self.offset = offset
            if event["event"] == "run_finished":
                self.finished = event
            elif event["event"] == "ledger_mismatch":
                _warn(event, path.parent.name)


def _warn(event: Event, run: str) -> None:
    log.warning(
        "the privacy ledger of %s is at %s, but %s was told before: %s",
        event["node"], event["told"], event["expected"],
        "its admin accepted that" if event["settled"] else "it was rolled back or changed",
        extra={"run": run},
    )  # fmt: skip


class _LastRounds:
    """The last round that each run has announced as done; remembers how far each events file has been read."""

    def __init__(self) -> None:
        self._seen: dict[Path, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def of(self, paths: RunPaths) -> int:
        """0 before the first round."""
        return self._read(paths)[1]

    def end(self, paths: RunPaths) -> int:
        """The offset behind the last whole event (a torn line behind it is cut off by the next writer)."""
        return self._read(paths)[0]

    def _read(self, paths: RunPaths) -> tuple[int, int]:
        with self._lock:
            offset, done = self._seen.get(paths.events, (0, 0))
            for event, behind in read_events(paths.events, offset):
                offset = behind
                if event["event"] == "round":
                    done = int(event["round"])
            self._seen[paths.events] = (offset, done)
            return offset, done


class RunManager:
    """Owns the runs' states. `start` runs it in a thread; `tick` is one step of it.

    roster: the federation's present roster. prepare: called before a run is started at Flower (makes every enrolled
    node known to the SuperLink); raises `FedwardError` if that is not possible now.
    """

    def __init__(
        self,
        paths: ServerPaths,
        store: Store,
        control: FlowerControl,
        roster: Callable[[], Roster],
        prepare: Callable[[], object],
        max_runs: int,
        clock: Callable[[], float] = time.time,
        follow_every: float = FOLLOW_EVERY,
    ) -> None:
        self._paths = paths
        self._store = store
        self._control = control
        self._roster = roster
        self._prepare = prepare
        self._max_runs = max_runs
        self._clock = clock
        self._follow_every = follow_every
        self._tails: dict[tuple[str, int], _Tail] = {}
        self._due: dict[str, float] = {}
        self._unreported: list[str] = []
        self._rounds = _LastRounds()
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    # Requests

    def submit(
        self, envelope: Mapping[str, Any], bundle: bytes, initial: Path | None, digest: str | None, by: str
    ) -> RunView:
        """Check a run and put it into the queue; a repeated submission of the same manifest changes nothing.

        initial: a starting model on the same file system as the state directory; it is moved away. digest: its
        SHA-256. by: the data scientist who sends the request.
        Raises `SignatureError`, `ManifestError`, `BundleError`, `ConfigError` or `RunError`.
        """
        roster = self._roster()
        manifest = open_manifest(envelope, roster)
        if manifest.scientist != by:
            raise ManifestError(f"the manifest is by {manifest.scientist!r}, but {by!r} sent it.")
        config = manifest.run_config()
        manifest.check_bundle(bundle)
        if digest != manifest.initial:
            raise ManifestError("the starting model is not the one that the manifest names.")
        Bundle.open(bundle).check()
        check_nodes(config, roster)
        with self._lock:
            with self._store.transaction() as session:
                known = session.get(Run, manifest.run)
            if known is not None:
                return self._repeated(manifest, envelope)
            self._write_files(self._paths.run(manifest.run), envelope, bundle, initial)
            with self._store.transaction() as session:
                session.add(self._row(manifest, config))
                session.flush()
                add_audit(session, f"scientist:{by}", "run.submitted", run=manifest.run, name=config.name)
        log.info("run %s submitted by %s", config.name, by, extra={"run": manifest.run})
        self._wake.set()
        return self.view(manifest.run)

    def _repeated(self, manifest: Manifest, envelope: Mapping[str, Any]) -> RunView:
        stored = json.loads(self._paths.run(manifest.run).manifest.read_text(encoding="utf-8"))
        if stored["manifest"] != envelope["manifest"]:
            raise RunError(f"run {manifest.run}: that id is taken by another run. Start it again: it gets a new id.")
        return self.view(manifest.run)

    def _row(self, manifest: Manifest, config: RunConfig) -> Run:
        return Run(
            id=manifest.run, name=config.name, status=RunStatus.QUEUED, config=config.model_dump(mode="json"),
            bundle=manifest.bundle, scientist=manifest.scientist, epoch=0, created=self._clock(), reason="",
        )  # fmt: skip

    def _write_files(
        self, paths: RunPaths, envelope: Mapping[str, Any], bundle: bytes, initial: Path | None
    ) -> None:
        """All files of a new run, or none: they are gathered aside and moved in at once."""
        owner_folder(self._paths.runs)
        aside = RunPaths(self._paths.runs / f".new-{paths.root.name}")
        for stale in (aside.root, paths.root):
            # Left by a crash between here and the store: the store does not know the run.
            if stale.exists():
                shutil.rmtree(stale)
        owner_folder(aside.root)
        write_atomic(aside.manifest, json.dumps(dict(envelope)).encode())
        write_atomic(aside.bundle, bundle)
        if initial is not None:
            os.replace(initial, aside.initial)
            sync_folder(aside.root)
        os.rename(aside.root, paths.root)
        sync_folder(self._paths.runs)

    def stop(self, run_id: str, by: str) -> RunView:
        """End a run: at once if it waits in the queue, else after the round in flight. Raises `RunError`."""
        with self._lock, self._store.transaction() as session:
            run = _known(session, run_id)
            if run.status in _ENDED:
                raise RunError(f"run {run.name}: it is {run.status} already.")
            paths = self._paths.run(run_id)
            if run.status == RunStatus.QUEUED:
                self._end(run, RunStatus.STOPPED, f"stopped by {by} in the queue")
            elif not paths.stop.exists():
                write_atomic(paths.stop, f"{by}\n".encode())
            add_audit(session, f"scientist:{by}", "run.stop", run=run_id)
        return self.view(run_id)

    def resume(self, run_id: str, by: str) -> RunView:
        """Queue a stopped or failed run again; it goes on from its last finished round. Raises `RunError`."""
        with self._lock, self._store.transaction() as session:
            run = _known(session, run_id)
            if run.status not in (RunStatus.STOPPED, RunStatus.FAILED):
                raise RunError(f"run {run.name}: it is {run.status}; only a stopped or failed run can be resumed.")
            paths = self._paths.run(run_id)
            # A ServerApp that has said "finished" may still be on its way out.
            end_owner(paths)
            paths.stop.unlink(missing_ok=True)
            # Restarts count anew: the next attempt will be the first after this epoch.
            replace(Attempt.read(paths), at_epoch=run.epoch + 1).write(paths)
            run.status, run.reason, run.ended = RunStatus.QUEUED, "", None
            add_audit(session, f"scientist:{by}", "run.resume", run=run_id)
        self._wake.set()
        return self.view(run_id)

    def view(self, run_id: str) -> RunView:
        """One run. Raises `Unknown`."""
        with self._store.transaction() as session:
            run = _known(session, run_id)
            queue = [one.id for one in list_runs(session, (RunStatus.QUEUED,))]
        return self._view(run, queue)

    def views(self) -> list[RunView]:
        """All runs in order of submission."""
        with self._store.transaction() as session:
            runs = list(list_runs(session))
        queue = [run.id for run in runs if run.status == RunStatus.QUEUED]
        return [self._view(run, queue) for run in runs]

    def config(self, run_id: str) -> dict[str, Any]:
        """A run's configuration as JSON. Raises `Unknown`."""
        with self._store.transaction() as session:
            return dict(_known(session, run_id).config)

    def _view(self, run: Run, queue: list[str]) -> RunView:
        return RunView(
            id=run.id, name=run.name, scientist=run.scientist, status=str(run.status), reason=run.reason,
            epoch=run.epoch, position=queue.index(run.id) + 1 if run.id in queue else None,
            rounds=int(run.config["rounds"]), round=self._rounds.of(self._paths.run(run.id)),
            algorithm=str(run.config["algorithm"]["name"]), created=run.created, started=run.started, ended=run.ended,
        )  # fmt: skip

    # The loop

    def start(self) -> None:
        """Begin to work in a thread."""
        self._thread = threading.Thread(target=self._work, name="runs", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop working; runs at Flower go on and are followed again by the next manager."""
        self._ending.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _work(self) -> None:
        while not self._ending.is_set():
            try:
                self.tick()
            except Exception:
                log.exception("the run manager could not work; trying again")
                self._ending.wait(5)
            self._wake.wait(TICK)
            self._wake.clear()

    def tick(self) -> None:
        """Follow every active run, start queued ones while there is room, and report what has ended."""
        with self._lock:
            for run_id in self._ids(_ACTIVE):
                self._guarded(run_id, self._follow)
            free = self._max_runs - len(self._ids(_ACTIVE))
            for run_id in self._ids((RunStatus.QUEUED,))[: max(0, free)]:
                self._guarded(run_id, self._launch)
        # Without the lock: an accountant may take seconds.
        while self._unreported:
            write_if_private(self._paths.run(self._unreported.pop()))

    def _ids(self, statuses: tuple[RunStatus, ...]) -> list[str]:
        with self._store.transaction() as session:
            return [run.id for run in list_runs(session, statuses)]

    def _guarded(self, run_id: str, step: Callable[[str], None]) -> None:
        if self._due.get(run_id, 0.0) > self._clock():
            return
        try:
            step(run_id)
        except FedwardError as error:
            # Mostly a SuperLink that is being restarted.
            log.warning("%s; trying again", error, extra={"run": run_id})
            self._due[run_id] = self._clock() + 2.0
        except Exception:
            log.exception("cannot follow the run; trying again", extra={"run": run_id})
            self._due[run_id] = self._clock() + 10.0

    def _launch(self, run_id: str) -> None:
        """Start the next attempt at a run. Raises `FedwardError` if the SuperLink does not answer."""
        self._control.ping()
        self._prepare()
        paths = self._paths.run(run_id)
        end_owner(paths)
        with self._store.transaction() as session:
            run = get_run(session, run_id)
            # Counted before Flower is asked: if this process dies in between, the attempt that nobody remembers is
            # fenced off by the next one.
            run.epoch += 1
            run.status, run.flower_run_id, run.ended = RunStatus.STARTING, None, None
            run.started = run.started or self._clock()
            epoch = run.epoch
        self._next_attempt(paths, epoch)
        envelope = paths.manifest.read_text(encoding="utf-8")
        try:
            flower_run = self._control.start_run(
                paths.bundle.read_bytes(), {"fedward-manifest": envelope, "fedward-epoch": epoch}
            )
        except FedwardError as error:
            with self._store.transaction() as session:
                get_run(session, run_id).reason = f"could not be started: {error}"
            raise
        with self._store.transaction() as session:
            run = get_run(session, run_id)
            run.flower_run_id, run.reason = str(flower_run), ""
        self._due.pop(run_id, None)
        log.info("run started at Flower, epoch %d", epoch, extra={"run": run_id})

    def _next_attempt(self, paths: RunPaths, epoch: int) -> None:
        before = Attempt.read(paths)
        done = self._rounds.of(paths)
        progress = before.at_epoch == 0 or done > before.round
        Attempt(epoch, self._rounds.end(paths), done, epoch if progress else before.at_epoch).write(paths)

    def _follow(self, run_id: str) -> None:
        with self._store.transaction() as session:
            run = get_run(session, run_id)
        paths = self._paths.run(run_id)
        tail = self._tail(run, paths)
        tail.read(paths.events)
        if tail.finished is None:
            # Asked before the events are read again: what a run says before it ends is then always seen.
            alive = self._alive(run, paths)
            tail.read(paths.events)
            if tail.finished is None:
                if alive:
                    self._attend(run, paths)
                else:
                    self._revive(run, paths)
                return
        self._finish(run_id, str(tail.finished["status"]), str(tail.finished.get("reason") or ""))

    def _tail(self, run: Run, paths: RunPaths) -> _Tail:
        key = (run.id, run.epoch)
        if key not in self._tails:
            attempt = Attempt.read(paths)
            if attempt.epoch != run.epoch:
                # The process died before the attempt was written: nothing has been said in it.
                return _Tail(self._rounds.end(paths))
            self._tails[key] = _Tail(attempt.offset)
        return self._tails[key]

    def _alive(self, run: Run, paths: RunPaths) -> bool:
        """Whether the present attempt is still at work; notes when it begins to be."""
        if run.flower_run_id is None:
            return False
        state = self._control.run_state(int(run.flower_run_id))
        if state == "running" and run.status != RunStatus.RUNNING:
            run.status = RunStatus.RUNNING
            with self._store.transaction() as session:
                get_run(session, run.id).status = RunStatus.RUNNING
        if state not in ("pending", "starting", "running"):
            return False
        owner = read_owner(paths)
        if owner is not None and owner.epoch == run.epoch and owner.process() is None:
            # Flower waits for missed heartbeats before it notices.
            self._control.stop_run(int(run.flower_run_id))
            return False
        return True

    def _attend(self, run: Run, paths: RunPaths) -> None:
        if self._overdue(run, paths):
            self._control.stop_run(int(run.flower_run_id or 0))
            end_owner(paths)
            self._finish(run.id, RunStatus.STOPPED, "stopped by force: the round in flight did not end in time")
        elif run.status == RunStatus.RUNNING:
            self._due[run.id] = self._clock() + self._follow_every

    def _revive(self, run: Run, paths: RunPaths) -> None:
        """Start a run again whose attempt is gone, unless it was to stop or has been started in vain too often."""
        end_owner(paths)
        printed = self._control.run_log(int(run.flower_run_id)).strip() if run.flower_run_id else ""
        if printed:
            log.warning("the run's server process printed last:\n%s", printed[-_SHOWN:], extra={"run": run.id})
        if paths.stop.exists():
            self._finish(run.id, RunStatus.STOPPED, "stopped; its server process had ended before")
            return
        attempt = Attempt.read(paths)
        stuck = attempt.at_epoch > 0 and self._rounds.of(paths) <= attempt.round
        if stuck and run.epoch - attempt.at_epoch >= MAX_RESTARTS:
            reason = f"it was started {MAX_RESTARTS + 1} times in a row without a new round"
            reason += f" ({run.reason})" if run.reason else ": its server process ended each time"
            self._finish(
                run.id, RunStatus.FAILED, f"{reason}. The server's log says why; 'fedward run resume' tries again."
            )
            return
        log.warning("the run's server process is gone; resuming from its last round", extra={"run": run.id})
        self._launch(run.id)

    def _overdue(self, run: Run, paths: RunPaths) -> bool:
        try:
            asked = paths.stop.stat().st_mtime
        except FileNotFoundError:
            return False
        return self._clock() > asked + float(run.config["cohort"]["deadline"]) + STOP_GRACE

    def _finish(self, run_id: str, status: str, reason: str) -> None:
        with self._store.transaction() as session:
            run = get_run(session, run_id)
            self._end(run, RunStatus(status), reason)
            add_audit(session, "service", "run.ended", run=run_id, status=status)
        self._tails = {key: tail for key, tail in self._tails.items() if key[0] != run_id}
        self._due.pop(run_id, None)
        self._unreported.append(run_id)
        log.info("run ended: %s %s", status, reason, extra={"run": run_id})

    def _end(self, run: Run, status: RunStatus, reason: str) -> None:
        run.status, run.reason, run.ended = status, reason, self._clock()


def check_nodes(config: RunConfig, roster: Roster) -> None:
    """Raises `ConfigError` if the configuration names nodes or tags that the federation does not have."""
    known = sorted(node.name for node in roster.nodes)
    listed = ", ".join(known) or "none"
    for field, names in (("cohort.nodes", config.cohort.nodes), ("evaluation.holdout", config.evaluation.holdout)):
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ConfigError(f"{field}: no node named {', '.join(unknown)} is enrolled. Enrolled: {listed}.")
    wanted = set(config.cohort.tags)
    chosen = [node for node in roster.nodes if not config.cohort.nodes or node.name in config.cohort.nodes]
    if wanted and not any(wanted <= set(node.tags) for node in chosen):
        tags = ", ".join(sorted({tag for node in roster.nodes for tag in node.tags})) or "none"
        raise ConfigError(
            f"cohort.tags = {sorted(wanted)}: no node that the run may use carries all of them. Tags in use: {tags}."
        )


def _known(session: Session, run_id: str) -> Run:
    run = session.get(Run, run_id)
    if run is None:
        raise Unknown(f"run {run_id!r}: there is no such run. 'fedward run list' shows all.")
    return run


def _attempt_file(paths: RunPaths) -> Path:
    return paths.root / "attempt.json"


LIVE = frozenset(LIVE_RUNS)
"""Statuses of runs that may still say something."""
