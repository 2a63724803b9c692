"""The guard: the node's trusted process. Holds the identity, the link, the policy, the journal and the state; task
code runs in workers. Receives while workers train, so that a short message of one run never waits for another's
training."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fedward_common.config import RunConfig
from fedward_common.errors import FedwardError
from fedward_common.members import Kind
from fedward_common.messages import Failure, Purpose, Reason, Request
from fedward_common.node import Participant, Refused
from fedward_common.privacy import anchor
from fedward_common.records import RecordError
from fedward_common.roster import Roster, RosterError, parse_roster
from fedward_common.secure import SecureParticipant, Standing
from fedward_common.signing import SignatureError, load_private
from fedward_common.steps import ROSTER
from fedward_common.work import Done, Work
from fedward_common.worker import sandbox
from fedward_common.worker.parent import Workers
from fedward_common.worker.setup import Setup

from fedward_client import old_runs
from fedward_client.accounts import BROKEN, NodeAccounts
from fedward_client.approval import Approvals
from fedward_client.incidents import Incidents
from fedward_client.inflight import Inflight
from fedward_client.journal import Journal, JournalError, Note
from fedward_client.link import Incoming, Link, LinkDown, LinkRefused, Outgoing, RunGone, RunInfo, Ticket
from fedward_client.membership import Membership, RosterPinned
from fedward_client.pace import WAIT, Backoff, Pace
from fedward_client.policy import Policy
from fedward_client.session import Session, admit, note, parse_envelope, refuse
from fedward_client.settings import NodeSettings
from fedward_client.state import FileStore
from fedward_client.status import StatusFile
from fedward_client.traffic import Traffic

log = logging.getLogger("fedward.node")

_FORGET = 3600.0
"""Seconds without a request after which a run's worker is ended: its server may be gone for good. The next request
opens the run again."""
_CLEAN_EVERY = 3600.0
"""Seconds between two looks for runs whose state has become old."""
_COUNT_EVERY = 60.0
"""Seconds after which what was sent is written down even if no message leaves: a guard that is killed loses the count
of no more than that."""
_SELF_STOP = 0.8
"""Share of a time limit after which training ends by itself."""


@dataclass(frozen=True)
class _Papers:
    """The papers of one run, from the link."""

    link: Link
    info: RunInfo

    def manifest(self) -> Mapping[str, Any]:
        return parse_envelope(self.info.settings)

    def bundle_sha256(self) -> str:
        return self.info.bundle_sha256

    def bundle(self) -> bytes:
        return self.link.bundle(self.info)


def _interrupt(link: Link, stop: threading.Event) -> None:
    """A guard that is told to stop does not wait for the server's next message."""
    stop.wait()
    link.interrupt()


