"""Runs by site at their edges: odd models and updates, nodes that fail, and crashes between a ledger and a release."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fedward_client.accounts import NodeAccounts
from fedward_common.config import RunConfig, parse_config
from fedward_common.messages import Failure, Purpose, Reason, Reply, Request
from fedward_common.node import MemoryStore, Refused
from fedward_common.privacy import site
from fedward_common.privacy.anchor import default_place
from fedward_common.privacy.budget import Limits, accounted, composed
from fedward_common.privacy.ledger import Release, verify
from fedward_common.secure import SecureParticipant, Standing
from fedward_common.steps import MASKED
from fedward_common.summand import Shape, Words
from fedward_common.task import Data
from fedward_common.update import Update
from fedward_server.events import read_events
from fedward_server.paths import RunPaths
from fedward_server.secure import SumFailed, Summed
from fedward_server.simulation import Faults, simulate
from secagg import federation
from torch import nn
from torch.utils.data import TensorDataset

torch.set_num_threads(1)

N = 5
BOTH = pytest.mark.parametrize("mechanism", ["distributed", "central"])


def config(mechanism: str, noise: float = 1e-3, **tables: Any) -> RunConfig:
    """One step of learning rate 1, so that an update is minus the gradient; next to no noise unless told."""
    return parse_config(
        {
            "name": "edges", "task": "t:T", "rounds": 1, "algorithm": {"name": "fedavg"},
            "local": {"lr": 1.0, "steps": 1}, "cohort": {"min_nodes": N}, "evaluation": {"every": 0},
            "secure_sum": {"bits": 16},
            "privacy": {"unit": "site", "mechanism": mechanism, "clip": 1.0, "noise_multiplier": noise},
            **tables,
        }
    )  # fmt: skip


# Models and updates


class Scalar(nn.Module):
    """One number, and a counter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor(0.0))
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, batch: Any) -> Any:
        self.steps += 1
        return self.x * batch[0].mean()


class Pulled:
    """x moves by what the node has: by its number if it is below the clip."""

    def __init__(self, of: Callable[[int], float] = lambda i: 0.1 * i) -> None:
        self.of = of

    def model(self) -> nn.Module:
        return Scalar()

    def data(self, config: dict[str, Any]) -> Data:
        return Data(TensorDataset(torch.tensor([self.of(config.get("partition", 0))])))

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return -model(batch)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, float]:
        return {}


def stamps(ledger: Path) -> list[tuple[int, int]]:
    return [(release.round, release.attempt) for release in verify(ledger).releases]


def rounds(paths: RunPaths) -> list[dict[str, Any]]:
    return [event for event, _ in read_events(paths.events) if event["event"] == "round"]


@BOTH
def test_a_model_of_one_number_and_a_counter(tmp_path: Path, mechanism: str) -> None:
    """Neither a tensor without dimensions nor an integer buffer is in the way; the counter stays where it is."""
    outcome = simulate(config(mechanism), Pulled(), N, RunPaths(tmp_path))
    assert outcome.status == "finished", outcome.reason
    assert outcome.state.model.shape == (1,) and outcome.state.vectors["counter"] == [0]
    # Noise of 0.001 in the sum over five, rounding of less.
    np.testing.assert_allclose(outcome.state.model, [0.2], atol=0.002)


@BOTH
@pytest.mark.parametrize("size", [1, 2, 33])
def test_a_zero_vector_is_nothing_but_zero(mechanism: str, size: int) -> None:
    """Without its noise, to within a rounding of each node."""
    made = site.mechanism(config(mechanism, noise=2.0**-10), size, N)
    of = site.Stamped("run", 1, 0)
    total = sum(made.words(np.zeros(size, np.float32), of).astype(np.int64) for _ in range(N))
    found = made.mean((total % (1 << made.shape.bits)).astype(np.uint32), N, of).groups["delta"]
    assert found.shape == (size,) and np.abs(found).max() < 0.01


# Nodes that fail


class Empty(Pulled):
    def data(self, config: dict[str, Any]) -> Data:
        if config.get("partition") == 3:
            return Data(TensorDataset(torch.zeros(0)))
        return super().data(config)


