"""Runs with an `[aggregation]` rule through the round engine, plain and secure, with nodes that lie on the wire."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import numpy as np
import pytest
from fedward_common.aggregation_options import RULES
from fedward_common.errors import ConfigError, TaskError
from fedward_common.messages import Purpose, Reply, Stamp
from fedward_common.node import MemoryStore, Participant
from fedward_common.secure import SecureParticipant, Standing
from fedward_common.signing import generate
from fedward_common.steps import MASKED
from fedward_common.work import Done
from fedward_server import gathering
from fedward_server.checkpoint import Checkpoints, read_checkpoint
from fedward_server.events import read_events
from fedward_server.paths import RunPaths
from fedward_server.simulation import Faults, simulate
from torch import nn

from .test_secure_rounds import Named
from .test_secure_rounds import config as secure_config
from .test_simulation import Task, bits, config
from .world import Crash, Shuffled

SINGLE = [
    {"rule": "krum", "byzantine": 2},
    {"rule": "multi_krum", "byzantine": 2},
    {"rule": "multi_krum", "byzantine": 2, "keep": 3},
    {"rule": "bulyan", "byzantine": 1},
    {"rule": "median"},
    {"rule": "trimmed_mean", "trim": 2},
    {"rule": "trimmed_mean", "share": 0.3},
    {"rule": "geometric_median"},
]
BOUND = {"rule": "norm_bound", "bound": 0.3}


@pytest.fixture
def paths():
    """In memory: what is flushed to a disk hundreds of times is no part of these tests."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        yield lambda name="run": RunPaths(Path(folder) / name)


def run(aggregation, paths, nodes=8, algorithm="fedavg", task=None, rounds=3, **more):
    changes = {name: more.pop(name) for name in ("cohort", "evaluation") if name in more}
    settings = config(algorithm, rounds=rounds, aggregation=aggregation, **changes)
    return simulate(settings, task or Task(), nodes, paths, **more)


def events(paths, kind="round"):
    return [event for event, _ in read_events(paths.events) if event["event"] == kind]


class Watched(Shuffled):
    """Keeps the updates as they arrive, after `change(name, update group)` of liars."""

    def __init__(self, change=None, liars=(), seed=0):
        super().__init__(seed)
        self.change, self.liars = change, set(liars)
        self.seen = {}

    def answers(self, name, request, reply):
        if request.purpose in (Purpose.TRAIN, Purpose.COLLECT) and reply.vectors:
            if name in self.liars:
                vectors = {group: self.change(vector).astype(vector.dtype) for group, vector in reply.vectors.items()}
                reply = dataclasses.replace(reply, vectors=vectors)
            self.seen[request.round, name] = reply
        return reply

    def deltas(self, round_):
        return {name: reply.vectors["delta"].astype(float) for (r, name), reply in self.seen.items() if r == round_}


def moved(outcome, paths):
    """What the last of the rounds moved the model by."""
    read, last = Checkpoints(paths), outcome.state.round
    before, after = (read_checkpoint(read.model_file(str(number))) for number in (last - 1, last))
    return after.state.model.astype(float) - before.state.model


def test_every_rule_is_tested_here():
    assert {table["rule"] for table in [*SINGLE, BOUND, {"rule": "mean"}]} == set(RULES)


def test_a_median_takes_the_place_of_the_mean(paths):
    faults = Watched(lambda vector: -100 * vector, ["node-3", "node-5"])
    outcome = run({"rule": "median"}, paths(), faults=faults)
    deltas = list(faults.deltas(3).values())
    assert len(deltas) == 8
    np.testing.assert_allclose(moved(outcome, paths()), np.median(deltas, axis=0), atol=1e-6)
    assert np.abs(np.mean(deltas, axis=0) - np.median(deltas, axis=0)).max() > 0.1
    assert events(paths())[-1]["aggregation"] == {"rule": "median", "updates": 8}


