"""A run's state on disk after each round: one safetensors file a checkpoint, renamed into place when whole.

The file's tensors are the server's flat vectors; its metadata holds the rest as JSON. The format is written here
by hand (it is a length, a JSON header and raw bytes) so that no vector is copied to be saved.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from fedward_common.algorithms.base import MODEL, STATISTIC, ServerState
from fedward_common.errors import FedwardError
from fedward_common.files import owner_folder, sync_folder
from fedward_common.messages import Stamp
from fedward_common.ranges import Scales
from fedward_common.update import Kind, Layout, Vector, Vectors
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as save_arrays

from fedward_server.fencing import Fenced, read_owner
from fedward_server.paths import RunPaths

if TYPE_CHECKING:
    import torch

COUNTER = "counter"
"""Name of the vector of integer buffers in the server's state, if the model has any: kept from the initial model."""

FROZEN = "frozen"
"""Key in a model file's metadata: `Layout.frozen`, if the model has frozen tensors. They are not in the file."""

KEEP_LAST = 3
_KEY = "fedward"
_NAME = re.compile(r"round-(\d{7})\.safetensors")
_DTYPES = {"float32": "F32", "float64": "F64", "int64": "I64"}


class CheckpointError(FedwardError):
    """No checkpoint, or none that can be read."""


@dataclass(frozen=True)
class Standing:
    """The best evaluation so far. stale: evaluations since then without improvement."""

    metric: str | None = None
    best: float | None = None
    best_round: int | None = None
    stale: int = 0


@dataclass(frozen=True)
class Checkpoint:
    """All that a run needs to go on after `state.round` finished rounds.

    enrolled: the N nodes of the run, fixed at its start, sorted. present: those that were ready, for whom a resumed
    run waits a while. included: each node's last training that was in a sum. cohorts: a round's nodes as indices
    into `enrolled`. scales: of the next secure sum's coordinates. event: the fields of the last round's event (None
    before round 1). epoch: of the writer.
    """

    run: str
    epoch: int
    layout: Layout
    state: ServerState
    enrolled: tuple[str, ...]
    present: tuple[str, ...] = ()
    included: Mapping[str, Stamp] = field(default_factory=dict)
    cohorts: tuple[tuple[int, ...], ...] = ()
    standing: Standing = Standing()
    event: Mapping[str, Any] | None = None
    scales: Scales | None = None

    @property
    def round(self) -> int:
        """Rounds finished."""
        return self.state.round

    def model_bytes(self) -> bytes:
        """The model as a safetensors file of named tensors, private and frozen ones left out."""
        kinds = ((Kind.TRAINABLE, MODEL), (Kind.STATISTIC, STATISTIC), (Kind.COUNTER, COUNTER))
        vectors = [(self.state.vectors[name], kind) for kind, name in kinds if name in self.state.vectors]
        metadata = {"round": str(self.round)} | ({FROZEN: self.layout.frozen} if self.layout.frozen else {})
        if self.layout.fits_numpy:
            arrays: dict[str, Vector] = {}
            for vector, kind in vectors:
                arrays |= self.layout.arrays(vector, kind)
            return save_arrays(arrays, metadata)
        # Imported only where a dtype needs it: it takes seconds and 200 MB.
        from safetensors.torch import save as save_tensors

        tensors: dict[str, torch.Tensor] = {}
        for vector, kind in vectors:
            tensors |= self.layout.unpack(vector, kind)
        return save_tensors(tensors, metadata)

    def to_json(self) -> str:
        """All but the vectors."""
        return json.dumps(
            {
                "run": self.run,
                "epoch": self.epoch,
                "layout": self.layout.to_json(),
                "round": self.round,
                "enrolled": self.enrolled,
                "present": self.present,
                "included": {name: [stamp.round, stamp.attempt] for name, stamp in self.included.items()},
                "cohorts": self.cohorts,
                "standing": asdict(self.standing),
                "event": self.event,
                "scales": None if self.scales is None else self.scales.to_json(),
            },
            separators=(",", ":"),
            allow_nan=False,
        )

    @classmethod
    def from_json(cls, text: str, vectors: Vectors) -> Checkpoint:
        """The inverse of `to_json`."""
        content = json.loads(text)
        return cls(
            run=content["run"],
            epoch=content["epoch"],
            layout=Layout.from_json(content["layout"]),
            state=ServerState(vectors, content["round"]),
            enrolled=tuple(content["enrolled"]),
            present=tuple(content["present"]),
            included={name: Stamp(*stamp) for name, stamp in content["included"].items()},
            cohorts=tuple(tuple(cohort) for cohort in content["cohorts"]),
            standing=Standing(**content["standing"]),
            event=content["event"],
            scales=None if content["scales"] is None else Scales.from_json(content["scales"]),
        )


