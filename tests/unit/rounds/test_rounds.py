"""The engine from PREPARE to FINISH over real `Participant`s in memory."""

import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest
from fedward_common.files import write_atomic
from fedward_common.messages import Failure, Purpose, Reason
from fedward_server.fencing import Fenced
from fedward_server.simulation import Faults

from .world import LAYOUT, SIZE, Shuffled, same_bits


def test_the_model_is_the_mean_of_the_nodes_work(world):
    w = world(rounds=1)
    outcome = w.run()
    deltas = [np.vectorize(Fraction)(n.execute(_train_work()).vectors["delta"]) for n in w.nodes.values()]
    expected = (sum(deltas) / len(deltas)).astype(float)
    assert outcome.status == "finished"
    np.testing.assert_allclose(outcome.state.model, expected, atol=2**-36)


def _train_work():
    from fedward_common.work import Work

    return Work("train", 1, {"model": np.zeros(SIZE), "c": np.zeros(SIZE)})


def test_scaffold_reaches_the_optimum_of_the_sum(world):
    """50 rounds of 5 steps: against the closed form, not against our own arithmetic."""
    w = world(rounds=120)
    outcome = w.run()
    weights = [n.curvature for n in w.nodes.values()]
    optimum = sum(a * n.optimum for a, n in zip(weights, w.nodes.values(), strict=True)) / sum(weights)
    np.testing.assert_allclose(outcome.state.model, optimum, atol=1e-8)


def test_events_tell_the_whole_story(world):
    w = world(rounds=2)
    w.run()
    assert [e["event"] for e in w.events()] == ["run_started", "round", "round", "run_finished"]
    started, first = w.events()[:2]
    assert started["nodes"] == sorted(w.nodes) and started["resumed_from"] is None
    assert first["cohort"] == first["replies"] == sorted(w.nodes) and first["failures"] == {}
    assert first["weight"] == 4 and first["train"]["examples"] == 40
    assert first["train"]["loss"] == pytest.approx(np.mean([1 + n.curvature for n in w.nodes.values()]) / 10)
    assert first["evaluate"]["examples"] == 40 and first["holdout"] is None
    assert first["bytes_down"] > 0 and first["bytes_up"] == 4 * 2 * SIZE * 8


@pytest.mark.parametrize("seed", range(3))
def test_order_of_arrival_leaves_no_trace(world, seed):
    assert same_bits(world(rounds=4).run(), world(rounds=4).run(Shuffled(seed)))


class _Answering(Faults):
    """Named nodes answer TRAIN with something else."""

    def __init__(self, **changes):
        self.changes = changes

    def answers(self, name, request, reply):
        change = self.changes.get(name.replace("-", "_"))
        return change(reply) if change and request.purpose is Purpose.TRAIN else reply


def _poisoned(reply):
    return dataclasses.replace(reply, vectors={**reply.vectors, "delta": np.full(SIZE, np.nan)})


def test_failing_nodes_are_left_out_named_and_counted(world):
    w = world(nodes=8, rounds=1, cohort={"quorum": 1})
    bad = _Answering(
        node_1=_poisoned,
        node_2=lambda r: dataclasses.replace(r, vectors={}),
        node_3=lambda r: None,
        node_4=lambda r: dataclasses.replace(r, failure=Failure(Reason.OUT_OF_MEMORY)),
        node_5=lambda r: dataclasses.replace(r, attempt=r.attempt - 1),
        node_6=lambda r: dataclasses.replace(r, weight=-1.0),
    )
    w.nodes["node-7"].execute = None  # what the worker runs raises
    w.nodes["node-7"].restart()
    outcome = w.run(bad)
    (event,) = w.events("round")
    assert event["replies"] == ["node-0"]
    reasons = {name: text.split(" ")[0] for name, text in event["failures"].items()}
    assert reasons == {
        "node-1": "bad_update",
        "node-2": "bad_update",
        "node-3": "no_reply",
        "node-4": "out_of_memory",
        "node-5": "bad_update",
        "node-6": "bad_update",
    }
    assert "node-7" in w.events("waiting")[0]["missing"]  # it broke in PREPARE, so it is not in the run
    alone = w.nodes["node-0"].execute(_train_work()).vectors["delta"]
    np.testing.assert_allclose(outcome.state.model, alone, atol=2**-36)


