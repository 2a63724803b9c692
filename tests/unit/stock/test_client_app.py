"""Fedward's ClientApp without a guard: what it answers under a stock SuperNode."""

from __future__ import annotations

import numpy as np
import pytest
from fedward_client.app import _answer
from fedward_common.messages import Purpose, Reason, Request
from fedward_common.records import message_to_reply, request_to_message
from flwr.app import Context, RecordDict
from flwr.supercore.task_identity import TaskIdentity

CONFIG = {
    "name": "r", "task": "tests.nowhere:Task", "rounds": 1, "algorithm": {"name": "fedavg"},
    "local": {"lr": 0.1, "steps": 1},
}  # fmt: skip
PRIVACY = {"unit": "site", "mechanism": "central", "clip": 1.0, "noise_multiplier": 1.0}


@pytest.mark.parametrize("more", [{}, {"privacy": PRIVACY, "evaluation": {"every": 0}}])
def test_a_secure_run_gets_no_plain_update(monkeypatch: pytest.MonkeyPatch, more: dict[str, object]) -> None:
    for name, value in (("_run_id", 7), ("_node_id", 5), ("_task_id", 1)):
        monkeypatch.setattr(TaskIdentity, name, value)
    # Before any code of the task is looked for.
    monkeypatch.setattr("fedward_client.app._runner", lambda *arguments: pytest.fail("task code"))
    vectors = {"model": np.zeros(3, np.float32)}
    request = Request(Purpose.TRAIN, "run", 1, 0, vectors, settings={"config": {**CONFIG, **more}})
    context = Context(run_id=7, node_id=5, node_config={}, state=RecordDict(), run_config={})
    reply = message_to_reply(_answer(request_to_message(request, 5, 60.0), context))
    assert reply.failure is not None and reply.failure.reason is Reason.SECURE_SUM
    assert not reply.vectors and not reply.metrics