class Checkpoints:
    """The checkpoints of one run. epoch: the writer's (0: a reader); an older writer is refused."""

    def __init__(self, paths: RunPaths, rounds: int = 0, epoch: int = 0) -> None:
        self._paths = paths
        self._every = max(1, rounds // 20)
        self._epoch = epoch

    def write(self, checkpoint: Checkpoint) -> Path:
        """Save durably, then drop what need not be kept: all but the last three, the best and every
        (rounds // 20)-th. Raises `Fenced` if a newer process owns the run; then no checkpoint has changed.
        """
        folder = owner_folder(self._paths.checkpoints)
        path = folder / f"round-{checkpoint.round:07d}.safetensors"
        temporary = folder / f".{path.name}.{os.getpid()}.tmp"
        with open(temporary, "wb", opener=_owner_only) as file:
            _write_safetensors(file, checkpoint.state.vectors, checkpoint.to_json())
            file.flush()
            os.fsync(file.fileno())
        self._check_owner()
        os.replace(temporary, path)
        sync_folder(folder)
        self._prune(checkpoint)
        return path

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that can be read; None if there is no file. Raises `CheckpointError` if there are
        files and all are broken (a run must not start again from nothing in silence)."""
        found = self._files()
        for number in sorted(found, reverse=True):
            try:
                return read_checkpoint(found[number])
            except CheckpointError:
                continue  # broken by the disk, never by a crash: the one before it is whole
        if found:
            raise CheckpointError(f"{self._paths.checkpoints}: none of {len(found)} checkpoints can be read.")
        return None

    def model_file(self, which: str) -> Path:
        """The checkpoint file of "last", "best" or a round's number. Raises `CheckpointError`."""
        found = self._files()
        if not found:
            raise CheckpointError("this run has no checkpoint yet: wait for its first round.")
        kept = ", ".join(str(number) for number in sorted(found))
        if which == "last":
            return found[max(found)]
        if which == "best":
            best = _read_metadata(found[max(found)]).standing.best_round
            if best is None:
                raise CheckpointError("this run has no evaluation yet, so no best round: ask for 'last'.")
            return found[best]
        if not which.isdecimal():
            raise CheckpointError(f"model {which!r}: ask for 'last', 'best' or a round's number (kept: {kept}).")
        if int(which) not in found:
            raise CheckpointError(f"the model of round {which} is not kept; kept are the rounds {kept}.")
        return found[int(which)]

    def _files(self) -> dict[int, Path]:
        folder = self._paths.checkpoints
        entries = folder.iterdir() if folder.is_dir() else ()
        return {int(match[1]): path for path in entries if (match := _NAME.fullmatch(path.name))}

    def _prune(self, newest: Checkpoint) -> None:
        found = self._files()
        keep = {*sorted(found)[-KEEP_LAST:], newest.round, newest.standing.best_round}
        for number, path in found.items():
            if number not in keep and number % self._every:
                path.unlink(missing_ok=True)
        for leftover in self._paths.checkpoints.glob(".*.tmp"):
            leftover.unlink(missing_ok=True)

    def _check_owner(self) -> None:
        owner = read_owner(self._paths)
        if owner is not None and owner.epoch > self._epoch:
            raise Fenced(
                f"run {self._paths.root.name}: epoch {self._epoch} may not write, epoch {owner.epoch} owns the run."
            )


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in `path`. Raises `CheckpointError` if it is not whole."""
    with _reading(path), safe_open(path, framework="np") as file:
        metadata = file.metadata()
        # A copy: what safe_open gives may be a view into a mapped file.
        vectors = {name: np.array(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
        checkpoint = Checkpoint.from_json(metadata[_KEY], vectors)
        sums = json.loads(metadata["crc32"])
        if sums != {name: _crc32(vector) for name, vector in vectors.items()}:
            raise ValueError("the checksum of its vectors is wrong, the disk changed it")
    return checkpoint


def _read_metadata(path: Path) -> Checkpoint:
    with _reading(path), safe_open(path, framework="np") as file:
        return Checkpoint.from_json(file.metadata()[_KEY], {})


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: not a whole checkpoint: {error}") from error


def _write_safetensors(file: BinaryIO, vectors: Vectors, text: str) -> None:
    whole = {name: np.ascontiguousarray(vectors[name]) for name in sorted(vectors)}
    sums = {name: _crc32(vector) for name, vector in whole.items()}
    header: dict[str, Any] = {"__metadata__": {_KEY: text, "crc32": json.dumps(sums)}}
    at = 0
    for name, vector in whole.items():
        dtype = _DTYPES[vector.dtype.name]
        header[name] = {"dtype": dtype, "shape": list(vector.shape), "data_offsets": [at, at + vector.nbytes]}
        at += vector.nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    file.write(len(encoded).to_bytes(8, "little") + encoded)
    for vector in whole.values():
        file.write(_raw(vector))


def _raw(vector: Vector) -> memoryview:
    return vector.view(np.uint8).data


def _crc32(vector: Vector) -> int:
    return zlib.crc32(_raw(vector))


def _owner_only(name: str, flags: int) -> int:
    return os.open(name, flags, 0o600)
