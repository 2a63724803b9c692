"""Before a run: what is refused and why, and what a round costs in bytes and seconds."""

from __future__ import annotations

import hashlib
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedward_common.algorithms.registry import build
from fedward_common.bundle import Bundle, build_bundle
from fedward_common.config import RunConfig
from fedward_common.errors import ConfigError, FedwardError, TaskError
from fedward_common.local import LocalRunner
from fedward_common.model import fresh_model, laid_out
from fedward_common.privacy import sampled, site, wording
from fedward_common.privacy.accounting import Claim, spent
from fedward_common.privacy.amplification import Drawn, unseen
from fedward_common.privacy.cost import check_layout, multiplier, round_cost
from fedward_common.secagg.graph import Parameters
from fedward_common.secagg.packing import packed_size
from fedward_common.shared_data import check_shared
from fedward_common.task import Task, load_task
from fedward_common.update import Kind, Vectors
from fedward_common.work import Work

from fedward_server.model_file import load_vectors

_MEASURED_STEPS = 10


@dataclass(frozen=True)
class Privacy:
    """What a run with [privacy] will have spent. spent: ε after every tenth round and the last one, by round.
    unseen: the same against those who see models only; sampling: why that is less, or not. last: the last round that
    the budget allows. noise_multiplier: z. surplus: how much more variance than was asked for stays in a sum if nobody
    drops out, and at most; 0.25 is a quarter more."""

    noise_multiplier: float
    spent: Mapping[int, float]
    unseen: Mapping[int, float]
    sampling: str
    last: int
    assumptions: tuple[str, ...]
    surplus: tuple[float, float]


@dataclass(frozen=True)
class Forecast:
    """What a round costs. Bytes are of tensors; messages add about 1 %.

    parameters: trainable ones. frozen: values that are the same everywhere and never sent. kept: private values, which
    never leave a node. down, up: bytes a node and round. evaluation: bytes down for an evaluation.
    secure: neighbours, threshold and what a round survives, if it is a secure sum (evaluations then come with it).
    privacy: ε over the rounds, if the run has [privacy].
    steps: K on the node whose data was measured, None if no data is here. step_seconds: one local step here.
    """

    parameters: int
    buffers: int
    cohort: int
    down: int
    up: int
    evaluation: int
    steps: int | None = None
    step_seconds: float | None = None
    secure: Parameters | None = None
    privacy: Privacy | None = None
    frozen: int = 0
    kept: int = 0

    @property
    def train_seconds(self) -> float | None:
        """Local training of one round on a machine like this one."""
        return None if self.steps is None or self.step_seconds is None else self.steps * self.step_seconds


def open_task(config: RunConfig, project: Path) -> Task:
    """The run's task from the project folder. Raises `TaskError`, also if it lies outside."""
    module = config.task.partition(":")[0].partition(".")[0]
    if not (project / module).is_dir() and not (project / f"{module}.py").is_file():
        raise TaskError(
            f"task = {config.task!r}: module {module!r} is not in {project}, so it would not be in the "
            "bundle. Put the task's package beside run.toml."
        )
    return load_task(config.task, project)


def refusals(config: RunConfig, project: Path) -> list[str]:
    """Why server or nodes would refuse this run, as far as can be told here."""
    problems: list[str] = []
    checks: tuple[Callable[[], None], ...] = (
        lambda: Bundle.open(build_bundle(project)).check(project),
        lambda: _check_task_packed(config, project),
        lambda: _check_task(config, project),
        lambda: _check_initial(config, project),
        lambda: _check_private(config, project),
    )
    for check in checks:
        try:
            check()
        except FedwardError as error:
            # A configuration's errors stand one a line; a task's is one, with an example of what to add.
            found = str(error).splitlines() if isinstance(error, ConfigError) else [str(error)]
            # The same fault may stop several checks.
            problems.extend(problem for problem in found if problem not in problems)
    return problems


def _check_task_packed(config: RunConfig, project: Path) -> None:
    open_task(config, project)
    module = config.task.partition(":")[0].replace(".", "/")
    names = Bundle.open(build_bundle(project)).files
    if f"{module}.py" not in names and f"{module}/__init__.py" not in names:
        raise TaskError(
            f"task = {config.task!r}: {module}.py is not packed into the bundle. "
            "Name its package in fab-include of pyproject.toml."
        )


def _check_task(config: RunConfig, project: Path) -> None:
    task = open_task(config, project)
    if config.shared is not None:
        check_shared(task)
    laid_out(config, task, fresh_model(config, task))


def _check_initial(config: RunConfig, project: Path) -> None:
    if config.initial_model is None:
        return
    path = project / config.initial_model
    if not path.is_file():
        raise TaskError(
            f"initial_model = {config.initial_model!r}: no such file in {project}. Correct the path, or remove the key."
        )
    task = open_task(config, project)
    load_vectors(laid_out(config, task, fresh_model(config, task)), path, {})


