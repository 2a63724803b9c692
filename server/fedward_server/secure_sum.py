"""Secure sums under a stock Flower strategy; the nodes' half is the mod `fedward_client.secure_mod.secure_sum_mod`:

    SecureSum(FedAdam(min_train_nodes=3, min_available_nodes=3)).start(grid=grid, initial_arrays=arrays, num_rounds=10)

The strategy chooses cohorts and says what is sent, as ever. It then gets one reply, the weighted mean over the cohort,
and the server never sees a node's own.

**Against an honest but curious server only.** Stock SuperNodes have no enrolled identity: the keys that the server
hands from node to node are unsigned, and one that lies could hand out its own. `fedward run start` does not have that
gap. At least three nodes are needed in a sum.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
from fedward_common import ranges, stock
from fedward_common.errors import ConfigError, FedwardError
from fedward_common.messages import Failure, Purpose, Reason, Request
from fedward_common.ranges import HEADROOM, Scales
from fedward_common.records import HEAD, request_record
from fedward_common.secagg.graph import NoProtection, Parameters
from fedward_common.secagg.keys import Advertisement, AdvertisementError
from fedward_common.steps import blob
from fedward_common.stock import CONTENT, FORM, KEPT, WEIGHED_BY, Form, FormError, node_name
from fedward_common.summand import CLIPPED, Shape
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedward_server import probe, secure
from fedward_server.grid import FlowerTransport, NumberedDirectory
from fedward_server.patience import Patience
from fedward_server.secure import SumFailed, Summed
from fedward_server.transport import Clock

log = logging.getLogger("flwr")  # a Flower app's log, where its operator looks

_WEEK = 7 * 24 * 3600.0
_LONGEST = 600.0
"""Seconds that a stage without training may take: stock SuperNodes ask for messages every three seconds, and start a
process with the whole app for each."""


class SecureSum(Strategy):
    """`strategy`, which gets its cohorts' weighted means and nothing else.

    It is probed before the first round (`probe.check`): what needs single replies is refused, and so is what is not
    one of `probe.KNOWN`, unless accept_unknown. metrics: names that its metric aggregation functions look for.
    dropout, corrupt: shares of a cohort that may be lost, and side with the server; the nodes' mod must say the same.
    bits: of a coordinate on the wire.
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        dropout: float = 0.2,
        corrupt: float = 0.2,
        bits: int = 20,
        accept_unknown: bool = False,
        metrics: tuple[str, ...] = (),
    ) -> None:
        self._strategy = strategy
        self._rules = _Unenrolled(dropout, corrupt)
        self._bits = bits
        self._accept_unknown = accept_unknown
        self._metrics = metrics

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """The strategy's own `start`, over a grid whose replies are sums.

        A round whose sum fails is one without replies to the strategy; the log says why. Raises `ConfigError` if the
        strategy must not be wrapped, `FedwardError` if not one sum came about.
        """
        probe.check(self._strategy, self._accept_unknown, self._metrics)
        log.warning(
            "SecureSum: nodes have no enrolled identities here, keys are unsigned: this hides replies from an honest "
            "but curious server, not from one that lies."
        )
        weight = str(getattr(self._strategy, "weighted_by_key", stock.WEIGHT_KEY))
        sums = _Sums(_Stock(grid), self._rules, self._bits, weight)
        result = self._strategy.start(
            _SecureGrid(grid, sums), initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn
        )
        if sums.failed and not sums.done:
            raise FedwardError(f"not one secure sum came about: {sums.failed}")
        return result

    def summary(self) -> None:
        """The strategy's."""
        self._strategy.summary()

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> NoReturn:
        """Not used, as are the other three: a secure sum takes more messages than one a node."""
        raise FedwardError("a secure sum takes more than one exchange: call SecureSum's start().")

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> NoReturn:
        """Not used."""
        raise FedwardError("a secure sum takes more than one exchange: call SecureSum's start().")

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> NoReturn:
        """Not used."""
        raise FedwardError("a secure sum takes more than one exchange: call SecureSum's start().")

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> NoReturn:
        """Not used."""
        raise FedwardError("a secure sum takes more than one exchange: call SecureSum's start().")


class _SecureGrid(Grid):
    """A grid on which a cohort answers with one reply, its weighted mean, and an error for each node that is not in
    it."""

    def __init__(self, grid: Grid, sums: _Sums) -> None:
        self._grid = grid
        self._sums = sums

    def set_run(self, run: Any) -> None:
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        return self._grid.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        return self._grid.get_node_ids()

    def get_nodes(self) -> Iterable[Any]:
        return self._grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> NoReturn:
        raise FedwardError("a strategy under SecureSum sends no messages of its own.")

    def pull_messages(self, message_ids: Iterable[str]) -> NoReturn:
        raise FedwardError("a strategy under SecureSum sends no messages of its own.")

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        asked = list(messages)
        return self._sums.replies(asked, _WEEK if timeout is None else timeout) if asked else []


