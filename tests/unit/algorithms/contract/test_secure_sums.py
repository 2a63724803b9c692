"""Under secure aggregation a run ends where the plain one does, but for the rounding to whole numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from fedward_common.local import LocalRunner
from fedward_common.messages import Purpose
from fedward_common.node import MemoryStore
from fedward_common.summand import Shape
from fedward_common.work import Done, Work
from fedward_server import simulation
from fedward_server.events import read_events
from fedward_server.paths import RunPaths
from fedward_server.simulation import Faults, simulate

from .cases import NAMES, case, config, task
from .engine import Bad

pytestmark = pytest.mark.parametrize("name", NAMES)

NODES = {f"n{i}": {"n": 8 + 4 * i, "seed": i, "test": 4} for i in range(5)}
BITS = 32


class Gone(Faults):
    """Replies that never arrive: (round, purpose) -> node."""

    def __init__(self, gone):
        self.gone = gone

    def answers(self, name, request, reply):
        return None if self.gone.get((request.round, request.purpose)) == name else reply


class Run:
    """One simulated run: its outcome, what nodes keep, and its rounds' events."""

    def __init__(self, name, folder, secure, faults, rounds=4, every=1):
        stores = {node: MemoryStore() for node in NODES}
        table = {"enabled": secure, **({"bits": BITS, "range": 16.0} if secure else {})}
        run = config(name, rounds=rounds, secure_sum=table, evaluation={"every": every})
        paths = RunPaths(folder / ("secure" if secure else "plain"))
        self.outcome = simulate(
            run, task(name, torch.float64), NODES, paths, store=stores.__getitem__, faults=faults
        )
        assert self.outcome.status == "finished", self.outcome.reason
        self.kept = {node: store.committed()[1] for node, store in stores.items()}
        events = [event for event, _ in read_events(paths.events)]
        assert not [event for event in events if event["event"] == "round_failed"]
        self.rounds = [event for event in events if event["event"] == "round"]

    def rounding(self):
        """An upper bound of what rounding adds to a coordinate of the means, all rounds together: in each a node's
        coordinate moves by less than one level, 2R/L of (w/W)·x, and W is at most twice the mean weight."""
        levels = Shape((), (), BITS, len(NODES)).levels
        return sum(2 * 2 * max(event["secure_sum"]["ranges"].values()) / levels for event in self.rounds)


def agree(name, plain, secure):
    """Equal to within the rounding, enlarged by what training makes of it."""
    assert [event["replies"] for event in secure.rounds] == [event["replies"] for event in plain.rounds]
    assert all(set(event["secure_sum"]["clipped"].values()) <= {0} for event in secure.rounds)
    tolerance = case(name).sensitivity * secure.rounding()
    assert tolerance < 1e-3, "no statement left"
    assert set(secure.outcome.state.vectors) == set(plain.outcome.state.vectors)
    for key, vector in plain.outcome.state.vectors.items():
        np.testing.assert_allclose(secure.outcome.state.vectors[key], vector, rtol=0, atol=tolerance, err_msg=key)
    for node, kept in plain.kept.items():
        assert set(secure.kept[node]) == set(kept)
        for key, vector in kept.items():
            np.testing.assert_allclose(secure.kept[node][key], vector, rtol=0, atol=tolerance, err_msg=f"{node} {key}")


def test_a_secure_run_ends_where_the_plain_one_does(name, tmp_path):
    """Nodes drop out before they have dealt shares, and before they have sent their vector (not in the sum), and
    when the sum is unmasked (in it)."""
    drops = {(2, Purpose.MASK): "n3", (3, Purpose.UNMASK): "n1", (4, Purpose.TRAIN): "n2"}
    secure = Run(name, tmp_path, True, Gone(drops))
    plain = Run(name, tmp_path, False, Gone({(2, Purpose.TRAIN): "n3", (4, Purpose.TRAIN): "n2"}))
    agree(name, plain, secure)
    assert [len(event["replies"]) for event in secure.rounds] == [5, 4, 5, 4]
    for event, plain_event in zip(secure.rounds, plain.rounds, strict=True):
        assert event["train"] == pytest.approx(plain_event["train"], abs=1e-4)


@contextmanager
def spoilt(bad: dict[str, Bad]) -> Iterator[None]:
    """Simulated nodes of these names make something else of their work."""

    class Spoilt(LocalRunner):
        def __init__(self, config, task, node, *more):
            super().__init__(config, task, node, *more)
            self._bad: Callable[[Work, Done], Done] = bad.get(node, lambda work, done: done)

        def do(self, work: Work) -> Done:
            return self._bad(work, super().do(work))

    with patch.object(simulation, "LocalRunner", Spoilt):
        yield


def test_a_bad_update_does_not_pass_its_own_node(name, tmp_path):
    """NaN, another length, weight 0, one node a round: refused in the node's gate, named, and the others go on."""

    def changed(round_, change):
        return lambda work, done: change(done) if work.op == "train" and work.round == round_ else done

    def nan(done):
        group = next(iter(done.vectors))
        return replace(done, vectors={**done.vectors, group: np.full_like(done.vectors[group], np.nan)})

    def short(done):
        return replace(done, vectors={group: vector[:-1] for group, vector in done.vectors.items()})

    bad = {
        "n1": changed(1, nan),
        "n3": changed(2, short),
        "n0": changed(3, lambda done: replace(done, weight=0.0)),
    }
    with spoilt(bad):
        secure = Run(name, tmp_path, True, None, rounds=3, every=0)
    for event, node in zip(secure.rounds, bad, strict=True):
        assert set(event["failures"]) == {node}
        assert event["failures"][node].startswith("bad_update")
    drops = {(1, Purpose.TRAIN): "n1", (2, Purpose.TRAIN): "n3", (3, Purpose.TRAIN): "n0"}
    agree(name, Run(name, tmp_path, False, Gone(drops), rounds=3, every=0), secure)
