"""Every refusal of a configuration names field, value, rule and way out, before anything starts."""

from __future__ import annotations

import copy
import tomllib
from pathlib import Path
from typing import Any

import pytest
from fedward_common.config import RunConfig, load_config, parse_config
from fedward_common.errors import ConfigError

GOOD: dict[str, Any] = {
    "name": "trial",
    "task": "digits.task:Digits",
    "rounds": 3,
    "algorithm": {"name": "scaffold"},
    "local": {"lr": 0.1, "steps": 5},
    "secure_sum": {"enabled": False},
}


def changed(**keys: Any) -> dict[str, Any]:
    """GOOD with dotted keys (written with __) set, or removed if None."""
    tables = copy.deepcopy(GOOD)
    for dotted, value in keys.items():
        *path, last = dotted.split("__")
        table = tables
        for part in path:
            table = table.setdefault(part, {})
        if value is None:
            del table[last]
        else:
            table[last] = value
    return tables


def refusal(**keys: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(changed(**keys))
    return str(caught.value)


def test_a_good_configuration_survives_the_way_through_json() -> None:
    config = parse_config(changed(cohort__nodes=["a", "b"], cohort__quorum=2, tags=["x"]))
    assert parse_config(config.model_dump(mode="json")) == config
    assert RunConfig.model_validate_json(config.model_dump_json()) == config
    assert config.algorithm.name == "scaffold"


def test_keys_may_stand_in_run_but_not_in_both_places() -> None:
    tables = {"run": {key: GOOD[key] for key in ("name", "task", "rounds")}}
    tables |= {key: GOOD[key] for key in ("algorithm", "local", "secure_sum")}
    assert parse_config(tables) == parse_config(GOOD)
    text = refusal(run={"rounds": 5})
    assert "rounds = 3" in text and "[run]" in text and "remove one" in text
    assert "must be a table" in refusal(run=5)


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        # Unknown keys, with what was probably meant.
        ({"rouns": 3}, ["rouns = 3", "unknown key", "'rounds'", "fedward plan --keys"]),
        ({"local__learning_rate": 1}, ["local.learning_rate = 1", "unknown key", "remove it"]),
        ({"cohort__quorom": 1}, ["cohort.quorom = 1", "'quorum'"]),
        ({"algorithm__serverlr": 1.0}, ["algorithm.serverlr = 1.0", "unknown key", "'server_lr'"]),
        ({"nodes__x": 1}, ["nodes = ", "unknown key"]),
        # Wrong types: nothing is converted silently.
        ({"rounds": "20"}, ['rounds = "20"', "whole number", "without quotes"]),
        ({"rounds": True}, ["rounds = true", "whole number"]),
        ({"rounds": 2.0}, ["rounds = 2.0", "whole number", "decimal point"]),
        ({"local__lr": "0.1"}, ['local.lr = "0.1"', "number", "without quotes"]),
        ({"evaluation__central": "yes"}, ['evaluation.central = "yes"', "true or false"]),
        ({"name": 5}, ["name = 5", "text", "quotes"]),
        ({"cohort__nodes": "a"}, ['cohort.nodes = "a"', "list", "brackets"]),
        ({"cohort__nodes": ["a", 3]}, ["cohort.nodes[1] = 3", "text"]),
        ({"local": 3}, ["local = 3", "table", "[local]"]),
        ({"algorithm": "scaffold"}, ['algorithm = "scaffold"', "algorithm.name"]),
        ({"algorithm__option": 2}, ["algorithm.option = 2", "'I' or 'II'"]),
        ({"name": tomllib.loads("x = 1979-05-27")["x"]}, ["name = ", "must be"]),
        # Impossible values.
        ({"rounds": 0}, ["rounds = 0", "at least 1"]),
        ({"seed": -1}, ["seed = -1", "at least 0"]),
        ({"local__lr": 0}, ["local.lr = 0", "more than 0"]),
        ({"local__momentum": 1.0}, ["local.momentum = 1.0", "less than 1"]),
        ({"local__lr": float("nan")}, ["local.lr = NaN", "finite"]),
        ({"local__lr": float("inf")}, ["local.lr = Infinity", "finite"]),
        ({"cohort__deadline": 1e9}, ["cohort.deadline = 1000000000.0", "at most 604800"]),
        ({"name": "No Spaces"}, ['name = "No Spaces"', "lower-case", "Rename"]),
        ({"task": "digits"}, ['task = "digits"', "module:Class", "digits.task:Digits"]),
        ({"evaluation__stop_mode": "most"}, ['evaluation.stop_mode = "most"', "'max' or 'min'"]),
        ({"algorithm__name": "scafold"}, ["algorithm.name = 'scafold'", "scaffold", "use one of"]),
        # Missing.
        ({"task": None}, ["task: missing", "Add it"]),
        ({"local__lr": None}, ["local.lr: missing", "Add it"]),
        ({"algorithm__name": None}, ["algorithm", "algorithm.name", "give"]),
    ],
)  # fmt: skip
def test_refusals_of_single_keys(keys: dict[str, Any], parts: list[str]) -> None:
    text = refusal(**keys)
    for part in parts:
        assert part in text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({"local__epochs": 2}, ["local = ", "local.steps", "local.epochs", "exactly one"]),
        ({"local__steps": None}, ["local = ", "local.steps", "local.epochs"]),
        ({"local__steps": None, "local__epochs": 2}, ["local.epochs = 2", "SCAFFOLD", "local.steps instead"]),
        ({"cohort__size": 2, "cohort__quorum": 3}, ["cohort.quorum = 3", "cohort.size = 2", "Lower quorum"]),
        ({"cohort__nodes": ["a"], "cohort__min_nodes": 2}, ["cohort.min_nodes = 2", "1 names", "Lower min_nodes"]),
        ({"cohort__nodes": ["a"], "cohort__size": 2}, ["cohort.size = 2", "1 names", "Lower size"]),
        ({"cohort__nodes": ["a"], "cohort__quorum": 2}, ["cohort.quorum = 2", "1 names", "Lower quorum"]),
        ({"cohort__nodes": ["a", "a"]}, ['cohort.nodes = ["a", "a"]', "twice", "Remove"]),
        (
            {"cohort__nodes": ["a", "b"], "evaluation__holdout": ["b"]},
            ['["b"]', "cohort.nodes and evaluation.holdout", "one of the two"],
        ),
        ({"evaluation__holdout": ["a", "a"]}, ["evaluation.holdout", "twice", "Remove"]),
        (
            {"evaluation__holdout": ["a"], "evaluation__every": 0},
            ['evaluation.holdout = ["a"]', "evaluation.every = 0", "Set every"],
        ),
        (
            {"evaluation__stop_metric": "loss", "evaluation__every": 0},
            ['evaluation.stop_metric = "loss"', "evaluation.every = 0", "drop stop_metric"],
        ),
        ({"evaluation__stop_patience": 9}, ["evaluation.stop_patience = 9", "no effect", "remove stop_patience"]),
        (
            {"local__max_seconds": 10, "cohort__deadline": 10},
            ["local.max_seconds = 10", "cohort.deadline = 10", "raise deadline"],
        ),
    ],
)  # fmt: skip
def test_refusals_of_combinations(keys: dict[str, Any], parts: list[str]) -> None:
    text = refusal(**keys)
    for part in parts:
        assert part in text


def test_every_problem_is_named_at_once() -> None:
    lines = refusal(rounds=0, local__lr="x", cohort__sise=3).splitlines()
    assert sorted(line.split(" ")[0] for line in lines) == ["cohort.sise", "local.lr", "rounds"]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such file.*fedward new"):
        load_config(tmp_path / "run.toml")
    with pytest.raises(ConfigError, match="a folder"):
        load_config(tmp_path)
    broken = tmp_path / "run.toml"
    broken.write_text("rounds = = 3")
    with pytest.raises(ConfigError, match=r"not valid TOML.*line 1"):
        load_config(broken)
