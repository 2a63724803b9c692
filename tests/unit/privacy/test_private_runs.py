"""Runs that hide each site's contribution, in one process, with the real engine, protocol and nodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fedward_common.config import RunConfig, parse_config
from fedward_common.errors import ConfigError
from fedward_common.privacy.ledger import Unit, verify
from fedward_common.task import Data
from fedward_server.events import read_events
from fedward_server.paths import RunPaths
from fedward_server.simulation import Faults, simulate
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

torch.set_num_threads(1)

N = 6


class Task:
    """Two classes around two points."""

    def model(self) -> nn.Module:
        return nn.Linear(2, 2)

    def data(self, config: dict[str, Any]) -> Data:
        rng = np.random.default_rng(config.get("partition", 99))
        y = (rng.random(40) < 0.5).astype(np.int64)
        x = rng.normal(size=(40, 2)) + 2 * np.stack([y, -y], 1)
        both = TensorDataset(torch.tensor(x, dtype=torch.float32), torch.tensor(y))
        return Data(train=both, test=both)

    def central_data(self, config: dict[str, Any]) -> Any:
        return self.data({})

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).float().mean()}


class Normed(Task):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def config(mechanism: str = "distributed", **tables: Any) -> RunConfig:
    privacy = {
        "unit": "site",
        "mechanism": mechanism,
        "clip": 0.5,
        "noise_multiplier": 1.0,
        **tables.pop("privacy", {}),
    }
    return parse_config(
        {
            "name": "private",
            "task": "t:Task",
            "rounds": 4,
            "algorithm": {"name": "fedavg"},
            "local": {"lr": 0.1, "steps": 5, "batch_size": 8},
            "cohort": {"min_nodes": N},
            "evaluation": {"every": 0, "central": True},
            "privacy": privacy,
            **tables,
        }
    )


def rounds(paths: RunPaths) -> list[dict[str, Any]]:
    return [event for event, _ in read_events(paths.events) if event["event"] == "round"]


@pytest.mark.parametrize("mechanism", ["distributed", "central"])
def test_epsilon_grows_and_stands_in_the_ledger(tmp_path: Path, mechanism: str) -> None:
    paths = RunPaths(tmp_path / "run")
    outcome = simulate(config(mechanism), Task(), N, paths)
    assert outcome.status == "finished"
    told = [event["privacy"] for event in rounds(paths)]
    spent = [each["epsilon"] for each in told]
    assert spent == sorted(spent) and spent[0] > 0
    report = verify(paths.ledger)
    assert not report.problems and len(report.releases) == 4
    assert {(release.unit, release.count) for release in report.releases} == {(Unit.SITE, 1)}
    # Nothing but the noisy mean: no loss, no metric of any node, no count of what was clipped.
    assert all(event["train"] == {} or event["train"] is None for event in rounds(paths))
    assert all(not event["secure_sum"].get("clipped") for event in rounds(paths))


@pytest.mark.parametrize("mechanism", ["distributed", "central"])
def test_with_next_to_no_noise_it_learns_as_without_privacy(tmp_path: Path, mechanism: str) -> None:
    quiet = config(mechanism, privacy={"noise_multiplier": 1e-3, "clip": 100.0}, rounds=3)
    plain = RunConfig.model_validate({**quiet.model_dump(mode="json"), "privacy": None})
    private = simulate(quiet, Task(), N, RunPaths(tmp_path / "private"))
    other = simulate(plain, Task(), N, RunPaths(tmp_path / "plain"))
    # Noise of 0.1 in the sum, in the mean over six.
    np.testing.assert_allclose(private.state.model, other.state.model, atol=0.5)
    assert not np.array_equal(private.state.model, other.state.model)


@pytest.mark.parametrize("mechanism", ["distributed", "central"])
def test_the_noise_in_the_model_is_what_was_asked_for(tmp_path: Path, mechanism: str) -> None:
    """Nobody moves (learning rate next to nothing), so that all that the model moves by is noise."""
    wide = 4000

    class Wide(Task):
        def model(self) -> nn.Module:
            return nn.Linear(2, wide // 3)

        def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
            return {}

    still = config(
        mechanism, rounds=1, local={"lr": 1e-9, "steps": 1, "batch_size": 8}, privacy={"noise_multiplier": 2.0}
    )
    first = simulate(
        config(mechanism, rounds=1, privacy={"noise_multiplier": 2.0}, local={"lr": 1e-9, "steps": 1}),
        Wide(),
        N,
        RunPaths(tmp_path / "a"),
    )
    second = simulate(still, Wide(), N, RunPaths(tmp_path / "b"))
    difference = (first.state.model - second.state.model).astype(np.float64)
    parameters = still.secure_sum.parameters(N)
    honest = parameters.survivors - parameters.colluders
    # All six were there; the noise is sized for the honest ones that must survive.
    surplus = N / honest if mechanism == "distributed" else 1.0
    asked = 2.0 * 0.5 / N * np.sqrt(surplus)
    found = np.std(difference) / np.sqrt(2)
    assert found == pytest.approx(asked, rel=0.05)
    assert found != pytest.approx(0.7 * asked, rel=0.05)


def test_shares_of_discrete_gaussian_noise(tmp_path: Path) -> None:
    """The same run with either law: nearly the same ε. Skellam noise pays a little for its heavier tails."""
    spent = {}
    for law in ("skellam", "discrete-gaussian"):
        paths = RunPaths(tmp_path / law)
        assert simulate(config(privacy={"noise": law}), Task(), N, paths).status == "finished"
        told = rounds(paths)[-1]["privacy"]
        assert told["event"]["kind"] == law
        spent[law] = told["epsilon"]
    assert spent["discrete-gaussian"] <= spent["skellam"] <= 1.02 * spent["discrete-gaussian"]


def test_the_run_ends_before_the_round_that_would_cross_its_budget(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    free = simulate(config(rounds=6), Task(), N, RunPaths(tmp_path / "free"))
    assert free.status == "finished"
    spent = [event["privacy"]["epsilon"] for event in rounds(RunPaths(tmp_path / "free"))]
    budget = (spent[2] + spent[3]) / 2
    outcome = simulate(config(rounds=6, privacy={"max_epsilon": budget}), Task(), N, paths)
    assert (outcome.status, outcome.state.round) == ("budget_spent", 3)
    assert "max_epsilon" in outcome.reason and f"{budget:g}"[:5] in outcome.reason
    assert rounds(paths)[-1]["privacy"]["epsilon"] <= budget
    # Resumed, it still knows what it has spent.
    assert simulate(config(rounds=6, privacy={"max_epsilon": budget}), Task(), N, paths).status == "budget_spent"
    assert len(verify(paths.ledger).releases) == 3


def test_a_target_is_met_by_all_rounds_together(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    outcome = simulate(config(privacy={"noise_multiplier": None, "target_epsilon": 3.0}), Task(), N, paths)
    assert outcome.status == "finished"
    told = [event["privacy"] for event in rounds(paths)]
    assert len(told) == 4 and 2.9 < told[-1]["epsilon"] <= 3.0


def test_drop_outs_leave_the_noise_that_was_asked_for(tmp_path: Path) -> None:
    class OneGoes(Faults):
        def answers(self, node: str, request: Any, reply: Any) -> Any:
            return (
                None if request.purpose.value == "mask" and node == "node-3" else super().answers(node, request, reply)
            )

    paths = RunPaths(tmp_path / "run")
    assert simulate(config(rounds=2), Task(), N, paths, faults=OneGoes()).status == "finished"
    assert [len(event["replies"]) for event in rounds(paths)] == [N - 1] * 2
    events = {json.dumps(event["privacy"]["event"]) for event in rounds(paths)}
    assert len(events) == 1


def test_a_cohort_that_is_too_small_fails_its_round_and_not_the_run(tmp_path: Path) -> None:
    class Away(Faults):
        """Four of six are away in the first attempts."""

        looks = 0

        def online(self, node: str) -> bool:
            self.looks += 1
            return node in ("node-0", "node-1") or not 12 < self.looks < 60

    paths = RunPaths(tmp_path / "run")
    outcome = simulate(config(rounds=2, cohort={"min_nodes": 3, "wait": 60}), Task(), N, paths, faults=Away())
    assert outcome.status == "finished", outcome.reason
    assert len(verify(paths.ledger).releases) == 2


def test_a_run_that_names_no_number_of_nodes(tmp_path: Path) -> None:
    quiet = config(cohort={}, rounds=1, privacy={"noise_multiplier": None, "target_epsilon": 4.0})
    assert simulate(quiet, Task(), N, RunPaths(tmp_path / "run")).status == "finished"


def test_what_no_norm_bounds_is_refused(tmp_path: Path) -> None:
    outcome = simulate(config(cohort={"min_nodes": N, "max_failed_rounds": 1}), Normed(), N, RunPaths(tmp_path / "run"))
    assert outcome.status == "failed"


@pytest.mark.parametrize(
    ("tables", "parts"),
    [
        ({"secure_sum": {"enabled": False}}, ("secure_sum.enabled = false", "Enable")),
        ({"algorithm": {"name": "scaffold"}}, ("scaffold", "fedavg")),
        ({"evaluation": {"every": 1}}, ("evaluation.every = 1", "central = true")),
        ({"evaluation": {"every": 0, "holdout": ["x"]}}, ("holdout",)),
        ({"privacy": {"noise_multiplier": None}}, ("noise_multiplier", "target_epsilon", "one of the two")),
        ({"privacy": {"target_epsilon": 1.0}}, ("give one of the two",)),
        ({"privacy": {"unit": "record"}}, ("privacy.unit",)),
        ({"privacy": {"clip": 0.0}}, ("privacy.clip",)),
        ({"privacy": {"delta": 1.0}}, ("privacy.delta",)),
        ({"privacy": {"mechanism": "central", "noise": "discrete-gaussian"}}, ("privacy.noise", "Remove noise")),
        ({"privacy": {"noise": "discrete-gaussian", "noise_on_dropout": "exact"}}, ("privacy.noise", "Skellam")),
    ],
)
def test_what_cannot_work_is_refused_at_submission(tables: dict[str, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**tables)
    for part in parts:
        assert part in str(caught.value)
