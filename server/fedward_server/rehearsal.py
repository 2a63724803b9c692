"""`fedward simulate`: a simulated run with its display, its directory and its model."""

from __future__ import annotations

import logging
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event as Flag
from typing import Any

from fedward_common.config import RunConfig
from fedward_common.errors import ConfigError
from fedward_common.files import write_atomic
from fedward_common.local import LocalRunner
from fedward_common.work import Work

from fedward_server.checkpoint import Checkpoints
from fedward_server.events import Event, EventLog
from fedward_server.live import Display, open_display
from fedward_server.model_file import load_vectors
from fedward_server.paths import RunPaths
from fedward_server.plan import open_task
from fedward_server.privacy_report import write_if_private
from fedward_server.simulation import simulate


@dataclass(frozen=True)
class Ended:
    """A simulated run that is over. model: its last model (safetensors), None if no round was finished."""

    status: str
    paths: RunPaths
    model: Path | None


class _ShownLog(EventLog):
    def __init__(self, path: Path, display: Display) -> None:
        super().__init__(path)
        self._display = display

    def append(self, kind: str, **fields: Any) -> Event:
        event = super().append(kind, **fields)
        self._display.show(event)
        return event


class _FirstError(logging.Handler):
    """Keeps the first traceback: with many nodes one mistake in a task shows itself many times."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        if not self.text and record.exc_info:
            self.text = f"{record.getMessage()}\n{''.join(traceback.format_exception(*record.exc_info))}"


def rehearse(
    config: RunConfig,
    project: Path,
    nodes: Mapping[str, Mapping[str, Any]],
    out: Path | None,
    device: str = "cpu",
    as_json: bool = False,
) -> Ended:
    """Simulate `config` over `nodes` (name -> [data] table); Ctrl-C ends it after the round in flight.

    Raises `ConfigError` or `TaskError` for what can be told before the first round.
    """
    import torch

    # Many small models one after another: threads cost more than they bring.
    torch.set_num_threads(1)
    task = open_task(config, project)
    paths = RunPaths(_fresh(out) if out is not None else _next_directory(project, config.name))
    initial = None
    if config.initial_model is not None:
        server = LocalRunner(config, task, "server", {})
        initial = load_vectors(server.layout, project / config.initial_model, server.do(Work("initial")).vectors)
    write_atomic(paths.config, config.model_dump_json().encode(), mode=0o644)
    with open_display(as_json) as display, _log_file(paths.root / "log.txt") as first_error, _stopping() as stop:
        outcome = simulate(
            config,
            task,
            nodes,
            paths,
            initial=initial,
            device=device,
            log=_ShownLog(paths.events, display),
            should_stop=stop.is_set,
        )
    write_if_private(paths)
    if first_error.text:
        print(f"first error in the task ({paths.root / 'log.txt'} has all):", file=sys.stderr)
        print(first_error.text, file=sys.stderr)
    newest = Checkpoints(paths).newest()
    if newest is None or newest.round == 0:
        return Ended(outcome.status, paths, None)
    model = paths.root / "model.safetensors"
    write_atomic(model, newest.model_bytes(), mode=0o644)
    return Ended(outcome.status, paths, model)


def _fresh(out: Path) -> Path:
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"--out {out}: holds files already. Name a new folder, or remove that one.")
    out.mkdir(parents=True, exist_ok=True)
    return out.resolve()


def _next_directory(project: Path, name: str) -> Path:
    number = 1
    while True:
        folder = project / "runs" / f"{name}-{number}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
            continue
        return folder


@contextmanager
def _log_file(path: Path) -> Iterator[_FirstError]:
    """Sends the engine's log to a file instead of through the table."""
    logger = logging.getLogger("fedward_server")
    handlers = (logging.FileHandler(path, encoding="utf-8"), _FirstError())
    before = logger.propagate
    logger.propagate = False
    for handler in handlers:
        logger.addHandler(handler)
    try:
        yield handlers[1]
    finally:
        logger.propagate = before
        for handler in handlers:
            logger.removeHandler(handler)
        handlers[0].close()


@contextmanager
def _stopping() -> Iterator[Flag]:
    """A flag that the first Ctrl-C sets; the second one interrupts."""
    stop = Flag()
    before = signal.getsignal(signal.SIGINT)

    def interrupted(number: int, frame: object) -> None:
        stop.set()
        signal.signal(signal.SIGINT, before)
        print("\nEnding after this round; Ctrl-C again ends at once.", file=sys.stderr)

    signal.signal(signal.SIGINT, interrupted)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
