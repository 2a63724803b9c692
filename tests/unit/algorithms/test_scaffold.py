"""SCAFFOLD's invariant and the traps that public implementations fell into."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from fedward_common.algorithms.base import Cohort
from fedward_common.errors import ConfigError
from fedward_common.messages import Purpose, Reason, Request, Stamp
from fedward_common.update import Kind, Update
from small_federation import Classes, Federation, configure

LOCAL = {"lr": 0.05, "steps": 3, "batch_size": 4, "momentum": 0.3}
NODES = {f"n{i}": {"n": 6 + i, "seed": i} for i in range(5)}


def federation(dtype=torch.float64, **options):
    return Federation(configure({"name": "scaffold", **options}, LOCAL), Classes(dtype), NODES)


def drift(fed):
    """Largest |c − mean over all N of c_i|, nodes that never took part counted as zero."""
    zero = np.zeros(fed.layout.size(Kind.TRAINABLE))
    kept = [fed.kept(name).get("c_i", zero).astype(np.float64) for name in fed.nodes]
    return float(np.abs(fed.state.vectors["c"] - np.mean(kept, axis=0)).max())


@pytest.mark.parametrize("option", ["I", "II"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_c_is_the_mean_of_all_c_i_whatever_is_lost(option, dtype, tolerance):
    fed = federation(dtype, option=option)
    chance = random.Random(7)
    losses = 0
    for _ in range(50):
        cohort = chance.sample(sorted(fed.nodes), 3)
        lost = {name for name in cohort if chance.random() < 0.3}
        losses += len(lost)
        fed.round(cohort, lost)
        assert drift(fed) < tolerance
    assert losses > 30
    assert np.abs(fed.state.vectors["c"]).max() > 1e-3
    for name, node in fed.nodes.items():
        reply = node.handle(Request(Purpose.FINISH, "run", included=fed.included.get(name)))
        assert reply.failure is None
        assert fed.stores[name].pending() is None
    assert drift(fed) < tolerance


def test_a_lost_reply_keeps_the_old_c_i():
    fed = federation()
    fed.round()
    fed.round()
    before = fed.kept("n0")["c_i"].copy()
    fed.round(lost={"n0"})
    np.testing.assert_array_equal(fed.kept("n0")["c_i"], before)
    fed.ask("n0")
    assert fed.stores["n0"].committed()[0] == fed.included["n0"]
    np.testing.assert_array_equal(fed.stores["n0"].committed()[1]["c_i"], before)


def test_c_moves_by_replied_over_enrolled():
    fed = federation()
    replies = fed.round(["n0", "n1"])
    change = sum(reply.vectors["delta_c"] for reply in replies)
    np.testing.assert_allclose(fed.state.vectors["c"], change / 5, rtol=1e-12)


def test_c_starts_at_zero_and_the_first_round_is_uniform_local_sgd():
    fed = federation()
    assert not fed.state.vectors["c"].any()
    start = fed.state.model
    replies = fed.round()
    expected = start + np.mean([reply.vectors["delta"] for reply in replies], axis=0)
    np.testing.assert_allclose(fed.state.model, expected, rtol=1e-12)


def test_control_variates_cover_trainable_tensors_only():
    """A huge c changes no float buffer beyond what the changed weights do, and has no entry for one."""
    fed = federation()
    trainable = fed.layout.size(Kind.TRAINABLE)
    assert len(fed.state.vectors["c"]) == trainable
    assert trainable + fed.layout.size(Kind.STATISTIC) + 1 == sum(spec.size for spec in fed.layout.tensors)
    groups = {"delta": np.zeros(trainable), "delta_c": np.full(trainable, 1e6)}
    groups["statistic"] = np.zeros(fed.layout.size(Kind.STATISTIC))
    after = fed.algorithm.server(fed.state, Update(groups, 5.0), Cohort(1, 5, 5, 5))
    np.testing.assert_array_equal(after.vectors["statistic"], fed.state.vectors["statistic"])


def test_correction_goes_through_momentum():
    """With a zero gradient everywhere the displacement is −mass · (c − c_i)."""
    from fedward_common.work import Work
    from small_federation import Quadratic

    config = configure("scaffold", {"lr": 0.1, "steps": 4, "momentum": 0.9})
    fed = Federation(config, Quadratic([1.0]), {"n": {"a": [0.0], "b": [0.0]}})
    message = {**fed.algorithm.broadcast(fed.state), "c": np.array([2.0])}
    done = fed.runners["n"].do(Work("train", 1, message, {"c_i": np.array([0.5])}))
    b, mass = 0.0, 0.0
    for _ in range(4):
        b = 0.9 * b + 1
        mass += 0.1 * b
    np.testing.assert_allclose(done.vectors["delta"], -mass * 1.5, rtol=1e-12)
    # The gradient was zero, so the new control variate is zero.
    np.testing.assert_allclose(done.state["c_i"], 0.0, atol=1e-12)


def test_epochs_are_refused_without_clipping():
    with pytest.raises(ConfigError, match=r"local\.epochs = 2 .*local\.steps.*max_corrected_norm"):
        configure("scaffold", {"lr": 0.1, "epochs": 2})
    configure({"name": "scaffold", "max_corrected_norm": 1.0}, {"lr": 0.1, "epochs": 2})


def test_a_node_that_lost_its_state_is_told_apart():
    fed = federation()
    fed.round()
    fed.stores["n0"].drop_pending()
    reply = fed.ask("n0")
    assert reply.failure is not None
    assert reply.failure.reason is Reason.STATE_DIVERGED
    assert isinstance(fed.included["n0"], Stamp)
