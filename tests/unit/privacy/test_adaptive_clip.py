"""Clipping that follows a quantile of the updates' norms: against the quantile itself, and what the count costs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fedward_common.privacy import site
from fedward_common.privacy.accounting import spent
from fedward_common.privacy.events import DiscreteGaussian
from fedward_common.privacy.options import PrivacyOptions
from fedward_server.paths import RunPaths
from fedward_server.simulation import simulate

from .test_private_runs import N, Task, config, rounds

STAMP = site.Stamped("r", 1, 1)


def total(made: site.Central, updates: list[np.ndarray]) -> np.ndarray:
    words = [made.words(update, STAMP).astype(np.uint64) for update in updates]
    return (sum(words) & ((1 << made.bits) - 1)).astype(np.uint32)  # type: ignore[union-attr]


@pytest.mark.parametrize("quantile", [0.3, 0.8])
def test_the_clip_ends_at_the_quantile_of_the_norms(quantile: float) -> None:
    rng = np.random.default_rng(0)
    norms = np.exp(rng.normal(0, 0.5, 50))
    updates = [norm * np.eye(16)[i % 16] for i, norm in enumerate(norms)]
    options = PrivacyOptions(
        unit="site", mechanism="central", clip=4.0, clip_quantile=quantile, noise_multiplier=0.1
    )
    bound, seen = options.clip, []
    for _ in range(70):
        made = site.Central(16, 24, 50, bound, 0.1, counts=True)
        bound = site.next_clip(options, bound, made.mean(total(made, updates), 50, STAMP).metrics[site.WITHIN])
        seen.append(bound)
    low, high = np.quantile(norms, [quantile - 0.08, quantile + 0.08])
    assert low < np.median(seen[-30:]) < high


def test_the_step_is_the_paper_s() -> None:
    options = PrivacyOptions(unit="site", mechanism="central", clip=1.0, clip_quantile=0.5, noise_multiplier=1.0)
    assert site.next_clip(options, 2.0, 1.0) == pytest.approx(2.0 * np.exp(-0.2 * 0.5))
    assert site.next_clip(options, 2.0, 0.5) == 2.0
    # A noisy share may lie outside of [0, 1].
    assert site.next_clip(options, 2.0, -3.0) == site.next_clip(options, 2.0, 0.0) > 2.0


@pytest.mark.parametrize("z", [0.5, 2.0])
def test_the_event_is_the_update_s_and_the_count_s_together(z: float) -> None:
    plain = site.Central(1000, 20, 40, 1.0, z)
    counting = replace(plain, counts=True)
    count = DiscreteGaussian(64.0, 64 * 10 * z, 1, 1)
    both = spent([(plain.event, 7), (count, 7)], 1e-5).epsilon
    assert spent([(counting.event, 7)], 1e-5).epsilon == pytest.approx(both, rel=1e-6)
    # The rule of the paper: z of the update for a total of z', z^-2 = z'^-2 - (noise of the count)^-2.
    assert both > spent([(plain.event, 7)], 1e-5).epsilon


def test_the_count_s_noise_has_the_spread_that_is_accounted_for() -> None:
    z = 2.0
    made = site.Central(4, 20, 8, 1.0, z, counts=True)
    sums = total(made, [np.zeros(4)] * 8)
    counts = [8 * made.mean(sums, 8, STAMP).metrics[site.WITHIN] for _ in range(600)]
    assert np.mean(counts) == pytest.approx(8, abs=5 * 20 / np.sqrt(600))
    assert np.std(counts) == pytest.approx(10 * z, rel=5 / np.sqrt(2 * 600))


def test_a_run_remembers_its_clip(tmp_path: Path) -> None:
    """It starts far too low, and goes on after a restart where it was."""
    wanted: dict[str, Any] = {"clip_quantile": 0.5, "clip": 1e-3, "noise_multiplier": 0.5}
    paths = RunPaths(tmp_path / "run")
    assert simulate(config("central", rounds=2, privacy=wanted), Task(), N, paths).status == "finished"
    assert simulate(config("central", rounds=4, privacy=wanted), Task(), N, paths).status == "finished"
    told = [event["privacy"] for event in rounds(paths)]
    assert len(told) == 4 and told[0]["clip"] == 1e-3
    options = config("central", privacy=wanted).privacy
    assert options is not None
    for before, after in pairwise(told):
        assert after["clip"] == pytest.approx(site.next_clip(options, before["clip"], before["within_clip"]))
    assert told[-1]["clip"] != told[0]["clip"]
