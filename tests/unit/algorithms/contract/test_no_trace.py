"""What did not count leaves no trace: lost replies, dead processes, lost disks, evaluations."""

from __future__ import annotations

import random
import shutil

import numpy as np
import pytest
from fedward_server.simulation import Faults

from .cases import NAMES, case, config, kind, task
from .engine import NODES, Federation, Lost, Undelivered, kept_by_all

pytestmark = pytest.mark.parametrize("name", NAMES)

ROUNDS = 3


def federation(name, folder, **tables):
    tables = {"rounds": ROUNDS, "evaluation": {"every": 0}, **tables}
    return Federation(folder, config(name, **tables), task(name))


def test_work_that_was_lost_leaves_no_trace(name, tmp_path):
    """Bit for bit the run in which the node was never asked: its reply was lost; its process died after it had saved
    its state and before the reply was away; its process died before."""
    never = federation(name, tmp_path / "never")
    expected = never.bits(never.run(Undelivered({"n1"}, 2)))
    assert [event["replies"] for event in never.events("round")] == [[*NODES], ["n0", "n2", "n3"], [*NODES]]

    lost = federation(name, tmp_path / "lost")
    assert lost.bits(lost.run(Lost({"n1"}, 2))) == expected

    died = federation(name, tmp_path / "died")

    def dies_after(node):
        assert died.sites[node].store.pending() is not None
        died.sites[node].start()

    assert died.bits(died.run(Lost({"n1"}, 2, dies_after))) == expected

    early = federation(name, tmp_path / "early")

    def dies_before(work, done):
        if work.op == "train" and work.round == 2:
            early.sites["n1"].start()
            raise RuntimeError("killed")
        return done

    early.sites["n1"].bad = dies_before
    assert early.bits(early.run()) == expected
    assert early.events("round")[1]["failures"] == {"n1": "worker_crashed (see the log)"}


class Storm(Faults):
    """Three of ten messages to train are lost, half of those after the node died with its work saved."""

    def __init__(self, fed, seed):
        self.fed, self.chance, self.lost = fed, random.Random(seed), 0

    def answers(self, name, request, reply):
        if request.purpose != "train" or self.chance.random() > 0.3:
            return reply
        self.lost += 1
        if self.chance.random() < 0.5:
            self.fed.sites[name].start()
        return None


def test_what_the_server_mirrors_is_what_nodes_keep(name, tmp_path):
    """Over all N nodes, whatever was lost."""
    if not kind(name).mirrored:
        assert not case(name).mirrors
        pytest.skip("the server holds no counterpart of what nodes keep")
    assert case(name).mirrors, "a mirrored algorithm says in cases.py which vectors mirror each other"
    fed = federation(name, tmp_path, rounds=12, cohort={"size": 3, "quorum": 1})
    storm = Storm(fed, seed=3)
    outcome = fed.run(storm)
    assert outcome.status == "finished" and storm.lost > 5
    for kept, (mirror, over_all) in case(name).mirrors.items():
        vector = outcome.state.vectors[mirror]
        assert np.abs(vector).max() > 1e-3
        own = over_all(kept_by_all(fed, kept), axis=0)
        np.testing.assert_allclose(vector, own, rtol=0, atol=1e-5 * np.abs(vector).max())


def test_a_node_that_lost_its_disk_goes_on_or_is_named(name, tmp_path):
    """A mirrored one may not go on as if it were new."""
    fed = federation(name, tmp_path)

    def burns(node):
        shutil.rmtree(tmp_path / node)
        fed.sites[node].start()

    fed.run(Lost({"n1"}, 2, burns))
    third = fed.events("round")[2]
    if kind(name).mirrored:
        assert third["replies"] == ["n0", "n2", "n3"]
        assert third["failures"]["n1"].startswith("state_diverged")
    else:
        assert third["replies"] == [*NODES]


def test_evaluations_leave_no_trace(name, tmp_path):
    with_, without = (
        federation(name, tmp_path / f"every-{every}", evaluation={"every": every}) for every in (1, 0)
    )
    expected = without.bits(without.run())
    assert with_.bits(with_.run()) == expected
    assert all(event["evaluate"]["examples"] == 20 for event in with_.events("round"))
