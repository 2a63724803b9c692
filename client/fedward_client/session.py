"""One run on this node: who started it, whether the policy allows it, and the answers to its requests."""

from __future__ import annotations

import hashlib
import json
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from fedward_common.bundle import BundleError
from fedward_common.config import RunConfig
from fedward_common.errors import ConfigError, FedwardError
from fedward_common.manifest import Manifest, open_manifest
from fedward_common.messages import Failure, Purpose, Reason, Reply, Request
from fedward_common.node import Participant, Refused
from fedward_common.roster import Roster
from fedward_common.signing import canonical
from fedward_common.worker.parent import WorkerFailed

from fedward_client.approval import Approvals
from fedward_client.incidents import Incidents
from fedward_client.journal import ALLOWED, Note
from fedward_client.policy import Policy, check_request, check_run

_BY_RULE = {
    Reason.POLICY,
    Reason.MANIFEST_INVALID,
    Reason.BUNDLE_BROKEN,
    Reason.BUNDLE_NOT_APPROVED,
    Reason.DEPENDENCIES_MISSING,
}
"""Reasons that are this site's refusals; all others are failures of what it allowed."""


class Source(Protocol):
    """Where a run's papers come from (the link)."""

    def manifest(self) -> Mapping[str, Any]:
        """The manifest's envelope."""

    def bundle_sha256(self) -> str:
        """Hash of the bundle that the server would hand out."""

    def bundle(self) -> bytes:
        """The bundle."""


@dataclass(frozen=True)
class Admitted:
    """A run that this node takes part in."""

    manifest: Manifest
    config: RunConfig

    @property
    def config_sha256(self) -> str:
        """SHA-256 of the configuration as it was signed, in canonical JSON."""
        return hashlib.sha256(canonical(self.manifest.config).encode()).hexdigest()


def admit(source: Source, roster: Roster, policy: Policy, approvals: Approvals, name: str) -> Admitted:
    """Check a run's papers: manifest signed by a data scientist of the roster, bundle as signed, approved on this
    node and complete, configuration within the policy. Raises `Refused`."""
    try:
        manifest = open_manifest(source.manifest(), roster)
        config = manifest.run_config()
    except FedwardError as error:
        raise Refused(Failure(Reason.MANIFEST_INVALID, str(error))) from error
    if manifest.bundle != source.bundle_sha256():
        raise Refused(
            Failure(Reason.MANIFEST_INVALID, "the server hands out another bundle than the one signed")
        )
    if config.cohort.nodes and name not in (*config.cohort.nodes, *config.evaluation.holdout):
        raise Refused(Failure(Reason.MANIFEST_INVALID, f"the signed run does not name this node ({name})"))
    refusals = check_run(policy, config)
    if refusals:
        raise Refused(refusals[0])
    try:
        if not approvals.known(manifest.bundle):
            approvals.receive(source.bundle())
        missing = approvals.missing_dependencies(manifest.bundle)
    except (BundleError, ConfigError) as error:
        raise Refused(Failure(Reason.BUNDLE_BROKEN, str(error))) from error
    if missing:
        raise Refused(Failure(Reason.DEPENDENCIES_MISSING, ", ".join(missing)))
    if policy.approved_bundles_only and not approvals.approved(manifest.bundle):
        rule = f"fedward node bundle approve {manifest.bundle[:12]}"
        raise Refused(Failure(Reason.BUNDLE_NOT_APPROVED, rule))
    return Admitted(manifest, config)


class Session:
    """Answers the requests of one admitted run. `participant` does the work; here every way to fail gets its code."""

    def __init__(
        self,
        admitted: Admitted,
        participant: Participant,
        policy: Policy,
        incidents: Incidents,
        on_finish: Callable[[], None],
    ) -> None:
        self.admitted = admitted
        self._participant = participant
        self._policy = policy
        self._incidents = incidents
        self._on_finish = on_finish

    def answer(self, request: Request) -> Reply:
        """The reply to `request`."""
        reply = self._reply(request)
        if request.purpose is Purpose.FINISH:
            self._on_finish()
        return reply

    def expire(self) -> None:
        """Forget secrets that no request can ask for any more."""
        self._participant.expire()

    def note(self, reply: Reply) -> Note:
        """What the journal is to say of a reply of this run."""
        return note(reply, self.admitted, self._participant.protections(reply))

    def _reply(self, request: Request) -> Reply:
        try:
            refusal = check_request(self._policy, request)
            if refusal is not None:
                raise Refused(refusal)
            return self._participant.handle(request)
        except Refused as refused:
            failure = refused.failure
        except WorkerFailed as failed:
            incident = self._incidents.write(f"run {request.run} round {request.round}\n{failed.detail}")
            failure = Failure(failed.reason, incident=incident)
        except Exception:  # noqa: BLE001 - the node must answer and stay up; the details stay in its own log
            incident = self._incidents.write(
                f"run {request.run} round {request.round}\n{traceback.format_exc()}"
            )
            failure = Failure(Reason.INTERNAL, incident=incident)
        return refuse(request, failure)


def refuse(request: Request, failure: Failure) -> Reply:
    """The reply that says why not."""
    return Reply(request.purpose, request.run, request.round, request.attempt, failure=failure)


def note(reply: Reply, admitted: Admitted | None = None, protections: tuple[str, ...] = ()) -> Note:
    """What the journal is to say of a reply; `admitted`: the run's papers, if it was admitted."""
    failure = reply.failure
    rule = failure.rule if failure else ""
    return Note(
        run=reply.run,
        round=reply.round,
        attempt=reply.attempt,
        purpose=reply.purpose.value,
        outcome=failure.reason.value if failure else "answered",
        rule=rule,
        incident=failure.incident if failure else "",
        tensors=tuple(sorted(reply.vectors)),
        metrics=tuple(sorted(reply.metrics)),
        bundle=admitted.manifest.bundle if admitted else "",
        config=admitted.config_sha256 if admitted else "",
        protections=protections,
        verdict=rule or failure.reason.value if failure and failure.reason in _BY_RULE else ALLOWED,
    )


def parse_envelope(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The manifest's envelope from a Flower run's settings. Raises `Refused`."""
    text = settings.get("fedward-manifest")
    try:
        envelope = json.loads(str(text)) if text else None
    except ValueError:
        envelope = None
    if not isinstance(envelope, dict):
        raise Refused(Failure(Reason.MANIFEST_INVALID, "the run carries no signed manifest"))
    return envelope
