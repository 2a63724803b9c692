"""Secure sums over stock nodes: what comes out, who may be lost, what leaves a node, and what stays in it."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from fedward_client import secure_mod
from fedward_client.secure_mod import SecureSumMod, secure_sum_mod
from fedward_common.errors import ConfigError, FedwardError
from fedward_server.secure_sum import SecureSum
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from .nodes import Nodes, never

BROADCAST = {
    "weight": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4),
    "scale": np.array(0.5),
    "steps": np.array([7, 7]),
    "empty": np.zeros((0, 3), dtype=np.float32),
}


def moved(number: int) -> dict[str, Any]:
    """What node `number` replies."""
    rng = np.random.default_rng(number)
    return {
        "weight": (BROADCAST["weight"] + rng.normal(size=(3, 4)) / 10).astype(np.float32),
        "scale": np.asarray(BROADCAST["scale"] + rng.normal() * 30),
        "steps": BROADCAST["steps"] + number,
        "empty": BROADCAST["empty"],
    }


def weight_of(number: int) -> int:
    return 10 * (number + 1) ** 2


def an_app(*mods: Any) -> ClientApp:
    """Replies with `moved`, whatever it is sent."""
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        number = int(str(context.node_config["partition-id"]))
        # The app has a state of its own, and finds its own records only.
        assert set(context.state) <= {"mine"} and set(message.content) == {"arrays", "config"}
        context.state["mine"] = ConfigRecord({"rounds": 1})
        metrics = MetricRecord(
            {"num-examples": weight_of(number), "loss": 0.25 * number, "each": [1.5 * number, -1.0 * number]}
        )
        arrays = ArrayRecord({name: Array(value) for name, value in moved(number).items()})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        number = int(str(context.node_config["partition-id"]))
        metrics = MetricRecord({"num-examples": number + 1, "accuracy": number / 8})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    @app.query("peek")
    def peek(message: Message, context: Context) -> Message:
        return Message(RecordDict({"metrics": MetricRecord({"secret": 1})}), reply_to=message)

    return app


def mean(survivors: list[int], name: str) -> Any:
    """By NumPy."""
    return np.average([moved(i)[name] for i in survivors], axis=0, weights=[weight_of(i) for i in survivors])


def start(nodes: Nodes, rounds: int = 1, strategy: FedAvg | None = None, **options: Any) -> Any:
    arrays = ArrayRecord({name: Array(value) for name, value in BROADCAST.items()})
    return SecureSum(strategy or FedAvg(), **options).start(nodes, arrays, rounds)


def assert_mean(result: Any, survivors: list[int]) -> None:
    for name, array in result.arrays.items():
        found = array.numpy()
        # A step is 2R/L, with R up to 64 times the largest coordinate of the mean and L = 2^20/n.
        apart = max([0.0, *np.abs(mean(survivors, name) - BROADCAST[name]).ravel()])
        np.testing.assert_allclose(found, mean(survivors, name), atol=1e-3 * apart + 1e-7, err_msg=name)
        assert found.dtype == (np.float32 if name in ("weight", "empty") else np.float64)


def test_the_mean_of_arrays_of_every_kind_and_of_metrics() -> None:
    result = start(Nodes(an_app(secure_sum_mod), 4))
    assert_mean(result, [0, 1, 2, 3])
    weights = [weight_of(i) for i in range(4)]
    trained = result.train_metrics_clientapp[1]
    assert trained["loss"] == pytest.approx(np.average([0.25 * i for i in range(4)], weights=weights), abs=1e-6)
    assert trained["each"] == pytest.approx([6 * trained["loss"], -4 * trained["loss"]], abs=1e-5)
    evaluated = result.evaluate_metrics_clientapp[1]
    assert evaluated["accuracy"] == pytest.approx(np.average([0, 1 / 8, 2 / 8, 3 / 8], weights=[1, 2, 3, 4]), abs=1e-6)


def test_four_exchanges_a_round_and_sum_once_it_is_known_what_is_summed() -> None:
    nodes = Nodes(an_app(secure_sum_mod), 3)
    start(nodes, rounds=2)
    asked = [purpose for purpose, number in nodes.seen if number == 0]
    sum_ = ["mask", "agree", "unmask"]
    first = ["prepare", "train", *sum_, "train", *sum_, "prepare", "evaluate", *sum_]
    assert asked == [*first, "train", *sum_, "evaluate", *sum_]


@pytest.mark.parametrize("stage", ["prepare", "train", "mask", "agree", "unmask"])
def test_one_node_in_five_may_be_lost_at_any_stage(stage: str) -> None:
    nodes = Nodes(an_app(secure_sum_mod), 5)
    # In the second round: in the first there is a sum before the sum.
    again = stage == "prepare"
    strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=5)
    rounds = {"now": 0}

    def lost(purpose: str, number: int) -> bool:
        rounds["now"] += purpose == "train" and number == 0
        return number == 2 and purpose == stage and (again or rounds["now"] == 3)

    nodes.lost = lost
    result = start(nodes, 1 if again else 2, strategy)
    late = stage in ("agree", "unmask")
    assert_mean(result, [0, 1, 2, 3, 4] if late else [0, 1, 3, 4])
    assert ("unmask", 2) in nodes.seen or not late


def test_a_sum_that_lost_too_many_is_a_round_without_replies_and_the_next_one_comes() -> None:
    nodes = Nodes(an_app(secure_sum_mod), 5)
    count = {"masks": 0}

    def lost(purpose: str, number: int) -> bool:
        count["masks"] += purpose == "mask" and number == 0
        return purpose == "mask" and number in (1, 2) and count["masks"] == 2

    nodes.lost = lost
    result = start(nodes, 2, FedAvg(fraction_evaluate=0.0))
    assert set(result.train_metrics_clientapp) == {2}
    assert_mean(result, [0, 1, 2, 3, 4])
    # Nobody unmasked in the round that failed: in the sum before it, in the two of the next round.
    assert [number for purpose, number in nodes.seen if purpose == "unmask"].count(0) == 3


def test_a_run_without_a_single_sum_is_an_error() -> None:
    with pytest.raises(FedwardError, match="needs at least 3"):
        start(Nodes(an_app(secure_sum_mod), 2))


def test_a_new_metric_is_asked_for_again() -> None:
    app = ClientApp(mods=[secure_sum_mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        more = {"late": 2.0} if int(str(message.content["config"]["server-round"])) > 1 else {}
        metrics = MetricRecord({"num-examples": 1, **more})
        return Message(RecordDict({"arrays": message.content["arrays"], "metrics": metrics}), reply_to=message)

    result = start(Nodes(app, 3), 3, FedAvg(fraction_evaluate=0.0))
    assert dict(result.train_metrics_clientapp[3]) == {"late": pytest.approx(2.0)}
    assert 2 not in result.train_metrics_clientapp


# --- what leaves a node


def ask(app: ClientApp, content: RecordDict, kind: str = "train") -> Message:
    """One message to node 0, and its reply."""
    nodes = Nodes(app, 1)
    [reply] = nodes.send_and_receive([Message(content, 11, kind)])
    return reply


def plain() -> RecordDict:
    arrays = ArrayRecord({name: Array(value) for name, value in BROADCAST.items()})
    return RecordDict({"arrays": arrays, "config": ConfigRecord({"server-round": 1})})


@pytest.mark.parametrize("kind", ["train", "evaluate", "query.peek"])
def test_a_plain_message_of_any_type_is_refused(kind: str) -> None:
    reply = ask(an_app(secure_sum_mod), plain(), kind)
    assert reply.has_error() and "plain" in str(reply.error.reason)
    assert ask(an_app(SecureSumMod(allow_plain=True)), plain(), kind).has_content()


def test_flowers_own_fedavg_gets_nothing() -> None:
    nodes = Nodes(an_app(secure_sum_mod), 3)
    result = FedAvg().start(nodes, ArrayRecord({name: Array(value) for name, value in BROADCAST.items()}), 1)
    assert not result.arrays and all(reply.has_error() for reply in nodes.sent)


def test_no_reply_holds_a_value_of_the_node() -> None:
    nodes = Nodes(an_app(secure_sum_mod), 3)
    start(nodes, rounds=2)
    assert nodes.sent
    for reply in nodes.sent:
        assert set(reply.content) <= {"fedward", "vectors"}
        data = b"".join(
            bytes(part) if isinstance(part, bytes) else str(part).encode()
            for record in reply.content.values()
            for part in record.values()
        )
        for number in range(3):
            assert moved(number)["weight"].tobytes() not in data
            assert b"loss" not in data or b'"metrics"' in data  # the name, in a form; never the value
            assert str(0.25 * 2).encode() not in data


def test_an_error_of_the_app_tells_nothing_of_it() -> None:
    app = ClientApp(mods=[secure_sum_mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        raise ValueError("patient 4711")

    nodes = Nodes(app, 3)
    with pytest.raises(FedwardError, match="not one secure sum"):
        start(nodes)
    assert nodes.sent and "4711" not in str(nodes.sent)


@pytest.mark.parametrize(
    ("records", "text"),
    [
        ({"metrics": MetricRecord({"num-examples": 1})}, "one ArrayRecord"),
        ({"arrays": ArrayRecord(), "metrics": MetricRecord({"loss": 1.0})}, "num-examples"),
        ({"arrays": ArrayRecord(), "metrics": MetricRecord({"num-examples": 1}), "more": ConfigRecord()}, "more"),
        (
            {"arrays": ArrayRecord({"z": Array(np.array([1j]))}), "metrics": MetricRecord({"num-examples": 1})},
            "complex128",
        ),
        (
            {"arrays": ArrayRecord({"z": Array(np.array([np.inf]))}), "metrics": MetricRecord({"num-examples": 1})},
            "not finite",
        ),
        ({"arrays": ArrayRecord(), "metrics": MetricRecord({"num-examples": 1, "f": float("nan")})}, "'metric.f'"),
        ({"arrays": ArrayRecord(), "metrics": MetricRecord({"num-examples": 0})}, "weight"),
    ],
)
def test_a_reply_that_no_sum_holds_is_refused_with_the_reason(
    records: dict[str, Any], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = ClientApp(mods=[secure_sum_mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return Message(RecordDict(records), reply_to=message)

    with pytest.raises(FedwardError, match="not one secure sum"):
        start(Nodes(app, 3))
    assert text in caplog.text


def test_a_node_asks_for_its_own_least_cohort_and_shares(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(FedwardError):
        start(Nodes(an_app(SecureSumMod(min_cohort=4)), 3))
    assert "min_cohort = 4, the round is for 3" in caplog.text
    with pytest.raises(FedwardError):
        start(Nodes(an_app(secure_sum_mod), 10), dropout=0.3)
    assert "survivors = 7, the rules give 8" in caplog.text


def test_both_sides_say_against_whom_it_protects(caplog: pytest.LogCaptureFixture) -> None:
    start(Nodes(an_app(secure_sum_mod), 3))
    warnings = [record.message for record in caplog.records if "honest but curious" in record.message]
    assert len([text for text in warnings if text.startswith("SecureSum")]) == 1
    assert len([text for text in warnings if text.startswith("secure_sum_mod")]) == 3  # once a node and run


def test_a_strategy_that_needs_single_replies_does_not_start() -> None:
    class Mine(FedAvg):
        pass

    with pytest.raises(ConfigError, match="accept_unknown=True"):
        start(Nodes(an_app(secure_sum_mod), 3), strategy=Mine())
    assert start(Nodes(an_app(secure_sum_mod), 3), strategy=Mine(), accept_unknown=True).arrays


def test_different_records_for_different_nodes_make_no_sum() -> None:
    class PerNode(FedAvg):
        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
            for number, message in enumerate(super().configure_train(server_round, arrays, config, grid)):
                content = RecordDict({**message.content, "config": ConfigRecord({"number": number})})
                yield Message(content, message.metadata.dst_node_id, "train")

    with pytest.raises(ConfigError, match="must get the same"):
        start(Nodes(an_app(secure_sum_mod), 3), strategy=PerNode(), accept_unknown=True)


# --- what stays in a node


def secrets_of(state: RecordDict) -> dict[str, Any]:
    return dict(state.get(secure_mod._STATE, ConfigRecord()).items())


def test_the_secrets_of_a_round_are_gone_once_it_is_unmasked() -> None:
    nodes = Nodes(an_app(secure_sum_mod), 3)
    held: list[dict[str, Any]] = []

    def look(purpose: str, number: int) -> bool:
        if number == 1:
            held.append(secrets_of(nodes.state(number)))
        return False

    nodes.lost = look
    start(nodes, 1, FedAvg(fraction_evaluate=0.0))
    # What was there on the way: the dealt round with its vector, then the masked one.
    assert any("steps.client" in told and "steps.words" in told for told in held)
    assert any("steps.masked" in told for told in held)
    after = nodes.state(1)
    told = secrets_of(after)
    assert set(told) == {"run", "until", "steps.keyring"} and set(after) == {secure_mod._STATE, "mine"}
    # One advertisement for the next round is outstanding, with keys that were in no round.
    assert len(told["steps.keyring"]) == 224
    used = {told["steps.keyring"] for told in held if told.get("steps.keyring")}
    assert told["steps.keyring"] not in used


def test_an_expired_round_is_forgotten_with_the_next_message_whatever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(an_app(secure_sum_mod), 3, lambda purpose, number: purpose == "mask")
    with pytest.raises(FedwardError):
        start(nodes, 1, FedAvg(fraction_evaluate=0.0))
    nodes.lost = never
    assert "steps.words" in secrets_of(nodes.state(0))
    message = Message(plain(), 11, "train")
    nodes.send_and_receive([message])
    assert "steps.words" in secrets_of(nodes.state(0))
    now = time.time()
    monkeypatch.setattr(secure_mod.time, "time", lambda: now + 2 * 3600 + secure_mod._SLACK + 1)
    nodes.send_and_receive([message])
    assert secure_mod._STATE not in nodes.state(0)
