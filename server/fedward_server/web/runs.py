"""Routes of data scientists: submit, list, watch, stop and resume runs, fetch their models."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, Query, Request, Response
from fedward_common.bundle import MAX_BYTES, BundleError
from fedward_common.errors import ConfigError, FedwardError
from fedward_common.manifest import ManifestError
from fedward_common.privacy.ledger import LedgerError
from fedward_common.privacy.report import ReportError
from fedward_common.privacy.report_page import page
from fedward_common.signing import SignatureError

from fedward_server import privacy_report
from fedward_server.checkpoint import CheckpointError, Checkpoints, read_checkpoint
from fedward_server.events import Event, read_events
from fedward_server.paths import RunPaths, ServerPaths
from fedward_server.refusal import Refusal
from fedward_server.runs import LIVE, RunError, RunManager, RunView, Unknown
from fedward_server.web.auth import ByScientist, OpenedByScientist
from fedward_server.web.uploads import Body, TooLarge, UploadError, receive, split

MAX_INITIAL = 2 * 1024**3
"""Bytes of a starting model."""
MAX_MANIFEST = 1024**2
_OVERHEAD = 65536
"""Bytes for boundaries and headers of a multipart body."""
WAIT = 10.0
"""Seconds that a long poll for events waits."""
MOST_EVENTS = 1000
"""Events in one answer."""
UPLOADS_AT_ONCE = 2

router = APIRouter()


def manager_of(request: Request) -> RunManager:
    """The application's run manager."""
    manager = request.app.state.runs
    assert isinstance(manager, RunManager)
    return manager


def refusal(error: FedwardError) -> Refusal:
    """An error of the run manager as an answer."""
    if isinstance(error, Refusal):
        return error
    code, status = next(
        (code, status)
        for kind, code, status in (
            (Unknown, "run_unknown", 404),
            (RunError, "run_state", 409),
            (TooLarge, "too_large", 413),
            (UploadError, "bad_request", 400),
            (ConfigError, "config_refused", 422),
            (BundleError, "bundle_refused", 422),
            (ManifestError, "manifest_refused", 422),
            (SignatureError, "signature_wrong", 403),
            (CheckpointError, "model_missing", 404),
            (ReportError, "no_report", 409),
            (LedgerError, "no_report", 409),
            (FedwardError, "refused", 400),
        )
        if isinstance(error, kind)
    )
    return Refusal(code, str(error), status)


@router.post("/runs", status_code=201)
async def submit(request: Request, opened: OpenedByScientist) -> dict[str, Any]:
    """Queue a run. Multipart: "manifest" (the signed envelope, JSON), "bundle" and, if there is one, "initial"."""
    folder: Path = request.app.state.uploads
    limit = MAX_INITIAL + MAX_BYTES + MAX_MANIFEST + _OVERHEAD
    try:
        if int(request.headers.get("content-length", "0")) > limit:
            raise TooLarge(f"the request is larger than the {limit} bytes allowed.")
        async with request.app.state.upload_slots:
            body = await receive(request.stream(), folder, limit)
            try:
                sender = await opened.accept(body.sha256)
                kind = request.headers.get("content-type", "")
                view = await to_thread.run_sync(_submit, manager_of(request), body, kind, sender.name)
            finally:
                body.path.unlink(missing_ok=True)
    except FedwardError as error:
        raise refusal(error) from error
    return asdict(view)


def _submit(manager: RunManager, body: Body, content_type: str, by: str) -> RunView:
    parts = split(body, content_type)
    if not {"manifest", "bundle"} <= set(parts) <= {"manifest", "bundle", "initial"}:
        raise UploadError(f"the parts must be manifest, bundle and maybe initial, not {', '.join(sorted(parts))}.")
    for name, most in (("manifest", MAX_MANIFEST), ("bundle", MAX_BYTES), ("initial", MAX_INITIAL)):
        if name in parts and parts[name].size > most:
            raise TooLarge(f"{name} has {parts[name].size} bytes; at most {most} are allowed.")
    try:
        envelope = json.loads(parts["manifest"].read())
    except (ValueError, RecursionError) as error:
        raise UploadError("the part 'manifest' is not JSON.") from error
    if not isinstance(envelope, dict):
        raise UploadError("the part 'manifest' is not a JSON object.")
    bundle = parts["bundle"].read()
    if "initial" not in parts:
        return manager.submit(envelope, bundle, None, None, by)
    initial = body.path.with_name(body.path.name + ".initial")
    try:
        return manager.submit(envelope, bundle, initial, parts["initial"].copy(initial), by)
    finally:
        initial.unlink(missing_ok=True)


