"""Which nodes a simulation has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fedward_common.config import parse_config
from fedward_common.errors import ConfigError
from fedward_server.scenario import Scenario, scenario


def nodes(count: int | None, data: Path | None = None, **tables: Any) -> Scenario:
    base = {"name": "t", "task": "t:T", "rounds": 1, "algorithm": {"name": "fedavg"}, "local": {"lr": 1, "steps": 1}}
    base["secure_sum"] = {"enabled": False}
    return scenario(parse_config({**base, **tables}), count, data)


def test_a_number_of_nodes_shares_the_data_out() -> None:
    found = nodes(20).nodes
    assert len(found) == 20
    assert sorted(table["partition"] for table in found.values()) == list(range(20))
    assert {table["partitions"] for table in found.values()} == {20}


def test_named_nodes_are_there() -> None:
    found = nodes(None, cohort={"nodes": ["x", "y"]}, evaluation={"holdout": ["z"]})
    assert list(found.nodes) == ["x", "y", "z"]
    assert list(found.trained) == ["x", "y"]
    assert len(nodes(None).nodes) == 5
    held = nodes(4, evaluation={"holdout": ["z"]})
    assert "z" in held.nodes and len(held.trained) == 3


def test_fewer_nodes_than_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="names 2"):
        nodes(1, cohort={"nodes": ["x", "y"]})


def test_tables_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "nodes.toml"
    file.write_text('[a]\npath = "a.npz"\n[b]\npath = "b.npz"\n')
    assert nodes(None, file).nodes == {"a": {"path": "a.npz"}, "b": {"path": "b.npz"}}
    assert len(nodes(2, file).nodes) == 2
    with pytest.raises(ConfigError, match=r"--nodes 3.*has 2 tables"):
        nodes(3, file)
    with pytest.raises(ConfigError, match="no table for c"):
        nodes(None, file, cohort={"nodes": ["a", "c"]})


@pytest.mark.parametrize(("text", "rule"), [("", "empty"), ("x = 3", "x is none"), ("[a", "not valid TOML")])
def test_files_that_hold_no_tables(tmp_path: Path, text: str, rule: str) -> None:
    file = tmp_path / "nodes.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=rule):
        nodes(None, file)
    with pytest.raises(ConfigError, match="no such file"):
        nodes(None, tmp_path / "none.toml")