def test_each_node_counts_once_whatever_it_claims(paths):
    class Claims(Faults):
        def __init__(self, weight):
            self.weight, self.honest = weight, set()

        def answers(self, name, request, reply):
            if not reply.vectors:
                return reply
            self.honest.add(reply.weight)
            return dataclasses.replace(reply, weight=self.weight) if name == "node-1" else reply

    for aggregation in (*SINGLE, BOUND):
        name = str(sorted(aggregation.items()))
        plain, little = run(aggregation, paths(name), rounds=1), Claims(0.001)
        assert bits(plain) == bits(run(aggregation, paths(f"{name} little"), rounds=1, faults=little))
        assert events(paths(name))[0]["weight"] == 8 and little.honest == {1.0}
    run({"rule": "median"}, paths("much"), rounds=1, faults=Claims(20.0))
    assert events(paths("much"))[0]["failures"] == {"node-1": "bad_update (the weight is not in (0, 1.0])"}


@pytest.mark.parametrize("aggregation", SINGLE[:4], ids=str)
def test_the_event_says_who_was_left_out_and_all_metrics_count(aggregation, paths):
    liar = ["node-2"]
    run(aggregation, paths(), faults=Watched(lambda vector: 100 * vector, liar))
    for event in events(paths()):
        told = event["aggregation"]
        chosen, left = told["delta"]["selected"], told["delta"]["left_out"]
        assert sorted(chosen + left) == event["replies"] and "node-2" in left
        assert len(chosen) == {"krum": 1, "multi_krum": aggregation.get("keep", 6), "bulyan": 6}[told["rule"]]
        assert event["train"]["examples"] == 8 * 25  # five steps of five each


@pytest.mark.parametrize("aggregation", [*SINGLE, BOUND], ids=str)
def test_order_waves_and_a_crash_leave_no_trace(aggregation, paths, monkeypatch):
    whole = run(aggregation, paths("whole"), faults=Watched(lambda vector: 5 * vector, ["node-0"], seed=1))
    assert whole.status == "finished"

    class Dies(Watched):
        def answers(self, name, request, reply):
            if (name, request.round, request.purpose) == ("node-6", 2, Purpose.TRAIN):
                raise Crash
            return super().answers(name, request, reply)

    stores = {f"node-{i}": MemoryStore() for i in range(8)}
    with pytest.raises(Crash):
        run(aggregation, paths("again"), store=stores.get, faults=Dies(lambda vector: 5 * vector, ["node-0"], seed=2))
    again = run(aggregation, paths("again"), store=stores.get, faults=Watched(lambda v: 5 * v, ["node-0"], seed=3))
    assert again.status == "finished" and bits(whole) == bits(again)

    monkeypatch.setattr(gathering, "UPLOADS_AT_ONCE", 2 * 6 * 4 + 1)
    waves = Watched(lambda vector: 5 * vector, ["node-0"], seed=4)
    assert bits(whole) == bits(run(aggregation, paths("waves"), faults=waves))


def test_too_few_replies_fail_the_round_with_the_numbers(paths):
    class Loses(Faults):
        lost = 0

        def answers(self, name, request, reply):
            if request.purpose is Purpose.TRAIN and request.round == 2 and self.lost < 1:
                self.lost += 1
                return None
            return reply

    outcome = run({"rule": "krum", "byzantine": 2}, paths(), nodes=7, faults=Loses())
    [failed] = events(paths(), "round_failed")
    assert outcome.status == "finished" and failed["failures"] == {"node-0": "no_reply"}
    for part in ("6 of 7 nodes contributed", "the quorum is 7", '"krum" (byzantine = 2)', "at least 7"):
        assert part in failed["reason"]
    assert bits(outcome) == bits(run({"rule": "krum", "byzantine": 2}, paths("quiet"), nodes=7))


def test_a_run_waits_for_as_many_nodes_as_its_rule_needs(paths):
    class Late(Faults):
        looks = 0

        def online(self, name):
            self.looks += name == "node-6"
            return name != "node-6" or self.looks > 3

    outcome = run({"rule": "krum", "byzantine": 2}, paths(), nodes=7, faults=Late())
    assert outcome.status == "finished" and not events(paths(), "round_failed")
    assert {event["needed"] for event in events(paths(), "waiting")} == {7}


def test_a_lost_reply_is_left_out_of_the_median(paths):
    class Loses(Watched):
        def answers(self, name, request, reply):
            reply = super().answers(name, request, reply)
            if (name, request.purpose, request.round) == ("node-4", Purpose.TRAIN, 3):
                del self.seen[3, name]
                return None
            return reply

    faults = Loses()
    outcome = run({"rule": "median"}, paths(), faults=faults)
    deltas = list(faults.deltas(3).values())
    assert len(deltas) == 7
    np.testing.assert_allclose(moved(outcome, paths()), np.median(deltas, axis=0), atol=1e-6)


