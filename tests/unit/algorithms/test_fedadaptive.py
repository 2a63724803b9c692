"""Weights by label distribution, against the formulas written down once more."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from contract.cases import Points
from fedward_common.algorithms.fedadaptive import FedAdaptive, FedAdaptiveOptions, hellinger, kl
from fedward_common.errors import ConfigError, TaskError
from fedward_common.local import LocalRunner
from fedward_common.messages import Purpose
from fedward_common.steps import DEALT, MASKED, REVEALED, SIGNATURES
from fedward_common.task import Data
from fedward_common.update import Layout
from fedward_common.work import Work
from fedward_server.events import read_events
from fedward_server.paths import RunPaths
from fedward_server.simulation import Faults, simulate
from hypothesis import given
from hypothesis import strategies as st
from small_federation import Federation, configure
from torch import nn
from torch.utils.data import TensorDataset

LOCAL = {"lr": 0.1, "steps": 3, "batch_size": 4}
COUNTS = {"a": (4, 4, 4), "b": (6, 2, 1), "c": (0, 1, 11)}


class Skewed(Points):
    """Points whose labels have the counts that the node's data configuration names."""

    def data(self, config):
        generator = torch.Generator().manual_seed(config["seed"])
        y = torch.repeat_interleave(torch.arange(len(config["counts"])), torch.tensor(config["counts"]))
        y = y[torch.randperm(len(y), generator=generator)]
        x = torch.randn(len(y), 4, generator=generator, dtype=self.dtype)
        x[:, 0] += y
        return Data(TensorDataset(x, y), TensorDataset(x, y))


def nodes(counts=None):
    return {name: {"counts": list(own), "seed": i} for i, (name, own) in enumerate((counts or COUNTS).items())}


def federation(counts=None, task=None, **options):
    table = {"name": "fedadaptive", "classes": 3, **options}
    return Federation(configure(table, LOCAL), task or Skewed(torch.float64), nodes(counts))


def made(**options):
    return FedAdaptive(FedAdaptiveOptions(classes=3, **options))


def weights(options, counts=COUNTS, summed=None):
    """u_i in plain Python."""
    summed = summed or [sum(column) for column in zip(*counts.values(), strict=True)]
    found = {}
    for name, own in counts.items():
        n, total = sum(own), sum(summed)
        pairs = [(k / n, q / total) for k, q in zip(own, summed, strict=True)]
        if options["distance"] == "kl":
            distance = sum(p * math.log(p / q) for p, q in pairs if p)
        else:
            distance = math.sqrt(sum((math.sqrt(p) - math.sqrt(q)) ** 2 for p, q in pairs) / 2)
        phi = options["floor"] + (1 - options["floor"]) * math.exp(-options["strength"] * distance)
        found[name] = n * phi
    return found


@pytest.mark.parametrize("distance", ["hellinger", "kl"])
def test_rounds_follow_the_formulas(distance):
    """Round 1 weighs by examples and sums the labels; from round 2 on the weights are u_i and the model is Σuy/Σu."""
    options = {"distance": distance, "strength": 3.0, "floor": 0.2}
    fed = federation(**options)
    first = fed.round()
    assert [reply.weight for reply in first] == [12, 9, 12]
    np.testing.assert_allclose(fed.state.vectors["labels"], [10, 7, 16], rtol=1e-14)
    expected = weights(options)
    for _ in range(2):
        start = fed.state.model
        replies = dict(zip(fed.nodes, fed.round(), strict=True))
        assert {name: reply.weight for name, reply in replies.items()} == pytest.approx(expected, rel=1e-12)
        mean = sum(expected[name] * replies[name].vectors["delta"] for name in expected) / sum(expected.values())
        np.testing.assert_allclose(fed.state.model, start + mean, rtol=1e-12)
        # Told once: the server's sum stays that of all nodes.
        np.testing.assert_allclose(fed.state.vectors["labels"], [10, 7, 16], rtol=1e-14)
    assert expected["c"] < 0.6 * 12 < expected["a"]


def test_distances_of_known_pairs():
    disjoint = np.array([1.0, 0, 0]), np.array([0, 0.25, 0.75])
    assert hellinger(*disjoint) == pytest.approx(1.0) and kl(*disjoint) == math.inf
    same = np.array([0.2, 0.3, 0.5])
    assert hellinger(same, same) == kl(same, same) == 0
    # KL of (1/2, 1/2) to (1/4, 3/4) is ln 2 − ½ ln 3; Hellinger² is 1 − (√2 + √6)/4.
    half, other = np.array([0.5, 0.5]), np.array([0.25, 0.75])
    assert kl(half, other) == pytest.approx(math.log(2) - math.log(3) / 2)
    assert hellinger(half, other) == pytest.approx(math.sqrt(1 - (math.sqrt(2) + math.sqrt(6)) / 4))


