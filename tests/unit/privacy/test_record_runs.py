"""Runs that hide records or patients, in one process, with the real engine, protocol and nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant
from fedward_common.config import RunConfig, parse_config
from fedward_common.errors import ConfigError, TaskError
from fedward_common.privacy.ledger import Unit, verify
from fedward_common.privacy.sampled import sampled_steps
from fedward_common.task import Data
from fedward_server.events import read_events
from fedward_server.paths import RunPaths
from fedward_server.plan import privacy
from fedward_server.simulation import simulate
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

torch.set_num_threads(1)

N = 4
DELTA = 1e-5


class Scans:
    """Two classes around two points; each patient has four scans of one class."""

    def model(self) -> nn.Module:
        return nn.Linear(2, 2)

    def data(self, config: dict[str, Any]) -> Data:
        rng = np.random.default_rng(config.get("partition", 99))
        patients = np.arange(240) // 4
        y = (patients % 2).astype(np.int64)
        x = rng.normal(size=(240, 2)) + 4 * np.stack([y, -y], 1) - [2, -2]
        both = TensorDataset(torch.tensor(x, dtype=torch.float32), torch.tensor(y))
        return Data(train=both, test=both, groups=patients)

    def central_data(self, config: dict[str, Any]) -> Any:
        return self.data({})

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).float().mean()}


class Headed(Scans):
    """With a last layer that stays on its node."""

    tensor_kinds: ClassVar = {"1.*": "private"}

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))


def config(unit: str = "record", **tables: Any) -> RunConfig:
    private = {
        "unit": unit,
        "clip": 1.0,
        "sampling_rate": 0.1,
        "noise_multiplier": 1.5,
        "delta": DELTA,
        **tables.pop("privacy", {}),
    }
    return parse_config(
        {
            "name": "private",
            "task": "t:Scans",
            "rounds": 4,
            "algorithm": {"name": "fedavg"},
            "local": {"lr": 0.5, "steps": 5, "batch_size": 16},
            "cohort": {"min_nodes": N, "max_failed_rounds": 1},
            "evaluation": {"every": 0, "central": True},
            "privacy": private,
            **tables,
        }
    )


def rounds(paths: RunPaths) -> list[dict[str, Any]]:
    return [event for event, _ in read_events(paths.events) if event["event"] == "round"]


def oracle(q: float, z: float, steps: int) -> float:
    """ε by dp-accounting itself."""
    accountant = PLDAccountant()
    accountant.compose(PoissonSampledDpEvent(q, GaussianDpEvent(z)), steps)
    return float(accountant.get_epsilon(DELTA))


ALGORITHMS = [
    {"name": "fedavg"},
    {"name": "fedprox", "mu": 0.1},
    {"name": "scaffold"},
    {"name": "fedadam", "server_lr": 0.05},
    {"name": "ditto"},
]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: a["name"])
@pytest.mark.parametrize("unit", ["record", "patient"])
def test_it_learns_and_accounts_every_step(tmp_path: Path, unit: str, algorithm: dict[str, Any]) -> None:
    paths = RunPaths(tmp_path / "run")
    outcome = simulate(config(unit, algorithm=algorithm), Scans(), N, paths)
    assert outcome.status == "finished", outcome.reason
    events = rounds(paths)
    assert events[-1]["central"]["accuracy"] > 0.9
    report = verify(paths.ledger)
    assert not report.problems
    assert {(release.unit, release.count) for release in report.releases} == {(Unit(unit), 5)}
    spent = [event["privacy"]["epsilon"] for event in events]
    assert spent == sorted(spent) and spent[-1] == pytest.approx(oracle(0.1, 1.5, 20), rel=2e-3)
    # Neither losses nor weights of the nodes are told.
    assert all(not event["train"] for event in events)


def test_a_private_head_stays_and_is_trained(tmp_path: Path) -> None:
    outcome = simulate(config(), Headed(), N, RunPaths(tmp_path / "run"))
    assert outcome.status == "finished"
    assert outcome.state.model.size == 2 * 4 + 4


@pytest.mark.parametrize("unit", ["record", "patient"])
def test_passes_over_the_data_are_equal_steps_everywhere(unit: str) -> None:
    steps = sampled_steps(config(unit, local={"lr": 0.2, "epochs": 2}, privacy={"sampling_rate": 0.03}))
    assert steps.steps == 2 * 34


def test_a_target_is_met_by_all_steps_of_all_rounds() -> None:
    wanted = config(privacy={"noise_multiplier": None, "target_epsilon": 2.0}, rounds=10)
    z = sampled_steps(wanted).noise_multiplier
    assert 1.95 < oracle(0.1, z, 50) <= 2.0 * (1 + 1e-3)
    shown = privacy(wanted, 6, N, N)
    assert shown.last == 10 and shown.spent[10] <= 2.0
    assert any("Poisson" in text for text in shown.assumptions)


def test_the_run_ends_before_the_round_that_would_cross_its_budget(tmp_path: Path) -> None:
    budget = (oracle(0.1, 1.5, 10) + oracle(0.1, 1.5, 15)) / 2
    paths = RunPaths(tmp_path / "run")
    outcome = simulate(config(privacy={"max_epsilon": budget}), Scans(), N, paths)
    assert (outcome.status, outcome.state.round) == ("budget_spent", 2)


def test_batch_norm_is_refused_with_its_name_and_replacement(tmp_path: Path) -> None:
    class Normed(Scans):
        tensor_kinds: ClassVar = {"1.running_*": "private"}

        def model(self) -> nn.Module:
            return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    with pytest.raises(TaskError, match=r"1 is BatchNorm1d.*GroupNorm"):
        simulate(config(cohort={"min_nodes": N, "wait": 1.0}), Normed(), N, RunPaths(tmp_path / "run"))


class Centred(nn.Module):
    """Keeps a mean of what it has seen: a part of the data, without a gradient and so without noise."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)  # type: ignore[operator]
        return x - self.seen


