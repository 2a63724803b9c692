"""What server and nodes say to each other, free of any transport.

A `Request` goes to one node and gets one `Reply`. `records.py` carries both over Flower's messages; the
in-memory transport hands them over as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from fedward_common.update import Vectors

WAIT_HEADER = "fedward-wait"
"""Header of a node's call for messages: seconds for which it is ready to wait for one."""


LEDGER_HEAD = "ledger_head"
"""In runs with [privacy]. In the info of a reply: the head of the node's privacy ledger. In the settings of a request:
the newest one that the server was told."""


class Purpose(StrEnum):
    """Why the server asks."""

    PREPARE = "prepare"
    """Check the run against the policy, load task and data; nothing derived from data is returned."""
    TRAIN = "train"
    EVALUATE = "evaluate"
    ADVERTISE = "advertise"
    """Secure aggregation: send a fresh key advertisement. TRAIN and EVALUATE then answer with dealt shares."""
    MASK = "mask"
    """Secure aggregation: here are the shares dealt to you; send your masked vector."""
    AGREE = "agree"
    """Secure aggregation: sign the set of survivors."""
    UNMASK = "unmask"
    """Secure aggregation: the set is signed by a quorum; reveal the shares that take the masks off."""
    COLLECT = "collect"
    """Send the training reply that was announced and held back (uploads are admitted in waves)."""
    FINISH = "finish"
    """The run is over: commit what was in the last sum, free the worker."""


class Reason(StrEnum):
    """Why a node did not contribute. A fixed list: never free text from task code."""

    BUNDLE_NOT_APPROVED = "bundle_not_approved"
    BUNDLE_BROKEN = "bundle_broken"
    DEPENDENCIES_MISSING = "dependencies_missing"
    MANIFEST_INVALID = "manifest_invalid"
    POLICY = "policy"
    LAYOUT_DIFFERS = "layout_differs"
    NO_DATA = "no_data"
    TASK_ERROR = "task_error"
    WORKER_CRASHED = "worker_crashed"
    OUT_OF_MEMORY = "out_of_memory"
    TIME_LIMIT = "time_limit"
    BAD_UPDATE = "bad_update"
    STATE_DIVERGED = "state_diverged"
    SECURE_SUM = "secure_sum"
    """A step of secure aggregation that breaks a rule of this node's, or did not come in time."""
    NOTHING_HELD = "nothing_held"
    BAD_REQUEST = "bad_request"
    INTERNAL = "internal"
    RESTARTED = "restarted"
    """The node was restarted while it worked on the request."""
    # Seen by the server only:
    NO_REPLY = "no_reply"
    UPLOAD_LOST = "upload_lost"
    OFFLINE = "offline"
    REVOKED = "revoked"


@dataclass(frozen=True)
class Failure:
    """A refusal or an error. `rule` is built from policy fields, names and numbers; `incident` is the id under
    which the node's own log holds the details."""

    reason: Reason
    rule: str = ""
    incident: str = ""

    def __str__(self) -> str:
        text = self.reason.value
        if self.rule:
            text += f" ({self.rule})"
        if self.incident:
            text += f" [incident {self.incident}]"
        return text


@dataclass(frozen=True)
class Stamp:
    """Names one training of one node: the round and the attempt at it (a round is tried again after a crash)."""

    round: int
    attempt: int


@dataclass(frozen=True)
class Request:
    """One question to one node.

    run: Fedward's run id. vectors: what is broadcast. included: the last training of **this node** that was in a
    sum (None: none yet); the node commits its pending state if it matches, and drops it if not.
    settings: JSON values (deadline_seconds, hold, split, layout digest …).
    """

    purpose: Purpose
    run: str
    round: int = 0
    attempt: int = 0
    vectors: Vectors = field(default_factory=dict)
    included: Stamp | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """The answer: either `failure`, or vectors with weight and metric sums.

    held: the node keeps `vectors` back until a COLLECT. info: JSON values that are not derived from data
    (layout digest, seconds, steps, bytes).
    """

    purpose: Purpose
    run: str
    round: int = 0
    attempt: int = 0
    vectors: Vectors = field(default_factory=dict)
    weight: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    held: bool = False
    failure: Failure | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