def test_without_quorum_the_model_stays_and_the_run_ends_after_so_many(world):
    w = world(rounds=2, cohort={"quorum": 3, "max_failed_rounds": 2})
    outcome = w.run(_Answering(node_0=lambda r: None, node_1=_poisoned))
    assert outcome.status == "failed" and "quorum is 3" in outcome.reason
    assert outcome.state.round == 0 and not outcome.state.model.any()
    failed = w.events("round_failed")
    assert [e["round"] for e in failed] == [1, 1]
    assert set(failed[0]["failures"]) == {"node-0", "node-1"}


def test_a_round_that_failed_is_tried_again_and_nodes_keep_in_step(world):
    w = world(rounds=3, cohort={"quorum": 4})

    class LosesOnce(Faults):
        lost = 0

        def answers(self, name, request, reply):
            if (name, request.purpose, request.round) == ("node-2", Purpose.TRAIN, 2) and not self.lost:
                self.lost += 1
                return None
            return reply

    outcome = w.run(LosesOnce())
    assert [e["round"] for e in w.events("round_failed")] == [2]
    assert same_bits(outcome, world(rounds=3, cohort={"quorum": 4}).run())
    np.testing.assert_allclose(outcome.state.vectors["c"], w.mean_kept(), atol=1e-9)


def test_the_deadline_closes_a_round_with_what_has_arrived(world):
    w = world(rounds=1, cohort={"deadline": 60, "quorum": 2}, evaluation={"every": 0})
    rounds = w.rounds()

    class Slow(Faults):
        def answers(self, name, request, reply):
            if (name, request.purpose) == ("node-2", Purpose.TRAIN):
                rounds.clock.sleep(100)
            return reply

    rounds.transport._faults = Slow()
    assert rounds.run().status == "finished"
    (event,) = w.events("round")
    assert event["replies"] == ["node-0", "node-1"]
    assert event["failures"] == {"node-2": "no_reply", "node-3": "no_reply"}
    seconds = [r.settings["seconds"] for r in w.nodes["node-0"].asked if r.purpose is Purpose.TRAIN]
    assert 0 < seconds[0] <= 60


def test_nodes_are_told_what_is_left_of_the_deadline_and_finish_commits(world):
    w = world(rounds=1)
    w.run()
    for node in w.nodes.values():
        assert node.purposes() == [Purpose.PREPARE, Purpose.TRAIN, Purpose.EVALUATE, Purpose.FINISH]
        assert node.store.pending() is None and node.store.committed()[0].round == 1
        assert node.asked[0].settings["layout"] == LAYOUT.digest()


def test_extra_settings_travel_with_prepare(world):
    w = world(rounds=1)
    w.run(prepare_settings=lambda: {"roster": {"signed": True}})
    assert w.nodes["node-0"].asked[0].settings["roster"] == {"signed": True}


def test_holdout_is_evaluated_and_never_trained(world):
    w = world(rounds=2, evaluation={"holdout": ["node-3"]})
    w.run()
    assert Purpose.TRAIN not in w.nodes["node-3"].purposes()
    assert w.events("run_started")[0]["nodes"] == ["node-0", "node-1", "node-2"]
    last = w.events("round")[-1]
    assert last["evaluate"]["examples"] == 30 and last["holdout"]["examples"] == 10
    assert last["holdout"]["loss"] != last["evaluate"]["loss"]


def test_evaluation_every_so_often_and_at_the_end(world):
    w = world(rounds=5, evaluation={"every": 2})
    w.run()
    assert [e["round"] for e in w.events("round") if e["evaluate"]] == [2, 4, 5]


def test_a_node_that_cannot_evaluate_is_named_and_the_round_stands(world):
    w = world(rounds=1)

    class Broken(Faults):
        def answers(self, name, request, reply):
            if request.purpose is Purpose.EVALUATE and name != "node-0":
                metrics = {"node-1": {"examples": math.nan}, "node-2": {"examples": 10.0, "loss": 1e308}}
                return dataclasses.replace(reply, metrics=metrics[name]) if name in metrics else None
            return reply

    assert w.run(Broken()).status == "finished"
    (event,) = w.events("round")
    assert event["evaluate"]["examples"] == 10
    assert set(event["evaluate_failures"]) == {"node-1", "node-2", "node-3"}