@router.get("/runs")
def list_all(request: Request, _: ByScientist) -> dict[str, Any]:
    """All runs in order of submission, with their places in the queue."""
    return {"runs": [asdict(view) for view in manager_of(request).views()]}


@router.get("/runs/{run_id}")
def show(request: Request, run_id: str, _: ByScientist) -> dict[str, Any]:
    """One run with its configuration."""
    manager = manager_of(request)
    try:
        return {**asdict(manager.view(run_id)), "config": manager.config(run_id)}
    except FedwardError as error:
        raise refusal(error) from error


@router.get("/runs/{run_id}/events")
async def events(
    request: Request,
    run_id: str,
    _: ByScientist,
    offset: Annotated[int, Query(ge=0)] = 0,
    wait: bool = False,
) -> dict[str, Any]:
    """Events after byte `offset`, the offset behind them, and the run's status; `wait` holds the answer back for up
    to 10 s until there is an event or the run is over."""
    manager = manager_of(request)
    paths = _run_paths(request, run_id)
    until = time.monotonic() + WAIT
    try:
        while True:
            # The status is read first: a run that is over has then written its last event already.
            view = await to_thread.run_sync(manager.view, run_id)
            found, behind = await to_thread.run_sync(_read, paths, offset)
            over = not wait or found or view.status not in LIVE or time.monotonic() > until
            if over or await request.is_disconnected():
                return {
                    "events": found,
                    "offset": behind,
                    "status": view.status,
                    "reason": view.reason,
                    "position": view.position,
                }
            await asyncio.sleep(0.2)
    except FedwardError as error:
        raise refusal(error) from error


def _read(paths: RunPaths, offset: int) -> tuple[list[Event], int]:
    found: list[Event] = []
    try:
        for event, behind in read_events(paths.events, offset):
            found.append(event)
            offset = behind
            if len(found) == MOST_EVENTS:
                break
    except ValueError as error:
        raise UploadError(f"offset = {offset}: no event begins there. Use the offsets that answers carry.") from error
    return found, offset


@router.post("/runs/{run_id}/stop")
def stop(request: Request, run_id: str, sender: ByScientist) -> dict[str, Any]:
    """End a run after the round in flight (at once if it is queued)."""
    try:
        return asdict(manager_of(request).stop(run_id, sender.name))
    except FedwardError as error:
        raise refusal(error) from error


@router.post("/runs/{run_id}/resume")
def resume(request: Request, run_id: str, sender: ByScientist) -> dict[str, Any]:
    """Queue a stopped or failed run again."""
    try:
        return asdict(manager_of(request).resume(run_id, sender.name))
    except FedwardError as error:
        raise refusal(error) from error


@router.get("/runs/{run_id}/model")
def model(request: Request, run_id: str, _: ByScientist, which: str = "last") -> Response:
    """The model after the last round, the best one, or round n, as safetensors (no private and frozen tensors)."""
    try:
        manager_of(request).view(run_id)
        checkpoint = read_checkpoint(Checkpoints(_run_paths(request, run_id)).model_file(which))
    except FedwardError as error:
        raise refusal(error) from error
    return Response(
        checkpoint.model_bytes(),
        media_type="application/octet-stream",
        headers={"Fedward-Round": str(checkpoint.round)},
    )


@router.get("/runs/{run_id}/privacy-report")
def report(request: Request, run_id: str, _: ByScientist) -> dict[str, Any]:
    """What a run with [privacy] has released so far and what that means: "report" as JSON, "page" as an HTML file."""
    try:
        manager_of(request).view(run_id)
        found = privacy_report.read(_run_paths(request, run_id))
    except FedwardError as error:
        raise refusal(error) from error
    return {"report": json.loads(found.to_json()), "page": page(found)}


def _run_paths(request: Request, run_id: str) -> RunPaths:
    # The id is looked up in the store before any of these paths is opened.
    paths = request.app.state.paths
    assert isinstance(paths, ServerPaths)
    return paths.run(run_id)
