"""Where a node keeps things: one state directory, owner-only."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

STATE_VARIABLE = "FEDWARD_NODE_STATE"


@dataclass(frozen=True)
class NodePaths:
    """Names of everything in the node's state directory."""

    root: Path

    @classmethod
    def default(cls) -> NodePaths:
        """`$FEDWARD_NODE_STATE`, else `./fedward-node`."""
        return cls(Path(os.environ.get(STATE_VARIABLE, "fedward-node")).resolve())

    @property
    def node(self) -> Path:
        """JSON: name, node id, server, fleet address, CA hash, roster key. There if, and only if, enrolled."""
        return self.root / "node.json"

    @property
    def ca(self) -> Path:
        """The server's CA certificate: the only one that this node trusts."""
        return self.root / "ca.pem"

    @property
    def keys(self) -> Path:
        return self.root / "keys"

    @property
    def flower_key(self) -> Path:
        """Flower's node-authentication key (OpenSSH form, P-256)."""
        return self.keys / "flower.key"

    @property
    def flower_public(self) -> Path:
        return self.keys / "flower.pub"

    @property
    def identity_key(self) -> Path:
        """Fedward's identity key (PKCS#8 PEM, Ed25519)."""
        return self.keys / "identity.key"

    @property
    def next_keys(self) -> Path:
        """Keys of a rotation that is not finished."""
        return self.keys / "next"

    @property
    def roster(self) -> Path:
        """The newest signed roster seen."""
        return self.root / "roster.json"

    @property
    def roster_log(self) -> Path:
        """JSON lines: every change of the roster, and whether it counts here."""
        return self.root / "roster-log.jsonl"

    @property
    def members(self) -> Path:
        """Folder with a file for each member of the roster that the site admin approved."""
        return self.root / "members"

    @property
    def status(self) -> Path:
        """JSON: what a running guard says of itself."""
        return self.root / "status.json"

    @property
    def policy(self) -> Path:
        """TOML, edited by the site admin."""
        return self.root / "policy.toml"

    @property
    def journal(self) -> Path:
        """JSON lines: what left this node."""
        return self.root / "journal.jsonl"

    @property
    def ledger(self) -> Path:
        """JSON lines: what this node's data have given away under differential privacy."""
        return self.root / "ledger.jsonl"

    @property
    def sent(self) -> Path:
        """JSON: bytes that the link sent in all, and the journal's line at which they were counted."""
        return self.root / "sent.json"

    @property
    def lock(self) -> Path:
        """Held by the one guard that works in this directory."""
        return self.root / "lock"

    @property
    def bundles(self) -> Path:
        return self.root / "bundles"

    def bundle(self, sha256: str) -> Path:
        """Folder of one bundle: bundle.fab, and `approved` once it is."""
        return self.bundles / sha256

    @property
    def runs(self) -> Path:
        return self.root / "runs"

    def run(self, run_id: str) -> Path:
        """Folder of one run's state."""
        return self.runs / run_id

    @property
    def log(self) -> Path:
        return self.root / "log"

    def private(self) -> tuple[Path, ...]:
        """What task code must never read."""
        rosters = (self.roster, self.roster_log, self.members)
        return (self.keys, self.node, self.policy, self.journal, self.ledger, self.sent, *rosters, self.log, self.lock)
