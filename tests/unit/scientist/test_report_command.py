"""`fedward report`: of a simulated run, and of a server's run by the signed API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result
from fedward_common import cli
from fedward_common.config import load_config
from fedward_common.http import ServiceError
from fedward_common.privacy.accounting import spent
from fedward_common.privacy.events import Skellam, from_json, to_json
from fedward_common.privacy.ledger import Ledger, Release, Unit, verify
from fedward_server.events import EventLog, read_events
from fedward_server.paths import RunPaths
from fedward_server.project import create

from .test_client_api import Bench

PRIVACY = """
[privacy]
unit = "site"
mechanism = "distributed"
clip = 0.5
noise_multiplier = 2.0
max_epsilon = 4.5
"""
EVENT = Skellam(100.0, 1000.0, 1.6e5)


@pytest.fixture(autouse=True)
def command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known to this process though the package was installed before it had the command."""
    found = cli._found()
    verb = metadata.EntryPoint("report", "fedward_server.commands.report:report", cli.VERBS)
    monkeypatch.setattr(cli, "_found", lambda: {**found, "report": verb})


def fedward(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.build(), [str(argument) for argument in arguments], catch_exceptions=False)


def private(project: Path, **changes: str) -> Path:
    file = project / "run.toml"
    text = file.read_text().replace("every = 1  ", "every = 0  ")
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    file.write_text(text + PRIVACY)
    return file


@pytest.fixture
def simulated(tmp_path: Path) -> RunPaths:
    """A run that its budget ends."""
    create("report-trial", tmp_path, "tests")
    result = fedward("simulate", private(tmp_path / "report-trial"), "--nodes", "5", "--out", tmp_path / "run")
    assert result.exit_code == 0 and f"privacy report {tmp_path / 'run' / 'privacy-report.html'}" in result.output
    return RunPaths(tmp_path / "run")


def test_a_simulated_run(simulated: RunPaths, tmp_path: Path) -> None:
    rounds = [event for event, _ in read_events(simulated.events) if event["event"] == "round"]
    assert 1 < len(rounds) < 10
    kept = json.loads(simulated.report_json.read_text())
    folder = tmp_path / "reports"
    folder.mkdir()
    result = fedward("report", simulated.root, "--out", folder)
    assert result.exit_code == 0
    told = json.loads((folder / "privacy-report.json").read_text())
    assert {**told, "made": ""} == {**kept, "made": ""}
    # The numbers are those that the run itself told, and those of the ledger's own events.
    assert told["claim"]["epsilon"] == rounds[-1]["privacy"]["epsilon"]
    assert [each["epsilon"] for each in told["spent"]] == [event["privacy"]["epsilon"] for event in rounds]
    released = verify(simulated.ledger).releases
    assert told["claim"]["epsilon"] == spent([(from_json(r.event), r.count) for r in released], 1e-5).epsilon
    assert (told["status"], told["sites"], told["budget"]) == ("budget_spent", 5, 4.5)
    tree = ElementTree.fromstring((folder / "privacy-report.html").read_text().removeprefix("<!DOCTYPE html>"))
    assert any("report-trial" in (node.text or "") for node in tree.iter())
    shown = " ".join(result.output.split())
    assert f"ε {told['claim']['epsilon']:.4g} by site" in shown and "one patient of a site" in shown
    # A folder that was renamed.
    moved = simulated.root.rename(tmp_path / "elsewhere")
    assert fedward("report", moved, "--out", folder).exit_code == 0


def test_no_report_of_a_ledger_that_was_touched(simulated: RunPaths, tmp_path: Path) -> None:
    lines = simulated.ledger.read_bytes().splitlines(keepends=True)
    for broken in (lines[:-1], [lines[0].replace(b'"round": 1', b'"round": 9'), *lines[1:]]):
        simulated.ledger.write_bytes(b"".join(broken))
        folder = tmp_path / "reports"
        folder.mkdir(exist_ok=True)
        result = fedward("report", simulated.root, "--out", folder)
        assert result.exit_code == 1 and "ledger" in result.stderr and "Restore it" in result.stderr
        assert list(folder.iterdir()) == []


