"""A run's configuration: TOML in, frozen pydantic out, every rule with its reason and the way out."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializeAsAny,
    ValidationError,
    model_validator,
)

from fedward_common.aggregation_options import RULES, AggregationOptions, Mean
from fedward_common.algorithms.base import DELTA, STATISTIC, AlgorithmOptions
from fedward_common.algorithms.local_options import LocalOptions
from fedward_common.algorithms.registry import ALGORITHMS, build, parse_options
from fedward_common.errors import ConfigError
from fedward_common.explain import NAME_PATTERN, TASK_PATTERN, NestedError, Source, show
from fedward_common.explain import explain as explain
from fedward_common.lora import LoraOptions
from fedward_common.privacy.options import PrivacyOptions
from fedward_common.secagg.graph import NoProtection, Parameters, choose
from fedward_common.shared_data import SharedOptions
from fedward_common.update import Kind, Layout, TensorSpec

Name = Annotated[str, Field(pattern=NAME_PATTERN)]
Seconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600)]


def _algorithm(value: Any) -> AlgorithmOptions:
    """Like `parse_options`, but strict about types, and with every problem named by itself."""
    if isinstance(value, dict) and isinstance(value.get("name"), str) and value["name"] in ALGORITHMS:
        return _strict(ALGORITHMS[value["name"]].Options, value)
    return parse_options(value)


def _aggregation(value: Any) -> AggregationOptions:
    if isinstance(value, AggregationOptions):
        return value
    if not isinstance(value, dict) or not isinstance(value.get("rule"), str):
        raise ValueError(f"give aggregation.rule, one of {sorted(RULES)}")
    if value["rule"] not in RULES:
        raise ValueError(f"aggregation.rule = {value['rule']!r} is not known: use one of {sorted(RULES)}")
    return _strict(RULES[value["rule"]], value)


O = TypeVar("O", bound=BaseModel)  # noqa: E741


def _strict(options: type[O], value: dict[str, Any]) -> O:
    try:
        return options.model_validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError as error:
        raise NestedError(error, options) from error


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class CohortOptions(_Table):
    """The `[cohort]` table: who takes part in a round and how long a round may take."""

    nodes: tuple[Name, ...] = Field(default=(), description="nodes to train on; empty: all that match tags")
    tags: tuple[Name, ...] = Field(default=(), description="only nodes that carry all of these tags")
    size: int | None = Field(default=None, ge=1, description="nodes drawn for a round; default all")
    min_nodes: int = Field(default=1, ge=1, description="nodes that must be ready before round 1")
    quorum: int | None = Field(default=None, ge=1, description="updates needed; default half of the cohort, rounded up")
    deadline: Seconds = Field(default=600.0, description="seconds after which a round closes with what has arrived")
    wait: Seconds = Field(default=600.0, description="seconds to wait for min_nodes (online, bundle approved)")
    max_failed_rounds: int = Field(
        default=3, ge=1, description="the run ends after so many rounds without quorum in a row"
    )
    max_weight: float = Field(default=1e7, gt=0, description="largest weight (examples) accepted from a node")

    def quorum_of(self, selected: int) -> int:
        """Updates that a round with `selected` nodes needs, whatever is made of them."""
        return self.quorum if self.quorum is not None else max(1, math.ceil(selected / 2))


class EvaluationOptions(_Table):
    """The `[evaluation]` table."""

    every: int = Field(default=1, ge=0, description="evaluate on the nodes' test data every so many rounds; 0: never")
    holdout: tuple[Name, ...] = Field(default=(), description="nodes never trained on, evaluated only")
    central: bool = Field(default=False, description="evaluate on the server with the task's central_data()")
    stop_metric: str | None = Field(default=None, description="early stopping: name of an evaluation metric, or 'loss'")
    stop_mode: Literal["max", "min"] = Field(default="max", description="whether more or less of stop_metric is better")
    stop_patience: int = Field(default=5, ge=1, description="evaluations without improvement before the run ends")
    stop_min_delta: float = Field(default=0.0, ge=0, description="a smaller gain does not count")


class SecureSumOptions(_Table):
    """The `[secure_sum]` table: the server learns a cohort's sum and no single update, weight or metric."""

    enabled: bool = Field(default=True, description="sum under masks; nodes' policies ask for it unless told otherwise")
    dropout: float = Field(default=0.2, ge=0, lt=0.5, description="δ: share of a cohort that may drop out in a round")
    corrupt: float = Field(
        default=0.2, ge=0, lt=0.5, description="γ: share of a cohort that may collude with the server"
    )
    honest_server: bool = Field(
        default=False,
        description="take the server to follow the protocol: fewer neighbours, but one that lies about who dropped "
        "out could then unmask a node",
    )
    bits: int = Field(default=20, ge=12, le=32, multiple_of=4, description="b: bits of a coordinate on the wire")
    range: float = Field(
        default=1.0, gt=0, le=2.0**60, description="largest coordinate of the first round's updates; later ones adapt"
    )

    def parameters(self, n: int) -> Parameters:
        """Neighbours, threshold and the rest for a cohort of `n`. Raises `NoProtection`."""
        return choose(n, self.dropout, self.corrupt, not self.honest_server)