@pytest.mark.parametrize("aggregation", [*SINGLE, BOUND], ids=str)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_never_get_in(aggregation, value, paths):
    faults = Watched(lambda vector: np.full_like(vector, value), ["node-1"])
    outcome = run(aggregation, paths(), faults=faults)
    assert outcome.status == "finished"
    for event in events(paths()):
        assert event["failures"]["node-1"].startswith("bad_update") and "node-1" not in event["replies"]
        assert event["aggregation"].get("updates", 7) == 7
    assert all(np.isfinite(vector).all() for vector in outcome.state.vectors.values())


@pytest.mark.parametrize("algorithm", ["fedavgm", "fedadam"])
def test_the_servers_half_of_an_algorithm_stays_as_it_is(algorithm, paths):
    """On nodes that all send the same, each rule is the mean."""

    class Alike(Task):
        def data(self, config):
            return super().data({"partition": 0})

    class Same(Faults):
        def answers(self, name, request, reply):
            if request.purpose is Purpose.TRAIN:
                self.first = reply if name == "node-0" else self.first
                reply = dataclasses.replace(reply, vectors=self.first.vectors)
            return reply

    more = {"algorithm": algorithm, "task": Alike(), "rounds": 2, "evaluation": {"every": 0}}
    mean = run({"rule": "mean"}, paths("mean"), faults=Same(), **more)
    for aggregation in (*SINGLE, {"rule": "norm_bound", "bound": 1e6}):
        other = run(aggregation, paths(str(aggregation)), faults=Same(), **more)
        for name, vector in mean.state.vectors.items():
            np.testing.assert_allclose(other.state.vectors[name], vector, rtol=1e-5, atol=1e-6)


def test_a_node_that_is_left_out_keeps_what_it_learnt(paths):
    """What it keeps has no counterpart on the server, so it goes on: its update was part of the round."""
    run({"rule": "krum", "byzantine": 2}, paths())
    included = Checkpoints(paths()).newest().included
    assert {stamp.round for stamp in included.values()} == {3} and len(included) == 8
    assert all(isinstance(stamp, Stamp) for stamp in included.values())


def norm(reply):
    return float(np.linalg.norm(reply.vectors["delta"].astype(float)))


def test_a_norm_bound_scales_updates_on_the_node_and_counts_them(paths):
    free = Watched()
    run({"rule": "mean"}, paths("free"), rounds=1, faults=free)
    large = {name for (_, name), reply in free.seen.items() if norm(reply) > BOUND["bound"]}
    assert 0 < len(large) < 8

    faults = Watched()
    outcome = run(BOUND, paths(), rounds=1, faults=faults)
    for (_, name), reply in faults.seen.items():
        assert norm(reply) <= BOUND["bound"] and reply.metrics["scaled"] == (name in large)
        unbounded = free.seen[1, name].vectors["delta"].astype(float)
        share = min(1.0, BOUND["bound"] / np.linalg.norm(unbounded))
        np.testing.assert_allclose(reply.vectors["delta"], share * unbounded, rtol=1e-5)
    [event] = events(paths())
    assert event["aggregation"] == {"rule": "norm_bound", "bound": 0.3, "scaled": len(large), "over": []}
    assert "scaled" not in event["train"]
    np.testing.assert_allclose(
        moved(outcome, paths()), np.mean(list(faults.deltas(1).values()), axis=0), atol=1e-6
    )


def test_the_server_bounds_what_a_lying_node_sends_and_names_it(paths):
    liars = Watched(lambda vector: 1000 * vector, ["node-6", "node-3"])
    outcome = run(BOUND, paths(), rounds=1, faults=liars)
    [event] = events(paths())
    assert event["aggregation"]["over"] == ["node-3", "node-6"]
    deltas = liars.deltas(1)
    within = [delta * min(1.0, 0.3 / np.linalg.norm(delta)) for delta in deltas.values()]
    np.testing.assert_allclose(moved(outcome, paths()), np.mean(within, axis=0), atol=1e-6)


