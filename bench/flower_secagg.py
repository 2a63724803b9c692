"""One round of Flower's own SecAgg+ in this process: its workflow, its mod, its messages, over a grid that hands them
over. CPU of the server and of each client is counted apart; copying messages from one to the other counts for nobody.
"""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.compat.common import recorddict_compat as compat
from flwr.server import LegacyContext, SimpleClientManager
from flwr.server.compat.grid_client_proxy import GridClientProxy
from flwr.server.strategy import FedAvg
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
from flwr.server.workflow.constant import Key as WorkflowKey
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.task_identity import TaskIdentity

from bench.cpu import Cpu


class Round:
    """A round of `n` clients that each hold `length` float32 parameters and a weight of 1.

    shares: into how many each secret is split (neighbours and oneself). threshold: shares that give a secret.
    silent: clients, of 0 to n - 1, that say nothing more once they have dealt their shares; if they are too many the
    round ends there.
    """

    def __init__(
        self, n: int, length: int, shares: int, threshold: int, silent: Collection[int] = frozenset()
    ) -> None:
        self._length = length
        self._silent = silent
        self._contexts = [Context(1, node, {}, RecordDict(), {}) for node in range(n)]
        self._client: defaultdict[int, Cpu] = defaultdict(Cpu)
        self._outside = Cpu()
        self._up: defaultdict[int, int] = defaultdict(int)
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, n  # of whoever makes a message
        manager = SimpleClientManager()
        for node in range(n):
            manager.register(GridClientProxy(node, self, 1))  # type: ignore[arg-type]
        strategy = _OneMean(fraction_fit=1.0, min_fit_clients=n, min_available_clients=n)
        state = RecordDict()
        state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({WorkflowKey.CURRENT_ROUND: 1})
        state.array_records[MAIN_PARAMS_RECORD] = ArrayRecord({"": Array(np.zeros(length, np.float32))})
        context = LegacyContext(Context(1, 0, {}, state, {}), None, strategy, manager)
        logging.getLogger("flwr").setLevel(logging.CRITICAL)
        server = Cpu()
        with server:
            SecAggPlusWorkflow(shares, threshold, max_weight=1.0)(self, context)  # type: ignore[arg-type]
        heard = [node for node in range(n) if node not in silent]
        self.server = server.seconds - self._outside.seconds
        self.clients = [self._client[node].seconds for node in heard]
        """CPU seconds of each client that was not silent."""
        self.bytes_up = [self._up[node] for node in heard]
        self.error: float | None = None
        """Largest difference between Flower's mean and the true one; None if the round ended without one."""
        if strategy.mean is not None:
            true = np.mean([self._vector(node) for node in heard], axis=0)
            self.error = float(np.abs(strategy.mean - true).max())

    def send_and_receive(self, messages: Iterable[Message], timeout: float | None = None) -> list[Message]:
        """See Flower's `Grid`."""
        with self._outside:
            return [self._answer(copy.deepcopy(message)) for message in messages]

    def _answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        stage = message.content.config_records[RECORD_KEY_CONFIGS][Key.STAGE]
        if node in self._silent and stage not in (Stage.SETUP, Stage.SHARE_KEYS):
            return Message(Error(0, "silent"), reply_to=message)
        result = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([self._vector(node)]), 1, {})
        trained = Message(compat.fitres_to_recorddict(result, keep_input=True), reply_to=message)
        with self._client[node]:
            reply = secaggplus_mod(message, self._contexts[node], lambda message, context: trained)
        self._up[node] += wire_bytes(reply)
        return copy.deepcopy(reply)

    def _vector(self, node: int) -> Any:
        return np.random.default_rng(node).uniform(-1, 1, self._length).astype(np.float32)


class _OneMean(FedAvg):
    """Flower gives every client's result the same mean; averaging them once more is no part of the protocol."""

    mean: Any = None

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        self.mean = parameters_to_ndarrays(results[0][1].parameters)[0]
        return results[0][1].parameters, {}


def wire_bytes(message: Message) -> int:
    """Bytes of a message's objects as they are uploaded."""
    return sum(len(item.deflate()) for item in get_all_nested_objects(message).values())