class Tracking(Scans):
    def model(self) -> nn.Module:
        return nn.Sequential(Centred(), nn.Linear(2, 2))


class Hoarding(Tracking):
    tensor_kinds: ClassVar = {"0.seen": "private"}


@pytest.mark.parametrize("unit", ["record", "patient"])
@pytest.mark.parametrize("task", [Tracking(), Hoarding()])
def test_buffers_that_gather_data_are_refused_on_the_node(tmp_path: Path, task: Scans, unit: str) -> None:
    """Sent, they would be a release without noise; kept, they would shape later updates without being accounted."""
    quick = config(unit, cohort={"min_nodes": N, "max_failed_rounds": 1, "wait": 1.0})
    outcome = simulate(quick, task, N, RunPaths(tmp_path / "run"))
    assert outcome.status == "failed" and outcome.state.round == 0
    assert not (tmp_path / "run" / "ledger.jsonl").exists()


def test_without_groups_a_run_by_patient_does_not_train(tmp_path: Path) -> None:
    class Loose(Scans):
        def data(self, config: dict[str, Any]) -> Data:
            return Data(super().data(config).train)

    outcome = simulate(config("patient", evaluation={"every": 0}), Loose(), N, RunPaths(tmp_path / "run"))
    assert outcome.status == "failed" and not (tmp_path / "run" / "ledger.jsonl").exists()


@pytest.mark.parametrize(
    ("tables", "parts"),
    [
        ({"secure_sum": {"enabled": False}}, ("secure_sum.enabled = false", "Enable")),
        ({"algorithm": {"name": "scaffold", "option": "I"}}, ("option = 'I'", "'II'")),
        ({"evaluation": {"every": 1}}, ("evaluation.every = 1", "central = true")),
        ({"privacy": {"mechanism": "central"}}, ("privacy.mechanism", "Remove")),
        ({"privacy": {"sampling_rate": None}}, ("privacy.sampling_rate", "0.05")),
        ({"privacy": {"unit": "patient", "ghost_clipping": True}}, ("ghost_clipping", "record")),
        ({"privacy": {"unit": "site", "mechanism": "central"}}, ("sampling_rate", "Remove")),
        ({"privacy": {"unit": "site", "sampling_rate": None}}, ("privacy.mechanism", "distributed")),
    ],
)
def test_what_cannot_work_is_refused_at_submission(tables: dict[str, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**tables)
    for part in parts:
        assert part in str(caught.value)
