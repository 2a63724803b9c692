"""A node's conversation: settling state, the gate, held replies."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from fedward_common.config import parse_config
from fedward_common.messages import Purpose, Reason, Request, Stamp
from fedward_common.node import MemoryStore, Participant, Refused, settle
from fedward_common.update import Kind, Layout, TensorSpec
from fedward_common.work import Done

LAYOUT = Layout((TensorSpec("w", (2,), "float64", Kind.TRAINABLE),))
HEADED = Layout((*LAYOUT.tensors, TensorSpec("h", (1,), "float64", Kind.PRIVATE)))


class Worker:
    """Stands for `LocalRunner.do`: each training adds 1 to what is kept."""

    def __init__(self, layout=LAYOUT, keeps=("c_i",)):
        self.layout = layout
        self.keeps = keeps
        self.works = []
        self.change = {}

    def __call__(self, work):
        self.works.append(work)
        if work.op == "prepare":
            return Done(info={"layout": self.layout.to_json()})
        if work.op == "evaluate":
            return Done(metrics={"examples": 1.0, "loss": 2.0})
        state = {name: work.state.get(name, np.zeros(2)) + 1 for name in self.keeps}
        groups = {"delta": np.ones(2)}
        if "c_i" in self.keeps:
            groups["delta_c"] = np.ones(2)
        done = {"vectors": groups, "state": state, "weight": 1.0, "metrics": {}, "info": {"steps": 1}}
        return Done(**{**done, **self.change})


def participant(algorithm="scaffold", worker=None, store=None):
    config = parse_config(
        {
            "name": "t", "task": "t:T", "rounds": 1, "algorithm": {"name": algorithm},
            "local": {"lr": 1, "steps": 1}, "secure_sum": {"enabled": False},
        }
    )
    worker = worker or Worker(keeps=("c_i",) if algorithm == "scaffold" else ())
    store = store or MemoryStore()
    return Participant(config, store, worker), store, worker


def train(node, round_=1, attempt=1, included=None, **settings):
    return node.handle(Request(Purpose.TRAIN, "run", round_, attempt, {}, included, settings))


A, B = Stamp(1, 1), Stamp(2, 1)


def test_settle_commits_what_was_included():
    store = MemoryStore()
    store.save_pending(A, {"c_i": np.ones(1)})
    settle(store, A)
    assert store.committed()[0] == A
    assert store.pending() is None
    settle(store, A)  # a repeated request
    assert store.committed()[0] == A


def test_settle_drops_what_was_not():
    store = MemoryStore()
    store.save_pending(A, {})
    settle(store, None)
    assert store.pending() is None
    assert store.committed() == (None, {})


@pytest.mark.parametrize("pending", [None, A])
@pytest.mark.parametrize("committed", [None, A])
def test_settle_refuses_what_it_does_not_know(pending, committed):
    store = MemoryStore()
    if committed:
        store.save_pending(committed, {})
        store.commit_pending()
    if pending and pending != committed:
        store.save_pending(pending, {})
    with pytest.raises(Refused, match="state_diverged"):
        settle(store, B)
    assert store.committed()[0] == committed


def test_a_node_with_committed_state_refuses_a_server_that_forgot_it():
    store = MemoryStore()
    store.save_pending(A, {})
    store.commit_pending()
    with pytest.raises(Refused, match="state_diverged"):
        settle(store, None)


def test_an_attempt_is_not_another():
    node, store, _ = participant()
    train(node, 1, 1)
    train(node, 1, 2)
    train(node, 2, 1, included=Stamp(1, 2))
    assert store.committed()[0] == Stamp(1, 2)
    assert train(node, 3, 1, included=Stamp(2, 9)).failure.reason is Reason.STATE_DIVERGED


@pytest.mark.parametrize("seed", range(20))
def test_kept_state_follows_the_server_through_any_losses_and_crashes(seed):
    """The model of the truth: how many of this node's trainings the server put in a sum."""
    chance = random.Random(seed)
    node, store, worker = participant()
    included, counted = None, 0
    for round_ in range(1, 40):
        for attempt in itertools.count(1):
            request = included
            if chance.random() < 0.2:  # the request is lost
                continue
            if chance.random() < 0.2:  # the worker dies in training: nothing pending is kept
                worker.change = {"weight": float("nan")}
                assert train(node, round_, attempt, request).failure.reason is Reason.BAD_UPDATE
                worker.change = {}
                continue
            reply = train(node, round_, attempt, request)
            assert reply.failure is None
            assert store.committed()[0] == included
            kept = store.committed()[1].get("c_i", np.zeros(2))
            assert (kept == counted).all()
            if chance.random() < 0.2:  # the guard dies and comes back on its store
                node, _, worker = participant(store=store)
            if chance.random() < 0.3:  # the reply is lost
                break
            if chance.random() < 0.2:  # the same request is delivered twice
                assert train(node, round_, attempt, request).failure is None
            included, counted = Stamp(round_, attempt), counted + 1
            break
    node.handle(Request(Purpose.FINISH, "run", included=included))
    node.handle(Request(Purpose.FINISH, "run", included=included))
    assert (store.committed()[1].get("c_i", np.zeros(2)) == counted).all()


