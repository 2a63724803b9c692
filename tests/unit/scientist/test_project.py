"""`fedward new`: what it writes is a bundle that nodes accept and a federation that learns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from fedward_common.bundle import Bundle, build_bundle
from fedward_common.cli import build
from fedward_common.config import load_config
from fedward_server.project import ProjectError, create, package_of
from safetensors.numpy import load_file


def fedward(*arguments: str | Path) -> Result:
    return CliRunner().invoke(build(), [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("projects")
    result = fedward("new", "heart-risk", "--in", folder)
    assert result.exit_code == 0 and "fedward simulate run.toml" in result.output
    return folder / "heart-risk"


def test_the_bundle_holds_the_task_and_nothing_else(project: Path) -> None:
    (project / "secret.json").write_text("{}")
    (project / "patients.md").write_text("names")
    bundle = Bundle.open(build_bundle(project))
    bundle.check(project)
    assert set(bundle.files) == {
        "pyproject.toml", "README.md", "heart_risk/__init__.py", "heart_risk/task.py", ".info/CONTENT"
    }  # fmt: skip
    assert bundle.name == "heart-risk"
    assert "scikit-learn" in bundle.dependencies


def test_it_is_small_and_complete(project: Path) -> None:
    assert len((project / "heart_risk/task.py").read_text().splitlines()) < 60
    config = load_config(project / "run.toml")
    assert config.task == "heart_risk.task:Digits"
    assert not [path for path in project.rglob("*") if path.is_file() and "$" in path.read_text(errors="ignore")]


def test_it_simulates_at_once(project: Path, tmp_path: Path) -> None:
    result = fedward("simulate", project / "run.toml", "--nodes", "20", "--out", tmp_path / "run", "--json")
    assert result.exit_code == 0
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert [event["event"] for event in events] == ["run_started", *["round"] * 10, "evaluation", "run_finished"]
    assert all(len(event["replies"]) == event["secure_sum"]["survivors"] == 20 for event in events[1:-2])
    assert events[-2]["evaluate"]["accuracy"] > 0.8 > events[2]["round_before"]["evaluate"]["accuracy"]
    # JSON lines are the run's own events, unchanged.
    assert result.stdout == (tmp_path / "run/events.jsonl").read_text()
    assert {name: array.shape for name, array in load_file(tmp_path / "run/model.safetensors").items()} == {
        "0.weight": (32, 64), "0.bias": (32,), "2.weight": (10, 32), "2.bias": (10,)
    }  # fmt: skip


def test_runs_get_directories_of_their_own(project: Path) -> None:
    short = project / "short.toml"
    short.write_text((project / "run.toml").read_text().replace("rounds = 10", "rounds = 1"))
    for number in (1, 2):
        result = fedward("simulate", short, "--nodes", "3")
        assert result.exit_code == 0
        assert f"runs/heart-risk-{number}/model.safetensors" in result.output
    taken = fedward("simulate", short, "--nodes", "3", "--out", project / "runs/heart-risk-1")
    assert taken.exit_code == 1 and "holds files already" in taken.stderr


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("Heart", "lower-case"),
        ("heart risk", "lower-case"),
        ("../heart", "lower-case"),
        ("-heart", "a letter first"),
        ("heart--risk", "single hyphens"),
        ("", "lower-case"),
        ("h" * 41, "at most 40"),
        ("class", "Python or Fedward"),
        ("json", "Python or Fedward"),
        ("fedward-x", "Python or Fedward"),
        ("torch", "would hide the installed module"),
    ],
)
def test_names_that_cannot_work_are_refused(name: str, rule: str, tmp_path: Path) -> None:
    with pytest.raises(ProjectError, match=rule):
        create(name, tmp_path, "tests")
    assert not list(tmp_path.iterdir())


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "lung-risk").mkdir()
    with pytest.raises(ProjectError, match="exists already"):
        create("lung-risk", tmp_path, "tests")
    assert package_of("lung-risk") == "lung_risk"
