"""What the mechanisms release, from nodes whose data are known: real engine, protocol, masks and ledger."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fedward_common.config import RunConfig, parse_config
from fedward_common.local import LocalRunner
from fedward_common.messages import Purpose, Reply, Request
from fedward_common.privacy import noise, site
from fedward_common.privacy.cost import round_cost
from fedward_common.privacy.events import DiscreteGaussian, Event, SampledGaussian, Skellam, from_json
from fedward_common.privacy.ledger import verify
from fedward_common.secagg.masks import Keystream
from fedward_common.secagg.packing import PackedSum, pack
from fedward_common.task import Data
from fedward_common.work import Work
from fedward_server.events import read_events
from fedward_server.paths import RunPaths
from fedward_server.simulation import Faults, simulate
from torch import nn
from torch.utils.data import TensorDataset

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Release:
    """One noisy sum and what is known of it.

    found, true: (d,), the sum as it was released, and without noise. bound: the most that one unit moves it, in L2.
    claimed: the standard deviation, over `bound`, that the noise in a coordinate must have, by the event that stands in
    the ledger and by who was in the sum.
    """

    found: Array
    true: Array
    bound: float
    claimed: float

    @property
    def noise(self) -> Array:
        """What was added, as a multiple of what is claimed."""
        return (self.found - self.true) / (self.bound * self.claimed)


@dataclass(frozen=True)
class Canaries:
    """Units that were put into one release if their own coin said so, and what an attacker makes of it.

    scores, included: (m,), as `one_run` takes them. events: what the release costs, by its own account.
    """

    scores: Array
    included: np.ndarray[Any, np.dtype[np.bool_]]
    events: list[tuple[Event, int]]


@dataclass(frozen=True)
class Mechanism:
    """One that is audited. releases: some of it, run in a folder. canaries: one release full of them. weaken: multiply
    the noise. repeat: draw the same noise each time."""

    releases: Callable[[Path], list[Release]]
    canaries: Callable[[], Canaries]
    weaken: Callable[[pytest.MonkeyPatch, float], None]
    repeat: Callable[[pytest.MonkeyPatch], None]


def spread(event: Event) -> float:
    """Standard deviation of an event's noise over the L2 sensitivity that it counts with."""
    if isinstance(event, Skellam):
        return math.sqrt(event.variance) / event.l2
    if isinstance(event, DiscreteGaussian):
        return math.sqrt(event.nodes) * event.sigma / event.l2
    if isinstance(event, SampledGaussian):
        return event.noise_multiplier
    raise TypeError(f"say what the noise of {event} is")


# Runs over nodes whose data are known

NODES, LENGTH, CLIP = 8, 1000, 0.5
ROUNDS = 8


class Known:
    """A record is a vector v, and its loss −⟨w, v⟩: one step of SGD with learning rate 1 moves w by the mean of them.
    vectors: (nodes, records, LENGTH). Two records in a row are of one patient."""

    def __init__(self, vectors: Array) -> None:
        self.vectors = vectors

    def model(self) -> nn.Module:
        model = nn.Linear(LENGTH, 1, bias=False)
        nn.init.zeros_(model.weight)
        return model

    def data(self, config: Mapping[str, Any]) -> Data:
        own = torch.tensor(self.vectors[config.get("partition", 0)], dtype=torch.float32)
        return Data(TensorDataset(own), groups=np.arange(len(own)) // 2)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return -model(batch[0]).mean()

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, float]:
        return {}


class Eavesdropper(Faults):
    """Keeps every model that is sent out. Nodes go after they have dealt their shares: none, one or two in a round; one
    more is gone after it has sent its masked vector."""

    def __init__(self) -> None:
        self.models: dict[int, Array] = {}

    def delivers(self, name: str, request: Request) -> bool:
        if request.purpose is Purpose.TRAIN:
            self.models[request.round] = request.vectors["model"].astype(np.float64)
        return True

    def answers(self, name: str, request: Request, reply: Reply) -> Reply | None:
        index = (int(name.removeprefix("node-")) + request.round) % NODES
        gone = request.purpose is Purpose.MASK and index < request.round % 3
        silent = request.purpose is Purpose.UNMASK and index == 2
        return None if gone or silent else reply


