"""FedNova, FedDC and FedDyn in runs that hide records or patients; by site each is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fedward_common.errors import ConfigError
from fedward_common.node import MemoryStore
from fedward_common.privacy.ledger import Unit, verify
from fedward_server.paths import RunPaths
from fedward_server.simulation import simulate

from .test_record_runs import N, Scans, config, rounds

CASES = [
    ("record", {"name": "fednova"}, {"lr": 0.5, "epochs": 1}),
    ("patient", {"name": "fednova", "mu": 0.1}, {"lr": 0.5, "steps": 10}),
    ("record", {"name": "feddc"}, {"lr": 0.2, "steps": 10}),
    ("patient", {"name": "feddyn", "alpha": 0.5}, {"lr": 0.2, "epochs": 1}),
]


@pytest.mark.parametrize(("unit", "algorithm", "local"), CASES, ids=str)
def test_it_learns_and_nothing_beside_the_noised_steps_is_released(
    tmp_path: Path, unit: str, algorithm: dict[str, Any], local: dict[str, Any]
) -> None:
    paths, stores = RunPaths(tmp_path / "run"), {f"node-{i}": MemoryStore() for i in range(N)}
    outcome = simulate(config(unit, algorithm=algorithm, local=local), Scans(), N, paths, store=stores.__getitem__)
    assert outcome.status == "finished", outcome.reason
    events = rounds(paths)
    assert events[-1]["central"]["accuracy"] > 0.9
    report = verify(paths.ledger)
    assert not report.problems
    # 10 steps of rate 0.1 are a pass over the data, whatever its size.
    assert {(release.unit, release.count) for release in report.releases} == {(Unit(unit), 10)}
    assert all(not event["train"] for event in events)
    assert all(set(event["secure_sum"]["ranges"]) == {"delta"} for event in events)
    for server, node in {"c": "c_i", "h": "h_i"}.items():
        if server in outcome.state.vectors:
            mean = np.mean([store.committed()[1][node] for store in stores.values()], axis=0)
            np.testing.assert_allclose(outcome.state.vectors[server], mean, atol=5e-3)


@pytest.mark.parametrize("name", ["fednova", "feddc", "feddyn"])
def test_by_site_it_is_refused_when_the_run_is_submitted(name: str) -> None:
    site = {"unit": "site", "sampling_rate": None, "mechanism": "central"}
    config("site", privacy=site)
    with pytest.raises(ConfigError, match=f"algorithm.name = '{name}' with privacy.unit = 'site'"):
        config("site", algorithm={"name": name}, privacy=site)
