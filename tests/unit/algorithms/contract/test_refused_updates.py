"""Updates that are no updates: refused by the node's own gate and by the server's, named, and the round goes on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fedward_common.algorithms.registry import build
from fedward_common.messages import Purpose
from fedward_common.update import Kind
from fedward_server.simulation import Faults

from .cases import LOCAL, NAMES, config, kind, task
from .engine import NODES, Federation, Undelivered

pytestmark = pytest.mark.parametrize("name", NAMES)


def _each(vectors, change):
    return {group: change(vector) for group, vector in vectors.items()}


def _one_nan(vector):
    out = vector.copy()
    out[-1] = np.nan
    return out


VECTORS = {
    "nan": lambda v: _each(v, _one_nan),
    "infinite": lambda v: _each(v, lambda x: np.full_like(x, np.inf)),
    "short": lambda v: _each(v, lambda x: x[:-1]),
    "broadcast": lambda v: _each(v, lambda x: x[:1] if len(x) > 1 else np.append(x, x)),
    "square": lambda v: _each(v, lambda x: x.reshape(1, -1)),
    "integers": lambda v: _each(v, lambda x: x.astype(np.int64)),
    "halves": lambda v: _each(v, lambda x: x.astype(np.float16)),
    "empty": lambda v: {},
    "one-missing": lambda v: dict(list(v.items())[1:]),
    "one-more": lambda v: {**v, "more": next(iter(v.values()))},
}
"""What is sent instead of the groups."""
WEIGHTS = {"zero": 0.0, "negative": -1.0, "not-a-number": np.nan, "infinite-weight": np.inf, "huge": 1e8}


def sites(names):
    honest = dict(list(NODES.items())[:2])
    return {**honest, **{name: {"n": 6, "seed": 1, "test": 3} for name in names}}


def federation(name, folder, names):
    local = {**LOCAL, "steps": 1}
    run = config(name, local=local, rounds=2, evaluation={"every": 0}, cohort={"quorum": 2})
    return Federation(folder, run, task(name), sites(names))


class Lies(Faults):
    """In round 2 these nodes' replies are changed on their way: name -> change."""

    def __init__(self, changes):
        self.changes = changes

    def answers(self, name, request, reply):
        change = self.changes.get(name)
        return change(reply) if change and request.purpose is Purpose.TRAIN and request.round == 2 else reply


def test_the_server_refuses_and_names_them(name, tmp_path):
    changes = {key: lambda reply, f=change: replace(reply, vectors=f(reply.vectors)) for key, change in VECTORS.items()}
    changes |= {key: lambda reply, w=weight: replace(reply, weight=w) for key, weight in WEIGHTS.items()}
    if kind(name).uniform:
        changes["heavy"] = lambda reply: replace(reply, weight=2.0)
    changes["metric"] = lambda reply: replace(reply, metrics={"loss": float("nan")})
    fed = federation(name, tmp_path / "lied", changes)
    found = fed.bits(fed.run(Lies(changes)))
    failures = fed.events("round")[1]["failures"]
    assert set(failures) == set(changes)
    assert all(text.startswith("bad_update") for text in failures.values())
    groups = build(fed.config.algorithm).sends(fed.sites["n0"].layout)
    for key in ("nan", "infinite", "short", "broadcast", "square", "integers", "halves"):
        assert any(f"group {group!r}" in failures[key] for group in groups)
    # As if nobody had asked them.
    expected = federation(name, tmp_path / "never", changes)
    assert found == expected.bits(expected.run(Undelivered(set(changes), 2)))


class Leaving(Faults):
    """Sees that nothing of a refused update has left its node, and that nothing of it is kept."""

    def __init__(self, fed, names):
        self.fed, self.names, self.refused = fed, names, set()

    def answers(self, name, request, reply):
        if request.purpose is Purpose.TRAIN and request.round == 2 and name in self.names:
            assert reply.failure is not None and not reply.vectors
            assert self.fed.sites[name].store.pending() is None
            self.refused.add(name)
        return reply


def test_the_nodes_own_gate_refuses_them_and_nothing_is_kept(name, tmp_path):
    few = {key: VECTORS[key] for key in ("nan", "short", "integers", "one-missing")}
    changes = {key: lambda done, f=change: replace(done, vectors=f(done.vectors)) for key, change in few.items()}
    changes |= {key: lambda done, w=WEIGHTS[key]: replace(done, weight=w) for key in ("zero", "not-a-number")}
    changes["kept-more"] = lambda done: replace(done, state={**done.state, "more": np.zeros(1)})
    of_kept = {
        "kept-nan": lambda done: replace(done, state=_each(done.state, _one_nan)),
        "kept-short": lambda done: replace(done, state=_each(done.state, lambda x: x[:-1])),
        "kept-missing": lambda done: replace(done, state={}),
    }
    names = [*changes, *of_kept]
    fed = federation(name, tmp_path / "spoilt", names)
    layout = fed.sites["n0"].layout
    if build(fed.config.algorithm).keeps(layout) or layout.size(Kind.PRIVATE):
        changes |= of_kept
    for key, change in changes.items():
        fed.sites[key].bad = lambda work, done, f=change: f(done) if (work.op, work.round) == ("train", 2) else done
    leaving = Leaving(fed, changes)
    found = fed.bits(fed.run(leaving))
    failures = fed.events("round")[1]["failures"]
    assert set(failures) == set(changes) == leaving.refused
    assert all(text.startswith("bad_update") for text in failures.values())
    expected = federation(name, tmp_path / "never", names)
    assert found == expected.bits(expected.run(Undelivered(set(changes), 2)))
