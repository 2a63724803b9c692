"""Large uploads: announced, held by the nodes, admitted a few at a time."""

import numpy as np
import pytest
from fedward_common.messages import Purpose
from fedward_server import gathering
from fedward_server.gathering import wave_size
from fedward_server.simulation import Faults

from .world import SIZE, Shuffled, same_bits

UPDATE = 2 * SIZE * 8


class Watched(Shuffled):
    """Notes what is sent with TRAIN, and in which exchanges COLLECT goes out."""

    def __init__(self, seed=0):
        super().__init__(seed)
        self.waves, self.early = [], []

    def order(self, names):
        self.names = names
        return super().order(names)

    def delivers(self, name, request):
        if request.purpose is Purpose.COLLECT and self.names not in self.waves:
            self.waves.append(self.names)
        return True

    def answers(self, name, request, reply):
        if request.purpose is Purpose.TRAIN:
            self.early.append(dict(reply.vectors))
        return reply


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_uploads_come_in_waves_with_the_same_result(world, monkeypatch, at_once):
    plain = world(nodes=7, rounds=2).run()
    monkeypatch.setattr(gathering, "UPLOADS_AT_ONCE", at_once * UPDATE + 1)
    w, faults = world(nodes=7, rounds=2), Watched()
    outcome = w.run(faults)
    assert same_bits(plain, outcome)
    assert all(len(wave) <= at_once for wave in faults.waves) and len(faults.waves) >= 7 // at_once
    assert faults.early == [{}] * 14  # no update travels before it is asked for
    assert [len(e["replies"]) for e in w.events("round")] == [7, 7]


def test_uploads_begin_while_others_train(world, monkeypatch):
    monkeypatch.setattr(gathering, "UPLOADS_AT_ONCE", 2 * UPDATE + 1)
    w, order = world(nodes=6, rounds=1), []

    class Ordered(Faults):
        def delivers(self, name, request):
            order.append(request.purpose)
            return True

    w.run(Ordered())
    assert order.index(Purpose.COLLECT) < len(order) - 1 - order[::-1].index(Purpose.TRAIN)


def test_a_node_that_dies_after_announcing_costs_its_own_reply_only(world, monkeypatch):
    monkeypatch.setattr(gathering, "UPLOADS_AT_ONCE", UPDATE)
    w = world(nodes=5, rounds=2, cohort={"deadline": 100})
    rounds = w.rounds()

    class DiesInUpload(Faults):
        def answers(self, name, request, reply):
            if (name, request.purpose, request.round) == ("node-1", Purpose.COLLECT, 1):
                w.nodes[name].restart()
                rounds.clock.sleep(request.settings["seconds"])  # the server waits for all of the wave's share
                return None
            return reply

    rounds.transport._faults = DiesInUpload()
    outcome = rounds.run()
    first, second = w.events("round")
    assert first["failures"] == {"node-1": "upload_lost"} and len(first["replies"]) == 4
    assert len(second["replies"]) == 5 and first["seconds"] < 100
    np.testing.assert_allclose(outcome.state.vectors["c"], w.mean_kept(), atol=1e-9)


def test_an_upload_that_was_lost_is_asked_for_once_more(world, monkeypatch):
    monkeypatch.setattr(gathering, "UPLOADS_AT_ONCE", UPDATE)
    w = world(nodes=4, rounds=1, cohort={"deadline": 100})
    asked = []

    class LosesOne(Faults):
        def answers(self, name, request, reply):
            if (name, request.purpose) == ("node-1", Purpose.COLLECT):
                asked.append(request.settings["seconds"])
                return reply if len(asked) == 2 else None
            return reply

    assert w.run(LosesOne()).status == "finished"
    (event,) = w.events("round")
    assert len(event["replies"]) == 4 and not event["failures"]
    assert asked[1] <= 2 * asked[0]


def test_a_node_whose_uploads_are_all_lost_is_asked_twice(world, monkeypatch):
    monkeypatch.setattr(gathering, "UPLOADS_AT_ONCE", UPDATE)
    w = world(nodes=4, rounds=1, cohort={"deadline": 100})
    asked = []

    class LosesAll(Faults):
        def answers(self, name, request, reply):
            if (name, request.purpose) == ("node-1", Purpose.COLLECT):
                asked.append(name)
                return None
            return reply

    assert w.run(LosesAll()).status == "finished"
    (event,) = w.events("round")
    assert event["failures"] == {"node-1": "upload_lost"} and len(asked) == 2


def test_a_node_that_only_ever_announces_does_not_keep_the_server_busy(world, monkeypatch):
    monkeypatch.setattr(gathering, "UPLOADS_AT_ONCE", UPDATE)
    w = world(nodes=3, rounds=1)
    announced = {}

    class Stalls(Faults):
        def answers(self, name, request, reply):
            if name == "node-1":
                announced.setdefault(request.purpose, reply)
                return announced[Purpose.TRAIN] if request.purpose is Purpose.COLLECT else reply
            return reply

    assert w.run(Stalls()).status == "finished"
    (event,) = w.events("round")
    assert event["replies"] == ["node-0", "node-2"] and event["failures"]["node-1"].startswith("upload_lost")


def test_wave_size():
    shapes = {"delta": (10_000_000, np.dtype(np.float32))}
    assert wave_size(shapes, 1) is None
    assert wave_size(shapes, 2) == 1
    assert wave_size({"delta": (1_000_000, np.dtype(np.float32))}, 50) == 16