@dataclass(frozen=True)
class _Unenrolled:
    """The rules where nobody has an identity: a node is who Flower says that it is."""

    dropout: float
    corrupt: float
    config = ""
    roster = ""
    identities = None
    envelope = b""

    def parameters(self, n: int) -> Parameters:
        return stock.parameters(n, self.dropout, self.corrupt)

    def check(self, name: str, advertisement: Advertisement) -> None:
        if name != node_name(int.from_bytes(advertisement.node)):
            raise AdvertisementError(f"it is not that of {name}.")


class _Stock(FlowerTransport):
    """Requests in messages of the type, and with the records, that the strategy gave: a stock ClientApp answers the
    types only that it has functions for."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid, NumberedDirectory())
        self._type = ""
        self._records = RecordDict()

    def carry(self, messages: list[Message]) -> list[str]:
        """What requests look like from now on, by the strategy's messages; the names of their nodes."""
        self._type, self._records = messages[0].metadata.message_type, messages[0].content
        ids = {node_name(message.metadata.dst_node_id): message.metadata.dst_node_id for message in messages}
        self._flower_ids.update(ids)
        return list(ids)

    def _messages(self, requests: Mapping[str, Request], ttl: float) -> list[Message]:
        # New records around the same arrays: messages are emptied once they are sent.
        carried = {name: record.copy() for name, record in self._records.items()}
        return [
            Message(
                RecordDict({HEAD: request_record(request), **(carried if _works(request) else {})}),
                self._flower_ids[name], self._type, ttl=ttl, group_id=str(request.round),
            )
            for name, request in requests.items()
        ]  # fmt: skip


def _works(request: Request) -> bool:
    """Whether the app has something to do for it."""
    works = request.purpose in (Purpose.PREPARE, Purpose.TRAIN, Purpose.EVALUATE)
    return works and not request.settings.get(KEPT)


@dataclass(frozen=True)
class _Known:
    """What is known of the replies to messages of one type: their form, the ranges of the next sum."""

    form: Form
    scales: Scales