def config(privacy: Mapping[str, Any], **tables: Any) -> RunConfig:
    """At most two of the eight drop out and one colludes, so that a sum has five honest ones."""
    return parse_config(
        {
            "name": "audited", "task": "t:Known", "rounds": ROUNDS, "algorithm": {"name": "fedavg"},
            "local": {"lr": 1.0, "steps": 1}, "cohort": {"min_nodes": NODES}, "evaluation": {"every": 0},
            "secure_sum": {"bits": 16, "dropout": 0.25, "corrupt": 0.125, "range": 2.0},
            "privacy": {"clip": CLIP, "noise_multiplier": 1.5, **privacy},
            **tables,
        }
    )  # fmt: skip


HONEST = 5


@dataclass(frozen=True)
class Heard:
    """What one round of a run gave away: who was in the sum, by how much the model moved, the events of the round and
    of the ledger."""

    nodes: list[int]
    moved: Array
    told: Mapping[str, Any]
    event: Event
    count: int


def heard(run: RunConfig, vectors: Array, folder: Path) -> list[Heard]:
    """Each round of a run over `vectors`."""
    paths, spy = RunPaths(folder), Eavesdropper()
    outcome = simulate(run, Known(vectors), NODES, paths, faults=spy)
    assert outcome.status == "finished", outcome.reason
    spy.models[ROUNDS + 1] = outcome.state.model.astype(np.float64)
    told = [event for event, _ in read_events(paths.events) if event["event"] == "round"]
    ledger = verify(paths.ledger).releases
    assert [release.round for release in ledger] == [event["round"] for event in told] == list(range(1, ROUNDS + 1))
    found = []
    for release, event in zip(ledger, told, strict=True):
        nodes = [int(name.removeprefix("node-")) for name in event["replies"]]
        assert len(nodes) == NODES - release.round % 3
        moved = spy.models[release.round + 1] - spy.models[release.round]
        found.append(Heard(nodes, moved, event, from_json(release.event), release.count))
    return found


def drawn(nodes: int, records: int) -> Array:
    """Vectors of norms below, at and far above the clip."""
    rng = np.random.default_rng(5)
    vectors = rng.normal(size=(nodes, records, LENGTH))
    norms = CLIP * np.resize([0.1, 0.5, 1.0, 1.0, 2.0, 3.0, 10.0, 100.0], (nodes, records))
    return vectors * (norms / np.linalg.norm(vectors, axis=2))[:, :, None]


def clipped(vectors: Array, bound: float) -> Array:
    """Along the last axis."""
    norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors * np.minimum(1.0, bound / norms)


# Hiding sites


def site_releases(privacy: Mapping[str, Any], folder: Path) -> list[Release]:
    run, vectors = config({"unit": "site", **privacy}), drawn(NODES, 1)
    parameters = run.secure_sum.parameters(NODES)
    assert parameters.survivors - parameters.colluders == HONEST
    releases = []
    for round_ in heard(run, vectors, folder):
        bound, there = round_.told["privacy"].get("clip", CLIP), len(round_.nodes)
        # What the nodes beyond the honest bring, if they bring any, comes on top of what is accounted for.
        surplus = math.sqrt(there / HONEST) if privacy["mechanism"] == "distributed" else 1.0
        true = clipped(vectors[round_.nodes, 0], bound).sum(axis=0)
        releases.append(Release(round_.moved * there, true, bound, spread(round_.event) * surplus))
    return releases


