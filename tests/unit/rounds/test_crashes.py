"""The server dies at every step there is, replies get lost, nodes restart: the result must not change."""

import numpy as np
import pytest
from fedward_common.messages import Purpose
from fedward_server import checkpoint

from .world import Bomb, Bombed, Crash, Lossy, same_bits


@pytest.fixture
def armed(monkeypatch):
    """armed(bomb): the bomb also counts the steps before and after a checkpoint is renamed into place."""

    def arm(bomb):
        rename = checkpoint.os.rename

        def replace(source, target):
            bomb.tick()
            rename(source, target)
            bomb.tick()

        monkeypatch.setattr(checkpoint.os, "replace", replace)
        return bomb

    return arm


@pytest.mark.parametrize("nodes_restart", [False, True])
def test_a_crash_at_any_step_changes_nothing(world, armed, nodes_restart):
    tables = {"rounds": 3, "cohort": {"size": 2, "min_nodes": 3}, "evaluation": {"stop_metric": "loss"}}
    count = armed(Bomb())
    undisturbed = world(nodes=3, **tables)
    whole = undisturbed.run(Bombed(count), count)
    assert count.steps > 40
    for step in range(1, count.steps + 1):
        bomb = armed(Bomb(step))
        w = world(nodes=3, **tables)
        with pytest.raises(Crash):
            w.run(Bombed(bomb), bomb)
        if nodes_restart:
            for node in w.nodes.values():
                node.restart()
        again = w.run(Bombed(bomb), bomb)
        assert again.status == "finished" and same_bits(whole, again), f"after a crash at step {step}"
        assert [e["round"] for e in w.events("round")] == [1, 2, 3], f"after a crash at step {step}"
        assert [e["cohort"] for e in w.events("round")] == [e["cohort"] for e in undisturbed.events("round")]
        np.testing.assert_allclose(again.state.vectors["c"], w.mean_kept(), atol=1e-9)
        for node in w.nodes.values():
            stamps = [(r.round, r.attempt) for r in node.asked if r.purpose is Purpose.TRAIN]
            assert len(set(stamps)) == len(stamps), "a lost attempt could pass for the one that counted"


@pytest.mark.parametrize("seed", range(3))
def test_control_variates_survive_losses_and_crashes(world, armed, seed):
    """c = mean over all N of c_i after 50 rounds, a third of the messages lost, two crashes."""
    w = world(nodes=10, rounds=50, cohort={"size": 6, "quorum": 1, "min_nodes": 5}, evaluation={"every": 0})
    bomb = armed(Bomb(230, 600))
    faults = Lossy(bomb, rate=0.16, seed=seed)  # either way: 30 % of the round trips
    for _ in range(2):
        with pytest.raises(Crash):
            w.run(faults, bomb)
    outcome = w.run(faults, bomb)
    assert outcome.state.round == 50 and faults.lost > 60
    np.testing.assert_allclose(outcome.state.vectors["c"], w.mean_kept(), atol=1e-6)
    assert np.abs(outcome.state.vectors["c"]).max() < 10 and any(n.kept.any() for n in w.nodes.values())


def test_a_node_killed_in_mid_round_changes_nothing_but_its_round(world):
    w = world(rounds=4, cohort={"quorum": 1})

    class Dies(Bombed):
        def answers(self, name, request, reply):
            if (name, request.purpose.value, request.round) == ("node-1", "train", 2):
                w.nodes[name].restart()  # trained, stored, died before its reply was away
                return None
            return reply

    outcome = w.run(Dies(Bomb()))
    assert [len(e["replies"]) for e in w.events("round")] == [4, 3, 4, 4]
    np.testing.assert_allclose(outcome.state.vectors["c"], w.mean_kept(), atol=1e-9)


def test_a_resumed_run_waits_for_the_nodes_that_it_had(world):
    """One of them reconnects late; with min_nodes = 1 the run could go on without it, to another model."""
    whole = world(rounds=3).run()
    w = world(rounds=3)
    w.run(should_stop=lambda: bool(w.events("round")))
    looks = []

    class BackLater(Bombed):
        def online(self, name):
            looks.append(name)
            return name != "node-3" or looks.count(name) > 3

    again = w.run(BackLater(Bomb()))
    assert again.status == "finished" and same_bits(whole, again)