class _Sums:
    """The secure sums of one start, each in place of a cohort's replies. done: how many came about. failed: why the
    last of the others did not."""

    def __init__(self, transport: _Stock, rules: _Unenrolled, bits: int, weight: str) -> None:
        self._transport = transport
        self._rules = rules
        self._bits = bits
        self._weight = weight
        self._run = secrets.token_hex(16)
        self._patience = Patience(Clock())
        self._secure = secure.SecureSum(transport, self._run, rules, self._patience, _LONGEST)
        self._known: dict[str, _Known] = {}
        self._count = 0
        self.done = 0
        self.failed = ""

    def replies(self, messages: list[Message], seconds: float) -> list[Message]:
        """One reply that stands for all, and the errors of those that are not in it."""
        _check(messages)
        kind = messages[0].metadata.message_type
        names = self._transport.carry(messages)
        self._count += 1
        failures: dict[str, Failure] = {}
        try:
            reply = [self._mean(messages[0], kind, names, seconds, failures)]
            self.done += 1
        except SumFailed as error:
            self.failed = str(error)
            failures = {**dict.fromkeys(names, Failure(Reason.SECURE_SUM, self.failed)), **failures, **error.failures}
            log.warning("SecureSum: no sum of %d %s replies: %s", len(names), kind, error)
            reply = []
            self._known.pop(kind, None)  # a reply of another form may be the cause: ask again
        for name, failure in sorted(failures.items()):
            log.warning("SecureSum: %s is not in the sum: %s", name, failure)
        at = dict(zip(names, messages, strict=True))
        return reply + [
            Message(Error(ErrorCode.UNKNOWN, str(failure)), reply_to=at[name])
            for name, failure in sorted(failures.items())
        ]

    def _mean(
        self, message: Message, kind: str, names: list[str], seconds: float, failures: dict[str, Failure]
    ) -> Message:
        purpose = Purpose(kind.partition(".")[0])
        settings = {WEIGHED_BY: self._weight, KEPT: kind not in self._known}
        digest = blob(bytes.fromhex(message.content.object_id))
        ask = Request(purpose, self._run, self._count, 1, {CONTENT: digest}, settings=settings)
        if kind not in self._known:
            form, names = self._form(ask, names, seconds, failures)
            scales = self._first_scales(form, ask, names, seconds)
            self._known[kind] = _Known(form, scales)
            ask = replace(ask, attempt=2)
        form, scales = self._known[kind].form, self._known[kind].scales

        def shape(n: int) -> Shape:
            return Shape(scales.shape_groups(form.lengths), form.scalars, self._bits, n, scales.weight)

        done = self._secure.sum(dict.fromkeys(names, ask), shape, seconds, self._least(names))
        failures |= done.failures
        if form.lengths:
            self._known[kind] = _Known(form, ranges.following(scales, done.mean, len(done.survivors)))
        clipped = sum(int(count) for name, count in done.mean.metrics.items() if name.startswith(CLIPPED))
        log.info(
            "SecureSum: %s, %d of %d nodes, %d coordinates clipped",
            kind, len(done.survivors), done.told["cohort"], clipped,
        )  # fmt: skip
        return _reply(message, form, done)

    def _least(self, names: list[str]) -> int:
        """Fewest of a cohort that must stay. Raises `SumFailed` if it is too small for any protection."""
        try:
            return self._rules.parameters(len(names)).survivors
        except NoProtection as error:
            raise SumFailed(str(error), {}) from error

    def _form(
        self, ask: Request, names: list[str], seconds: float, failures: dict[str, Failure]
    ) -> tuple[Form, list[str]]:
        """The form of the nodes' replies, and the nodes that keep one of that form back. Raises `SumFailed`."""
        settings = {WEIGHED_BY: self._weight, "seconds": seconds}
        ask = replace(ask, purpose=Purpose.PREPARE, attempt=0, vectors={}, settings=settings)
        forms: dict[str, Form] = {}
        stage = self._patience.stage("form", self._least(names), 10.0)
        for name, reply in self._transport.exchange(dict.fromkeys(names, ask), seconds, stage.over):
            self._secure.hear(name, reply)
            stage.answered()
            if reply.failure is not None:
                failures[name] = reply.failure
                continue
            try:
                forms[name] = Form.from_json(str(reply.info.get(FORM)))
            except FormError as error:
                failures[name] = Failure(Reason.BAD_UPDATE, str(error))
        if not forms:
            raise SumFailed("no node told the form of its reply", failures)
        [(form, _)] = Counter(forms.values()).most_common(1)
        for name in names:
            if name in forms and forms[name] != form:
                failures[name] = Failure(Reason.LAYOUT_DIFFERS, "its reply has other arrays or metrics than most")
            elif name not in forms:
                failures.setdefault(name, Failure(Reason.NO_REPLY))
        return form, [name for name in names if forms.get(name) == form]

    def _first_scales(self, form: Form, ask: Request, names: list[str], seconds: float) -> Scales:
        if not form.lengths:
            return ranges.first({})

        def shape(n: int) -> Shape:
            return Shape((), form.peaks, self._bits, n)

        done = self._secure.sum(dict.fromkeys(names, ask), shape, seconds, self._least(names))
        count = len(done.survivors)
        # The bound is a sum over nodes: with very many of them it is wider than what their mean needs.
        share = min(1.0, HEADROOM / count)
        bounds = {name: share * bound for name, bound in form.bounds(done.mean, count).items()}
        return ranges.first(bounds, done.mean.weight / count)


def _check(messages: list[Message]) -> None:
    """Raises `ConfigError` unless one secure sum can answer all of them."""
    first = messages[0]
    if first.metadata.message_type.partition(".")[0] not in ("train", "evaluate"):
        raise ConfigError(
            f"SecureSum: a message of type {first.metadata.message_type!r}: replies to 'train' and 'evaluate' can be "
            "summed, others are refused by the nodes."
        )
    if HEAD in first.content:
        raise ConfigError(f"SecureSum: the strategy's record {HEAD!r} has a name that is taken. Give it another.")
    for message in messages:
        same_type = message.metadata.message_type == first.metadata.message_type
        same = message.content is first.content or message.content.object_id == first.content.object_id
        if not (same and same_type):
            raise ConfigError(
                "SecureSum: the strategy sends its nodes different records; all that are in one sum must get the same."
            )


def _reply(message: Message, form: Form, done: Summed) -> Message:
    base = {name: array.numpy() for record in message.content.array_records.values() for name, array in record.items()}
    arrays, metrics = form.reply(done.mean, base)
    content = RecordDict({form.metric_key: MetricRecord(dict(metrics))})
    if form.array_key:
        content[form.array_key] = ArrayRecord({name: Array(np.asarray(value)) for name, value in arrays.items()})
    return Message(content, reply_to=message)