class Guard:
    """Serves runs until told to stop. `member` says who this node is, `settings` what its admin configured."""

    def __init__(self, member: Membership, settings: NodeSettings, policy: Policy) -> None:
        self._member = member
        self._settings = settings
        self._policy = policy
        paths = member.paths
        self._approvals = Approvals(paths)
        self._traffic = Traffic()
        self._journal = Journal(paths.journal, paths.sent, member.node_id, self._traffic)
        self._incidents = Incidents(paths.log)
        self._inflight = Inflight(paths.root / "inflight")
        self._status = StatusFile(paths.status)
        self._workers = Workers()
        self._sessions: dict[str, Session] = {}
        self._quiet_since: dict[str, float] = {}
        self._lanes: dict[int, _Lane] = {}
        self._lock = threading.Lock()
        self._admission = threading.Lock()
        self._stop = threading.Event()
        self._cleaned = -math.inf
        self._opened: NodeAccounts | None = None

    def run(self, stop: threading.Event) -> None:
        """Serve until `stop` is set. Raises `LinkRefused` when the server will not have this node any more, and
        `JournalError` when the journal cannot be written."""
        self._stop = stop
        sandbox.hide_memory()
        if not sandbox.available():
            log.warning("this kernel has no Landlock: workers %s", self._without_landlock())
        self._journal.opened()
        counting = threading.Event()
        counter = threading.Thread(target=self._count_often, args=(counting,), name="journal", daemon=True)
        counter.start()
        backoff = Backoff()
        link = self._member.link(self._traffic)
        threading.Thread(target=_interrupt, args=(link, stop), name="stop", daemon=True).start()
        try:
            while not stop.is_set():
                try:
                    flower_id = link.connect()
                    backoff.reset()
                    self._status.write(state="connected", flower_id=str(flower_id))
                    log.info("connected to %s as %s", self._member.server, self._member.name)
                    self._tell_standing()
                    self._serve(link, stop)
                except LinkDown as down:
                    if stop.is_set():
                        break
                    wait = backoff.seconds()
                    self._status.write(state="disconnected", reason=str(down))
                    log.warning("server not reachable (%s); trying again in %.1f s", down, wait)
                    stop.wait(wait)
        except LinkRefused as refused:
            self._status.write(state="refused", reason=str(refused))
            raise
        finally:
            self._workers.close()
            link.close()
            counting.set()
            counter.join()
            self._write_down(self._journal.closed)
        self._status.write(state="stopped")

    def _tell_standing(self) -> None:
        if not self._member.listed():
            log.warning("this node is not in the roster yet: its enrolment authority has still to sign")
        for member in self._member.pending():
            log.warning("%s waits for approval: fedward node roster show", member)

    def _serve(self, link: Link, stop: threading.Event) -> None:
        try:
            self._answer_interrupted(link)
            self._receive(link, stop)
        finally:
            self._write_down(self._journal.control)

    def _count_often(self, done: threading.Event) -> None:
        while not done.wait(_COUNT_EVERY):
            self._write_down(self._journal.control)

    def _write_down(self, write: Callable[[], None]) -> None:
        try:
            write()
        except JournalError as error:
            log.error("%s", error)

    def _without_landlock(self) -> str:
        if self._policy.allow_unsandboxed_worker:
            return "run unsandboxed, as policy.toml allows"
        return "will be refused; allow_unsandboxed_worker in policy.toml changes that"

    def _receive(self, link: Link, stop: threading.Event) -> None:
        pace = Pace()
        while not stop.is_set():
            asked = time.monotonic()
            try:
                incoming = link.receive(WAIT)
            except (RunGone, RecordError) as void:
                log.warning("a message is void: %s", void)
                continue
            if incoming is None:
                self._forget_quiet_runs()
                self._forget_old_runs()
                stop.wait(pace.seconds(bool(self._sessions), time.monotonic() - asked))
                continue
            pace.busy()
            self._inflight.add(incoming.ticket)
            self._lane(link, incoming.ticket.flower_run).put(incoming)

    def _lane(self, link: Link, flower_run: int) -> _Lane:
        with self._lock:
            lane = self._lanes.get(flower_run)
            if lane is None or not lane.alive:
                lane = self._lanes[flower_run] = _Lane(
                    lambda incoming: self._handle(link, incoming), flower_run
                )
            return lane

    def _handle(self, link: Link, incoming: Incoming) -> None:
        request, ticket = incoming.request, incoming.ticket
        log.info("run %s round %d: %s", request.run[:8], request.round, request.purpose.value)
        self._quiet_since[request.run] = math.inf
        try:
            session = self._session(link, ticket.flower_run, request)
            reply = session.answer(request)
            line = session.note(reply)
        except Refused as refused:
            reply = refuse(request, refused.failure)
            line = note(reply)
        if reply.failure is not None:
            log.warning("run %s round %d: %s", request.run[:8], request.round, reply.failure)
        self._send(link, link.pack(reply, ticket), ticket, line)
        self._inflight.remove(ticket)
        if request.run in self._sessions:
            self._quiet_since[request.run] = time.monotonic()
        else:
            self._quiet_since.pop(request.run, None)

    def _forget_quiet_runs(self) -> None:
        for session in list(self._sessions.values()):
            session.expire()
        for run, since in list(self._quiet_since.items()):
            if time.monotonic() - since > _FORGET:
                log.info("run %s: nothing heard for an hour, its worker is ended", run[:8])
                self._quiet_since.pop(run)
                self._close(run)

    def _forget_old_runs(self) -> None:
        if time.monotonic() - self._cleaned < _CLEAN_EVERY:
            return
        self._cleaned = time.monotonic()
        days = self._settings.node.keep_runs_days
        try:
            # Not while a run is opened again.
            with self._admission:
                gone = old_runs.forget(self._member.paths.runs, set(self._sessions), days)
            for run in gone:
                log.info("run %s: its state here is deleted, unused for %g days (keep_runs_days)", run[:8], days)
        except OSError as error:
            log.error("the state of old runs cannot be deleted: %s", error)

    def _send(self, link: Link, outgoing: Outgoing, ticket: Ticket, line: Note) -> None:
        """Journal a reply, then send it; while the server cannot be reached, keep it until its request expires: it
        cost a training."""
        self._journal.message(line, outgoing.size, outgoing.sha256)
        backoff = Backoff()
        try:
            while True:
                try:
                    return link.send(outgoing)
                except LinkDown as down:
                    if time.time() > ticket.created_at + ticket.ttl or self._stop.wait(backoff.seconds()):
                        log.error("run %s round %d: reply could not be sent: %s", ticket.run[:8], ticket.round, down)
                        return
        except RunGone as gone:
            log.info("run %s is over, its reply is dropped: %s", ticket.run[:8], gone)
        finally:
            link.drop(outgoing)

    def _session(self, link: Link, flower_run: int, request: Request) -> Session:
        """The open session of the request's run; the first request of a run (or after a restart) opens it."""
        with self._admission:
            return self._admit(link, flower_run, request)

    def _admit(self, link: Link, flower_run: int, request: Request) -> Session:
        roster = self._roster(request)
        session = self._sessions.get(request.run)
        if session is not None and request.purpose is not Purpose.PREPARE:
            return session
        papers = _Papers(link, link.run_info(flower_run))
        self._check_signer(papers)
        admitted = admit(papers, roster, self._policy, self._approvals, self._member.name)
        if admitted.manifest.run != request.run:
            raise Refused(
                Failure(Reason.MANIFEST_INVALID, "the request names another run than the signed manifest")
            )
        if session is not None:
            return session
        run = request.run
        config = admitted.config
        run_dir = self._member.paths.run(run)
        setup = Setup(
            config=config.model_dump_json(),
            bundle=self._approvals.unpacked(admitted.manifest.bundle),
            node=self._member.name,
            scratch=run_dir / "scratch",
            log=self._member.paths.log / f"worker-{run[:12]}.log",
            data=self._settings.data,
            device=self._settings.node.device,
            threads=self._settings.node.threads,
            read=self._settings.readable(),
            private=self._member.paths.private(),
            sandboxed=sandbox.available() > 0 or not self._policy.allow_unsandboxed_worker,
            max_memory=self._policy.max_memory_bytes,
        )

        def execute(work: Work) -> Done:
            limit = self._policy.seconds_for(work.seconds)
            # Training stops by itself a little earlier: partial work is worth more than a killed worker.
            early = replace(work, seconds=_SELF_STOP * limit)
            return self._workers.do(run, setup, early, limit, wait=limit)

        session = Session(
            admitted,
            self._participant(run, config, FileStore(run_dir / "state"), execute),
            self._policy,
            self._incidents,
            on_finish=lambda: self._close(run),
        )
        self._sessions[run] = session
        self._status.write(state="connected", runs=sorted(self._sessions))
        return session

    def _participant(
        self, run: str, config: RunConfig, store: FileStore, execute: Callable[[Work], Done]
    ) -> Participant:
        if not config.secure_sum.enabled:
            return Participant(config, store, execute)
        identity = load_private(self._member.paths.identity_key)
        node, least = bytes.fromhex(self._member.node_id), self._policy.min_cohort
        standing = Standing(node, identity, self._member.newest, self._member.roster, least)
        accounts = self._accounts() if config.privacy is not None else None
        return SecureParticipant(run, config, store, execute, standing, accounts)

    def _accounts(self) -> NodeAccounts:
        """This node's accounts, opened by the first run that needs them. Raises `Refused`."""
        if self._opened is None:
            paths, options = self._member.paths, self._settings.node
            place = options.ledger_anchor or anchor.default_place(paths.ledger)
            try:
                self._opened = NodeAccounts(
                    paths.ledger, self._member.node_id, place, self._policy.epsilon_limits, options.dataset,
                    self._member.server,
                )  # fmt: skip
            except FedwardError as error:
                log.error("privacy ledger: %s", error)
                raise Refused(Failure(Reason.POLICY, BROKEN)) from error
        return self._opened

    def _close(self, run: str) -> None:
        self._sessions.pop(run, None)
        self._workers.release(run)
        self._status.write(state="connected", runs=sorted(self._sessions))

    def _roster(self, request: Request) -> Roster:
        """Who counts here, after the roster that a request may bring. Raises `Refused`."""
        try:
            if ROSTER in request.vectors:
                self._member.accept_roster(parse_roster(request.vectors[ROSTER].tobytes()))
            elif request.purpose is Purpose.PREPARE and "roster" in request.settings:
                self._member.accept_roster(request.settings["roster"])
            return self._member.roster()
        except RosterPinned as error:
            raise Refused(Failure(Reason.POLICY, str(error))) from error
        except (SignatureError, RosterError) as error:
            raise Refused(Failure(Reason.MANIFEST_INVALID, f"roster refused: {error}")) from error

    def _check_signer(self, papers: _Papers) -> None:
        """A data scientist who waits for approval is not unknown: the refusal says what is to be done."""
        signer = papers.manifest().get("key")
        for member in self._member.pending():
            if member.kind is Kind.SCIENTIST and member.key_id == signer:
                raise Refused(Failure(Reason.POLICY, self._member.why_not(member)))

    def _answer_interrupted(self, link: Link) -> None:
        """Tell the server about requests that a killed predecessor took and never answered, so that no round
        waits for them until its deadline."""
        for ticket in self._inflight.left_over():
            reply = refuse(ticket.request(), Failure(Reason.RESTARTED))
            self._send(link, link.pack(reply, ticket), ticket, note(reply))
            self._inflight.remove(ticket)


class _Lane:
    """One run's requests, in order, on a thread of their own."""

    def __init__(self, handle: Any, flower_run: int) -> None:
        self._queue: queue.SimpleQueue[Incoming] = queue.SimpleQueue()
        self._handle = handle
        self._thread = threading.Thread(target=self._work, name=f"run-{flower_run}", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def put(self, incoming: Incoming) -> None:
        self._queue.put(incoming)

    def _work(self) -> None:
        while True:
            incoming = self._queue.get()
            try:
                self._handle(incoming)
            except FedwardError as error:
                # The link is down: the ticket stays on disk and is answered after the next connect.
                log.error("a request got no answer yet: %s", error)
