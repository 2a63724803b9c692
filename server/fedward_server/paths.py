"""Where the server keeps things: one state directory, owner-only."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

STATE_VARIABLE = "FEDWARD_SERVER_STATE"
"""Environment variable that names the state directory (set by the supervisor for all its children)."""


@dataclass(frozen=True)
class ServerPaths:
    """Names of everything in the server's state directory."""

    root: Path

    @classmethod
    def default(cls) -> ServerPaths:
        """`$FEDWARD_SERVER_STATE`, else `./fedward-server`."""
        return cls(Path(os.environ.get(STATE_VARIABLE, "fedward-server")).resolve())

    @property
    def settings(self) -> Path:
        """TOML: name, SANs, ports, limits. Written by `init`, edited by the server admin."""
        return self.root / "server.toml"

    @property
    def authority(self) -> Path:
        """CA key and certificate, roster-signing key (or its public half). Nothing but the service reads it."""
        return self.root / "authority"

    @property
    def ca_certificate(self) -> Path:
        return self.authority / "ca.pem"

    @property
    def ca_key(self) -> Path:
        return self.authority / "ca.key"

    @property
    def roster_key(self) -> Path:
        """Ed25519 private key that signs the roster."""
        return self.authority / "roster.key"

    @property
    def roster_public(self) -> Path:
        """Public half of the key that signs the roster; there if, and only if, the key lives on another machine."""
        return self.authority / "roster.pub"

    @property
    def exported_roster(self) -> Path:
        """The roster that was last handed out to be signed elsewhere (JSON, unsigned)."""
        return self.authority / "exported-roster.json"

    @property
    def server_certificate(self) -> Path:
        return self.root / "tls" / "server.pem"

    @property
    def server_key(self) -> Path:
        return self.root / "tls" / "server.key"

    @property
    def public_ca(self) -> Path:
        """A copy of the CA certificate that every process of the server may read."""
        return self.root / "tls" / "ca.pem"

    @property
    def database(self) -> Path:
        """Fedward's own store (SQLite): nodes, tokens, scientists, runs, audit."""
        return self.root / "fedward.db"

    @property
    def superlink_database(self) -> Path:
        """Flower's SuperLink database (SQLite)."""
        return self.root / "superlink" / "superlink.db"

    @property
    def flower_home(self) -> Path:
        """`FLWR_HOME` of every Flower process."""
        return self.root / "superlink" / "home"

    @property
    def roster(self) -> Path:
        """The signed roster, public: node names, Flower ids, identity keys, tags; scientists' keys."""
        return self.root / "roster.json"

    @property
    def ledger_heads(self) -> Path:
        """JSON: the newest head of each node's privacy ledger that the server was told. Written by ServerApps."""
        return self.root / "ledger-heads.json"

    @property
    def credential(self) -> Path:
        """The credential for runs that `init` writes (a data scientist's key with the server's address and CA)."""
        return self.root / "credential.json"

    @property
    def runs(self) -> Path:
        return self.root / "runs"

    def run(self, run_id: str) -> RunPaths:
        """Paths of one run."""
        return RunPaths(self.runs / run_id)


@dataclass(frozen=True)
class RunPaths:
    """Names of everything in one run's directory. The ServerApp writes it, the service reads it."""

    root: Path

    @property
    def bundle(self) -> Path:
        """The bundle (FAB) as submitted."""
        return self.root / "bundle.fab"

    @property
    def manifest(self) -> Path:
        """The signed manifest (JSON) as submitted."""
        return self.root / "manifest.json"

    @property
    def initial(self) -> Path:
        """A pretrained starting model as submitted (safetensors), if any."""
        return self.root / "initial.safetensors"

    @property
    def events(self) -> Path:
        """JSON lines, append-only: see `events.py`."""
        return self.root / "events.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def owner(self) -> Path:
        """JSON {"epoch", "pid"} of the ServerApp that may write here (fencing)."""
        return self.root / "owner.json"

    @property
    def ledger(self) -> Path:
        """JSON lines: every release of a run with [privacy], before it was made."""
        return self.root / "ledger.jsonl"

    @property
    def lot(self) -> Path:
        """The secret (32 bytes) that a run with [privacy] draws its cohorts with."""
        return self.root / "lot.key"

    @property
    def config(self) -> Path:
        """The configuration (JSON) of a simulated run, which has no manifest."""
        return self.root / "config.json"

    @property
    def report(self) -> Path:
        """What a run with [privacy] released and what that means, for people; once the run has ended."""
        return self.root / "privacy-report.html"

    @property
    def report_json(self) -> Path:
        """The same as JSON."""
        return self.root / "privacy-report.json"

    @property
    def stop(self) -> Path:
        """If this file exists, the run ends after the round in flight."""
        return self.root / "stop"
