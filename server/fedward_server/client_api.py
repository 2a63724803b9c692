"""The run API from a data scientist's side: signed requests, the bundle, the signed manifest."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import httpx
from fedward_common.bundle import Bundle, build_bundle
from fedward_common.config import RunConfig
from fedward_common.credential import Credential
from fedward_common.errors import FedwardError
from fedward_common.files import write_atomic
from fedward_common.http import Service, ServiceError, Unreachable
from fedward_common.manifest import Manifest

from fedward_server.events import Event
from fedward_server.live import ENDS

CREDENTIAL_VARIABLE = "FEDWARD_CREDENTIAL"
DEFAULT_CREDENTIAL = Path("fedward-server") / "credential.json"

UPLOAD_SECONDS = 600.0
"""A bundle is small, but a starting model may not be."""
POLL_SECONDS = 40.0
"""The service holds an events request for up to 10 s."""
RETRY_SECONDS = (0.5, 1.0, 2.0, 5.0)
PATIENCE_SECONDS = 600.0
"""So long a watcher waits for a server that does not answer."""

RunView = dict[str, Any]


class NoSuchRun(FedwardError):
    """No run, or more than one, fits what was typed."""


def credential_path(given: Path | None) -> Path:
    """The file given, else `$FEDWARD_CREDENTIAL`, else the one that `fedward server init` makes here."""
    if given is not None:
        return given
    named = os.environ.get(CREDENTIAL_VARIABLE)
    return Path(named) if named else DEFAULT_CREDENTIAL


class RunClient:
    """Talks to the Fedward service as one data scientist. Every method raises `Unreachable` or `ServiceError`."""

    def __init__(self, credential: Credential) -> None:
        self._credential = credential
        self._service = Service(credential.server, credential.ca, credential.key)

    @classmethod
    def open(cls, path: Path | None) -> RunClient:
        """With the credential in `path` (see `credential_path`). Raises `CredentialError`."""
        return cls(Credential.load(credential_path(path)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._service.close()

    def start(self, config: RunConfig, project: Path) -> str:
        """Pack `project`, sign the manifest, submit; returns the run's id.

        Raises `BundleError`, `ConfigError` or `ServiceError`.
        """
        bundle = build_bundle(project)
        Bundle.open(bundle).check(project)
        initial = None if config.initial_model is None else (project / config.initial_model).read_bytes()
        run = uuid.uuid4().hex
        manifest = Manifest.make(run, config, bundle, initial, self._credential.name)
        envelope = json.dumps(manifest.sign(self._credential.key)).encode()
        files = {
            "manifest": ("manifest.json", envelope, "application/json"),
            "bundle": ("bundle.fab", bundle, "application/octet-stream"),
        }
        if initial is not None:
            files["initial"] = ("initial.safetensors", initial, "application/octet-stream")
        self._service.post("/runs", files=files, timeout=UPLOAD_SECONDS)
        return run

    def runs(self) -> list[RunView]:
        """All runs, in order of submission."""
        found: list[RunView] = self._service.get("/runs")["runs"]
        return found

    def nodes(self) -> list[dict[str, Any]]:
        """All enrolled nodes."""
        found: list[dict[str, Any]] = self._service.get("/nodes")["nodes"]
        return found

    def find(self, given: str) -> str:
        """The id of the run that `given` is the beginning of. Raises `NoSuchRun`."""
        runs = self.runs()
        found = [run["id"] for run in runs if given and run["id"].startswith(given)]
        if len(found) == 1:
            return str(found[0])
        if not found:
            raise NoSuchRun(f"RUN = {given!r}: no run's id begins so. 'fedward run list' shows all.")
        ids = ", ".join(run_id[:12] for run_id in found[:5])
        raise NoSuchRun(f"RUN = {given!r}: {len(found)} runs begin so ({ids} …). Give more letters of the id.")

    def run(self, run_id: str) -> RunView:
        """One run, with its configuration."""
        found: RunView = self._service.get(f"/runs/{run_id}")
        return found

    def stop(self, run_id: str) -> RunView:
        """End a run after the round in flight."""
        found: RunView = self._service.post(f"/runs/{run_id}/stop")
        return found

    def resume(self, run_id: str) -> RunView:
        """Let a stopped or failed run go on from its last round."""
        found: RunView = self._service.post(f"/runs/{run_id}/resume")
        return found

    def model(self, run_id: str, which: str, out: Path) -> int:
        """Write a model (`which`: last, best or a round) to `out`, whole or not at all; returns its bytes."""
        response = self._service.request(
            "GET", f"/runs/{run_id}/model", params={"which": which}, timeout=UPLOAD_SECONDS
        )
        write_atomic(out, response.content, mode=0o644)
        return len(response.content)

    def privacy_report(self, run_id: str) -> dict[str, Any]:
        """The privacy report of a run so far: "report" as JSON, "page" as an HTML file."""
        found: dict[str, Any] = self._service.get(f"/runs/{run_id}/privacy-report", timeout=POLL_SECONDS)
        return found

    def events(
        self,
        run_id: str,
        notice: Callable[[str], None] = lambda text: None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> Iterator[Event]:
        """All events of a run as they happen, until it is over.

        `notice` is told the run's place in the queue, and when a server that is away is waited for.
        Raises `Unreachable` when it stays away.
        """
        offset, waited, failures = 0, 0.0, 0
        place: int | None = None
        while True:
            try:
                page = self._service.get(
                    f"/runs/{run_id}/events",
                    params={"offset": offset, "wait": 1},
                    timeout=httpx.Timeout(POLL_SECONDS, connect=10.0),
                )
            except (Unreachable, ServiceError) as error:
                if isinstance(error, ServiceError) and error.status < 500:
                    raise
                if waited >= PATIENCE_SECONDS:
                    raise
                if failures == 0:
                    notice(f"waiting for the server: {error}")
                pause = RETRY_SECONDS[min(failures, len(RETRY_SECONDS) - 1)]
                failures, waited = failures + 1, waited + pause
                sleep(pause)
                continue
            if failures:
                notice("the server is back")
                waited, failures = 0.0, 0
            offset = page["offset"]
            if page.get("position") not in (None, place):
                place = page["position"]
                notice(f"queued: number {place} in line")
            yield from page["events"]
            if not page["events"] and page["status"] in ENDS:
                return