class RunConfig(_Table):
    """One federated training, completely."""

    model_config = ConfigDict(serialize_by_alias=True)

    name: Name = Field(description="what lists and tables call the run")
    task: str = Field(
        pattern=TASK_PATTERN,
        description="'module:Class' in the bundle; where there is a [task.shared] table, written as entry in [task]",
    )
    shared: SharedOptions | None = Field(
        default=None, alias="task.shared", description="a public data set in local training; without the table, none"
    )
    rounds: int = Field(ge=1, le=1_000_000, description="rounds of the training")
    seed: int = Field(default=0, ge=0, lt=2**31, description="of the model, batches and, without [privacy], cohorts")
    algorithm: Annotated[SerializeAsAny[AlgorithmOptions], BeforeValidator(_algorithm)]
    local: LocalOptions
    aggregation: Annotated[SerializeAsAny[AggregationOptions], BeforeValidator(_aggregation)] = Mean()
    cohort: CohortOptions = CohortOptions()
    evaluation: EvaluationOptions = EvaluationOptions()
    secure_sum: SecureSumOptions = SecureSumOptions()
    privacy: PrivacyOptions | None = Field(default=None, description="differential privacy; without the table, none")
    lora: LoraOptions | None = Field(default=None, description="adapters in a frozen model; without the table, none")
    initial_model: str | None = Field(default=None, description="safetensors file to start from (path beside the TOML)")
    tags: tuple[Name, ...] = Field(default=(), description="what the run is for; nodes' policies may ask for some")

    @property
    def uniform(self) -> bool:
        """Every node counts the same: how many examples one has is not asked."""
        by_rule = not isinstance(self.aggregation, Mean)
        return by_rule or self.privacy is not None or ALGORITHMS[self.algorithm.name].uniform

    def quorum_of(self, selected: int) -> int:
        """Updates that a round with `selected` nodes needs."""
        return max(self.cohort.quorum_of(selected), self.aggregation.least)

    @model_validator(mode="after")
    def _combinations(self) -> RunConfig:
        for problem in (
            self.algorithm.check(self.local),
            _cohort_problem(self.cohort),
            _evaluation_problem(self.cohort, self.evaluation),
            _time_problem(self.local, self.cohort),
            _aggregation_problem(self),
            _secure_problem(self),
            _privacy_problem(self),
            _shared_problem(self),
        ):
            if problem:
                raise ValueError(problem)
        return self


def _cohort_problem(cohort: CohortOptions) -> str | None:
    if len(set(cohort.nodes)) != len(cohort.nodes):
        return f"cohort.nodes = {show(cohort.nodes)} names a node twice: each node counts once. Remove the repeats."
    if cohort.size is not None and cohort.quorum is not None and cohort.quorum > cohort.size:
        return (
            f"cohort.quorum = {cohort.quorum} is more than cohort.size = {cohort.size}: no round could "
            "close. Lower quorum or raise size."
        )
    if not cohort.nodes:
        return None
    named = len(cohort.nodes)
    for key, value, why, way in (
        ("min_nodes", cohort.min_nodes, "the run could never start", "Lower min_nodes or name more nodes."),
        ("size", cohort.size, "no round could be drawn", "Lower size or name more nodes."),
        ("quorum", cohort.quorum, "no round could close", "Lower quorum or name more nodes."),
    ):
        if value is not None and value > named:
            return f"cohort.{key} = {value} is more than the {named} names in cohort.nodes: {why}. {way}"
    return None


