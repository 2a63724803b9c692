"""Several trainings in one round of a node."""

from __future__ import annotations

import time
from dataclasses import replace

from fedward_common.algorithms.node_half import Local, derived
from fedward_common.update import Kind


class Phases:
    """Each training of a round has a seed of its own, what is left of the round's time, and the counters that the round
    started with."""

    def __init__(self, local: Local) -> None:
        self._local = local
        self._began = time.monotonic()
        self._counters = local.layout.pack(local.model.state_dict(), Kind.COUNTER)

    def next(self, name: str = "") -> Local:
        """What the next training is given. name: tells a round's trainings apart; "" has the round's own seed."""
        local = self._local
        local.layout.load(local.model, self._counters, Kind.COUNTER)
        limits = [limit for limit in (local.seconds, local.options.max_seconds) if limit is not None]
        left = max(min(limits) - (time.monotonic() - self._began), 0.0) if limits else None
        return replace(local, seconds=left, seed=derived(local.seed, name) if name else local.seed)
