"""Secure runs through the round engine: the same result as plain ones, whoever drops out where."""

from __future__ import annotations

import numpy as np
import pytest
from fedward_common.config import RunConfig
from fedward_common.messages import Failure, Purpose, Reason, Reply
from fedward_server.checkpoint import Checkpoints
from fedward_server.events import read_events
from fedward_server.paths import RunPaths
from fedward_server.simulation import Faults, simulate

from .test_simulation import Task


class Named(Task):
    metric_names = ("accuracy",)


def config(algorithm="scaffold", secure=True, **tables):
    options = algorithm if isinstance(algorithm, dict) else {"name": algorithm}
    base = {"name": "test", "task": "t:Task", "rounds": 4, "algorithm": options}
    local = {"lr": 0.1, "steps": 5, "batch_size": 5}
    return RunConfig.model_validate({**base, "local": local, "secure_sum": {"enabled": secure}, **tables})


@pytest.fixture
def paths(tmp_path):
    return lambda name="run": RunPaths(tmp_path / name)


def events(paths, kind):
    return [event for event, _ in read_events(paths.events) if event["event"] == kind]


class Lost(Faults):
    """Replies of some nodes to some purpose never arrive."""

    def __init__(self, names, purpose, rounds=(2,)):
        self._lost = (set(names), purpose, rounds)

    def answers(self, name, request, reply):
        names, purpose, rounds = self._lost
        return None if name in names and request.purpose is purpose and request.round in rounds else reply


ALGORITHMS = [
    "fedavg",
    "fedprox",
    "scaffold",
    {"name": "scaffold", "option": "I"},
    {"name": "scaffold", "warm_start_rounds": 2},
    "fedavgm",
    "fedadam",
    "fedyogi",
    "fedadagrad",
]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_a_secure_run_ends_where_a_plain_one_does(algorithm, paths):
    plain = simulate(config(algorithm, secure=False), Named(), 5, paths("plain"))
    secure = simulate(config(algorithm), Named(), 5, paths("secure"))
    assert secure.status == plain.status == "finished"
    for name, vector in plain.state.vectors.items():
        # 20 bits for five nodes: a step of 2R/2^17 a round, and adaptive steps magnify what is near zero.
        tolerance = 2e-2 if algorithm in ("fedadam", "fedyogi", "fedadagrad") else 2e-3
        assert np.allclose(vector, secure.state.vectors[name], atol=tolerance), name
    rounds = events(paths("secure"), "round")
    assert [event["secure_sum"]["exchanges"] for event in rounds] == [4] * 4
    assert all(set(event["secure_sum"]["clipped"].values()) == {0} for event in rounds)
    open_rounds = events(paths("plain"), "round")
    for event, plain_event in zip(rounds, open_rounds, strict=True):
        assert event["train"]["examples"] == plain_event["train"]["examples"]
        assert event["train"]["loss"] == pytest.approx(plain_event["train"]["loss"], abs=5e-3)
    # A model's figures come with the first training that starts from it, the last one's with a sum of their own.
    [last] = events(paths("secure"), "evaluation")
    figures = [event["round_before"]["evaluate"] for event in rounds[1:]] + [last["evaluate"]]
    assert [event["round_before"]["round"] for event in rounds[1:]] == [1, 2, 3] and last["round"] == 4
    for found, plain_event in zip(figures, open_rounds, strict=True):
        assert found["examples"] == plain_event["evaluate"]["examples"]
        assert found["loss"] == pytest.approx(plain_event["evaluate"]["loss"], abs=5e-3)
    assert secure.best_round == plain.best_round


def test_scaffold_sends_one_vector_where_the_other_follows_from_it(paths):
    simulate(config(), Named(), 5, paths("one"))
    simulate(config({"name": "scaffold", "option": "I"}), Named(), 5, paths("two"))
    assert set(events(paths("one"), "round")[0]["secure_sum"]["ranges"]) == {"delta"}
    assert set(events(paths("two"), "round")[0]["secure_sum"]["ranges"]) == {"delta", "delta_c"}


@pytest.mark.parametrize("purpose", [Purpose.TRAIN, Purpose.MASK, Purpose.AGREE, Purpose.UNMASK])
def test_one_of_five_may_be_lost_at_any_stage(purpose, paths):
    run = paths()
    outcome = simulate(config("fedavg"), Named(), 5, run, faults=Lost({"node-3"}, purpose))
    assert outcome.status == "finished"
    second = events(run, "round")[1]
    in_sum = purpose in (Purpose.AGREE, Purpose.UNMASK)
    assert ("node-3" in second["replies"]) == in_sum
    assert second["secure_sum"]["survivors"] == 4 + in_sum
    assert not events(run, "round_failed")
    # It comes back, with fresh keys.
    assert all(len(event["replies"]) == 5 for event in events(run, "round")[2:])


