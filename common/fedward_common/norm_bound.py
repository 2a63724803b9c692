"""A bound on the norm of an update, as the node and (in plain runs) the server apply it."""

from __future__ import annotations

from dataclasses import replace

from fedward_common.algorithms.base import DELTA
from fedward_common.privacy.clip import clip
from fedward_common.update import Update

SCALED = "scaled"
"""Metric of an update, added by the guard: 1 if it was over the bound, 0 if not. Its sum is how many were."""


def bounded(update: Update, bound: float) -> tuple[Update, bool]:
    """`update` with "delta" scaled to an L2 norm of at most `bound`, and whether that was needed. Of what it gives back
    nothing has to be scaled again. Raises `UpdateError` for values that are not finite."""
    groups, over = clip({DELTA: update.groups[DELTA]}, bound)
    return (replace(update, groups={**update.groups, **groups}), True) if over else (update, False)
