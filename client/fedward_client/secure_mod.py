"""Secure sums for a stock Flower ClientApp, by one mod; the server's half is `fedward_server.secure_sum.SecureSum`:

    app = ClientApp(mods=[secure_sum_mod])

It stands first among the mods: what it answers is what leaves. The app trains and evaluates as ever, but its replies
are kept back: what leaves is a masked vector that only the sum over the cohort makes sense of. The server's other
messages of a round are answered here and never reach the app.

**Against an honest but curious server only.** Stock SuperNodes have no enrolled identity, so nobody can tell whose
keys the server hands out: one that lies could play all other nodes. Fedward's own nodes do not have that gap. They do
not use this mod either: their guard answers, masks, and runs tasks, never a ClientApp with its mods.

A SuperNode starts a process for each message. Between them the secrets of a round stay in `context.state`, which the
SuperNode holds in memory; they are gone from it once the round is unmasked, or with the first message after it expired.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fedward_common import stock
from fedward_common.errors import FedwardError, UpdateError
from fedward_common.messages import Failure, Purpose, Reason, Reply, Request
from fedward_common.node import Refused
from fedward_common.records import HEAD, array_record, content_to_request, reply_to_message
from fedward_common.secagg.client import Guarantees
from fedward_common.steps import Blobs, Steps, Words, bytes_of, digest, laid_out, refusing, told_terms
from fedward_common.stock import CONTENT, FORM, KEPT, WEIGHED_BY, Form
from fedward_common.summand import Shape
from fedward_common.update import Update
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from flwr.common.constant import ErrorCode

log = logging.getLogger("flwr")  # a Flower app's log, where its operator looks

_STATE, _GROUPS = "fedward.secure-sum", "fedward.secure-sum.groups"
_SLACK = 600.0
"""Seconds that a round may take beyond what the server gives its nodes for their work, twice."""
_LONGEST = 7 * 24 * 3600.0


@dataclass
class _Result:
    """What the app replied, kept back. content: SHA-256 of the records that it was given."""

    content: str
    form: Form
    update: Update


@dataclass
class _Memory:
    """What a node knows of one run between two messages. until: when it is forgotten (seconds since 1970)."""

    run: str
    steps: Steps
    result: _Result | None = None
    until: float = field(default_factory=lambda: time.time() + _SLACK)

    def save(self, state: RecordDict) -> None:
        """Into the state that Flower keeps for the run."""
        told: dict[str, Any] = {"run": self.run, "until": self.until}
        told |= {f"steps.{name}": data for name, data in self.steps.export().items()}
        if self.result is not None:
            update = self.result.update
            told["content"], told["form"] = self.result.content, self.result.form.to_json()
            told["update"] = json.dumps([update.weight, dict(update.metrics)])
            state[_GROUPS] = array_record(update.groups)
        state[_STATE] = ConfigRecord(told)

    @classmethod
    def load(cls, mod: SecureSumMod, context: Context) -> _Memory | None:
        """Out of it, so that the app never sees it. None if there is nothing, or it has expired."""
        told: Any = context.state.pop(_STATE, None)
        groups: Any = context.state.pop(_GROUPS, ArrayRecord())
        if told is None or time.time() > told["until"]:
            return None
        data = {name.removeprefix("steps."): part for name, part in told.items() if name.startswith("steps.")}
        steps = Steps.restore(told["run"], stock.node_bytes(context.node_id), None, mod.guarantees, data)
        memory = cls(told["run"], steps, until=told["until"])
        if "form" in told:
            form = Form.from_json(told["form"])
            update = Update(_arrays(groups), *json.loads(told["update"]))
            memory.result = _Result(told["content"], form, update)
        return memory


@dataclass(frozen=True)
class SecureSumMod:
    """The mod, with what this node asks of a sum.

    min_cohort: fewest nodes in it. dropout, corrupt: shares of the cohort that may be lost, and side with the server;
    the server's `SecureSum` must say the same. allow_plain: answer messages of a server that asks for no secure sum,
    in the clear. Without it this node refuses them, whatever their type.
    """

    min_cohort: int = 3
    dropout: float = 0.2
    corrupt: float = 0.2
    allow_plain: bool = False

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Answer one message."""
        memory = _Memory.load(self, context)
        try:
            if not message.has_content() or HEAD not in message.content:
                return self._plain(message, context, call_next)
            request = content_to_request(RecordDict({HEAD: message.content[HEAD]}))
            if memory is None or memory.run != request.run:
                log.warning(
                    "secure_sum_mod: nodes have no enrolled identities here, keys are unsigned: this hides replies "
                    "from an honest but curious server, not from one that lies."
                )
                memory = _Memory(request.run, Steps(request.run, stock.node_bytes(context.node_id), None))
            return reply_to_message(_Node(self, memory, message, context, call_next).answer(request), message)
        finally:
            if memory is not None:
                memory.save(context.state)

    def guarantees(self, n: int) -> Guarantees:
        """What this node asks of a sum over `n` nodes. Raises `Refused`."""
        with refusing():
            return Guarantees(stock.parameters(n, self.dropout, self.corrupt), self.min_cohort, None)

    def _plain(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if self.allow_plain:
            return call_next(message, context)
        reason = (
            f"secure_sum_mod: a plain {message.metadata.message_type!r} message is refused, this node's replies leave "
            "in secure sums only. Wrap the server's strategy in SecureSum(...)."
        )
        return Message(Error(ErrorCode.MOD_FAILED_PRECONDITION, reason), reply_to=message)


secure_sum_mod = SecureSumMod()


@dataclass
class _Node:
    """This node while it answers one request."""

    mod: SecureSumMod
    memory: _Memory
    message: Message
    context: Context
    app: ClientAppCallable

    def answer(self, request: Request) -> Reply:
        """The reply; a failure if a rule is broken or the app fails."""
        steps = self.memory.steps
        seconds = min(float(request.settings.get("seconds", 0.0)), _LONGEST)
        self.memory.until = max(self.memory.until, time.time() + 2 * seconds + _SLACK)
        info: Mapping[str, Any] = {}
        try:
            match request.purpose:
                case Purpose.ADVERTISE:
                    vectors = steps.fresh()
                case Purpose.PREPARE:
                    self.memory.result = self._work(request)
                    vectors, info = steps.fresh(), {FORM: self.memory.result.form.to_json()}
                case Purpose.TRAIN | Purpose.EVALUATE:
                    vectors = self._start(request)
                case Purpose.MASK:
                    vectors = steps.mask(request)
                case Purpose.AGREE:
                    vectors = steps.agree(request)
                case Purpose.UNMASK:
                    vectors = {**steps.unmask(request), **steps.fresh()}
                case other:
                    raise Refused(Failure(Reason.BAD_REQUEST, f"secure_sum_mod has no {other.value!r}"))
            failure = None
        except Refused as refused:
            log.warning("secure_sum_mod: %s", refused.failure)
            vectors, failure = steps.fresh(), refused.failure
        return Reply(
            request.purpose, request.run, request.round, request.attempt, vectors, failure=failure, info=info
        )

    def _start(self, request: Request) -> Blobs:
        self.memory.steps.abandon()
        category = self.message.metadata.message_type.partition(".")[0]
        if request.purpose.value != category:
            raise Refused(Failure(Reason.BAD_REQUEST, f"a sum for {request.purpose.value!r} in a {category!r} message"))
        kept = self.memory.result if request.settings.get(KEPT) else None
        if request.settings.get(KEPT) and kept is None:
            raise Refused(Failure(Reason.NOTHING_HELD, "no reply was kept back for this sum"))
        self.memory.result = None
        content = kept.content if kept is not None else self._records().object_id
        if bytes_of(request, CONTENT).hex() != content:
            raise Refused(Failure(Reason.SECURE_SUM, "the records that came are not those that the sum is for"))
        model = digest({CONTENT: request.vectors[CONTENT]})
        shape, terms = told_terms(request, request.run, model, config="", roster="")

        def words(_: bytes) -> Words:
            result = kept if kept is not None else self._work(request)
            update = self._asked(shape, terms.n, result)
            if not shape.groups and result.form.lengths:
                self.memory.result = result  # the sum itself is still to come
            return laid_out(shape, update)

        return self.memory.steps.start(terms, self.mod.guarantees(terms.n), words)

    def _asked(self, shape: Shape, n: int, result: _Result) -> Update:
        """The summand that a sum of this shape is for; only ranges, bits and weight scale are the server's."""
        form = result.form
        groups = {group.name: group.length for group in shape.groups}
        if shape.capacity != n:
            raise Refused(Failure(Reason.SECURE_SUM, f"capacity of the sum: {shape.capacity}, the cohort is {n}"))
        if not groups and form.lengths and shape.metrics == form.peaks:
            with _checking():
                return form.measured(result.update)
        for what, given, own in (("arrays", groups, form.lengths), ("metrics", shape.metrics, form.scalars)):
            if given != own:
                raise Refused(Failure(Reason.SECURE_SUM, f"{what} of the sum: {given}, this node's reply has {own}"))
        return result.update

    def _records(self) -> RecordDict:
        """The app's own records in the message."""
        return RecordDict({name: record for name, record in self.message.content.items() if name != HEAD})

    def _work(self, request: Request) -> _Result:
        """Have the app reply."""
        records = self._records()
        content, base = records.object_id, _arrays(*records.array_records.values())
        self.message.content = records
        try:
            reply = self.app(self.message, self.context)
        except Exception as error:
            # Flower would send its text, which may tell of data.
            log.error("secure_sum_mod: the app failed", exc_info=error)
            raise Refused(Failure(Reason.TASK_ERROR, "the app raised an exception; see this node's log")) from error
        if reply.has_error():
            raise Refused(Failure(Reason.TASK_ERROR, "the app replied with an error; see this node's log"))
        with _checking():
            array_key, arrays, metric_key, metrics = _parts(self.message.metadata.message_type, reply.content)
            form = Form.of(array_key, arrays, metric_key, metrics, str(request.settings.get(WEIGHED_BY)))
            return _Result(content, form, form.update(arrays, metrics, base))


@contextmanager
def _checking() -> Iterator[None]:
    """What a reply must not hold, as a refusal of the request."""
    try:
        yield
    except FedwardError as error:
        raise Refused(Failure(Reason.BAD_UPDATE, str(error))) from error


def _parts(message_type: str, content: RecordDict) -> tuple[str, dict[str, Any], str, dict[str, Any]]:
    """Names and contents of a reply's ArrayRecord and MetricRecord. Raises `UpdateError` if a sum does not hold it."""
    trains = message_type.partition(".")[0] == "train"
    arrays, metrics = content.array_records, content.metric_records
    if len(arrays) != trains or len(metrics) != 1 or content.config_records:
        raise UpdateError(
            f"the app's reply has records {sorted(content)}: a secure sum needs one MetricRecord, one ArrayRecord in "
            "a training and none in an evaluation, and holds no ConfigRecord"
        )
    metric_key, metric_record = next(iter(metrics.items()))
    array_key, array_record = next(iter(arrays.items())) if trains else ("", ArrayRecord())
    return array_key, _arrays(array_record), metric_key, dict(metric_record)


def _arrays(*records: ArrayRecord) -> dict[str, Any]:
    return {name: array.numpy() for record in records for name, array in record.items()}