def _evaluation_problem(cohort: CohortOptions, evaluation: EvaluationOptions) -> str | None:
    both = sorted(set(cohort.nodes) & set(evaluation.holdout))
    if both:
        return (
            f"{show(both)} in both cohort.nodes and evaluation.holdout: a held-out node is never trained on. "
            "Name it in one of the two."
        )
    if len(set(evaluation.holdout)) != len(evaluation.holdout):
        return (
            f"evaluation.holdout = {show(evaluation.holdout)} names a node twice: each node counts once. "
            "Remove the repeats."
        )
    if evaluation.holdout and evaluation.every == 0:
        return (
            f"evaluation.holdout = {show(evaluation.holdout)}, but evaluation.every = 0: held-out nodes "
            "would never be asked. Set every ≥ 1 or remove holdout."
        )
    if evaluation.stop_metric is not None and evaluation.every == 0 and not evaluation.central:
        return (
            f"evaluation.stop_metric = {show(evaluation.stop_metric)} needs evaluations, but "
            "evaluation.every = 0: set every ≥ 1 or drop stop_metric."
        )
    if evaluation.stop_metric is None:
        for key in ("stop_mode", "stop_patience", "stop_min_delta"):
            value = getattr(evaluation, key)
            if value != EvaluationOptions.model_fields[key].default:
                return (
                    f"evaluation.{key} = {show(value)} has no effect without evaluation.stop_metric: "
                    f"name the metric to watch, or remove {key}."
                )
    return None


def _time_problem(local: LocalOptions, cohort: CohortOptions) -> str | None:
    if local.max_seconds is not None and local.max_seconds >= cohort.deadline:
        return (
            f"local.max_seconds = {local.max_seconds:g} is not under cohort.deadline = {cohort.deadline:g}: "
            "partial work would arrive after the round has closed. Lower max_seconds or raise deadline."
        )
    return None


_ANY_MODEL = Layout(
    (TensorSpec("w", (1,), "float32", Kind.TRAINABLE), TensorSpec("s", (1,), "float32", Kind.STATISTIC))
)


def _aggregation_problem(config: RunConfig) -> str | None:
    options, algorithm = config.aggregation, build(config.algorithm)
    if isinstance(options, Mean):
        return None
    rule, name = f"aggregation.rule = {show(options.rule)}", f"algorithm.name = {show(config.algorithm.name)}"
    if options.single_updates and config.secure_sum.enabled:
        return (
            f"{rule} needs single updates, which a secure sum hides. Choose \"mean\" or \"norm_bound\", or set "
            "secure_sum.enabled = false (nodes' policies must allow it)."
        )
    if config.privacy is not None:
        what = (
            "privacy.clip bounds each node's update already"
            if config.privacy.unit == "site"
            else "an update is mostly the noise of its steps, and that is what a bound on its norm would cut"
        )
        return f"{rule} with [privacy]: {what}. Remove [aggregation] or [privacy]."
    if algorithm.mirrored:
        return (
            f"{rule} with {name}: what a node keeps follows from its own update, what the server keeps is the mean "
            "of that over all nodes, and with another rule than the mean the two would part. Choose an algorithm "
            "without control variates, or rule = \"mean\"."
        )
    others = sorted(set(algorithm.sends(_ANY_MODEL)) - {DELTA, STATISTIC})
    if others:
        return (
            f"{rule} with {name}: its updates hold {show(others)} beside the model's change, and its server half needs "
            "the mean of both. Choose an algorithm that sends changes of the model alone, or rule = \"mean\"."
        )
    return _too_few(config)


def _too_few(config: RunConfig) -> str | None:
    options, cohort = config.aggregation, config.cohort
    sizes = {
        "cohort.size": (cohort.size, "Raise size"),
        "cohort.quorum": (cohort.quorum, "Raise quorum, or remove it"),
        "the number of names in cohort.nodes": (len(cohort.nodes) or None, "Name more nodes"),
    }
    for what, (n, way) in sizes.items():
        if n is not None and n < options.least:
            return f"{what} is {n}, but {options.need}. {way}, or choose a rule that needs fewer."
    return None


