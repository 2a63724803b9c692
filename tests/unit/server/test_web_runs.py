"""The run API as a data scientist sees it: signed requests against the real application, Flower faked."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from fedward_common.algorithms.base import MODEL, ServerState
from fedward_common.credential import Credential
from fedward_common.files import owner_folder
from fedward_common.http import RequestSigner
from fedward_common.manifest import Manifest
from fedward_common.signing import generate
from fedward_common.update import Kind, Layout
from fedward_server import authority
from fedward_server.checkpoint import Checkpoint, Checkpoints
from fedward_server.control import ControlNode
from fedward_server.events import EventLog
from fedward_server.paths import ServerPaths
from fedward_server.runs import RunManager
from fedward_server.service import build
from fedward_server.settings import make_settings
from fedward_server.web import runs as routes
from safetensors.torch import load
from starlette.testclient import TestClient
from torch import nn
from world import FakeFlower, make_bundle, make_config


class FakeSuperLink(FakeFlower):
    """Knows nodes too."""

    def register_node(self, public_key: bytes) -> int:
        return 1

    def unregister_node(self, flower_id: int) -> None:
        pass

    def list_nodes(self) -> list[ControlNode]:
        self.ping()
        return [ControlNode(1, "online", ""), ControlNode(2, "offline", "")]


class Api:
    """A server after `init`, and its data scientist's client."""

    def __init__(self, root: Path) -> None:
        self.paths = ServerPaths(root)
        authority.init(self.paths, make_settings(name="fl.example.org"))
        settings, self.store = authority.open_server(self.paths)
        self.flower = FakeSuperLink()
        # Not entered as a context: the run manager's thread does not run, tests call `tick`.
        app = build(self.paths, settings, self.store, self.flower, supervisor=os.getpid())
        self.manager: RunManager = app.state.runs
        owner_folder(app.state.uploads)
        self.uploads: Path = app.state.uploads
        self.credential = Credential.load(self.paths.credential)
        self.client = TestClient(app, base_url="https://testserver", raise_server_exceptions=False)
        self.signer = RequestSigner(self.credential.key)

    def get(self, path: str, **options: Any) -> Any:
        return self.client.get(path, auth=self.signer, **options)

    def post(self, path: str, **options: Any) -> Any:
        return self.client.post(path, auth=self.signer, **options)

    def files(
        self, initial: bytes | None = None, key: Ed25519PrivateKey | None = None, **tables: Any
    ) -> dict[str, bytes]:
        bundle = make_bundle()
        manifest = Manifest.make(uuid.uuid4().hex, make_config(**tables), bundle, initial, self.credential.name)
        found = {"manifest": json.dumps(manifest.sign(key or self.credential.key)).encode(), "bundle": bundle}
        return found if initial is None else {**found, "initial": initial}

    def submit(self, **tables: Any) -> str:
        answer = self.post("/runs", files=self.files(**tables))
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    made = Api(tmp_path / "server")
    yield made
    made.store.close()


def test_a_run_is_submitted_listed_and_shown(api: Api) -> None:
    first, second = api.submit(), api.submit(seed=5)
    listed = api.get("/runs").json()["runs"]
    assert [(run["id"], run["status"], run["position"]) for run in listed] == [
        (first, "queued", 1),
        (second, "queued", 2),
    ]
    shown = api.get(f"/runs/{second}").json()
    assert shown["config"]["seed"] == 5
    assert shown["scientist"] == api.credential.name
    assert not list(api.uploads.iterdir())


def test_a_starting_model_of_many_bytes_arrives_whole(api: Api) -> None:
    initial = np.random.default_rng(0).bytes(3_000_000) + b"\r\n--" + b"x" * 100
    run = api.post("/runs", files=api.files(initial)).json()["id"]
    assert api.paths.run(run).initial.read_bytes() == initial
    assert not list(api.uploads.iterdir())


def test_unsigned_requests_and_strangers_are_refused_before_anything_is_kept(api: Api) -> None:
    assert api.client.get("/runs").status_code == 401
    stranger = RequestSigner(generate())
    answer = api.client.post("/runs", auth=stranger, files=api.files())
    assert (answer.status_code, answer.json()["error"]) == (401, "key_unknown")
    assert not list(api.uploads.iterdir())
    assert api.get("/runs").json()["runs"] == []


def test_a_body_that_is_not_the_signed_one_is_refused(api: Api) -> None:
    request = api.client.build_request("POST", "/runs", files=api.files())
    request.read()
    signed = next(api.signer.auth_flow(request))
    body = bytearray(signed.read())
    body[-100] ^= 1
    answer = api.client.post("/runs", content=bytes(body), headers=dict(signed.headers))
    assert (answer.status_code, answer.json()["error"]) == (401, "signature_wrong")
    assert not list(api.uploads.iterdir())


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"bundle": b"no zip"}, 422, "manifest_refused"),
        ({"manifest": b"{"}, 400, "bad_request"),
        ({"manifest": b"[]"}, 400, "bad_request"),
        ({"manifest": b"{}"}, 403, "signature_wrong"),
        ({"other": b""}, 400, "bad_request"),
        ({"initial": b"unsigned"}, 422, "manifest_refused"),
        ({"bundle": b"x" * (10 * 1024**2 + 1)}, 413, "too_large"),
    ],
)
def test_bad_submissions(api: Api, change: dict[str, bytes], status: int, code: str) -> None:
    answer = api.post("/runs", files={**api.files(), **change})
    assert (answer.status_code, answer.json()["error"]) == (status, code), answer.text
    assert not list(api.uploads.iterdir())


