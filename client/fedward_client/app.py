"""The node's half as a plain Flower ClientApp: for stock `flower-supernode` and Flower's simulation runtime.

A bundle's `clientapp` is `fedward_client.app:app`. Under Fedward's own guard this module is not used: the guard
answers the same requests with the same `Participant`, and adds policy, journal, sandbox and approval. Here the
process is Flower's, so the site trusts the bundle as it would trust any Flower app.

Node configuration (`--node-config`): `partition-id` and `num-partitions` become `partition` and `partitions` of
the task's data configuration, as in Flower's examples; `fedward-name` is the name under which the node is enrolled
(its random numbers hang on it; Flower's node id if it is missing); every other key is passed on as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from fedward_common.config import RunConfig, parse_config
from fedward_common.errors import FedwardError
from fedward_common.local import LocalRunner
from fedward_common.messages import Failure, Reason, Reply, Request, Stamp
from fedward_common.node import Participant
from fedward_common.records import array_record, message_to_request, reply_to_message
from fedward_common.task import load_task
from fedward_common.update import Vectors
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

_NAME = "fedward-name"
_RENAMED = {"partition-id": "partition", "num-partitions": "partitions"}


class ContextStore:
    """A `StateStore` in Flower's context, which the SuperNode keeps for the run."""

    def __init__(self, state: RecordDict, run: str) -> None:
        self._state = state
        self._run = run

    def committed(self) -> tuple[Stamp | None, Vectors]:
        return self._read("committed") or (None, {})

    def pending(self) -> tuple[Stamp, Vectors] | None:
        return self._read("pending")

    def save_pending(self, stamp: Stamp, vectors: Vectors) -> None:
        stamped: dict[str, int | str] = {"round": stamp.round, "attempt": stamp.attempt}
        self._state[self._key("pending", "stamp")] = ConfigRecord(stamped)  # type: ignore[arg-type]
        self._state[self._key("pending", "vectors")] = array_record(vectors)

    def commit_pending(self) -> None:
        for part in ("stamp", "vectors"):
            self._state[self._key("committed", part)] = self._state.pop(self._key("pending", part))

    def drop_pending(self) -> None:
        for part in ("stamp", "vectors"):
            del self._state[self._key("pending", part)]

    def _key(self, which: str, part: str) -> str:
        return f"fedward.{self._run}.{which}.{part}"

    def _read(self, which: str) -> tuple[Stamp, Vectors] | None:
        stamp = self._state.get(self._key(which, "stamp"))
        vectors = self._state.get(self._key(which, "vectors"))
        if not isinstance(stamp, ConfigRecord) or not isinstance(vectors, ArrayRecord):
            return None
        arrays = {name: array.numpy() for name, array in vectors.items()}
        return Stamp(int(str(stamp["round"])), int(str(stamp["attempt"]))), arrays


def _configuration(request: Request, context: Context) -> str:
    """The run's configuration as JSON text: from the signed manifest, else from the server's request."""
    envelope = str(context.run_config.get("fedward-manifest", ""))
    if envelope:
        return json.dumps(json.loads(json.loads(envelope)["manifest"])["config"])
    if "config" in request.settings:
        return json.dumps(request.settings["config"])
    raise FedwardError("neither the run nor the request carries a Fedward configuration")


@lru_cache(maxsize=8)
def _runner(config_json: str, node: str, data_json: str) -> LocalRunner:
    # One model and one data set a node and run, however many messages this process sees.
    config: RunConfig = parse_config(json.loads(config_json))
    return LocalRunner(config, load_task(config.task), node, json.loads(data_json))


def _data_config(node_config: Mapping[str, Any]) -> dict[str, Any]:
    return {_RENAMED.get(key, key): value for key, value in node_config.items() if key != _NAME}


def _answer(message: Message, context: Context) -> Message:
    request = message_to_request(message)
    config_json = _configuration(request, context)
    config = parse_config(json.loads(config_json))
    if config.secure_sum.enabled:
        # Whoever asks for a secure run and for plain updates in it gets none.
        failure = Failure(Reason.SECURE_SUM, "a stock SuperNode has no enrolled identity to take part with")
        return reply_to_message(Reply(request.purpose, request.run, failure=failure), message)
    node = str(context.node_config.get(_NAME, f"node-{context.node_id}"))
    runner = _runner(config_json, node, json.dumps(_data_config(context.node_config)))
    participant = Participant(config, ContextStore(context.state, request.run), runner.do)
    return reply_to_message(participant.handle(request), message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Answer a training request."""
    return _answer(message, context)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Answer an evaluation request."""
    return _answer(message, context)


@app.query("prepare")
def prepare(message: Message, context: Context) -> Message:
    """Check model and data before the first round."""
    return _answer(message, context)


@app.query("finish")
def finish(message: Message, context: Context) -> Message:
    """Commit what was in the last sum."""
    return _answer(message, context)
