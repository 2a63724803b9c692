"""Who takes part: in the run by name and tags, in a round by lot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from fedward_common.config import RunConfig
from fedward_common.messages import Failure

from fedward_server.transport import Peer


@dataclass(frozen=True)
class Members:
    """Which nodes a run wants. named: () means every node that carries `tags`."""

    named: tuple[str, ...]
    tags: tuple[str, ...]
    holdout: tuple[str, ...]

    @classmethod
    def of(cls, config: RunConfig) -> Members:
        """The members that `config` asks for."""
        return cls(config.cohort.nodes, config.cohort.tags, config.evaluation.holdout)

    def trains(self, peer: Peer) -> bool:
        """True for a node that the run trains on; never for a held-out one."""
        if peer.name in self.holdout or (self.named and peer.name not in self.named):
            return False
        return set(self.tags) <= set(peer.tags)

    def wants(self, peer: Peer) -> bool:
        """True for a node that the run trains on or holds out."""
        return peer.name in self.holdout or self.trains(peer)

    @property
    def expected(self) -> tuple[str, ...]:
        """Nodes that the run knows by name, online or not."""
        return (*self.named, *self.holdout)


@dataclass(frozen=True)
class Selection:
    """A round's cohort, sorted by name, and the nodes that were drawn but could not be asked."""

    cohort: tuple[str, ...]
    passed_over: Mapping[str, Failure]


def draw(
    enrolled: Iterable[str], unavailable: Mapping[str, Failure], size: int | None, seed: int, round_: int
) -> Selection:
    """`size` of the enrolled nodes (None: all), uniformly without replacement.

    The order of drawing depends on (seed, round) and the enrolled names alone, so a repeated round draws the same
    cohort; an unavailable node is passed over for the next in that order.
    """
    names = sorted(enrolled)
    wanted = len(names) if size is None else size
    cohort: list[str] = []
    passed_over: dict[str, Failure] = {}
    for index in np.random.default_rng([seed, round_]).permutation(len(names)):
        if len(cohort) == wanted:
            break
        name = names[index]
        if name in unavailable:
            passed_over[name] = unavailable[name]
        else:
            cohort.append(name)
    return Selection(tuple(sorted(cohort)), passed_over)
