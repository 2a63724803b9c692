"""The site's own rules, in TOML. Whatever a run asks for, the node holds it against these and refuses what breaks
one, naming the rule."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Literal

import psutil
from fedward_common.algorithms.local_options import LocalOptions
from fedward_common.config import Name, RunConfig
from fedward_common.errors import ConfigError
from fedward_common.explain import SHA256_PATTERN, Source, explain
from fedward_common.messages import Failure, Purpose, Reason, Request
from fedward_common.privacy.budget import Limits
from fedward_common.privacy.options import PrivacyOptions
from fedward_common.privacy.sampled import steps
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

_GRACE = 5.0
"""Seconds between the moment when a training is asked to stop and contribute and the one when it is ended."""
_MIB = 1 << 20
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


Epsilon = Annotated[float, Field(gt=0, strict=False)] | None


class Policy(BaseModel):
    """What this node agrees to. The descriptions stand as comments in the file that `default_policy_toml` writes."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    approved_bundles_only: bool = Field(
        default=True,
        description="Run a bundle only after 'fedward node bundle approve'. With false, any data scientist of the\n"
        "roster may run code on this site's data.",
    )
    allow_unsandboxed_worker: bool = Field(
        default=False,
        description="Run task code even where the kernel has no Landlock. It could then read this node's keys.",
    )
    approve_roster_changes: bool = Field(
        default=False,
        description="Nodes and data scientists count for this node only after 'fedward node roster approve', and once\n"
        "more when their key changes. With false, whoever the enrolment authority enters counts at once.",
    )
    pinned_roster: Annotated[str, Field(pattern=SHA256_PATTERN)] | None = Field(
        default=None,
        examples=["0" * 64],
        description="Accept this very roster and no other (its SHA-256, as 'fedward node roster show' prints it).",
    )
    algorithms: Annotated[tuple[str, ...], BeforeValidator(lambda value: () if value == "any" else value)] = Field(
        default=(), description='Algorithms that may run, such as ["fedavg", "scaffold"]; empty or "any": all.'
    )
    run_tags: tuple[Name, ...] = Field(
        default=(), description="Take part only in runs that carry one of these tags; empty: in all runs."
    )
    max_epochs: Annotated[int, Field(ge=1)] = Field(
        default=20, description="Most passes over this site's data that a round may make (local.epochs)."
    )
    max_steps: Annotated[int, Field(ge=1)] = Field(
        default=10_000, description="Most steps of local training that a round may make (local.steps)."
    )
    max_seconds_per_round: Annotated[float, Field(gt=0, strict=False)] = Field(
        default=3600, description="A training or evaluation that takes longer is ended."
    )
    min_cohort: Annotated[int, Field(ge=1)] = Field(
        default=2, description="Fewest nodes in a round (or an evaluation) for this node to take part in it."
    )
    require_secure_sum: bool = Field(
        default=True,
        description="Take part only in runs whose server sees sums alone. With false, a run may have this node\n"
        "send its update, weight and metrics in the open.",
    )
    require_privacy: bool = Field(
        default=False,
        description="Take part only in runs with [privacy]: what leaves is bounded and noised, and stands in this\n"
        "node's ledger ('fedward node ledger show').",
    )
    privacy_units: tuple[Literal["record", "patient", "site"], ...] = Field(
        default=(),
        description="Whose contribution a run with [privacy] must hide, such as [\"patient\", \"site\"]; empty: any.\n"
        "With \"record\", a patient with many records is hidden less.",
    )
    trust_servers_noise: bool = Field(
        default=False,
        description="Take part in runs whose server adds the noise (privacy.mechanism = \"central\"). It sees the sum\n"
        "without noise, and this node's ledger takes its word for it.",
    )
    max_epsilon_per_run: Epsilon = Field(
        default=None, examples=[8.0], description="Most that one run may learn of this site's data: its ε."
    )
    max_epsilon_per_dataset: Epsilon = Field(
        default=None, examples=[16.0], description="The same for all runs together, of all servers, for good."
    )
    max_epsilon_per_year: Epsilon = Field(
        default=None, examples=[8.0], description="The same for all runs in any 365 days."
    )
    epsilon_delta: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=1e-5, description="δ at which these ε are calculated: less than one in the number of patients."
    )
    max_memory_mb: Annotated[int, Field(ge=64)] | None = Field(
        default=None,
        examples=[8192],
        description="Memory in MiB that a worker may use before it is ended; without it, three quarters of what\n"
        "this machine (or container) has.",
    )

    @property
    def epsilon_limits(self) -> Limits:
        """What this site's data may give away."""
        return Limits(
            self.max_epsilon_per_run, self.max_epsilon_per_dataset, self.max_epsilon_per_year, self.epsilon_delta
        )

    @property
    def max_memory_bytes(self) -> int:
        """Resident memory that one worker may use."""
        if self.max_memory_mb is not None:
            return self.max_memory_mb * _MIB
        return _machine_memory() * 3 // 4

    def seconds_for(self, seconds: float | None) -> float:
        """When work that was given `seconds` is ended by force."""
        if seconds is None:
            return self.max_seconds_per_round
        return min(self.max_seconds_per_round, seconds + _GRACE)


