"""Who takes part: in the run by name and tags, in a round by lot."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from fedward_common.config import RunConfig
from fedward_common.files import write_atomic
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
    """A round's cohort, sorted by name, the nodes that were drawn but could not be asked, and how many could have been
    drawn and asked."""

    cohort: tuple[str, ...]
    passed_over: Mapping[str, Failure]
    available: int


class Lot(Protocol):
    """Puts names into an order of its own for each round, any order as likely as any other."""

    def order(self, names: Sequence[str], round_: int) -> list[str]:
        """The names (sorted) in the order of a round; always the same one."""


@dataclass(frozen=True)
class Seeded:
    """The order that whoever knows the run's configuration can calculate: runs can be repeated."""

    seed: int

    def order(self, names: Sequence[str], round_: int) -> list[str]:
        return [names[index] for index in np.random.default_rng([self.seed, round_]).permutation(len(names))]


@dataclass(frozen=True)
class Secret:
    """An order that nobody can calculate who has not `key`: by HMAC-SHA256 of round and name. What a run with
    [privacy] spends against those who do not know its cohorts rests on it."""

    key: bytes

    @classmethod
    def kept(cls, path: Path) -> Secret:
        """With the key in the file, made if there is none: a resumed run draws as before."""
        if not path.exists():
            write_atomic(path, secrets.token_bytes(32))
        return cls(path.read_bytes())

    def order(self, names: Sequence[str], round_: int) -> list[str]:
        return sorted(names, key=lambda name: hmac.digest(self.key, f"{round_} {name}".encode(), "sha256"))


def draw(
    enrolled: Iterable[str], unavailable: Mapping[str, Failure], size: int | None, lot: Lot, round_: int
) -> Selection:
    """`size` of the enrolled nodes (None: all), uniformly without replacement.

    The order of drawing depends on lot, round and the enrolled names alone, so a repeated round draws the same
    cohort; an unavailable node is passed over for the next in that order.
    """
    names = sorted(enrolled)
    wanted = len(names) if size is None else size
    cohort: list[str] = []
    passed_over: dict[str, Failure] = {}
    for name in lot.order(names, round_):
        if len(cohort) == wanted:
            break
        if name in unavailable:
            passed_over[name] = unavailable[name]
        else:
            cohort.append(name)
    available = sum(name not in unavailable for name in names)
    return Selection(tuple(sorted(cohort)), passed_over, available)
