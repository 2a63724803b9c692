"""What the journal says of a reply: the papers of its run, what protected it, and the policy's verdict."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from fedward_client.incidents import Incidents
from fedward_client.policy import Policy
from fedward_client.session import Admitted, Session, note, refuse
from fedward_common.config import parse_config
from fedward_common.manifest import Manifest
from fedward_common.messages import Failure, Purpose, Reason, Reply, Request
from fedward_common.node import Refused

RUN = {"name": "t", "task": "a:b", "rounds": 2, "algorithm": {"name": "fedavg"}, "local": {"lr": 0.1, "steps": 1}}
CONFIG = parse_config(RUN)
MANIFEST = Manifest.make("a" * 32, CONFIG, b"a bundle", None, "ada")


class Answers:
    """A participant with one answer."""

    def __init__(self, reply: Reply | None, protections: tuple[str, ...]) -> None:
        self._reply = reply
        self._protections = protections

    def protections(self, reply: Reply) -> tuple[str, ...]:
        return self._protections if reply.vectors else ()

    def handle(self, request: Request) -> Reply:
        if self._reply is None:
            raise Refused(Failure(Reason.NOTHING_HELD))
        return self._reply


def session(
    tmp_path: Path, reply: Reply | None = None, protections: tuple[str, ...] = ("update-gate",)
) -> Session:
    participant = Answers(reply, protections)
    admitted = Admitted(MANIFEST, CONFIG)
    return Session(admitted, participant, Policy(min_cohort=3), Incidents(tmp_path), lambda: None)  # type: ignore[arg-type]


def test_an_answer(tmp_path: Path) -> None:
    reply = Reply(Purpose.TRAIN, "a" * 32, 2, 1, {"delta": np.ones(3), "c": np.ones(3)}, 1.0, {"loss": 0.5})
    asked = session(tmp_path, reply)
    found = asked.note(asked.answer(Request(Purpose.TRAIN, "a" * 32, 2, 1, settings={"cohort": 3})))
    assert (found.run, found.round, found.attempt, found.purpose) == ("a" * 32, 2, 1, "train")
    assert (found.outcome, found.verdict, found.rule) == ("answered", "allowed", "")
    assert (found.tensors, found.metrics) == (("c", "delta"), ("loss",))
    assert found.protections == ("update-gate",)
    assert found.bundle == hashlib.sha256(b"a bundle").hexdigest()
    # As an auditor does it who has the signed manifest.
    config = json.loads(MANIFEST.model_dump_json())["config"]
    text = json.dumps(config, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert found.config == hashlib.sha256(text.encode()).hexdigest()


def test_other_protections(tmp_path: Path) -> None:
    reply = Reply(Purpose.TRAIN, "r", vectors={"masked": np.ones(3)})
    asked = session(tmp_path, reply, protections=("update-gate", "secure-sum"))
    assert asked.note(reply).protections == ("update-gate", "secure-sum")
    # Nothing derived from data, nothing to protect.
    assert asked.note(Reply(Purpose.PREPARE, "r")).protections == ()


def test_the_policy_refuses(tmp_path: Path) -> None:
    asked = session(tmp_path)
    found = asked.note(asked.answer(Request(Purpose.TRAIN, "r", 1, settings={"cohort": 2})))
    assert found.outcome == "policy" and found.bundle == MANIFEST.bundle
    assert found.verdict == found.rule == "min_cohort = 3, the request is for 2"
    assert found.protections == ()


def test_a_failure_of_what_was_allowed(tmp_path: Path) -> None:
    asked = session(tmp_path)
    found = asked.note(asked.answer(Request(Purpose.COLLECT, "r", 1)))
    assert (found.outcome, found.verdict) == ("nothing_held", "allowed")


@pytest.mark.parametrize(
    ("failure", "verdict"),
    [
        (Failure(Reason.BUNDLE_NOT_APPROVED, "fedward node bundle approve 3f"), "fedward node bundle approve 3f"),
        (Failure(Reason.MANIFEST_INVALID), "manifest_invalid"),
        (Failure(Reason.RESTARTED), "allowed"),
    ],
)
def test_a_run_that_is_not_admitted(failure: Failure, verdict: str) -> None:
    found = note(refuse(Request(Purpose.PREPARE, "r", 1), failure))
    assert (found.outcome, found.verdict, found.bundle, found.config) == (failure.reason.value, verdict, "", "")
