"""A simulated federation: which nodes it has and what each one's [data] table says."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedward_common.config import RunConfig
from fedward_common.errors import ConfigError

from fedward_server.simulation import node_data

DataTable = Mapping[str, Any]

DEFAULT_NODES = 5


@dataclass(frozen=True)
class Scenario:
    """Node name -> [data] table; `trained` leaves out the held-out nodes."""

    nodes: Mapping[str, DataTable]
    holdout: frozenset[str]

    @property
    def trained(self) -> dict[str, DataTable]:
        """The nodes that may be trained on."""
        return {name: table for name, table in self.nodes.items() if name not in self.holdout}


def scenario(config: RunConfig, count: int | None, data_file: Path | None) -> Scenario:
    """The nodes of a simulation: those of `data_file`; else those that the run names; else `count` nodes.

    Without a file, each node's table says which partition of how many it is. Raises `ConfigError`.
    """
    named = (*config.cohort.nodes, *config.evaluation.holdout)
    if data_file is None:
        # Without names, one more than the held-out ones at least.
        least = len(named) if config.cohort.nodes else max(DEFAULT_NODES, len(named) + 1)
        return Scenario(node_data(config, count or least, {}), frozenset(config.evaluation.holdout))
    tables = _read_tables(data_file)
    if count is not None and len(tables) != count:
        way = f"Leave --nodes out, or give {len(tables)}."
        raise ConfigError(f"--nodes {count}: {data_file} has {len(tables)} tables. {way}")
    missing = sorted(set(named) - set(tables))
    if missing:
        names = ", ".join(missing)
        raise ConfigError(f"{data_file}: has no table for {names}, which the run names. Add one each.")
    return Scenario(tables, frozenset(config.evaluation.holdout))


def _read_tables(path: Path) -> dict[str, DataTable]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file. Give one with a table for each node.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}. Correct that line.") from error
    wrong = [name for name, table in tables.items() if not isinstance(table, dict)]
    if wrong or not tables:
        what = ", ".join(wrong) + " is none" if wrong else "it is empty"
        raise ConfigError(f"{path}: must hold a table for each node; {what}. Write [NODE] and its keys below.")
    return tables
