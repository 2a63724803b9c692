"""The client of the run API and `fedward run …` against the real service application; Flower alone is faked."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from click.testing import CliRunner, Result
from fedward_common.algorithms.base import MODEL, ServerState
from fedward_common.cli import build as build_cli
from fedward_common.config import load_config
from fedward_common.credential import Credential
from fedward_common.files import owner_folder
from fedward_common.http import RequestSigner, ServiceError, Unreachable
from fedward_common.manifest import open_manifest
from fedward_common.roster import open_roster, read_roster
from fedward_common.signing import load_private
from fedward_common.update import Layout
from fedward_server import authority, client_api
from fedward_server.checkpoint import Checkpoint, Checkpoints
from fedward_server.client_api import NoSuchRun, RunClient, credential_path
from fedward_server.control import ControlNode
from fedward_server.events import EventLog
from fedward_server.paths import ServerPaths
from fedward_server.project import create
from fedward_server.runs import RunManager
from fedward_server.service import build as build_service
from fedward_server.settings import make_settings
from fedward_server.web import runs as routes
from safetensors.numpy import load_file
from starlette.testclient import TestClient
from torch import nn


class IdleFlower:
    """A SuperLink that accepts runs and does nothing with them."""

    def __init__(self) -> None:
        self.states: list[str] = []

    def ping(self) -> None:
        pass

    def register_node(self, public_key: bytes) -> int:
        return 1

    def unregister_node(self, flower_id: int) -> None:
        pass

    def list_nodes(self) -> list[ControlNode]:
        return []

    def start_run(self, fab: bytes, config: Mapping[str, str | int]) -> int:
        self.states.append("running")
        return len(self.states)

    def stop_run(self, flower_run: int) -> None:
        self.states[flower_run - 1] = "finished"

    def run_state(self, flower_run: int) -> str | None:
        return self.states[flower_run - 1]

    def run_log(self, flower_run: int) -> str:
        return ""


class Bench:
    """A server after `init` and a data scientist's client of it. The manager works when `tick` is called."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paths = ServerPaths(root / "server")
        authority.init(self.paths, make_settings(name="fl.example.org"))
        settings, self.store = authority.open_server(self.paths)
        app = build_service(self.paths, settings, self.store, IdleFlower(), supervisor=os.getpid())
        self.manager: RunManager = app.state.runs
        owner_folder(app.state.uploads)
        self.app = app
        # The client's own Service, its transport replaced: what it sends is what the real routes get.
        monkeypatch.setattr(client_api, "Service", self.service)
        monkeypatch.setenv("FEDWARD_CREDENTIAL", str(self.paths.credential))
        create("api-trial", root, "tests")
        self.project = root / "api-trial"
        self.client = RunClient.open(None)
        self.config = load_config(self.project / "run.toml")

    def service(self, server: str, ca: str, key: Any) -> Any:
        from fedward_common.http import Service

        # The service is another process: what the client has imported is not importable there.
        sys.path[:] = [path for path in sys.path if path != str(self.project)]
        made = Service(server, ca, key)
        made._client = TestClient(self.app, base_url=server, raise_server_exceptions=False)
        made._client.auth = RequestSigner(key)
        return made

    def start(self) -> str:
        return self.client.start(self.config, self.project)

    def finish(self, run: str, rounds: int = 2) -> None:
        """What a ServerApp would have written."""
        paths = self.paths.run(run)
        log = EventLog(paths.events)
        log.append("run_started", run=run, name="api-trial", algorithm="fedavg", rounds=rounds, nodes=["a"],
                   resumed_from=None, epoch=1)  # fmt: skip
        layout = Layout.of(nn.Linear(2, 1))
        for number in range(1, rounds + 1):
            vectors = {MODEL: np.full(3, number, np.float32)}
            Checkpoints(paths, rounds).write(
                Checkpoint(run=run, epoch=0, layout=layout, state=ServerState(vectors, number), enrolled=("a",))
            )
            log.append("round", round=number, of=rounds, cohort=["a"], replies=["a"], failures={}, weight=1.0,
                       train={"loss": 1.0}, evaluate=None, holdout=None, central=None, bytes_down=1, bytes_up=1,
                       seconds=0.1)  # fmt: skip
        log.append("run_finished", status="finished", reason="", round=rounds, best_round=None, seconds=1.0)
        self.manager.tick()


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench(tmp_path, monkeypatch)
    yield made
    made.store.close()