def test_a_node_that_keeps_nothing_survives_a_lost_store():
    node, store, _ = participant("fedavg")
    train(node)
    train(node, 2, included=A)
    node, store, _ = participant("fedavg")
    assert train(node, 3, included=B).failure is None
    assert store.pending()[0] == Stamp(3, 1)
    assert train(node, 4, included=Stamp(3, 1)).failure is None
    assert node.handle(Request(Purpose.FINISH, "run", included=B)).failure is None


@pytest.mark.parametrize(("change", "rule"), [
    ({"vectors": {"delta": np.array([1, np.nan]), "delta_c": np.ones(2)}}, "not finite"),
    ({"vectors": {"delta": np.ones(1), "delta_c": np.ones(2)}}, "shape"),
    ({"vectors": {"delta": np.ones(2)}}, "groups"),
    ({"vectors": {"delta": np.ones(2, np.float32), "delta_c": np.ones(2)}}, "dtype"),
    ({"weight": 0.0}, "weight"),
    ({"weight": 2.0}, "every node counts the same"),
    ({"state": {}}, "kept vectors"),
    ({"state": {"c_i": np.array([np.nan, 0])}}, "kept vector 'c_i'"),
    ({"state": {"c_i": np.ones(3)}}, "kept vector 'c_i'"),
])  # fmt: skip
def test_the_gate_stands_before_state_and_reply(change, rule):
    node, store, worker = participant()
    worker.change = change
    reply = train(node)
    assert reply.failure.reason is Reason.BAD_UPDATE
    assert rule in reply.failure.rule
    assert not reply.vectors
    assert store.pending() is None


def test_private_state_is_asked_for_and_checked():
    worker = Worker(HEADED, keeps=())
    node, store, _ = participant("fedavg", worker)
    assert "private" in train(node).failure.rule
    worker.change = {"state": {"private": np.ones(1)}}
    assert train(node).failure is None
    assert store.pending()[1]["private"] == 1


def test_evaluation_reads_the_state_and_settles_nothing():
    node, store, worker = participant()
    train(node)
    evaluate = Request(Purpose.EVALUATE, "run", 1)
    assert node.handle(evaluate).metrics == {"examples": 1.0, "loss": 2.0}
    assert worker.works[-1].state == {}
    node.handle(Request(Purpose.EVALUATE, "run", 1, included=A))
    assert (worker.works[-1].state["c_i"] == 1).all()
    assert store.pending()[0] == A
    assert store.committed()[0] is None


def test_held_replies_are_collected_as_often_as_asked():
    node, _, _ = participant()
    reply = train(node, hold=True)
    assert reply.held
    assert not reply.vectors
    collect = Request(Purpose.COLLECT, "run", 1, 1)
    for _ in range(2):
        got = node.handle(collect)
        assert got.purpose is Purpose.COLLECT
        assert set(got.vectors) == {"delta", "delta_c"}
    assert node.handle(Request(Purpose.COLLECT, "run", 1, 2)).failure.reason is Reason.NOTHING_HELD
    train(node, 2, included=A)
    assert node.handle(collect).failure.reason is Reason.NOTHING_HELD
    train(node, 3, included=B, hold=True)
    node.handle(Request(Purpose.FINISH, "run", included=B))
    assert node.handle(Request(Purpose.COLLECT, "run", 3, 1)).failure.reason is Reason.NOTHING_HELD


def test_prepare_compares_layouts():
    node, _, _ = participant()
    same = Request(Purpose.PREPARE, "run", settings={"layout": LAYOUT.digest()})
    assert node.handle(same).info["layout"] == LAYOUT.digest()
    other = Request(Purpose.PREPARE, "run", settings={"layout": HEADED.digest()})
    assert node.handle(other).failure.reason is Reason.LAYOUT_DIFFERS


def test_what_the_worker_raises_goes_through():
    def broken(work):
        raise RuntimeError("patient 7")

    node, _, _ = participant(worker=broken)
    with pytest.raises(RuntimeError):
        train(node)
