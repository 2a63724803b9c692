"""`fedward plan`: the forecast against what a run really moves, and everything that it refuses."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from fedward_common.aggregation_options import RULES
from fedward_common.algorithms.registry import ALGORITHMS
from fedward_common.cli import build
from fedward_common.config import RunConfig, load_config
from fedward_common.lora import LoraOptions
from fedward_common.privacy.accounting import spent
from fedward_common.privacy.amplification import Drawn, unseen
from fedward_common.privacy.exact_gaussian import epsilon_of
from fedward_common.privacy.options import PrivacyOptions
from fedward_common.privacy.site import mechanism
from fedward_common.shared_data import SharedOptions
from fedward_server import plan
from fedward_server.keys import all_keys
from fedward_server.plan import forecast, open_task, refusals
from fedward_server.project import create
from safetensors.numpy import save_file
from torch import nn

Change = Callable[[Path], None]


def fedward(*arguments: str | Path) -> Result:
    return CliRunner().invoke(build(), [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("projects")
    create("plan-trial", folder, "tests")
    return folder / "plan-trial"


@pytest.fixture
def project(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "project", ignore=shutil.ignore_patterns("__pycache__")))


def edit(file: str, old: str, new: str) -> Change:
    def change(project: Path) -> None:
        text = (project / file).read_text()
        assert old in text
        (project / file).write_text(text.replace(old, new))

    return change


def test_the_plan_of_a_good_run(project: Path) -> None:
    result = fedward("plan", project / "run.toml", "--nodes", "20")
    assert result.exit_code == 0
    # 64 x 32 + 32 + 32 x 10 + 10 parameters of four bytes.
    assert "parameters   2,410" in result.output
    assert "0.00964 MB a node, 0.193 MB a round" in result.output
    assert "20 steps of" in result.output


def test_the_forecast_of_a_secure_sum(project: Path) -> None:
    result = fedward("plan", project / "run.toml", "--nodes", "10")
    # 2410 parameters of 20 bits, three to a cell of 60: 804 · 7.5 bytes; ten nodes, δ = γ = 0.2: t > 1.2 · 10 / 2.
    assert "0.00603 MB a node" in result.output
    assert "10 nodes, all with all, threshold 7 (t): survives 2 drop-outs and 2" in " ".join(result.output.split())
    refused = fedward("plan", project / "run.toml", "--nodes", "2")
    assert refused.exit_code == 1 and "a secure sum needs at least 3" in " ".join(refused.output.split())


def test_the_plan_of_a_rule_that_keeps_updates(project: Path) -> None:
    with (project / "run.toml").open("a") as file:
        file.write('[secure_sum]\nenabled = false\n[aggregation]\nrule = "krum"\nbyzantine = 2\n')
    shown = " ".join(fedward("plan", project / "run.toml", "--nodes", "10").output.split())
    assert 'aggregation "krum" (byzantine = 2): the server keeps 0.0964 MB a round' in shown
    refused = fedward("plan", project / "run.toml", "--nodes", "6")
    shown = " ".join((refused.output + refused.stderr).split())
    assert refused.exit_code == 1 and "a round has 6 nodes" in shown and "at least 7 nodes" in shown


def test_the_plan_of_a_norm_bound(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (project / "run.toml").open("a") as file:
        file.write('[aggregation]\nrule = "norm_bound"\nbound = 0.5\n')
    shown = " ".join(fedward("plan", project / "run.toml", "--nodes", "10").output.split())
    assert 'aggregation "norm_bound" (bound = 0.5)' in shown and "the server keeps" not in shown
    config = load_config(project / "run.toml")
    task = open_task(config, project)
    monkeypatch.setattr(task, "model", lambda: nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32)))
    monkeypatch.setattr(plan, "open_task", lambda config, project: task)
    assert any("64 float buffers" in problem for problem in refusals(config, project))


PRIVATE = """
[privacy]
unit = "site"
mechanism = "distributed"
clip = 1.0
"""


def private(project: Path, rules: str, rounds: int = 40) -> Path:
    edit("run.toml", "rounds = 10", f"rounds = {rounds}")(project)
    edit("run.toml", "every = 1  ", "every = 0  ")(project)
    with (project / "run.toml").open("a") as file:
        file.write(f"{PRIVATE}{rules}\n")
    return project / "run.toml"


def test_the_forecast_of_privacy(project: Path) -> None:
    run = private(project, "noise_multiplier = 5.0\nmax_epsilon = 6.0")
    config = load_config(run)
    found = forecast(config, open_task(config, project), 10, None).privacy
    assert found is not None
    # Gaussian noise of z = 5 has 2.7 after ten rounds (exactly: Balle & Wang 2018); Skellam's bound is a little more.
    exact = {rounds: epsilon_of(1e-5, math.sqrt(rounds) / 5.0) for rounds in (10, 20, 30)}
    for rounds, epsilon in exact.items():
        assert epsilon < found.spent[rounds] < 1.15 * epsilon
    assert list(found.spent) == [10, 20, 30, found.last] and found.spent[found.last] <= 6.0
    event = mechanism(config, 2410, 10).event
    assert spent([(event, found.last + 1)], 1e-5).epsilon > 6.0
    shown = " ".join(fedward("plan", run, "--nodes", "10").output.split())
    assert "by site, distributed noise, z = 5" in shown
    assert f"the budget of ε = 6 ends the run after round {found.last}" in shown
    # 4096 words, the next power of two, of 20 bits, three to a cell.
    assert f"{-(-4096 // 3) * 7.5 / 1e6:.3g} MB a node" in shown


def test_two_epsilons_where_a_round_draws_few(project: Path) -> None:
    run = private(project, "noise_multiplier = 8.0")
    edit("run.toml", "min_nodes = 3", "min_nodes = 3\nsize = 5")(project)
    config = load_config(run)
    found = forecast(config, open_task(config, project), 100, None).privacy
    assert found is not None
    event = mechanism(config, 2410, 5).event
    assert found.spent[40] == spent([(event, 40)], 1e-5).epsilon
    assert found.unseen[40] == unseen([(Drawn(event, 5, 100), 40)], 1e-5).epsilon < found.spent[40] / 2
    shown = " ".join(fedward("plan", run, "--nodes", "100").output.split())
    assert f"{found.unseen[40]:.3g} after round 40: against those who see models and do not know" in shown
    assert "5 % of the available sites" in shown
    # Of seven there is nothing to be gained, and of five nobody is left out.
    few = " ".join(fedward("plan", run, "--nodes", "7").output.split())
    assert "costs more than the draw gains" in few and "ε, unseen" not in few
    assert "all that are available are asked. Both" in " ".join(fedward("plan", run, "--nodes", "5").output.split())


def test_a_target_becomes_noise(project: Path) -> None:
    config = load_config(private(project, "target_epsilon = 3.0"))
    found = forecast(config, open_task(config, project), 3, None).privacy
    assert found is not None and found.last == 40
    assert 2.9 < found.spent[40] <= 3.0
    assert found.noise_multiplier > math.sqrt(40) / 3


def test_privacy_and_batch_norm(project: Path) -> None:
    file = next(path for path in project.rglob("*.py") if "nn.Linear" in path.read_text())
    run = private(project, "noise_multiplier = 1.0")
    file.write_text(file.read_text().replace("nn.ReLU()", "nn.BatchNorm1d(32), nn.ReLU()"))
    refused = fedward("plan", run, "--nodes", "10")
    assert refused.exit_code == 1 and "GroupNorm" in refused.output


def method(name: str, returned: str) -> Change:
    text = f"def {name}(self, model, batch):\n        return {returned}\n\n    def metrics("
    return edit("plan_trial/task.py", "def metrics(", text)


LABELS = "def labels(self, dataset):\n        return dataset.tensors[1]\n\n    def metrics("
NEEDED = {
    "fedadaptive": [
        edit("run.toml", 'name = "fedadaptive"', 'name = "fedadaptive"\nclasses = 10'),
        edit("plan_trial/task.py", "def metrics(", LABELS),
    ],
    "moon": [method("representation", "model[:-1](batch[0])")],
    "fednp": [method("representation", "model[:-1](batch[0])")],
    "fedphp": [method("logits", "model(batch[0])")],
    "fedper": [edit("run.toml", 'name = "fedper"', 'name = "fedper"\nhead = ["2.*"]')],
    "fedrep": [edit("run.toml", 'name = "fedrep"', 'name = "fedrep"\nhead = ["2.*"]')],
    "fedbn": [edit("plan_trial/task.py", "nn.ReLU()", "nn.BatchNorm1d(32), nn.ReLU()")],
}
"""What some algorithms ask of run or task."""


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_the_forecast_is_what_a_run_moves(project: Path, tmp_path: Path, name: str) -> None:
    edit("run.toml", 'name = "fedavg"', f'name = "{name}"')(project)
    edit("run.toml", "rounds = 10", "rounds = 1")(project)
    for change in NEEDED.get(name, ()):
        change(project)
    with (project / "run.toml").open("a") as file:
        file.write("\n[secure_sum]\nenabled = false\n")
    config = load_config(project / "run.toml")
    cost = forecast(config, open_task(config, project), 4, None)
    result = fedward("simulate", project / "run.toml", "--nodes", "4", "--out", tmp_path / "run", "--json")
    event = json.loads(result.stdout.splitlines()[1])
    assert event["bytes_up"] == 4 * cost.up
    assert event["bytes_down"] == 4 * (cost.down + cost.evaluation)


@pytest.mark.parametrize("name", ["moon", "fednp"])
def test_a_method_that_the_algorithm_asks_for_is_missed(project: Path, name: str) -> None:
    edit("run.toml", 'name = "fedavg"', f'name = "{name}"')(project)
    result = fedward("plan", project / "run.toml", "--nodes", "4")
    assert result.exit_code == 1
    text = " ".join(result.output.split())
    assert f"- Digits lacks representation, which algorithm.name = '{name}' asks of a task" in text
    assert "def representation(self, model, batch)" in text and text.count("lacks representation") == 1


def test_a_public_data_set_that_the_task_lacks_is_missed(project: Path) -> None:
    entry = (project / "run.toml").read_text().split('task = "')[1].partition('"')[0]
    edit("run.toml", f'task = "{entry}"\n', "")(project)
    with (project / "run.toml").open("a") as file:
        file.write(f'\n[task]\nentry = "{entry}"\n\n[task.shared]\nshare = 0.5\n')
    result = fedward("plan", project / "run.toml", "--nodes", "4")
    assert result.exit_code == 1 and "[task.shared] needs shared_data(config)" in " ".join(result.output.split())


def test_a_cohort_is_no_larger_than_asked_for(project: Path) -> None:
    edit("run.toml", "min_nodes = 3", "min_nodes = 3\nsize = 3")(project)
    config = load_config(project / "run.toml")
    assert forecast(config, open_task(config, project), 20, None).cohort == 3


def test_epochs_are_turned_into_steps(project: Path) -> None:
    edit("run.toml", "steps = 20  ", "epochs = 3 ")(project)
    config = load_config(project / "run.toml")
    task = open_task(config, project)
    table = {"partition": 0, "partitions": 4}
    batches = -(-len(task.data(table).train) // 16)  # type: ignore[arg-type]
    assert forecast(config, task, 4, table).steps == 3 * batches


def test_public_examples_make_a_pass_longer(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit("run.toml", "steps = 20  ", "epochs = 1 ")(project)
    config = load_config(project / "run.toml").model_copy(update={"shared": SharedOptions(share=0.5)})
    task = open_task(config, project)
    table = {"partition": 0, "partitions": 4}
    own = len(task.data(table).train)  # type: ignore[arg-type]
    monkeypatch.setattr(task, "shared_data", lambda table: task.data({**table, "partition": 1}).train, raising=False)
    assert forecast(config, task, 4, table).steps == -(-2 * own // 16)


def test_data_that_is_elsewhere_is_no_error(project: Path, tmp_path: Path) -> None:
    tables = tmp_path / "nodes.toml"
    tables.write_text('[a]\npath = "/not/here.npz"\n[b]\npath = "/nor/here.npz"\n[c]\npath = "/none.npz"\n')
    result = fedward("plan", project / "run.toml", "--data", tables)
    assert result.exit_code == 0
    assert "3 nodes a round" in result.output and "not measured" in result.output


def wrong_model(project: Path) -> None:
    save_file({"0.weight": np.zeros((3, 3), np.float32)}, project / "start.safetensors")
    edit("run.toml", "seed = 0", 'seed = 0\ninitial_model = "start.safetensors"')(project)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (edit("pyproject.toml", "fedward_server.app:app", "evil:app"), ["serverapp = 'evil:app'", "must be"]),
        (edit("pyproject.toml", "fedward-epoch = 0", ""), ["fedward-epoch", "Add the line"]),
        (edit("pyproject.toml", 'publisher = "tests"', ""), ["publisher"]),
        (edit("pyproject.toml", '"plan_trial/**/*.py", ', ""), ["plan_trial/task.py is not packed", "fab-include"]),
        (edit("run.toml", "plan_trial.task", "plan_trial.tusk"), ["plan_trial.tusk", "cannot import"]),
        (edit("run.toml", "task:Digits", "task:Dogits"), ["has no 'Dogits'", "Digits"]),
        (edit("run.toml", "plan_trial.task:Digits", "fedward_common.task:Data"), ["is not in", "beside run.toml"]),
        (edit("run.toml", "seed = 0", 'seed = 0\ninitial_model = "x.st"'), ["initial_model = 'x.st'", "no such file"]),
        (wrong_model, ["0.weight", "(3, 3)", "2.bias: missing"]),
        (lambda project: (project / "pyproject.toml").unlink(), ["no pyproject.toml", "fedward new"]),
    ],
)  # fmt: skip
def test_what_would_be_refused_is_said_here(project: Path, change: Change, parts: list[str]) -> None:
    change(project)
    result = fedward("plan", project / "run.toml")
    assert result.exit_code == 1
    flat = " ".join(result.output.split())
    assert "refused" in flat
    for part in parts:
        assert part in flat


def test_nothing_speaks_against_a_new_project(project: Path) -> None:
    assert refusals(load_config(project / "run.toml"), project) == []


def test_a_bad_configuration_is_refused_first(project: Path) -> None:
    edit("run.toml", "rounds = 10", "rounds = 0")(project)
    result = fedward("plan", project / "run.toml")
    assert result.exit_code == 1
    assert "rounds = 0: must be at least 1" in result.stderr


def test_keys_are_those_of_the_schema() -> None:
    listed = {(key.table, key.name) for key in all_keys()}
    tables = {name: RunConfig.model_fields[name].annotation for name in ("local", "cohort", "evaluation", "secure_sum")}
    more = {"privacy": PrivacyOptions, "lora": LoraOptions, "task.shared": SharedOptions}
    for table, model in {**tables, **more}.items():
        assert {name for where, name in listed if where == table} == set(model.model_fields)  # type: ignore[union-attr]
    for name, algorithm in ALGORITHMS.items():
        where = f'algorithm, name = "{name}"'
        assert {key for table, key in listed if table == where} == set(algorithm.Options.model_fields)
    for rule, options in RULES.items():
        where = f'aggregation, rule = "{rule}"'
        assert {key for table, key in listed if table == where} == set(options.model_fields)
    top = {name for where, name in listed if where == ""}
    assert top == set(RunConfig.model_fields) - {"algorithm", "aggregation", "privacy", "lora", "shared", *tables}


def test_keys_have_types_defaults_and_meanings() -> None:
    keys = {(key.table, key.name): key for key in all_keys()}
    assert keys["", "rounds"].type == "whole number ≥ 1 ≤ 1000000" and keys["", "rounds"].default == "required"
    assert keys["cohort", "deadline"].type == "number > 0 ≤ 604800" and keys["cohort", "deadline"].default == "600.0"
    assert keys["cohort", "nodes"].type == "list of text" and keys["cohort", "nodes"].default == "[]"
    assert keys["cohort", "size"].default == "–"
    assert keys["privacy", "clip"].default == "required" and ("", "privacy") not in keys
    assert keys["evaluation", "stop_mode"].type == '"max" | "min"'
    assert keys['algorithm, name = "scaffold"', "option"].default == '"II"'
    for key in keys.values():
        assert "<" not in key.type.replace("< ", "") and "Annotated" not in key.type


def test_plan_prints_the_keys() -> None:
    output = fedward("plan", "--keys").output
    for part in ("top level, or [run]", "[cohort]", "max_failed_rounds", 'name = "scaffold"]', "warm_start_rounds"):
        assert part in output
    missing = CliRunner().invoke(build(), ["plan"])
    assert missing.exit_code == 2 and "--keys" in missing.stderr