def fedward(*arguments: str | Path) -> Result:
    return CliRunner().invoke(build_cli(), ["run", *map(str, arguments)], catch_exceptions=False)


def test_what_is_submitted_is_what_was_signed(bench: Bench) -> None:
    run = bench.start()
    paths = bench.paths.run(run)
    roster = open_roster(read_roster(bench.paths.roster), load_private(bench.paths.roster_key).public_key())
    manifest = open_manifest(json.loads(paths.manifest.read_text()), roster)
    manifest.check_bundle(paths.bundle.read_bytes())
    manifest.check_initial(None)
    assert manifest.run == run and manifest.run_config() == bench.config
    assert manifest.scientist == Credential.load(bench.paths.credential).name
    assert bench.client.run(run)["status"] == "queued"


def test_a_starting_model_goes_along(bench: Bench) -> None:
    (bench.project / "start.safetensors").write_bytes(b"any bytes")
    config = bench.config.model_copy(update={"initial_model": "start.safetensors"})
    run = bench.client.start(config, bench.project)
    assert bench.paths.run(run).initial.read_bytes() == b"any bytes"


def test_the_service_says_why_in_its_own_words(bench: Bench) -> None:
    cohort = bench.config.cohort.model_copy(update={"nodes": ("nowhere", "there", "here"), "min_nodes": 1})
    with pytest.raises(ServiceError, match="nowhere") as caught:
        bench.client.start(bench.config.model_copy(update={"cohort": cohort}), bench.project)
    assert caught.value.status == 422


def test_runs_are_found_by_the_beginning_of_their_id(bench: Bench) -> None:
    first, second = bench.start(), bench.start()
    assert bench.client.find(first[:8]) == first and bench.client.find(second) == second
    with pytest.raises(NoSuchRun, match="no run's id begins so"):
        bench.client.find("x")
    with pytest.raises(NoSuchRun, match="no run's id begins so"):
        bench.client.find("")
    while first[0] != second[0]:
        second = bench.start()
    with pytest.raises(NoSuchRun, match=r"\d runs begin so"):
        bench.client.find(first[0])