def test_a_nodes_journal_says_that_its_update_was_bounded():
    full = Reply(Purpose.TRAIN, "run", vectors={"delta": np.zeros(1)}, metrics={"examples": 1.0})
    held = dataclasses.replace(full, vectors={}, held=True)
    for aggregation, told in ((BOUND, ("update-gate", "clip-norm")), ({"rule": "median"}, ("update-gate",))):
        node = Participant(config("fedavg", aggregation=aggregation), MemoryStore(), lambda work: Done())
        assert node.protections(full) == told and node.protections(held) == ("update-gate",)
    identity = generate()
    standing = Standing(b"n" * 16, identity, lambda: None, lambda: None, 2)
    run = secure_config("fedavg", aggregation=BOUND)
    node = SecureParticipant("r", run, MemoryStore(), lambda work: Done(), standing)
    masked = Reply(Purpose.MASK, "r", vectors={MASKED: np.zeros(1, np.uint8)})
    assert node.protections(masked) == ("update-gate", "clip-norm", "clip", "quantize", "secure-sum")


@pytest.mark.parametrize("algorithm", ["fedavg", "fedadam"])
def test_a_norm_bound_under_secure_aggregation_is_the_plain_one(algorithm, paths):
    plain = simulate(secure_config(algorithm, secure=False, aggregation=BOUND), Named(), 5, paths("plain"))
    secure = simulate(secure_config(algorithm, aggregation=BOUND), Named(), 5, paths("secure"))
    assert plain.status == secure.status == "finished"
    for name, vector in plain.state.vectors.items():
        np.testing.assert_allclose(secure.state.vectors[name], vector, atol=2e-3 if algorithm == "fedavg" else 2e-2)
    for one, other in zip(events(paths("plain")), events(paths("secure")), strict=True):
        assert other["aggregation"] == {key: value for key, value in one["aggregation"].items() if key != "over"}
        assert one["aggregation"]["scaled"] > 0 and "scaled" not in other["train"]
        assert other["secure_sum"]["clipped"]["delta"] == 0
        assert one["weight"] == other["weight"] == 5


class Normed(Task):
    def model(self):
        return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def test_a_liar_about_its_buffers_is_not_carried_by_its_parameters(paths):
    """It sends the parameters of another node, which any rule takes, and buffers of its own making."""

    class Buffers(Watched):
        def answers(self, name, request, reply):
            if request.purpose is Purpose.TRAIN and request.vectors:
                if name == "node-7":
                    vectors = {"delta": self.model, "statistic": np.full_like(reply.vectors["statistic"], 1e6)}
                    reply = dataclasses.replace(reply, vectors=vectors)
                self.model = reply.vectors["delta"]
            return reply

        def order(self, names):
            return sorted(names)

    for aggregation in SINGLE:
        outcome = run(aggregation, paths(str(aggregation)), task=Normed(), faults=Buffers(), rounds=2)
        assert outcome.status == "finished" and np.abs(outcome.state.vectors["statistic"]).max() < 100
        told = events(paths(str(aggregation)))[0]["aggregation"]
        if "delta" in told and "left_out" in told["delta"]:
            assert "node-7" in told["statistic"]["left_out"]


def test_a_norm_bound_refuses_a_model_with_averaged_buffers(paths):
    with pytest.raises(TaskError, match="4 float buffers") as caught:
        run(BOUND, paths(), task=Normed())
    assert "GroupNorm" in str(caught.value) and '"private"' in str(caught.value)
    private = Normed()
    private.tensor_kinds = {"1.running_*": "private"}
    assert run(BOUND, paths(), task=private).status == "finished"


@pytest.mark.parametrize(
    ("aggregation", "nodes", "needs"),
    [
        ({"rule": "krum", "byzantine": 2}, 6, 7),
        ({"rule": "multi_krum", "byzantine": 1, "keep": 5}, 5, 6),
        ({"rule": "bulyan", "byzantine": 1}, 6, 7),
        ({"rule": "median"}, 2, 3),
        ({"rule": "trimmed_mean", "trim": 2}, 4, 5),
        ({"rule": "trimmed_mean", "share": 0.15}, 6, 7),
        ({"rule": "geometric_median"}, 2, 3),
    ],
)
def test_too_few_simulated_nodes_are_refused_before_anything_starts(aggregation, nodes, needs, paths):
    with pytest.raises(ConfigError, match=f"has {nodes} nodes, but .* at least {needs} nodes"):
        run(aggregation, paths(), nodes=nodes)
    assert not paths().events.exists()
    assert run(aggregation, paths(), nodes=needs, rounds=1).status == "finished"