def forecast(config: RunConfig, task: Task, nodes: int, data_config: Mapping[str, Any] | None) -> Forecast:
    """What a round with up to `nodes` nodes costs. data_config: the [data] table of a node whose data is here
    (its local step is measured), or None. Raises `TaskError`, and `ConfigError` for too few nodes.
    """
    model = fresh_model(config, task)
    layout = laid_out(config, task, model)
    algorithm = build(config.algorithm)
    start: Vectors = {
        name: layout.pack(model.state_dict(), kind)
        for name, kind in (("model", Kind.TRAINABLE), ("statistic", Kind.STATISTIC))
        if layout.size(kind)
    }
    # The last round's broadcast: a warm start sends less before.
    broadcast = algorithm.broadcast(replace(algorithm.initial(layout, start), round=config.rounds))
    cohort = min(nodes, config.cohort.size or nodes)
    config.aggregation.check_cohort(cohort)
    extents = map(layout.extent, algorithm.sends(layout).values())
    up = sum(length * dtype.itemsize for length, dtype in extents)
    parameters = None
    if config.secure_sum.enabled:
        parameters = config.secure_sum.parameters(cohort)
        summed = build(config.algorithm).summed(layout, config.local)
        length = sum(layout.extent(extent)[0] for extent in summed.values())
        up = packed_size(site.padded(config, length), config.secure_sum.bits)
    result = Forecast(
        parameters=layout.size(Kind.TRAINABLE),
        buffers=layout.size(Kind.STATISTIC),
        cohort=cohort,
        down=sum(vector.nbytes for vector in broadcast.values()),
        up=up,
        evaluation=0 if parameters else sum(vector.nbytes for vector in start.values()),
        secure=parameters,
        privacy=None if config.privacy is None else privacy(config, layout.size(Kind.TRAINABLE), cohort, nodes),
        frozen=layout.size(Kind.FROZEN),
        kept=layout.size(Kind.PRIVATE),
    )
    if data_config is None:
        return result
    examples, step_seconds = _measure(config, task, data_config, broadcast)
    return Forecast(**{**vars(result), "steps": _steps(config, examples), "step_seconds": step_seconds})


def _steps(config: RunConfig, examples: int) -> int:
    local = config.local
    if config.privacy is not None and config.privacy.sampling_rate is not None:
        return sampled.steps(local, config.privacy.sampling_rate)
    return local.steps or (local.epochs or 1) * math.ceil(examples / local.batch_size)


def privacy(config: RunConfig, length: int, n: int, population: int) -> Privacy:
    """ε of a run whose rounds have `n` nodes each, drawn from `population`, for a model of `length` parameters. Raises
    `ConfigError`."""
    options = config.privacy
    assert options is not None
    cost = round_cost(config, length, n)

    def after(rounds: int) -> Claim:
        return spent([(cost.event, rounds * cost.count)], options.delta)

    last, budget = config.rounds, options.budget
    if budget is not None and after(last).epsilon > budget:
        # ε grows with the rounds: the first one that is too many, counted from 0, follows the last that is not.
        last = bisect_left(range(1, config.rounds + 1), True, key=lambda rounds: after(rounds).epsilon > budget)
    shown = sorted({*range(10, last + 1, 10), last} - {0})
    claim, drawn = after(max(1, last)), Drawn(cost.event, n, population)
    models_only = {r: unseen([(drawn, r * cost.count)], options.delta) for r in shown}
    return Privacy(
        noise_multiplier=multiplier(config, length),
        spent={r: after(r).epsilon for r in shown},
        unseen={r: found.epsilon for r, found in models_only.items()},
        sampling=wording.sampling(
            config, claim, models_only.get(last, claim), [n / population] if n < population else [], 0
        ),
        last=last,
        assumptions=claim.assumptions,
        surplus=_surplus(config, length, n),
    )


def _surplus(config: RunConfig, length: int, n: int) -> tuple[float, float]:
    assert config.privacy is not None
    if config.privacy.unit != "site":
        return 0.0, 0.0  # each node's noise is about its own data, and stays
    made = site.mechanism(config, length, n)
    left = [
        made.surplus(count, 0 if made.spare is None else count - made.spare.keepers(count, count))
        for count in range(config.secure_sum.parameters(n).survivors, n + 1)
    ]
    return left[-1], max(left)


def _check_private(config: RunConfig, project: Path) -> None:
    if config.privacy is None:
        return
    task = open_task(config, project)
    model = fresh_model(config, task)
    if config.privacy.unit != "site":
        from fedward_common.privacy.dp_sgd import check_model

        check_model(model)
    layout = laid_out(config, task, model)
    check_layout(layout)
    round_cost(config, layout.size(Kind.TRAINABLE), site.planned(config))


def _measure(config: RunConfig, task: Task, data_config: Mapping[str, Any], broadcast: Vectors) -> tuple[int, float]:
    """(examples of a pass on the node, seconds of one local step here)."""
    changes: dict[str, Any] = {"local": config.local.model_copy(update={"steps": _MEASURED_STEPS, "epochs": None})}
    if config.privacy is not None:
        # A step takes as long with any noise: none is to be calibrated for so few steps.
        changes["privacy"] = config.privacy.model_copy(update={"noise_multiplier": 1.0, "target_epsilon": None})
    runner = LocalRunner(config.model_copy(update=changes), task, "plan", data_config)
    seconds = math.inf
    # The first training pays for loading and warming up; the best of three is the machine's own speed.
    for _ in range(3):
        started = time.perf_counter()
        runner.do(Work("train", 1, broadcast))
        seconds = min(seconds, time.perf_counter() - started)
    own = len(task.data(data_config).train)  # type: ignore[arg-type]
    return own + (config.shared.count(own) if config.shared is not None else 0), seconds / _MEASURED_STEPS


def bundle_digest(project: Path) -> str:
    """SHA-256 of the bundle as it would be sent now: what a site admin approves."""
    return hashlib.sha256(build_bundle(project)).hexdigest()