def test_central_evaluation(world):
    w = world(rounds=2, evaluation={"every": 0, "central": True})
    w.run(central=lambda vectors: {"examples": 2.0, "accuracy": 2.0 * vectors["model"].size})
    assert [e["central"] for e in w.events("round")] == [{"examples": 2.0, "accuracy": SIZE}] * 2


def test_early_stop_goes_by_the_metric_and_keeps_the_best(world):
    scores = iter([0.1, 0.5, 0.4, 0.5, 0.3, 0.9])
    w = world(rounds=6, evaluation={"every": 0, "central": True, "stop_metric": "accuracy", "stop_patience": 3})
    outcome = w.run(central=lambda vectors: {"examples": 1.0, "accuracy": next(scores)})
    assert (outcome.status, outcome.state.round, outcome.best_round) == ("early_stopped", 5, 2)
    assert w.events("run_finished")[0]["best_round"] == 2
    # Started again, it sees from the checkpoint that it had stopped.
    assert w.run(central=lambda vectors: pytest.fail("no further round")).status == "early_stopped"


def test_early_stop_for_a_loss(world):
    losses = iter([3.0, 2.0, 2.5, 2.6])
    options = {"every": 0, "central": True, "stop_metric": "loss", "stop_mode": "min", "stop_patience": 2}
    outcome = world(rounds=9, evaluation=options).run(central=lambda v: {"examples": 1.0, "loss": next(losses)})
    assert (outcome.state.round, outcome.best_round) == (4, 2)


def test_an_unknown_stop_metric_ends_the_run_with_the_known_ones(world):
    outcome = world(evaluation={"stop_metric": "acuracy"}).run()
    assert outcome.status == "failed" and "['examples', 'loss']" in outcome.reason


class _Presence(Faults):
    """Who is online, by how often one has looked."""

    def __init__(self, **looks):
        self.looks, self.seen = looks, {}

    def online(self, name):
        self.seen[name] = self.seen.get(name, 0) + 1
        first, last = self.looks.get(name.replace("-", "_"), (0, 10**9))
        return first <= self.seen[name] <= last


def test_the_run_waits_for_min_nodes_and_says_for_whom(world):
    w = world(rounds=1, cohort={"min_nodes": 4})
    assert w.run(_Presence(node_3=(4, 10**9))).status == "finished"
    waiting = w.events("waiting")
    assert waiting[0]["ready"] == ["node-0", "node-1", "node-2"] and waiting[0]["needed"] == 4
    assert w.events("round")[0]["replies"] == sorted(w.nodes)


def test_too_few_nodes_fail_the_run_with_reasons(world):
    w = world(cohort={"nodes": ["node-0", "node-1", "node-9"], "min_nodes": 3, "wait": 30})

    class Refuses(Faults):
        def answers(self, name, request, reply):
            if name == "node-1" and request.purpose is Purpose.PREPARE:
                return dataclasses.replace(reply, failure=Failure(Reason.POLICY, "max_epochs = 1"))
            return reply

    outcome = w.run(Refuses())
    assert outcome.status == "failed"
    assert "1 of 3" in outcome.reason and "node-1: policy (max_epochs = 1)" in outcome.reason
    assert "node-9: offline" in outcome.reason
    assert [e["event"] for e in w.events()] == ["waiting", "run_finished"]
    assert Purpose.TRAIN not in w.nodes["node-0"].purposes()


def test_a_node_of_another_layout_is_refused(world):
    w = world(cohort={"nodes": ["node-0", "node-1"], "min_nodes": 2, "wait": 5})
    node = w.nodes["node-1"]
    plain = node.execute
    node.execute = lambda work: dataclasses.replace(
        plain(work), info={"layout": LAYOUT.to_json().replace('"w"', '"v"')}
    )
    node.restart()
    assert "layout_differs" in w.run().reason