def _secure_problem(config: RunConfig) -> str | None:
    options, cohort, holdout = config.secure_sum, config.cohort, config.evaluation.holdout
    if not options.enabled:
        return None
    sizes = {
        "cohort.size": cohort.size,
        "the names in cohort.nodes": len(cohort.nodes) if cohort.nodes and cohort.size is None else None,
        "the names in evaluation.holdout": len(holdout) or None,
    }
    for what, n in sizes.items():
        if n is None:
            continue
        try:
            options.parameters(n)
        except NoProtection as error:
            return f"{what}: {error}"
    return None


def _privacy_problem(config: RunConfig) -> str | None:
    if config.privacy is None:
        return None
    unit = config.privacy.unit
    if not config.secure_sum.enabled:
        sees = "each update without the noise" if unit == "site" else "each site's update"
        return (
            f"privacy.unit = '{unit}', but secure_sum.enabled = false: the server would see {sees}. Enable the secure "
            "sum, or remove [privacy]."
        )
    if config.evaluation.every > 0 or config.evaluation.holdout:
        return (
            f"evaluation.every = {config.evaluation.every}, holdout = {show(config.evaluation.holdout)} with "
            "[privacy]: what a model scores on nodes' data is a release without noise. Set every = 0 and no holdout; "
            "central = true evaluates on data that the server may see."
        )
    return config.algorithm.check_privacy(unit)


def _shared_problem(config: RunConfig) -> str | None:
    if config.shared is None or config.privacy is None or config.privacy.unit != "patient":
        return None
    return (
        "[task.shared] with privacy.unit = 'patient': how many public examples a node adds follows from how many "
        "records it has, and one patient may have many, so that more than this patient's records would move the steps. "
        "Remove the table, or choose unit = 'record' or 'site'."
    )


def _with_plain_task(tables: dict[str, Any]) -> dict[str, Any]:
    """`[task] entry = …` with `[task.shared]` as the two fields that they are in `RunConfig`."""
    task = tables.get("task")
    if not isinstance(task, dict):
        return tables
    unknown = sorted(set(task) - {"entry", "shared"})
    if unknown:
        raise ConfigError(
            "\n".join(
                f"task.{key} = {show(task[key])}: unknown key. [task] has entry and the table [task.shared]."
                for key in unknown
            )
        )
    if "entry" not in task:
        raise ConfigError(
            "task.entry: missing. Write the task's 'module:Class' as entry in [task], for example "
            '"digits.task:Digits".'
        )
    shared = {"task.shared": task["shared"]} if "shared" in task else {}
    return {**tables, "task": task["entry"], **shared}


def parse_config(tables: dict[str, Any]) -> RunConfig:
    """A `RunConfig` from TOML tables (top-level keys may stand in `[run]`). Raises `ConfigError`.

    Types are taken as they are written: `rounds = "20"` and `rounds = true` are refused.
    """
    run = tables.get("run", {})
    if not isinstance(run, dict):
        raise ConfigError(f"run = {show(run)}: must be a table. Write name, task, rounds below a [run] line.")
    rest = {key: value for key, value in tables.items() if key != "run"}
    twice = sorted(set(run) & set(rest))
    if twice:
        raise ConfigError(
            "\n".join(f"{key} = {show(rest[key])}: also in [run]. Give it once; remove one." for key in twice)
        )
    try:
        # By way of JSON: strict there still reads a list as a tuple. TOML's dates are no text, so not made one.
        text = json.dumps(_with_plain_task({**run, **rest}), default=lambda date: [str(date)])
        return RunConfig.model_validate_json(text, strict=True)
    except ValidationError as error:
        source = Source(RunConfig, "the run's TOML", "; 'fedward plan --keys' lists all keys")
        raise ConfigError(explain(error, source)) from error


def load_config(path: Path) -> RunConfig:
    """A `RunConfig` from a TOML file. Raises `ConfigError`."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file. 'fedward new NAME' writes one to start from.") from error
    except IsADirectoryError as error:
        way = f"Give the run's TOML, for example {path}/run.toml."
        raise ConfigError(f"{path}: a folder, not a file. {way}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}. Correct that line.") from error
    return parse_config(tables)