@BOTH
@pytest.mark.parametrize("task", [Empty(), Pulled(lambda i: np.nan if i == 3 else 0.1 * i)], ids=["no data", "NaN"])
def test_a_node_that_has_nothing_to_give_is_left_out(tmp_path: Path, mechanism: str, task: Pulled) -> None:
    """One without data, one with a gradient that is no number: the sum is that of the others, their number its
    denominator, and the noise is what it was."""
    outcome = simulate(config(mechanism), task, N, RunPaths(tmp_path))
    assert outcome.status == "finished", outcome.reason
    (told,) = rounds(RunPaths(tmp_path))
    assert told["replies"] == ["node-0", "node-1", "node-2", "node-4"] and set(told["failures"]) == {"node-3"}
    np.testing.assert_allclose(outcome.state.model, [0.7 / 4], atol=0.002)
    (released,) = verify(RunPaths(tmp_path).ledger).releases
    other = tmp_path / "other"
    simulate(config(mechanism), Pulled(), N, RunPaths(other))
    assert verify(RunPaths(other).ledger).releases[0].event == released.event


def test_where_all_fail_nothing_is_spent(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    outcome = simulate(config("distributed"), Pulled(lambda i: np.inf), N, paths)
    assert outcome.status == "failed" and not verify(paths.ledger).releases


# Crashes: the server


class Crash(BaseException):
    """The process is gone."""


class Dies(Faults):
    """The server, once, when it has sent so many requests of a purpose. accounted: of each request to unmask a sum,
    whether the ledger had it by then."""

    def __init__(self, purpose: Purpose, after: int, paths: RunPaths) -> None:
        self.purpose, self.left, self.paths = purpose, after, paths
        self.accounted: list[bool] = []

    def delivers(self, name: str, request: Request) -> bool:
        if request.purpose is Purpose.UNMASK:
            self.accounted.append((request.round, request.attempt) in stamps(self.paths.ledger))
        self.left -= request.purpose is self.purpose
        if self.left < 0:
            self.left = 10**6
            raise Crash
        return True


@BOTH
@pytest.mark.parametrize(
    ("purpose", "after", "spent"), [(Purpose.AGREE, N + 2, 0), (Purpose.UNMASK, N, 1), (Purpose.UNMASK, N + 3, 1)]
)
def test_a_server_that_dies_has_spent_what_it_may_have_seen(
    tmp_path: Path, mechanism: str, purpose: Purpose, after: int, spent: int
) -> None:
    """In the second round: before it asks for what unmasks the sum, with that request on its way, in the midst of the
    replies. The round is tried again with fresh noise, and stands in the ledger as often as it may have been seen."""
    paths, stores = RunPaths(tmp_path), {f"node-{i}": MemoryStore() for i in range(N)}
    run = config(mechanism, noise=1.0, rounds=3)
    faults = Dies(purpose, after, paths)
    with pytest.raises(Crash):
        simulate(run, Pulled(), N, paths, faults=faults, store=stores.__getitem__)
    assert [round_ for round_, _ in stamps(paths.ledger)] == [1, 2][: 1 + spent]
    assert simulate(run, Pulled(), N, paths, faults=faults, store=stores.__getitem__).status == "finished"
    released = stamps(paths.ledger)
    assert sorted(round_ for round_, _ in released) == sorted([1, 2, 3, *[2] * spent])
    assert len(set(released)) == len(released) and all(faults.accounted)
    by_hand = accounted(composed(verify(paths.ledger).releases), 1e-5)
    assert rounds(paths)[-1]["privacy"]["epsilon"] == pytest.approx(by_hand)
    assert by_hand > rounds(paths)[0]["privacy"]["epsilon"]


# Crashes: a node


@dataclass
class Private(federation.Federation):
    """Five nodes with ledgers on disk, and a server that asks for private sums."""

    folder: Path = field(default=Path(), kw_only=True)

    def ledger(self, name: str) -> Path:
        return self.folder / name / "ledger.jsonl"

    def released(self, name: str) -> list[tuple[int, int]]:
        return stamps(self.ledger(name))

    def accounts(self, name: str) -> NodeAccounts:
        self.ledger(name).parent.mkdir(exist_ok=True)
        place = default_place(self.ledger(name))
        return NodeAccounts(self.ledger(name), name, place, Limits(), "data", "server")

    def started(self, name: str) -> SecureParticipant:
        node = self.roster.node(name)
        assert node is not None
        standing = Standing(node.id_bytes, self.identities[name], lambda: self.roster, lambda: self.roster, self.least)
        return SecureParticipant(
            federation.RUN, self.config, self.stores[name], self.sites[name], standing, self.accounts(name)
        )

    def train(self, round_: int = 1, attempt: int = 1) -> Summed:
        request = Request(Purpose.TRAIN, federation.RUN, round_, attempt, {"model": np.zeros(federation.WIDTH)})
        of = site.Stamped(federation.RUN, round_, attempt)

        def made(n: int) -> site.SiteMechanism:
            return site.mechanism(self.config, federation.WIDTH, n)

        def read(shape: Shape, words: Words, count: int) -> Update:
            return made(shape.capacity).mean(words, count, of)

        requests = dict.fromkeys(self.nodes, request)
        return self.server.sum(requests, lambda n: made(n).shape, 60.0, 2, read=read)


@pytest.fixture(params=["distributed", "central"])
def private(request: pytest.FixtureRequest, tmp_path: Path) -> Private:
    return Private(N, config(request.param), folder=tmp_path)


NAMES = [f"node-{i}" for i in range(N)]


def test_a_release_is_on_disk_before_it_leaves(private: Private, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked up when the reply is handed over, and not before it has to leave: who dealt only has spent nothing."""
    seen = []

    def answers(name: str, request: Request, reply: Reply) -> Reply | None:
        stands = (request.round, request.attempt) in private.released(name)
        if request.purpose is Purpose.TRAIN:
            assert not stands
        elif request.purpose is Purpose.MASK:
            assert stands and MASKED in reply.vectors
            seen.append(name)
        return reply

    monkeypatch.setattr(private.faults, "answers", answers)
    done = private.train()
    assert sorted(seen) == done.survivors == NAMES
    clipped = [s.delta * min(1, 1 / np.linalg.norm(s.delta)) for s in private.sites.values()]
    np.testing.assert_allclose(done.mean.groups["delta"], np.mean(clipped, axis=0), atol=0.002)


def test_a_node_that_dies_between_ledger_and_release_has_spent(
    private: Private, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a drop-out of the round, and does not make the same release once more after its start."""
    dying = private.nodes["node-2"]

    def dies(request: Request) -> Any:
        assert private.released("node-2") == [(1, 1)]
        raise Crash

    monkeypatch.setattr(dying._steps, "mask", dies)
    replied: list[Reply] = []
    handle = dying.handle

    def handled(request: Request) -> Reply:
        try:
            replied.append(handle(request))
            return replied[-1]
        except Crash:
            private.nodes["node-2"] = private.started("node-2")
            return Reply(request.purpose, request.run, request.round, request.attempt, failure=Failure(Reason.NO_REPLY))

    monkeypatch.setattr(dying, "handle", handled)
    assert private.train().survivors == [name for name in NAMES if name != "node-2"]
    assert not any(MASKED in reply.vectors for reply in replied)
    assert private.nodes["node-2"] is not dying and private.released("node-2") == [(1, 1)]
    # The same attempt again, as a server may ask that has crashed, too: answered by nobody twice.
    with pytest.raises(SumFailed):
        private.train()
    assert [private.released(name) for name in NAMES] == [[(1, 1)]] * N
    assert private.train(attempt=2).survivors == NAMES
    assert [private.released(name) for name in NAMES] == [[(1, 1), (1, 2)]] * N


def test_what_cannot_be_written_down_does_not_leave(private: Private, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at the second request, either."""
    node, asked, replied = private.nodes["node-2"], [], []

    def full(release: Release) -> None:
        raise Refused(Failure(Reason.POLICY, "no space left"))

    def answers(name: str, request: Request, reply: Reply) -> Reply | None:
        if name == "node-2" and request.purpose is Purpose.MASK:
            asked.append(request)
            # What a server may try that lies, or has not heard the answer.
            replied.extend([reply, node.handle(request), node.handle(request)])
        return reply

    monkeypatch.setattr(private.faults, "answers", answers)
    monkeypatch.setattr(node._accounts, "write", full)
    done = private.train()
    assert done.failures["node-2"] == Failure(Reason.POLICY, "no space left")
    assert len(asked) == 1 and not any(MASKED in reply.vectors for reply in replied)
    assert private.released("node-2") == []


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_update_that_is_no_number_spends_nothing(private: Private, value: float) -> None:
    private.sites["node-2"].delta[3] = value
    done = private.train()
    assert done.failures["node-2"].reason is Reason.BAD_UPDATE
    assert [len(private.released(name)) for name in NAMES] == [1, 1, 0, 1, 1]
