"""The runner: from work to done."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from fedward_common.errors import TaskError, UpdateError
from fedward_common.local import LocalRunner
from fedward_common.messages import Purpose, Reason, Request
from fedward_common.task import Data, NoDataError
from fedward_common.update import Kind, Layout
from fedward_common.work import Work
from small_federation import Classes, Federation, Net, configure
from torch.utils.data import TensorDataset, random_split

LOCAL = {"lr": 0.1, "steps": 3, "batch_size": 4}
NODE = {"n": 9, "seed": 1, "test": 5}


def runner(task=None, data=NODE, node="a", algorithm="fedavg", **more):
    return LocalRunner(configure(algorithm, LOCAL, **more), task or Classes(), node, data)


def broadcast(made):
    vectors = dict(made.do(Work("initial")).vectors)
    vectors.pop("counter", None)
    return vectors


def test_prepare_tells_the_layout():
    made = runner()
    text = made.do(Work("prepare")).info["layout"]
    assert Layout.from_json(text) == made.layout == Layout.of(Net())


def test_prepare_refuses_empty_data():
    with pytest.raises(NoDataError, match="no example"):
        runner(data={"n": 0, "seed": 1}).do(Work("prepare"))


def test_initial_is_the_seeded_model_even_after_training():
    made = runner(seed=11)
    torch.manual_seed(11)
    expected = Net()
    made.do(Work("train", 1, broadcast(made)))
    vectors = made.do(Work("initial")).vectors
    for name, kind in (("model", Kind.TRAINABLE), ("statistic", Kind.STATISTIC), ("counter", Kind.COUNTER)):
        np.testing.assert_array_equal(vectors[name], made.layout.pack(expected.state_dict(), kind))
    other = runner(seed=12).do(Work("initial")).vectors
    assert not np.array_equal(other["model"], vectors["model"])


def test_train_differs_by_round_and_node_and_repeats_exactly():
    one, same, other = runner(), runner(), runner(node="b")
    start = broadcast(one)
    first = one.do(Work("train", 1, start))
    one.do(Work("train", 2, start))
    again = one.do(Work("train", 1, start))
    assert first.vectors["delta"].tobytes() == again.vectors["delta"].tobytes()
    assert first.vectors["delta"].tobytes() == same.do(Work("train", 1, start)).vectors["delta"].tobytes()
    assert first.vectors["delta"].tobytes() != same.do(Work("train", 2, start)).vectors["delta"].tobytes()
    assert first.vectors["delta"].tobytes() != other.do(Work("train", 1, start)).vectors["delta"].tobytes()
    assert first.info == {"steps": 3, "complete": True}
    assert first.weight == 9
    json.dumps(dict(first.info))


def test_counters_start_every_round_anew():
    made = runner()
    start = broadcast(made)
    for round_ in (1, 2):
        made.do(Work("train", round_, start))
        assert int(made._built.model.norm.num_batches_tracked) == 3


@pytest.mark.parametrize("split", ["test", "train"])
def test_evaluate_sums_over_all_examples(split):
    data = {"n": 700, "seed": 1, "test": 300}  # more than one batch, the last one smaller
    made = runner(data=data)
    done = made.do(Work("evaluate", 1, broadcast(made), split=split))
    torch.manual_seed(0)
    model = Net().eval()
    task = Classes()
    rows = getattr(task.data(data), split).tensors
    with torch.no_grad():
        loss, right = float(task.loss(model, rows)), float(task.metrics(model, rows)["accuracy"])
    count = len(rows[1])
    assert done.metrics == {
        "examples": count, "loss": pytest.approx(loss * count), "accuracy": pytest.approx(right * count),
    }  # fmt: skip


def test_evaluate_without_data_has_no_examples():
    made = runner(data={"n": 9, "seed": 1})
    assert made.do(Work("evaluate", 1, broadcast(made))).metrics == {"examples": 0.0}


def test_evaluate_leaves_the_model_and_its_buffers_alone():
    made = runner()
    start = broadcast(made)
    made.do(Work("evaluate", 1, start))
    np.testing.assert_array_equal(
        made.layout.pack(made._built.model.state_dict(), Kind.STATISTIC), start["statistic"]
    )


def test_central_evaluation():
    class Central(Classes):
        def central_data(self, config):
            return Data(self.data({"n": 6, "seed": 2}).train)

    made = runner(Central())
    assert made.do(Work("evaluate", 1, broadcast(made), split="central")).metrics["examples"] == 6
    plain = runner()
    with pytest.raises(TaskError, match="central_data"):
        plain.do(Work("evaluate", 1, broadcast(plain), split="central"))


def test_a_random_split_is_the_same_after_a_restart():
    class Split(Classes):
        def data(self, config):
            whole = super().data(config).train
            assert isinstance(whole, TensorDataset)
            return Data(*random_split(whole, [6, 3]))

    one, two = runner(Split()), runner(Split())
    start = broadcast(one)
    torch.rand(5)
    a, b = (made.do(Work("evaluate", 1, start)).metrics for made in (one, two))
    assert a == b
    assert a["examples"] == 3


def test_kept_vectors_default_to_zero_and_must_fit():
    made = runner(algorithm="scaffold")
    start = broadcast(made)
    size = len(start["model"])
    message = {**start, "c": np.zeros(size, np.float32)}
    done = made.do(Work("train", 1, message))
    zero = made.do(Work("train", 1, message, {"c_i": np.zeros(size, np.float32)}))
    assert done.vectors["delta_c"].tobytes() == zero.vectors["delta_c"].tobytes()
    with pytest.raises(UpdateError, match="c_i"):
        made.do(Work("train", 1, message, {"c_i": np.zeros(1, np.float32)}))


def test_a_broadcast_that_does_not_fit_is_refused():
    made = runner()
    start = broadcast(made)
    with pytest.raises(UpdateError, match="lacks 'statistic'"):
        made.do(Work("train", 1, {"model": start["model"]}))
    with pytest.raises(UpdateError, match=r"shape \(1,\)"):
        made.do(Work("evaluate", 1, {**start, "model": np.zeros(1, np.float32)}))


def test_read_only_vectors_are_taken():
    made = runner()
    start = {name: np.frombuffer(vector.tobytes(), vector.dtype) for name, vector in broadcast(made).items()}
    assert not start["model"].flags.writeable
    made.do(Work("train", 1, start))


def test_private_tensors_persist_on_the_node_and_enter_evaluation():
    task = Classes(kinds={"head.*": "private"})
    fed = Federation(configure("fedavg", {**LOCAL, "lr": 0.5, "steps": 20}), task, {"a": NODE, "b": NODE})
    start = fed.kept("a")
    assert start == {}
    fed.round()
    head = fed.kept("a")["private"]
    request = Request(Purpose.EVALUATE, "run", 1, vectors=fed.algorithm.broadcast(fed.state))
    settled = Request(
        Purpose.EVALUATE, "run", 1, vectors=request.vectors, included=fed.included["a"], settings={"split": "test"}
    )
    # Until the node hears that its training was in the sum, its old head counts.
    old, new = (fed.nodes["a"].handle(asked).metrics["loss"] for asked in (request, settled))
    direct = fed.runners["a"].do(Work("evaluate", 1, request.vectors, {"private": head})).metrics["loss"]
    assert new == direct != old
    assert fed.stores["a"].pending() is not None  # evaluating settles nothing
    fed.round()
    np.testing.assert_array_equal(fed.stores["a"].committed()[1]["private"], head)
    assert not np.array_equal(fed.kept("a")["private"], head)


def test_private_tensors_of_a_lost_reply_are_forgotten():
    task = Classes(kinds={"head.*": "private"})
    fed = Federation(configure("fedavg", LOCAL), task, {"a": NODE, "b": NODE})
    fed.round()
    head = fed.kept("a")["private"]
    fed.round(lost={"a"})
    np.testing.assert_array_equal(fed.kept("a")["private"], head)


@pytest.mark.parametrize(("metrics", "message"), [
    (lambda m, b: 0.5, "returned float"),
    (lambda m, b: {"accuracy": "high"}, "is a str"),
    (lambda m, b: {"accuracy": torch.zeros(3)}, "is a Tensor"),
    (lambda m, b: {"loss": 1.0}, "'loss'"),
    (lambda m, b: {1: 1.0}, "names are strings"),
])  # fmt: skip
def test_wrong_metrics_are_explained(metrics, message):
    task = Classes()
    task.metrics = metrics
    made = runner(task)
    with pytest.raises(TaskError, match=message):
        made.do(Work("evaluate", 1, broadcast(made)))


def test_a_metric_that_is_not_finite_is_refused():
    task = Classes()
    task.metrics = lambda model, batch: {"accuracy": float("nan")}
    fed = Federation(configure("fedavg", LOCAL), task, {"a": NODE})
    reply = fed.nodes["a"].handle(Request(Purpose.EVALUATE, "run", 1, vectors=fed.algorithm.broadcast(fed.state)))
    assert reply.failure is not None
    assert reply.failure.reason is Reason.BAD_UPDATE


def test_model_must_be_a_module():
    task = Classes()
    task.model = lambda: "net"
    with pytest.raises(TaskError, match="returned str"):
        runner(task).do(Work("prepare"))


@pytest.mark.parametrize("work", [Work("dance"), Work("evaluate", split="valid")])
def test_unknown_work_is_refused(work):
    with pytest.raises(ValueError, match="expected"):
        runner().do(work)
