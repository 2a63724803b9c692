"""What a worker is told at its start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedward_common.worker.frames import Frame, FrameError


@dataclass(frozen=True)
class Setup:
    """One run's worker.

    config: the RunConfig as JSON. bundle: the folder of the unpacked bundle (None: the task is installed).
    node: this node's name. data: the node's `[data]` table. device: "auto", "cpu", "cuda" or "cuda:<n>".
    read: the data's folders and files. scratch: the only folder that task code may write; emptied with the worker.
    private: paths that task code must never see; a `read` path that holds one is refused.
    network: may task code open sockets. sandboxed: False only if the site's policy allows it.
    log: file for what task code prints. max_memory: bytes of resident memory, with child processes.
    """

    config: str
    bundle: Path | None
    node: str
    scratch: Path
    log: Path
    data: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    threads: int = 1
    read: tuple[Path, ...] = ()
    private: tuple[Path, ...] = ()
    network: bool = False
    sandboxed: bool = True
    max_memory: int | None = None

    def to_frame(self) -> Frame:
        """What the child needs of it."""
        return Frame(
            {
                "config": self.config,
                "bundle": None if self.bundle is None else str(self.bundle),
                "node": self.node,
                "scratch": str(self.scratch),
                "log": str(self.log),
                "data": dict(self.data),
                "device": self.device,
                "threads": self.threads,
                "read": [str(path) for path in self.read],
                "private": [str(path) for path in self.private],
                "network": self.network,
                "sandboxed": self.sandboxed,
            }
        )

    @classmethod
    def from_frame(cls, frame: Frame) -> Setup:
        """The inverse of `to_frame`. Raises `FrameError`."""
        head = dict(frame.json)
        try:
            bundle = head.pop("bundle")
            return cls(
                bundle=None if bundle is None else Path(bundle),
                scratch=Path(head.pop("scratch")),
                log=Path(head.pop("log")),
                read=tuple(Path(path) for path in head.pop("read")),
                private=tuple(Path(path) for path in head.pop("private")),
                **head,
            )
        except (KeyError, TypeError) as error:
            raise FrameError(f"a setup frame is not complete: {error}") from error