def site_canaries(privacy: Mapping[str, Any]) -> Canaries:
    """One sum with the least noise that is allowed: of 1000 sites 800 are left, 200 of which side with the server, add
    no noise and know what they added. Each of the other 600 is a canary, whose update is of norm C in a direction of
    its own, or zero. (Masks are left out: of sums under masks, `site_releases` says that they are exact.)"""
    run = config({"unit": "site", **privacy, "noise_multiplier": 2.0}, secure_sum={"bits": 20})
    made, of = site.mechanism(run, LENGTH, 1000), site.Stamped("run", 1, 0)
    parameters = run.secure_sum.parameters(1000)
    m = parameters.survivors - parameters.colluders
    directions, included = _canaries(m)
    total = PackedSum(made.shape.length, made.shape.bits)
    for direction, there in zip(directions, included, strict=True):
        total.add(pack(made.words(CLIP * direction * there, of), made.shape.bits))
    mean = made.mean(total.total(), m, of).groups["delta"]
    return Canaries(directions @ mean, included, [(made.event, 1)])


# Hiding records and patients


def sampled_releases(unit: str, folder: Path) -> list[Release]:
    """Every unit takes part in each of two steps: only then is it known what is there beside the noise."""
    records, steps = 6, 2
    run = config({"unit": unit, "sampling_rate": 1.0}, local={"lr": 1.0, "steps": steps, "batch_size": 4})
    vectors = drawn(NODES, records)
    units = vectors if unit == "record" else vectors[:, ::2] + vectors[:, 1::2]
    releases = []
    for round_ in heard(run, vectors, folder):
        there = len(round_.nodes)
        assert round_.count == steps
        # Each node alone brings in each step what is accounted for.
        claimed = spread(round_.event) * math.sqrt(there * steps)
        true = steps * clipped(units[round_.nodes], CLIP).sum(axis=(0, 1))
        releases.append(Release(round_.moved * there * units.shape[1], true, CLIP, claimed))
    return releases


def sampled_canaries(unit: str, scans: int = 1) -> Canaries:
    """One node's training, eight steps over half of the units. Each of 600 units is there or is not; its gradient is of
    norm C in a direction of its own. scans: how many records of a person there are whom the run takes for as many."""
    privacy = {"unit": unit, "sampling_rate": 0.5, "noise_multiplier": 6.0}
    run = config(privacy, local={"lr": 1.0, "steps": 8, "batch_size": 256})
    directions, included = _canaries(600)
    there = CLIP * directions[included]
    if unit == "patient":
        there = np.repeat(there, 2, axis=0)  # each record of a patient is as long as all of them may be together
    there = np.repeat(there, scans, axis=0)
    runner = LocalRunner(run, Known(there[None]), "node", {})
    moved = runner.do(Work("train", 1, runner.do(Work("initial")).vectors)).vectors["delta"]
    cost = round_cost(run, LENGTH, NODES)
    return Canaries(directions @ moved, included, [(cost.event, cost.count)])


def _canaries(m: int) -> tuple[Array, np.ndarray[Any, np.dtype[np.bool_]]]:
    """Orthogonal directions, (m, LENGTH), and a coin for each."""
    directions = np.linalg.qr(np.random.default_rng(6).normal(size=(LENGTH, m)))[0].T
    return directions, np.array([secrets.randbits(1) for _ in range(m)], bool)


# All of them


def weaken(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """Whoever draws integer noise gets so much of it."""
    draw = noise.Noise.draw

    def less(self: noise.Noise, count: int, stream: Any = None) -> noise.Whole:
        return np.rint(factor * draw(self, count, stream)).astype(np.int32)

    monkeypatch.setattr(noise.Noise, "draw", less)


def repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """As from a generator that is seeded alike each time."""
    monkeypatch.setattr(noise, "Keystream", lambda: Keystream(bytes(32)))


_SITES: dict[str, dict[str, Any]] = {
    "site, distributed": {"mechanism": "distributed"},
    "site, distributed, discrete Gaussian": {"mechanism": "distributed", "noise": "discrete-gaussian"},
    "site, central": {"mechanism": "central"},
    "site, central, adaptive clip": {"mechanism": "central", "clip_quantile": 0.5},
}
MECHANISMS = {
    name: Mechanism(partial(site_releases, privacy), partial(site_canaries, privacy), weaken, repeat)
    for name, privacy in _SITES.items()
} | {
    unit: Mechanism(partial(sampled_releases, unit), partial(sampled_canaries, unit), weaken, repeat)
    for unit in ("record", "patient")
}
