"""The node admin's own configuration (`node.toml`): device, logs, and the `[data]` table that tasks read."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Literal

from fedward_common.config import explain
from fedward_common.errors import ConfigError
from pydantic import BaseModel, ConfigDict, Field, ValidationError


class NodeOptions(BaseModel):
    """The `[node]` table."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    threads: int = Field(default=1, ge=1, description="torch threads of a worker")
    log: Literal["human", "json"] = "human"
    dataset: str = Field(default="data", min_length=1, description="name of this node's data in its privacy ledger")
    ledger_anchor: Path | None = Field(default=None, description="file that remembers the ledger's head, elsewhere")
    keep_runs_days: float = Field(default=30.0, gt=0, description="days that a run's state is kept after its last use")
    read: tuple[Path, ...] = Field(default=(), description="further files and folders that tasks may read")


class NodeSettings(BaseModel):
    """All of `node.toml`. data: handed to the task's `data()`; existing absolute paths in it become readable for
    the worker, nothing else outside Python and the bundle does."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    node: NodeOptions = NodeOptions()
    data: dict[str, Any] = Field(default_factory=dict)

    def readable(self) -> tuple[Path, ...]:
        """Paths that the worker may read: `[node] read` and every absolute path named in `[data]`."""
        named = [
            Path(value) for value in self.data.values() if isinstance(value, str) and value.startswith("/")
        ]
        return tuple(path for path in (*self.node.read, *named) if path.exists())


def load_settings(path: Path | None) -> NodeSettings:
    """Read `node.toml`; None gives the defaults. Relative paths in `[data]` and in `ledger_anchor` are taken from the
    file's folder.

    Raises `ConfigError`.
    """
    if path is None:
        return NodeSettings()
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        settings = NodeSettings.model_validate(tables)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path}: no such file. It holds a [data] table for the task; see docs/operations.md."
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    except ValidationError as error:
        raise ConfigError(f"{path}:\n{explain(error)}") from error
    folder = path.resolve().parent
    data = {key: _absolute(folder, value) for key, value in settings.data.items()}
    node = settings.node
    if node.ledger_anchor is not None:
        node = node.model_copy(update={"ledger_anchor": folder / node.ledger_anchor})
    return settings.model_copy(update={"data": data, "node": node})


def _absolute(folder: Path, value: Any) -> Any:
    """A text that names an existing path relative to the file's folder becomes absolute; all else stays."""
    if isinstance(value, str) and value and not value.startswith("/") and (folder / value).exists():
        return str((folder / value).resolve())
    return value