def _machine_memory() -> int:
    total = int(psutil.virtual_memory().total)
    if _CGROUP_LIMIT.is_file():
        text = _CGROUP_LIMIT.read_text().strip()
        if text.isdecimal():
            total = min(total, int(text))
    return total


def load_policy(path: Path) -> Policy:
    """The policy in a TOML file. A missing file is an error: it is written when the node joins, and a site whose
    rules got lost must not fall back to others unseen. Raises `ConfigError`."""
    try:
        return parse_policy(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path}: no such file; a node has a policy. Restore it; an empty file stands for the strict defaults."
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error


def parse_policy(text: str, name: str = "policy.toml") -> Policy:
    """A `Policy` from TOML text. Raises `ConfigError`: one line a problem."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name}: not valid TOML: {error}") from error
    # TOML arrays become tuples, which strict validation would not do by itself.
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in tables.items()}
    try:
        return Policy.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{name}:\n{explain(error, Source(Policy, name))}") from error


def default_policy_toml() -> str:
    """The default policy as a TOML file with a comment above each key."""
    parts = ["# What this node agrees to. A run that breaks a rule is refused, and its data scientist told which.\n"
             "# Changes count after a restart of the guard."]  # fmt: skip
    for name, field in Policy.model_fields.items():
        comment = "\n".join(f"# {line}" for line in str(field.description).splitlines())
        # A key without a default stands as a comment, with an example.
        line = f"{name} = {_toml(field.default)}" if not field.examples else f"# {name} = {_toml(field.examples[0])}"
        parts.append(f"{comment}\n{line}")
    return "\n\n".join(parts) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _refusal(rule: str) -> Failure:
    return Failure(Reason.POLICY, rule)


def check_run(policy: Policy, config: RunConfig) -> list[Failure]:
    """Every rule that a run's configuration breaks."""
    found = []
    algorithm = config.algorithm.name
    if policy.algorithms and algorithm not in policy.algorithms:
        found.append(_refusal(f"algorithms = {_toml(policy.algorithms)}, the run uses {algorithm}"))
    if policy.run_tags and not set(policy.run_tags) & set(config.tags):
        found.append(_refusal(f"run_tags = {_toml(policy.run_tags)}, the run has {_toml(config.tags)}"))
    if policy.require_secure_sum and not config.secure_sum.enabled:
        found.append(_refusal("require_secure_sum = true, the run has secure_sum.enabled = false"))
    if config.privacy is None:
        limits = policy.epsilon_limits.by_rule()
        asked = [f"{name} = {limit:g}" for name, limit in limits.items() if limit is not None]
        asked += ["require_privacy = true"] if policy.require_privacy else []
        if asked:
            found.append(_refusal(f"{asked[0]}, the run has no [privacy]: what it learns is without bound"))
    else:
        found += _private_problems(policy, config.privacy, config.local)
    local = config.local
    if local.epochs is not None and local.epochs > policy.max_epochs:
        found.append(_refusal(f"max_epochs = {policy.max_epochs}, the run asks for {local.epochs}"))
    if local.steps is not None and local.steps > policy.max_steps:
        found.append(_refusal(f"max_steps = {policy.max_steps}, the run asks for {local.steps}"))
    limit = policy.max_seconds_per_round
    if local.max_seconds is not None and local.max_seconds > limit:
        found.append(_refusal(f"max_seconds_per_round = {limit:g}, the run asks for {local.max_seconds:g}"))
    return found


def _private_problems(policy: Policy, options: PrivacyOptions, local: LocalOptions) -> list[Failure]:
    found = []
    if policy.privacy_units and options.unit not in policy.privacy_units:
        found.append(
            _refusal(f'privacy_units = {_toml(policy.privacy_units)}, the run has privacy.unit = "{options.unit}"')
        )
    if options.mechanism == "central" and not policy.trust_servers_noise:
        found.append(_refusal('trust_servers_noise = false, the run has privacy.mechanism = "central"'))
    if options.sampling_rate is not None and (count := steps(local, options.sampling_rate)) > policy.max_steps:
        found.append(_refusal(f"max_steps = {policy.max_steps}, the run's passes over the data are {count}"))
    return found


def check_request(policy: Policy, request: Request) -> Failure | None:
    """The rule that a request breaks, if any: a training or evaluation says how many nodes take part in it
    (settings["cohort"])."""
    if request.purpose not in (Purpose.TRAIN, Purpose.EVALUATE):
        return None
    cohort = request.settings.get("cohort")
    if cohort is None and policy.min_cohort == 1:
        return None
    if type(cohort) is not int:
        return _refusal(f"min_cohort = {policy.min_cohort}, the request does not say how many nodes take part")
    if cohort < policy.min_cohort:
        return _refusal(f"min_cohort = {policy.min_cohort}, the request is for {cohort}")
    return None
