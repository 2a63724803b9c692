"""A run's configuration: TOML in, frozen pydantic out, every rule with its reason and the way out."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializeAsAny,
    ValidationError,
    model_validator,
)

from fedward_common.algorithms.base import AlgorithmOptions
from fedward_common.algorithms.registry import parse_options
from fedward_common.algorithms.training import LocalOptions
from fedward_common.errors import ConfigError

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9_.-]{0,62}[a-z0-9])?$")]
Seconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600)]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class CohortOptions(_Table):
    """The `[cohort]` table: who takes part in a round and how long a round may take."""

    nodes: tuple[Name, ...] = Field(default=(), description="names of the nodes to train on; empty: all that match tags")
    tags: tuple[Name, ...] = Field(default=(), description="only nodes that carry all of these tags")
    size: int | None = Field(default=None, ge=1, description="nodes drawn for a round; default all")
    min_nodes: int = Field(default=1, ge=1, description="nodes that must be ready before round 1")
    quorum: int | None = Field(default=None, ge=1, description="updates needed; default half of the round's cohort, rounded up")
    deadline: Seconds = Field(default=600.0, description="seconds after which a round closes with what has arrived")
    wait: Seconds = Field(default=600.0, description="seconds to wait for min_nodes to be ready (online, bundle approved)")
    max_failed_rounds: int = Field(default=3, ge=1, description="the run ends after so many rounds in a row without quorum")
    max_weight: float = Field(default=1e7, gt=0, description="largest weight (examples) accepted from a node")

    def quorum_of(self, selected: int) -> int:
        """Updates that a round with `selected` nodes needs."""
        return self.quorum if self.quorum is not None else max(1, math.ceil(selected / 2))


class EvaluationOptions(_Table):
    """The `[evaluation]` table."""

    every: int = Field(default=1, ge=0, description="evaluate on the nodes' test data every so many rounds; 0: never")
    holdout: tuple[Name, ...] = Field(default=(), description="nodes never trained on, evaluated only")
    central: bool = Field(default=False, description="evaluate on the server with the task's central_data()")
    stop_metric: str | None = Field(default=None, description="early stopping: name of an evaluation metric, or 'loss'")
    stop_mode: Literal["max", "min"] = "max"
    stop_patience: int = Field(default=5, ge=1, description="evaluations without improvement before the run ends")
    stop_min_delta: float = Field(default=0.0, ge=0)


class RunConfig(_Table):
    """One federated training, completely."""

    name: Name
    task: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", description="'module:Class' in the bundle")
    rounds: int = Field(ge=1, le=1_000_000)
    seed: int = Field(default=0, ge=0, lt=2**31)
    algorithm: Annotated[SerializeAsAny[AlgorithmOptions], BeforeValidator(parse_options)]
    local: LocalOptions
    cohort: CohortOptions = CohortOptions()
    evaluation: EvaluationOptions = EvaluationOptions()
    initial_model: str | None = Field(default=None, description="safetensors file to start from (path beside the TOML)")
    tags: tuple[Name, ...] = Field(default=(), description="what the run is for; nodes' policies may ask for some")

    @model_validator(mode="after")
    def _combinations(self) -> RunConfig:
        problem = self.algorithm.check(self.local)
        if problem:
            raise ValueError(problem)
        cohort, evaluation = self.cohort, self.evaluation
        if cohort.size is not None and cohort.quorum is not None and cohort.quorum > cohort.size:
            raise ValueError(
                f"cohort.quorum = {cohort.quorum} is more than cohort.size = {cohort.size}: no round could close. "
                "Lower quorum or raise size."
            )
        if cohort.nodes and cohort.min_nodes > len(cohort.nodes):
            raise ValueError(
                f"cohort.min_nodes = {cohort.min_nodes} is more than the {len(cohort.nodes)} names in cohort.nodes: "
                "the run could never start. Lower min_nodes or name more nodes."
            )
        if len(set(cohort.nodes)) != len(cohort.nodes):
            raise ValueError("cohort.nodes names a node twice: each node counts once. Remove the repeats.")
        both = set(cohort.nodes) & set(evaluation.holdout)
        if both:
            raise ValueError(
                f"{sorted(both)} in both cohort.nodes and evaluation.holdout: a held-out node is never trained on. "
                "Name it in one of the two."
            )
        if evaluation.stop_metric is not None and evaluation.every == 0 and not evaluation.central:
            raise ValueError(
                "evaluation.stop_metric needs evaluations, but evaluation.every = 0: set every ≥ 1 or drop stop_metric."
            )
        if self.local.max_seconds is not None and self.local.max_seconds >= cohort.deadline:
            raise ValueError(
                f"local.max_seconds = {self.local.max_seconds} is not under cohort.deadline = {cohort.deadline}: "
                "partial work would arrive after the round has closed. Lower max_seconds or raise deadline."
            )
        return self


def parse_config(tables: dict[str, Any]) -> RunConfig:
    """A `RunConfig` from TOML tables (top-level keys may stand in `[run]`). Raises `ConfigError`."""
    merged = {**tables.get("run", {}), **{key: value for key, value in tables.items() if key != "run"}}
    try:
        return RunConfig.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(explain(error)) from error


def load_config(path: Path) -> RunConfig:
    """A `RunConfig` from a TOML file. Raises `ConfigError`."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file. 'fedward new NAME' writes one to start from.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    return parse_config(tables)


def explain(error: ValidationError) -> str:
    """A pydantic error as lines of field, value, rule."""
    lines = []
    for item in error.errors(include_url=False):
        where = ".".join(str(part) for part in item["loc"])
        rule = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            rule = "unknown key. Check the spelling, or remove it; 'fedward plan --keys' lists all keys."
            lines.append(f"{where} = {item['input']!r}: {rule}")
        elif item["type"] == "missing":
            lines.append(f"{where}: missing. Add it to the run's TOML.")
        elif not where or isinstance(item["input"], dict):
            lines.append(f"{where}: {rule}" if where else rule)
        else:
            lines.append(f"{where} = {item['input']!r}: {rule}")
    return "\n".join(lines)
