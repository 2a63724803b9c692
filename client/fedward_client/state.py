"""What a node keeps for one run, in files that survive a crash at any moment."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from fedward_common.errors import FedwardError
from fedward_common.files import owner_folder, sync_folder, write_atomic
from fedward_common.messages import Stamp
from fedward_common.update import Vectors
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save


class StateError(FedwardError):
    """A state file cannot be read."""


class FileStore:
    """A `StateStore` in a folder: `committed.safetensors` and `pending.safetensors`.

    The stamp stands in the same file as the vectors, so no crash can mix those of two trainings; a commit is one
    rename.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = owner_folder(folder)
        self._committed = folder / "committed.safetensors"
        self._pending = folder / "pending.safetensors"
        for half_written in folder.glob(".*.tmp"):
            half_written.unlink(missing_ok=True)

    def committed(self) -> tuple[Stamp | None, Vectors]:
        return _read(self._committed) or (None, {})

    def pending(self) -> tuple[Stamp, Vectors] | None:
        return _read(self._pending)

    def save_pending(self, stamp: Stamp, vectors: Vectors) -> None:
        arrays = {name: np.ascontiguousarray(vector) for name, vector in vectors.items()}
        metadata = {"round": str(stamp.round), "attempt": str(stamp.attempt)}
        write_atomic(self._pending, save(arrays, metadata))

    def commit_pending(self) -> None:
        os.replace(self._pending, self._committed)
        sync_folder(self._folder)

    def drop_pending(self) -> None:
        self._pending.unlink()
        sync_folder(self._folder)


def _read(path: Path) -> tuple[Stamp, Vectors] | None:
    try:
        # Read whole, not mapped: the file may be replaced while the vectors are in use.
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            stamp = Stamp(int(metadata["round"]), int(metadata["attempt"]))
            return stamp, {name: np.array(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        return None
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise StateError(
            f"{path}: cannot be read ({error}). The disk may be failing: restore the file from a backup. Without it "
            "this node cannot go on in that run."
        ) from error
