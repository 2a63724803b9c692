"""What all nodes of a secure round must have been told alike: every pairwise key is bound to its hash."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property

from fedward_common.secagg.graph import Parameters
from fedward_common.secagg.keys import Advertisement
from fedward_common.secagg.messages import joined

VERSION = 1
"""Of the protocol."""


@dataclass(frozen=True)
class Terms:
    """The terms of one secure round.

    purpose: what the round is for ("train", "evaluate"). model, config, roster: digests of the broadcast, of the run's
    configuration and of the roster, as this side knows them. shape: canonical text of what the summed vector holds
    (`summand.Shape`). length, bits: of that vector. advertisements: the cohort's, sorted by node id.

    Two nodes that were told different things derive different masks, which then do not cancel, and the check words
    in the sum show it.
    """

    run: str
    round: int
    attempt: int
    purpose: str
    model: str
    config: str
    roster: str
    shape: str
    length: int
    bits: int
    parameters: Parameters
    advertisements: tuple[Advertisement, ...]

    @property
    def n(self) -> int:
        """Nodes that advertised."""
        return len(self.advertisements)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 over all of it."""
        told = {
            "version": VERSION,
            "run": self.run,
            "round": self.round,
            "attempt": self.attempt,
            "purpose": self.purpose,
            "model": self.model,
            "config": self.config,
            "roster": self.roster,
            "shape": self.shape,
            "length": self.length,
            "bits": self.bits,
            "parameters": asdict(self.parameters),
        }
        text = json.dumps(told, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(
            joined([b"fedward secagg terms", text.encode(), *(a.to_bytes() for a in self.advertisements)])
        ).digest()

    def to_json(self) -> str:
        """All fields, for the node's own memory."""
        return json.dumps({**asdict(self), "advertisements": [a.to_bytes().hex() for a in self.advertisements]})

    @classmethod
    def from_json(cls, text: str) -> Terms:
        """The inverse of `to_json`."""
        told = json.loads(text)
        told["parameters"] = Parameters(**told["parameters"])
        told["advertisements"] = tuple(Advertisement.from_bytes(bytes.fromhex(a)) for a in told["advertisements"])
        return cls(**told)

    def index(self, node: bytes) -> int | None:
        """The index (1 … n) of a node, None if it did not advertise."""
        return self._indices.get(node)

    @cached_property
    def _indices(self) -> dict[bytes, int]:
        return {advertisement.node: i for i, advertisement in enumerate(self.advertisements, 1)}

    def advertisement(self, index: int) -> Advertisement:
        """The advertisement of the node with that index."""
        return self.advertisements[index - 1]


def survivors_statement(terms: Terms, sharers: bytes, survivors: bytes) -> bytes:
    """What a survivor signs: this round, who dealt shares in it, who is in the sum."""
    return joined([b"fedward secagg survivors 1", terms.digest, sharers, survivors])
