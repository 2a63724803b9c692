"""The noise that is in what leaves, measured from outside: as much as accounted for, and fresh in each release.

A canary is a direction of length 1: what a release holds along it, less what is known to be there, is one draw of the
noise. A thousand orthogonal ones in eight releases give the scale to 0.8 % (one standard error).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from .releases import MECHANISMS, Release

CANARIES = 1000
QUICK = ("patient", "site, distributed")


def canaries(releases: list[Release]) -> np.ndarray:
    """The noise along each canary, as a multiple of what is claimed: (releases, canaries)."""
    size = releases[0].found.size
    basis, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(size, min(size, CANARIES))))
    return np.array([release.noise for release in releases]) @ basis


def check(releases: list[Release]) -> None:
    """What the audit asserts of a mechanism's releases."""
    drawn = canaries(releases)
    assert drawn.size >= 6000, "too few canaries to tell 5 % from chance"
    scale = np.sqrt(np.mean(drawn**2))
    assert 0.95 < scale < 1.05, f"the noise is {scale:.3f} times what is claimed"
    # Independent noise adds up by its squares. What every release holds, a bias or the same noise, by itself.
    together = np.sqrt(np.mean(drawn.sum(axis=0) ** 2) / len(drawn))
    assert 0.85 < together < 1.15, f"the noise of {len(drawn)} releases together is {together:.2f} times fresh noise"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in MECHANISMS]
)
def test_the_noise_is_what_is_accounted_for(tmp_path: Path, name: str) -> None:
    check(MECHANISMS[name].releases(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("name", MECHANISMS)
def test_the_audit_finds_noise_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    MECHANISMS[name].weaken(monkeypatch, 0.7)
    with pytest.raises(AssertionError, match=r"the noise is 0\.(6|7)\d+ times what is claimed"):
        check(MECHANISMS[name].releases(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("name", MECHANISMS)
def test_the_audit_finds_noise_that_comes_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    MECHANISMS[name].repeat(monkeypatch)
    with pytest.raises(AssertionError, match="the noise"):
        check(MECHANISMS[name].releases(tmp_path))
