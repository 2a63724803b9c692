"""Is the service alive, and are all parts of the server ready?"""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

router = APIRouter()

Checks = Callable[[], dict[str, str]]
"""The parts that are not ready, each with the reason; {} when all are."""


@router.get("/health")
def health() -> dict[str, str]:
    """The service itself answers."""
    return {"status": "ok"}


@router.get("/ready")
def ready(request: Request) -> JSONResponse:
    """200 when every part answers, else 503 with those that do not."""
    missing: dict[str, str] = {}
    for check in request.app.state.checks:
        missing |= check()
    if not missing:
        return JSONResponse({"status": "ready", "parts": {}})
    message = "; ".join(f"{part}: {reason}" for part, reason in sorted(missing.items()))
    return JSONResponse({"error": "not_ready", "message": message, "parts": missing}, status_code=503)