@pytest.mark.parametrize("purpose", [Purpose.TRAIN, Purpose.MASK, Purpose.AGREE, Purpose.UNMASK])
def test_two_of_five_end_the_round_and_the_next_one_starts(purpose, paths):
    class Once(Lost):
        failed = 0

        def answers(self, name, request, reply):
            found = super().answers(name, request, reply)
            self.failed += found is None
            return found if self.failed <= 2 else reply

    run = paths()
    outcome = simulate(config("fedavg"), Named(), 5, run, faults=Once({"node-1", "node-3"}, purpose))
    assert outcome.status == "finished"
    [failed] = events(run, "round_failed")
    assert failed["round"] == 2 and "4" in failed["reason"]
    if purpose in (Purpose.TRAIN, Purpose.MASK):
        assert set(failed["failures"]) == {"node-1", "node-3"}
    assert [event["round"] for event in events(run, "round")] == [1, 2, 3, 4]


def test_sampled_cohorts_need_four_exchanges_too(paths):
    run = paths()
    simulate(config("fedavg", rounds=8, cohort={"size": 4}, evaluation={"every": 0}), Named(), 9, run)
    assert [event["secure_sum"]["exchanges"] for event in events(run, "round")] == [4] * 8
    assert {event["secure_sum"]["cohort"] for event in events(run, "round")} == {4}


def test_a_node_without_outstanding_keys_advertises_first(paths):
    class Restarted(Faults):
        def answers(self, name, request, reply):
            if name == "node-2" and request.purpose is Purpose.UNMASK and request.round == 1:
                return Reply(
                    request.purpose, request.run, request.round, request.attempt, failure=Failure(Reason.RESTARTED)
                )
            return reply

    run = paths()
    simulate(config("scaffold"), Named(), 5, run, faults=Restarted())
    found = events(run, "round")
    assert [event["secure_sum"]["exchanges"] for event in found] == [4, 5, 4, 4]
    assert all(len(event["replies"]) == 5 for event in found)
    assert "restarted" in found[0]["secure_sum"]["late"]["node-2"]


def test_held_out_nodes_have_a_sum_of_their_own(paths):
    run = paths()
    names = {f"n{i}": {"partition": i} for i in range(8)}
    tables = {"evaluation": {"holdout": ["n5", "n6", "n7"]}}
    simulate(config("fedavg", **tables), Named(), names, run)
    simulate(config("fedavg", secure=False, **tables), Named(), names, paths("plain"))
    for event, plain in zip(events(run, "round"), events(paths("plain"), "round"), strict=True):
        assert event["holdout"] == pytest.approx(plain["holdout"], abs=5e-3)


def test_too_few_nodes_are_refused_when_the_run_is_submitted():
    for tables in ({"cohort": {"size": 2}}, {"cohort": {"nodes": ["a", "b"]}}, {"evaluation": {"holdout": ["x"]}}):
        with pytest.raises(ValueError, match="a secure sum needs at least 3"):
            config("fedavg", **tables)


def test_a_task_that_does_not_declare_its_metrics_hears_so(paths):
    run = paths()
    outcome = simulate(config("fedavg", rounds=2), Task(), 5, run)
    assert outcome.status == "failed"
    assert "metric_names" in str(events(run, "round_failed")[0]["failures"])


def test_a_secure_run_resumes_with_its_ranges(paths):
    run = paths()

    class Dies(Faults):
        def delivers(self, name, request):
            if request.round == 3 and request.purpose is Purpose.MASK:
                raise KeyboardInterrupt
            return True

    stores = {}

    def store(name):
        from fedward_common.node import MemoryStore

        return stores.setdefault(name, MemoryStore())

    with pytest.raises(KeyboardInterrupt):
        simulate(config("fedavg"), Named(), 5, run, faults=Dies(), store=store)
    before = Checkpoints(run).newest()
    assert before is not None and before.round == 2 and before.scales is not None
    outcome = simulate(config("fedavg"), Named(), 5, run, store=store)
    assert outcome.status == "finished"
    plain = simulate(config("fedavg", secure=False), Named(), 5, paths("plain"))
    assert np.allclose(outcome.state.model, plain.state.model, atol=2e-3)
    # No second count of the examples: the scale came from the checkpoint.
    assert events(run, "round")[2]["secure_sum"]["exchanges"] == 4
