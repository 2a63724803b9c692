"""Task code on the server: builds the model and evaluates centrally, in the same sandboxed worker as on nodes."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedward_common.bundle import Bundle
from fedward_common.config import RunConfig
from fedward_common.update import Layout, Vectors
from fedward_common.work import Work
from fedward_common.worker.parent import Worker
from fedward_common.worker.setup import Setup

from fedward_server.model_file import load_vectors
from fedward_server.paths import RunPaths, ServerPaths

_BUILD_SECONDS = 300.0


class TaskHost:
    """A run's task on the server. Raises `WorkerFailed` where the task's code fails."""

    def __init__(self, config: RunConfig, paths: ServerPaths, run: RunPaths, data: Mapping[str, Any]) -> None:
        folder = run.root / "bundle"
        # An earlier attempt may have been cut off while it unpacked.
        shutil.rmtree(folder, ignore_errors=True)
        Bundle.open(run.bundle.read_bytes()).unpack(folder)
        named = [Path(value) for value in data.values() if isinstance(value, str) and value.startswith("/")]
        setup = Setup(
            config=config.model_dump_json(),
            bundle=folder,
            node="server",
            scratch=run.root / "scratch",
            log=run.root / "worker.log",
            data=data,
            read=tuple(path for path in named if path.exists()),
            private=(paths.authority, paths.database, paths.server_key, paths.credential),
        )
        self._worker = Worker(setup)

    def initial(self, start: Path | None) -> tuple[Layout, Vectors, tuple[str, ...]]:
        """The model's layout, initial vectors, and the names of the task's metrics; `start` is a safetensors file to
        begin from, if given."""
        done = self._worker.do(Work("initial"), _BUILD_SECONDS)
        layout = Layout.from_json(str(done.info["layout"]))
        vectors = done.vectors if start is None else load_vectors(layout, start, done.vectors)
        return layout, vectors, tuple(map(str, done.info["metric_names"]))

    def evaluate(self, round_: int, vectors: Vectors, seconds: float) -> Mapping[str, float]:
        """Metric sums of the global model on the task's central data."""
        return self._worker.do(Work("evaluate", round_, vectors, split="central"), seconds).metrics

    def close(self) -> None:
        """End the worker."""
        self._worker.close()