def test_the_discount_starts_at_one_falls_and_ends_at_the_floor():
    uniform = np.ones(3) / 3
    for distance in ("hellinger", "kl"):
        algorithm = made(distance=distance, strength=2.0, floor=0.25)
        assert algorithm.discount(uniform, uniform) == 1.0
        shares = np.linspace(1 / 3, 1, 20)
        found = [algorithm.discount(np.array([s, (1 - s) / 2, (1 - s) / 2]), uniform) for s in shares]
        assert found == sorted(found, reverse=True) and found[-1] > 0.25
    assert made(distance="kl", floor=0.25).discount(uniform, np.array([0.5, 0.5, 0])) == 0.25
    assert made(distance="kl", strength=0.0).discount(uniform, np.array([0.5, 0.5, 0])) == 1.0
    assert made().discount(uniform, None) == 1.0


labels = st.lists(st.integers(0, 10**6), min_size=3, max_size=3).filter(any)


@given(labels, labels, st.floats(0, 100), st.floats(1e-3, 0.999), st.sampled_from(["hellinger", "kl"]))
def test_the_discount_is_within_floor_and_one(own, all_, strength, floor, distance):
    algorithm = made(strength=strength, floor=floor, distance=distance)
    counts = np.array(own, np.float64)
    phi = algorithm.discount(counts / counts.sum(), np.array(all_) / sum(all_))
    assert floor <= phi <= 1
    assert algorithm.discount(counts / counts.sum(), counts / counts.sum()) == 1.0


def test_no_strength_is_fedavg_bit_for_bit():
    mine = federation(strength=0.0)
    plain = Federation(configure("fedavg", LOCAL), Skewed(torch.float64), nodes())
    for _ in range(4):
        mine.round()
        plain.round()
        for name, vector in plain.state.vectors.items():
            assert mine.state.vectors[name].tobytes() == vector.tobytes()


def test_each_node_tells_its_labels_once_and_in_the_census_only():
    fed = federation(census_rounds=2, strength=2.0)
    lost = fed.round(lost={"b"})
    assert lost[1].vectors["labels"].any()
    np.testing.assert_allclose(fed.state.vectors["labels"], [4, 5, 15], rtol=1e-14)
    # b was not in the sum, so it tells again, now at a weight of its own; the others have told.
    a, b, c = fed.round(["a", "b", "c"])
    assert not a.vectors["labels"].any() and not c.vectors["labels"].any()
    summed = weights({"distance": "hellinger", "strength": 2.0, "floor": 0.1}, summed=[4, 5, 15])
    assert b.weight == pytest.approx(summed["b"])
    np.testing.assert_allclose(b.vectors["labels"] * b.weight, COUNTS["b"], rtol=1e-14)
    np.testing.assert_allclose(fed.state.vectors["labels"], [10, 7, 16], rtol=1e-14)
    short = federation(census_rounds=1)
    short.round(lost={"b"})
    for _ in range(2):
        assert not any(reply.vectors["labels"].any() for reply in short.round())
    np.testing.assert_allclose(short.state.vectors["labels"], [4, 5, 15], rtol=1e-14)
    assert short.kept("b")["told"] == 0 and short.kept("a")["told"] == 1


def test_labels_are_read_once():
    calls = Counter()

    class Counted(Skewed):
        def labels(self, dataset):
            calls[len(dataset)] += 1
            return super().labels(dataset)

    fed = federation({"a": (4, 4, 4), "b": (6, 2, 1)}, Counted(torch.float64))
    for _ in range(4):
        fed.round()
    assert calls == {12: 1, 9: 1}


def test_a_count_below_zero_is_none():
    """Only a node that lies can bring it about; without any count there is no distribution."""
    algorithm = made()
    state = algorithm.initial(Layout(()), {"model": np.zeros(2)})
    assert "labels" not in algorithm.broadcast(state)
    np.testing.assert_array_equal(
        algorithm.broadcast(state.with_vectors(labels=np.array([-1.0, 3.0, 1.0])))["labels"], [0, 0.75, 0.25]
    )
    assert "labels" not in algorithm.broadcast(state.with_vectors(labels=np.array([-1.0, 0.0, 0.0])))


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (torch.zeros(9), "1-D integer tensor"),
        (torch.zeros(9, 1, dtype=torch.int64), r"returned \(9, 1\)"),
        (list(range(9)), "returned list"),
        (torch.zeros(8, dtype=torch.int64), "8 labels for 9 examples"),
        (torch.full((9,), 3), r"labels from 3 to 3, but algorithm\.classes = 3.*0 to 2"),
        (torch.full((9,), -1), "labels from -1 to -1"),
    ],
)
def test_labels_that_are_none_are_refused(found, message):
    class Wrong(Skewed):
        def labels(self, dataset):
            return found

    config = configure({"name": "fedadaptive", "classes": 3}, LOCAL)
    runner = LocalRunner(config, Wrong(), "b", nodes()["b"])
    start = {key: v for key, v in runner.do(Work("initial")).vectors.items() if key != "counter"}
    with pytest.raises(TaskError, match=message):
        runner.do(Work("train", 1, start))