def test_a_named_node_that_comes_late_joins_and_others_stay_outside(world):
    named = {"nodes": ["node-0", "node-1", "node-2"], "min_nodes": 2}
    w = world(rounds=4, cohort=named)

    class Late(Faults):
        def online(self, name):
            return name != "node-2" or Purpose.TRAIN in w.nodes["node-0"].purposes()

    outcome = w.run(Late())
    cohorts = [e["cohort"] for e in w.events("round")]
    assert cohorts[0] == ["node-0", "node-1"] and cohorts[-1] == ["node-0", "node-1", "node-2"]
    assert w.events("round")[0]["failures"] == {"node-2": "offline"}
    assert w.nodes["node-3"].asked == []
    kept = np.mean([w.nodes[name].kept for name in named["nodes"]], axis=0)
    np.testing.assert_allclose(outcome.state.vectors["c"], kept, atol=1e-9)


def test_a_node_that_went_away_is_passed_over_and_prepares_again(world):
    w = world(rounds=5)

    class Away(Faults):
        def online(self, name):
            return name != "node-1" or len(w.events("round")) != 1

    w.run(Away())
    assert [len(e["cohort"]) for e in w.events("round")] == [4, 3, 3, 4, 4]
    assert [e["failures"].get("node-1", "")[:7] for e in w.events("round")] == ["", "offline", "no_repl", "", ""]
    assert w.nodes["node-1"].purposes().count(Purpose.PREPARE) == 2


def test_a_stranger_that_comes_later_is_not_asked(world):
    w = world(rounds=3)
    w.run(_Presence(node_3=(8, 10**9)))
    assert w.nodes["node-3"].asked == []
    assert w.events("run_started")[0]["nodes"] == ["node-0", "node-1", "node-2"]


def test_cohorts_are_drawn_and_recorded(world):
    w = world(nodes=9, rounds=5, cohort={"size": 3})
    rounds = w.rounds()
    rounds.run()
    cohorts = [e["cohort"] for e in w.events("round")]
    assert all(len(set(cohort)) == 3 for cohort in cohorts) and len({tuple(c) for c in cohorts}) > 1
    last = rounds._checkpoints.newest()
    assert [[last.enrolled[i] for i in cohort] for cohort in last.cohorts] == cohorts


def test_stop_file_ends_after_the_round_and_the_run_goes_on_bit_identical(world):
    whole = world(rounds=5).run()
    w = world(rounds=5)

    class Stops(Faults):
        def answers(self, name, request, reply):
            if request.purpose is Purpose.TRAIN and request.round == 2:
                w.paths.stop.touch()
            return reply

    first = w.run(Stops())
    assert (first.status, first.state.round) == ("stopped", 2)
    w.paths.stop.unlink()
    second = w.run()
    assert second.status == "finished" and same_bits(whole, second)
    assert w.events("run_started")[1]["resumed_from"] == 2
    assert [e["round"] for e in w.events("round")] == [1, 2, 3, 4, 5]


def test_should_stop_also_ends_the_waiting(world):
    outcome = world(cohort={"min_nodes": 9, "wait": 1e5}).run(should_stop=lambda: True)
    assert (outcome.status, outcome.state.round) == ("stopped", 0)


def test_an_older_process_may_not_write(world):
    w = world(rounds=3)

    class TakenOver(Faults):
        def answers(self, name, request, reply):
            if request.purpose is Purpose.TRAIN and request.round == 2:
                write_atomic(w.paths.owner, b'{"epoch": 7, "pid": 1, "created": 0, "command": []}')
            return reply

    with pytest.raises(Fenced, match="epoch 1 may not write"):
        w.run(TakenOver())
    assert [e["round"] for e in w.events("round")] == [1]
    w.epoch = 6
    assert w.run().status == "finished"


def test_values_that_overflow_in_the_servers_step_fail_the_round(world, monkeypatch):
    w = world(cohort={"max_failed_rounds": 1})
    rounds = w.rounds()
    step = rounds.algorithm.server
    monkeypatch.setattr(
        rounds.algorithm, "server", lambda *a: step(*a).with_vectors(model=np.full(SIZE, np.inf)), raising=False
    )
    outcome = rounds.run()
    assert outcome.status == "failed" and "not finite" in outcome.reason and np.isfinite(outcome.state.model).all()