def test_folders_that_will_not_do(tmp_path: Path) -> None:
    result = fedward("report", tmp_path)
    assert result.exit_code == 1 and "is no run's folder" in result.stderr
    assert fedward("report", tmp_path, "--out", tmp_path / "nowhere").exit_code == 2


def test_a_run_without_privacy_has_none(tmp_path: Path) -> None:
    create("report-trial", tmp_path, "tests")
    run = tmp_path / "report-trial" / "run.toml"
    run.write_text(run.read_text().replace("rounds = 10", "rounds = 1"))
    result = fedward("simulate", run, "--nodes", "4", "--out", tmp_path / "run")
    assert result.exit_code == 0 and "privacy report" not in result.output
    assert not RunPaths(tmp_path / "run").report.exists()
    refused = fedward("report", tmp_path / "run")
    assert refused.exit_code == 1 and "[privacy]" in refused.stderr


# --- of a server


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench(tmp_path, monkeypatch)
    made.config = load_config(private(made.project))
    yield made
    made.store.close()


def worked(bench: Bench, rounds: int = 3) -> str:
    """A run's id, after its process has written so many rounds."""
    run = bench.start()
    bench.manager.tick()
    paths = bench.paths.run(run)
    log, ledger = EventLog(paths.events), Ledger(paths.ledger, run)
    log.append("run_started", run=run, name="api-trial", algorithm="fedavg", rounds=10, nodes=["a"] * 5,
               resumed_from=None, epoch=1)  # fmt: skip
    for number in range(1, rounds + 1):
        ledger.append(Release(run, number, 0, "train", run, Unit.SITE, "server", to_json(EVENT)))
        log.append("round", round=number, of=10, cohort=["a"] * 5, available=5, replies=["a"] * 5)
    return run


def test_a_run_on_a_server(bench: Bench, tmp_path: Path) -> None:
    run = worked(bench)
    under_way = fedward("report", run[:8], "--out", tmp_path)
    assert under_way.exit_code == 0 and "under way" in under_way.output
    told = json.loads((tmp_path / "privacy-report.json").read_text())
    assert told["claim"]["epsilon"] == spent([(EVENT, 3)], 1e-5).epsilon and told["run"] == run
    ElementTree.fromstring((tmp_path / "privacy-report.html").read_text().removeprefix("<!DOCTYPE html>"))
    unknown = fedward("report", "zz")
    assert unknown.exit_code == 1 and "no run's id begins so" in unknown.stderr


@pytest.mark.parametrize("status", ["finished", "early_stopped", "budget_spent", "stopped", "failed"])
def test_the_server_keeps_a_report_of_each_run_that_ended(bench: Bench, status: str) -> None:
    run = worked(bench)
    paths = bench.paths.run(run)
    assert not paths.report.exists()
    EventLog(paths.events).append("run_finished", status=status, reason="r", round=3, best_round=None, seconds=1.0)
    bench.manager.tick()
    assert bench.client.run(run)["status"] == status
    told = json.loads(paths.report_json.read_text())
    assert (told["status"], told["rounds"]) == (status, 3) and "</html>" in paths.report.read_text()
    assert paths.report.stat().st_mode & 0o777 == 0o600


def test_a_run_ends_though_no_report_can_be_made(bench: Bench) -> None:
    run = worked(bench)
    paths = bench.paths.run(run)
    paths.ledger.write_bytes(b"".join(paths.ledger.read_bytes().splitlines(keepends=True)[:-1]))
    paths.report.write_text("of before")
    EventLog(paths.events).append("run_finished", status="finished", reason="", round=3, best_round=None, seconds=1.0)
    bench.manager.tick()
    assert bench.client.run(run)["status"] == "finished" and not paths.report.exists()
    with pytest.raises(ServiceError, match="cut off") as caught:
        bench.client.privacy_report(run)
    assert (caught.value.code, caught.value.status) == ("no_report", 409)


def test_the_report_is_for_data_scientists_of_the_federation(bench: Bench) -> None:
    from starlette.testclient import TestClient

    run = worked(bench)
    stranger = TestClient(bench.app, base_url="https://testserver", raise_server_exceptions=False)
    assert stranger.get(f"/runs/{run}/privacy-report").status_code == 401
    with pytest.raises(ServiceError) as caught:
        bench.client.privacy_report("0" * 32)
    assert caught.value.status == 404