def test_a_task_without_labels_is_refused_when_it_is_prepared():
    class Without(Skewed):
        labels = None

    config = configure({"name": "fedadaptive", "classes": 3}, LOCAL)
    with pytest.raises(TaskError, match=r"Without lacks labels, .*'fedadaptive' asks(.|\n)*dataset\.tensors\[1\]"):
        LocalRunner(config, Without(), "b", nodes()["b"]).do(Work("prepare"))


@pytest.mark.parametrize("unit", ["record", "patient", "site"])
def test_privacy_is_refused(unit):
    privacy = {"unit": unit, "clip": 1.0, "noise_multiplier": 1.0}
    privacy |= {"mechanism": "distributed"} if unit == "site" else {"sampling_rate": 0.1}
    tables = {"privacy": privacy, "secure_sum": {}, "evaluation": {"every": 0}}
    with pytest.raises(ConfigError, match=f"fedadaptive' with privacy.unit = '{unit}': label counts"):
        configure({"name": "fedadaptive", "classes": 3}, LOCAL, **tables)


def test_options():
    for wrong in ({}, {"classes": 1}, {"classes": 3, "floor": 0.0}, {"classes": 3, "strength": -1.0}):
        with pytest.raises(ConfigError):
            configure({"name": "fedadaptive", **wrong}, LOCAL)


class Overheard(Faults):
    """All that nodes send to the server."""

    def __init__(self):
        self.replies = []

    def answers(self, name, request, reply):
        self.replies.append((request.purpose, reply))
        return reply


def test_under_secure_aggregation_the_server_sees_sums_only(tmp_path, monkeypatch):
    """No reply holds a histogram, a weight or a metric; the server's half gets the sum, and it is the right one. A
    class that nobody has stays at zero exactly, so that no distribution has a negative entry."""
    counts = {"a": (4, 4, 4, 0), "b": (6, 2, 1, 0), "c": (0, 1, 11, 0), "d": (5, 0, 3, 0)}
    seen = []
    half = FedAdaptive.server

    def server(self, state, mean, cohort):
        seen.append((mean, half(self, state, mean, cohort)))
        return seen[-1][1]

    monkeypatch.setattr(FedAdaptive, "server", server)
    table = {"name": "fedadaptive", "classes": 4, "strength": 2.0}
    config = configure(table, LOCAL, rounds=3, secure_sum={"enabled": True})
    heard = Overheard()
    outcome = simulate(config, Skewed(torch.float64), nodes(counts), RunPaths(tmp_path / "run"), faults=heard)
    assert outcome.status == "finished"
    secret = {DEALT, MASKED, SIGNATURES, REVEALED, "advertisement"}
    assert {purpose for purpose, _ in heard.replies} > {Purpose.TRAIN, Purpose.MASK}
    for _, reply in heard.replies:
        assert set(reply.vectors) <= secret and all(vector.dtype == np.uint8 for vector in reply.vectors.values())
        assert reply.weight == 0 and not reply.metrics
        assert set(reply.info) <= {"seconds", "layout"}
    (first, after), *later = seen
    np.testing.assert_allclose(first.groups["labels"] * first.weight, [15, 7, 19, 0], atol=1e-4)
    np.testing.assert_allclose(after.vectors["labels"], [15, 7, 19, 0], atol=1e-4)
    expected = weights({"distance": "hellinger", "strength": 2.0, "floor": 0.1}, counts)
    for mean, state in later:
        assert not mean.groups["labels"].any()
        assert mean.weight == pytest.approx(sum(expected.values()), rel=1e-3)
        assert state.vectors["labels"][3] == 0 and (state.vectors["labels"] >= 0).all()
    rounds = [event for event, _ in read_events(tmp_path / "run" / "events.jsonl") if event["event"] == "round"]
    assert all(not any(event["secure_sum"]["clipped"].values()) for event in rounds)


def test_a_large_node_with_other_labels_loses_weight_in_the_model():
    """Five balanced nodes and a sixth, as large as all of them, which has one class alone: the model errs less on
    balanced data than FedAvg's."""

    class Linear(Skewed):
        def model(self):
            return nn.Linear(4, 3, dtype=self.dtype)

    counts = {f"n{i}": (6, 6, 6) for i in range(5)} | {"outlier": (0, 0, 90)}
    local = {"lr": 0.3, "steps": 15, "batch_size": 8}
    losses = {}
    for table in ({"name": "fedavg"}, {"name": "fedadaptive", "classes": 3, "strength": 5.0}):
        fed = Federation(configure(table, local), Linear(torch.float64), nodes(counts))
        for _ in range(6):
            fed.round()
        model = {"model": fed.state.model}
        done = [fed.runners[f"n{i}"].do(Work("evaluate", 7, model)).metrics for i in range(5)]
        losses[table["name"]] = sum(one["loss"] for one in done) / sum(one["examples"] for one in done)
    assert losses["fedadaptive"] < 0.9 * losses["fedavg"]