def test_a_body_over_the_limit_is_cut_off_and_leaves_nothing(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "MAX_INITIAL", -(11 * 1024**2) - 65000)
    answer = api.post("/runs", files=api.files())
    assert (answer.status_code, answer.json()["error"]) == (413, "too_large")
    assert not list(api.uploads.iterdir())


def test_a_refused_configuration_names_the_known_nodes(api: Api) -> None:
    answer = api.post("/runs", files=api.files(cohort={"nodes": ["nowhere"]}))
    assert (answer.status_code, answer.json()["error"]) == (422, "config_refused")
    assert "Enrolled: none" in answer.json()["message"]


def test_events_are_read_on_from_an_offset(api: Api) -> None:
    run = api.submit()
    assert api.get(f"/runs/{run}/events").json()["events"] == []
    log = EventLog(api.paths.run(run).events)
    log.append("run_started", run=run)
    log.append("round", round=1)
    first = api.get(f"/runs/{run}/events").json()
    assert [event["event"] for event in first["events"]] == ["run_started", "round"]
    log.append("run_finished", status="finished", reason="")
    api.manager.tick()
    api.manager.tick()
    rest = api.get(f"/runs/{run}/events", params={"offset": first["offset"], "wait": "1"}).json()
    assert [event["event"] for event in rest["events"]] == ["run_finished"]
    wrong = api.get(f"/runs/{run}/events", params={"offset": 3})
    assert (wrong.status_code, wrong.json()["error"]) == (400, "bad_request")


def test_a_long_poll_answers_at_once_when_the_run_is_over(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "WAIT", 3600.0)
    run = api.submit()
    api.post(f"/runs/{run}/stop")
    answer = api.get(f"/runs/{run}/events", params={"wait": "1"}).json()
    assert (answer["events"], answer["status"]) == ([], "stopped")


def test_a_long_poll_ends_after_its_time(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "WAIT", 0.0)
    answer = api.get(f"/runs/{api.submit()}/events", params={"wait": "1"}).json()
    assert (answer["events"], answer["status"], answer["position"]) == ([], "queued", 1)


def test_stop_and_resume(api: Api) -> None:
    run = api.submit()
    assert api.post(f"/runs/{run}/stop").json()["status"] == "stopped"
    again = api.post(f"/runs/{run}/stop")
    assert (again.status_code, again.json()["error"]) == (409, "run_state")
    assert api.post(f"/runs/{run}/resume").json()["status"] == "queued"


@pytest.mark.parametrize("path", ["", "/events", "/model"])
def test_a_run_that_is_not_there(api: Api, path: str) -> None:
    answer = api.get(f"/runs/{'0' * 32}{path}")
    assert (answer.status_code, answer.json()["error"]) == (404, "run_unknown")


def test_a_model_is_fetched_by_round(api: Api) -> None:
    run = api.submit()
    missing = api.get(f"/runs/{run}/model")
    assert (missing.status_code, missing.json()["error"]) == (404, "model_missing")
    network = nn.Linear(3, 2)
    layout = Layout.of(network)
    for number in (1, 2):
        with torch.no_grad():
            network.bias.fill_(number)
        state = ServerState({MODEL: layout.pack(network.state_dict(), Kind.TRAINABLE)}, number)
        Checkpoints(api.paths.run(run), rounds=3).write(Checkpoint(run, 0, layout, state, ()))
    answer = api.get(f"/runs/{run}/model", params={"which": "1"})
    assert answer.headers["Fedward-Round"] == "1"
    assert load(answer.content)["bias"].tolist() == [1.0, 1.0]
    assert load(api.get(f"/runs/{run}/model").content)["bias"].tolist() == [2.0, 2.0]


def test_metrics_count_what_the_events_tell(api: Api) -> None:
    run = api.submit()
    log = EventLog(api.paths.run(run).events)
    log.append(
        "round", round=1, replies=["a", "b"], failures={"c": "policy (max_epochs) [incident 1f]"}, bytes_up=10,
        bytes_down=20, seconds=0.7,
    )  # fmt: skip
    log.append("round_failed", round=2, failures={"c": "no_reply"}, seconds=3.0)
    for _ in range(2):
        lines = api.client.get("/metrics").text.splitlines()
        for line in (
            "fedward_nodes_enrolled 0.0",
            "fedward_nodes_online 1.0",
            'fedward_runs{status="queued"} 1.0',
            "fedward_rounds_total 1.0",
            "fedward_rounds_failed_total 1.0",
            "fedward_replies_total 2.0",
            'fedward_failures_total{reason="policy"} 1.0',
            'fedward_failures_total{reason="no_reply"} 1.0',
            'fedward_round_bytes_total{direction="up"} 10.0',
            'fedward_round_seconds_bucket{le="0.5"} 0.0',
            'fedward_round_seconds_bucket{le="1.0"} 1.0',
            "fedward_round_seconds_count 1.0",
        ):
            assert line in lines, line
    api.flower.down = True
    assert "fedward_nodes_online" not in api.client.get("/metrics").text.replace("# ", "")


def test_ready_names_the_parts_that_are_not(api: Api) -> None:
    api.flower.down = True
    answer = api.client.get("/ready")
    assert answer.status_code == 503
    assert set(answer.json()["parts"]) >= {"control", "fleet"}
    assert "superexec" in answer.json()["parts"]
