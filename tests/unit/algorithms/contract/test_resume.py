"""A run whose server dies goes on from its checkpoint, bit for bit."""

from __future__ import annotations

import pytest
from fedward_common.messages import Purpose
from fedward_server.events import EventLog
from fedward_server.simulation import Faults

from .cases import NAMES, config, task
from .engine import Federation, Killed

pytestmark = pytest.mark.parametrize("name", NAMES)


class KilledInRound(Faults):
    """The server dies when two nodes have answered."""

    def __init__(self, round_):
        self.round, self.answered = round_, 0

    def answers(self, name, request, reply):
        self.answered += request.purpose is Purpose.TRAIN and request.round == self.round
        if self.answered == 2:
            raise Killed
        return reply


class KilledAfterCheckpoint(EventLog):
    """The server dies between a round's checkpoint and its announcement."""

    def __init__(self, path, round_):
        super().__init__(path)
        self.round = round_

    def append(self, kind, **fields):
        if kind == "round" and fields["round"] == self.round:
            raise Killed
        return super().append(kind, **fields)


def test_a_resumed_run_ends_with_the_same_bits(name, tmp_path):
    """Server and nodes start anew, once in the middle of a round and once right after a checkpoint."""
    tables = {"rounds": 4, "cohort": {"size": 3, "min_nodes": 4}}
    whole = Federation(tmp_path / "whole", config(name, **tables), task(name))
    expected = whole.bits(whole.run())

    fed = Federation(tmp_path / "killed", config(name, **tables), task(name))
    for died in ({"faults": KilledInRound(2)}, {"log": KilledAfterCheckpoint(fed.paths.events, 3)}):
        with pytest.raises(Killed):
            fed.run(**died)
        for site in fed.sites.values():
            site.start()
    assert fed.bits(fed.run()) == expected
    assert [event["round"] for event in fed.events("round")] == [1, 2, 3, 4]
    assert [event["resumed_from"] for event in fed.events("run_started")] == [None, 1, 3]
