"""One slow node does not stall a round; a usual one is waited for."""

from __future__ import annotations

from fedward_server.patience import Patience
from fedward_server.transport import Clock


class Watch:
    def __init__(self) -> None:
        self.time = 0.0
        self.patience = Patience(Clock(lambda: self.time, lambda seconds: None))


def test_a_stage_waits_for_several_times_what_the_others_took() -> None:
    watch = Watch()
    stage = watch.patience.stage("mask", 3, floor=1.0)
    for at in (1.0, 2.0, 4.0):
        watch.time = at
        assert not stage.over()
        stage.answered()
    watch.time = 8.0
    assert not stage.over()
    watch.time = 8.1
    assert stage.over()


def test_never_before_enough_have_answered_nor_before_the_floor() -> None:
    watch = Watch()
    stage = watch.patience.stage("mask", 2, floor=5.0)
    stage.answered()
    watch.time = 1e6
    assert not stage.over()
    watch.time = 0.1
    stage.answered()
    watch.time = 4.9
    assert not stage.over()
    watch.time = 5.1
    assert stage.over()


def test_a_node_that_is_always_slow_is_waited_for_the_next_time() -> None:
    watch = Watch()
    first = watch.patience.stage("start", 2, floor=1.0)
    for at in (5.0, 5.5, 9.0):
        watch.time = at
        first.answered()
    watch.time = 100.0
    second = watch.patience.stage("start", 2, floor=1.0)
    for at in (100.1, 100.2):
        watch.time = at
        second.answered()
    # Others were quick this time; the slowest of the last round took 9 s.
    watch.time = 117.9
    assert not second.over()
    watch.time = 118.1
    assert second.over()


def test_stages_are_told_apart_and_none_is_needed_at_once() -> None:
    watch = Watch()
    stage = watch.patience.stage("advertise", 0, floor=2.0)
    watch.time = 1.9
    assert not stage.over()
    watch.time = 2.1
    assert stage.over()
