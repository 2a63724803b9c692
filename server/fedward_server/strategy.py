"""Fedward as a Flower strategy, and any algorithm of ours in a stock Flower ServerApp:

    Fedward(config, task).start(grid=grid, initial_arrays=arrays, num_rounds=10)
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import numpy as np
from fedward_common.algorithms.base import MODEL, STATISTIC
from fedward_common.algorithms.registry import build
from fedward_common.config import RunConfig
from fedward_common.errors import ConfigError, FedwardError
from fedward_common.messages import Reply, Request
from fedward_common.model import fresh_model, laid_out
from fedward_common.task import Task
from fedward_common.update import Kind, Layout, Vector, Vectors
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedward_server.checkpoint import COUNTER
from fedward_server.collecting import PlainCollector
from fedward_server.events import EventLog, read_events
from fedward_server.grid import FlowerTransport, NumberedDirectory
from fedward_server.model_file import holds
from fedward_server.paths import RunPaths
from fedward_server.rounds import Rounds
from fedward_server.transport import Clock, Peer, Transport, never

_KINDS = {MODEL: Kind.TRAINABLE, STATISTIC: Kind.STATISTIC, COUNTER: Kind.COUNTER}


class Fedward(Strategy):
    """A run of `config` in a ServerApp of the user's own. `start` runs our rounds, not Flower's.

    task: builds the model, so that parameters and buffers can be told apart. work_dir: checkpoints and events (a
    fresh temporary folder if None; give one to be able to resume, with a higher `epoch`).
    """

    def __init__(self, config: RunConfig, task: Task, work_dir: Path | None = None, epoch: int = 1) -> None:
        if config.secure_sum.enabled:
            raise ConfigError(
                "secure_sum.enabled = true: nodes of a stock SuperLink have no enrolled identity and keep no secrets "
                "between messages. Set secure_sum.enabled = false here, run it with 'fedward run start', or wrap one "
                "of Flower's own strategies in fedward_server.secure_sum.SecureSum."
            )
        self._config = config
        self._layout = laid_out(config, task, fresh_model(config, task))
        self._work_dir = work_dir
        self._epoch = epoch

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int | None = None,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run to the end. initial_arrays: a state dict as Flower arrays. num_rounds and timeout replace `rounds` and
        `cohort.deadline` of the configuration. Raises `FedwardError` if the run fails.

        train_config and evaluate_config have no use here and are refused: nodes take their settings from the run's
        configuration, which they can check.
        """
        if train_config or evaluate_config:
            raise ConfigError("train_config and evaluate_config are not sent: put settings into the RunConfig.")
        config = self._config if num_rounds is None else self._config.model_copy(update={"rounds": num_rounds})
        if timeout is not None:
            cohort = config.cohort.model_copy(update={"deadline": timeout})
            config = config.model_copy(update={"cohort": cohort})
        root = self._work_dir if self._work_dir is not None else Path(tempfile.mkdtemp(prefix="fedward-"))
        paths = RunPaths(root / config.name)
        result = Result()
        algorithm, clock = build(config.algorithm), Clock()
        transport = _WithConfig(FlowerTransport(grid, NumberedDirectory()), config)
        rounds = Rounds(
            config=config,
            algorithm=algorithm,
            layout=self._layout,
            initial=vectors_of(self._layout, initial_arrays),
            transport=transport,
            collector=PlainCollector(config, algorithm, self._layout, transport, clock),
            clock=clock,
            paths=paths,
            epoch=self._epoch,
            log=EventLog(paths.events),
            central=self._central(evaluate_fn, result),
        )
        outcome = rounds.run()
        if outcome.status == "failed":
            raise FedwardError(f"the run failed: {outcome.reason}")
        result.arrays = arrays_of(self._layout, outcome.state.vectors)
        for event, _ in read_events(paths.events):
            if event["event"] == "round":
                for name, into in (
                    ("train", result.train_metrics_clientapp),
                    ("evaluate", result.evaluate_metrics_clientapp),
                ):
                    if event[name]:
                        into[event["round"]] = MetricRecord(event[name])
        return result

    def _central(
        self, evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None, result: Result
    ) -> Callable[[Vectors], Mapping[str, float]] | None:
        if evaluate_fn is None:
            return None

        def central(vectors: Vectors) -> Mapping[str, float]:
            round_ = len(result.evaluate_metrics_serverapp) + 1
            metrics = evaluate_fn(round_, arrays_of(self._layout, vectors)) or MetricRecord()
            result.evaluate_metrics_serverapp[round_] = metrics
            return {"examples": 1.0, **{name: float(np.asarray(value)) for name, value in metrics.items()}}

        return central

    def summary(self) -> None:
        """Nothing: `start` writes its own events."""

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> NoReturn:
        """Not used, as are the other three: Fedward runs its own rounds."""
        raise FedwardError("Fedward runs its own rounds: call start().")

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> NoReturn:
        """Not used."""
        raise FedwardError("Fedward runs its own rounds: call start().")

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> NoReturn:
        """Not used."""
        raise FedwardError("Fedward runs its own rounds: call start().")

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> NoReturn:
        """Not used."""
        raise FedwardError("Fedward runs its own rounds: call start().")


class _WithConfig:
    """A transport whose every request carries the run's configuration: a stock ClientApp has no signed manifest,
    and may be a fresh process for each message (so nothing is held back for a later COLLECT either)."""

    def __init__(self, inner: Transport, config: RunConfig) -> None:
        self._inner = inner
        self._config = config.model_dump(mode="json")

    def online(self) -> list[Peer]:
        return self._inner.online()

    def bytes_moved(self) -> tuple[int, int]:
        return self._inner.bytes_moved()

    def exchange(
        self, requests: Mapping[str, Request], seconds: float, over: Callable[[], bool] = never
    ) -> Iterator[tuple[str, Reply]]:
        extra = {"config": self._config, "hold": False}
        told = {name: replace(request, settings={**request.settings, **extra}) for name, request in requests.items()}
        return self._inner.exchange(told, seconds, over)


def vectors_of(layout: Layout, arrays: ArrayRecord) -> dict[str, Vector]:
    """The flat vectors of a state dict in Flower arrays; private and frozen tensors may be missing. Raises
    `ConfigError`."""
    missing = [spec.name for kind in _KINDS.values() for spec in layout.of_kind(kind) if spec.name not in arrays]
    if missing:
        raise ConfigError(f"initial_arrays lacks {missing}: give ArrayRecord(model.state_dict()).")
    frozen = [spec for spec in layout.of_kind(Kind.FROZEN) if spec.name in arrays]
    others = [spec.name for spec in frozen if not holds(arrays[spec.name].numpy(), spec)]
    if others:
        raise ConfigError(
            f"initial_arrays has other values than the task's model in {others}, which are frozen and not sent: give "
            "the arrays of fedward_common.model.fresh_model(config, task), or leave them out."
        )
    vectors = {}
    for name, kind in _KINDS.items():
        parts = [arrays[spec.name].numpy().reshape(-1) for spec in layout.of_kind(kind)]
        if parts:
            vectors[name] = np.concatenate(parts).astype(layout.dtype(kind))
    return vectors


def arrays_of(layout: Layout, vectors: Vectors) -> ArrayRecord:
    """The inverse of `vectors_of`: a state dict in Flower arrays, private and frozen tensors left out."""
    arrays: dict[str, Array] = {}
    for name, kind in _KINDS.items():
        if name in vectors:
            arrays.update({key: Array(tensor.numpy()) for key, tensor in layout.unpack(vectors[name], kind).items()})
    return ArrayRecord(arrays)