def test_watch_tells_the_whole_run_and_ends(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    # The run takes several pages.
    monkeypatch.setattr(routes, "MOST_EVENTS", 2)
    run = bench.start()
    bench.manager.tick()
    bench.finish(run)
    events = list(bench.client.events(run))
    assert [event["event"] for event in events] == ["run_started", "round", "round", "run_finished"]
    as_json = fedward("watch", run[:8], "--json")
    assert as_json.exit_code == 0
    assert as_json.stdout == bench.paths.run(run).events.read_text()
    plain = fedward("watch", run[:8])
    assert "round 2/2" in plain.output and f"fedward run model {run[:8]}" in plain.output


def test_a_server_that_is_away_is_waited_for(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    run = bench.start()
    bench.manager.tick()
    bench.finish(run)
    get, calls, slept, told = bench.client._service.get, [], [], []

    def shaky(path: str, **options: Any) -> Any:
        calls.append(path)
        if len(calls) in (1, 2):
            raise Unreachable("connection refused")
        if len(calls) == 3:
            raise ServiceError("internal", "restarting", 503)
        return get(path, **options)

    monkeypatch.setattr(bench.client._service, "get", shaky)
    assert len(list(bench.client.events(run, told.append, slept.append))) == 4
    assert slept == [0.5, 1.0, 2.0]
    assert told == ["waiting for the server: connection refused", "the server is back"]


def test_a_server_that_stays_away_is_given_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(path: str, **options: Any) -> Any:
        raise Unreachable("connection refused")

    monkeypatch.setattr(bench.client._service, "get", away)
    slept: list[float] = []
    with pytest.raises(Unreachable):
        list(bench.client.events("a" * 32, sleep=slept.append))
    assert sum(slept) >= client_api.PATIENCE_SECONDS


def test_a_refusal_is_not_tried_again(bench: Bench) -> None:
    with pytest.raises(ServiceError) as caught:
        list(bench.client.events("0" * 32, sleep=lambda seconds: pytest.fail("waited for a refusal")))
    assert caught.value.status == 404


def test_watching_a_queued_run_tells_its_place(bench: Bench) -> None:
    first, second = bench.start(), bench.start()
    bench.client.stop(first)
    told: list[str] = []
    pages = bench.client.events(second, told.append)
    bench.client.stop(second)
    assert list(pages) == []
    assert fedward("show", second[:8]).output.count("stopped") >= 1


def test_models_by_last_and_number(bench: Bench, tmp_path: Path) -> None:
    run = bench.start()
    bench.manager.tick()
    bench.finish(run)
    out = tmp_path / "model.safetensors"
    assert fedward("model", run[:6], "-o", out).exit_code == 0
    assert load_file(out)["bias"].tolist() == [2.0]
    assert fedward("model", run[:6], "-o", out, "--which", "1").exit_code == 0
    assert load_file(out)["bias"].tolist() == [1.0]
    missing = fedward("model", run[:6], "-o", tmp_path / "none", "--which", "7")
    assert missing.exit_code == 1 and "7" in missing.stderr and not (tmp_path / "none").exists()
    assert fedward("model", run[:6], "-o", out, "--which", "newest").exit_code == 2
    assert fedward("model", run[:6], "-o", tmp_path / "no/where").exit_code == 2


def test_the_commands(bench: Bench) -> None:
    assert fedward("list").output == "no runs yet\n"
    started = fedward("start", bench.project / "run.toml", "--detach")
    assert started.exit_code == 0
    run = started.stdout.strip()
    as_json = fedward("start", bench.project / "run.toml", "--detach", "--json")
    second = json.loads(as_json.stdout)["run"]
    listed = fedward("list").output
    assert run[:8] in listed and "queued (1)" in listed and "queued (2)" in listed
    assert [one["id"] for one in json.loads(fedward("list", "--json").stdout)] == [run, second]
    shown = fedward("show", run[:8]).output
    assert "api-trial" in shown and '"lr": 0.1' in shown
    assert json.loads(fedward("show", run[:8], "--json").stdout)["config"]["local"]["steps"] == 20
    stopped = fedward("stop", run[:8])
    assert f"run {run[:8]}: stopped" in stopped.output
    again = fedward("stop", run[:8])
    assert again.exit_code == 1 and "stopped already" in again.stderr
    assert "queued" in fedward("resume", run[:8]).output
    assert "no nodes yet" in fedward("nodes").output
    unknown = fedward("show", "zz")
    assert unknown.exit_code == 1 and "fedward run list" in unknown.stderr


def test_a_run_that_would_be_refused_is_not_sent(bench: Bench) -> None:
    shutil.rmtree(bench.project / "api_trial")
    result = fedward("start", bench.project / "run.toml", "--detach")
    assert result.exit_code == 1 and "beside run.toml" in result.stderr
    assert fedward("list").output == "no runs yet\n"


def test_control_c_detaches_and_says_how_to_come_back(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> Iterator[Any]:
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(RunClient, "events", interrupted)
    result = fedward("start", bench.project / "run.toml")
    run = result.stdout.split()[1]
    assert result.exit_code == 0
    assert f"Detached; the run goes on. Come back: fedward run watch {run[:8]}" in result.stderr
    assert bench.client.run(run)["status"] == "queued"


def test_a_failed_run_has_exit_code_one(bench: Bench) -> None:
    run = bench.start()
    bench.manager.tick()
    log = EventLog(bench.paths.run(run).events)
    log.append("run_finished", status="failed", reason="no quorum three times", round=0, best_round=None, seconds=1.0)
    bench.manager.tick()
    result = fedward("watch", run[:8])
    assert result.exit_code == 1 and "no quorum three times" in result.output


def test_where_the_credential_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDWARD_CREDENTIAL", raising=False)
    assert credential_path(None) == Path("fedward-server/credential.json")
    monkeypatch.setenv("FEDWARD_CREDENTIAL", "/x/ada.json")
    assert credential_path(None) == Path("/x/ada.json")
    assert credential_path(tmp_path) == tmp_path
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDWARD_CREDENTIAL")
    result = fedward("list")
    assert result.exit_code == 1 and "no such file" in result.stderr


def test_an_unreachable_server_is_an_error_in_words(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def down(*_: Any, **__: Any) -> httpx.Response:
        raise httpx.ConnectError("refused")

    monkeypatch.setattr(TestClient, "request", down)
    result = fedward("list")
    assert result.exit_code == 1 and "cannot be reached" in result.stderr and "Check the address" in result.stderr
