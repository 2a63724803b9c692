"""Routes of nodes: CA certificate, enrolment, rotation, leaving."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from fedward_server.enrolment import Claim, Enrolment, EnrolRequest
from fedward_server.refusal import Refusal
from fedward_server.web.auth import ByNode

router = APIRouter()


def enrolment_of(request: Request) -> Enrolment:
    """The application's enrolment."""
    enrolment = request.app.state.enrolment
    assert isinstance(enrolment, Enrolment)
    return enrolment


@router.get("/ca.pem")
def ca_certificate(
    request: Request, expected: Annotated[str | None, Query(pattern=r"^[0-9a-f]{64}$")] = None
) -> Response:
    """The CA certificate. expected: the hash in the asker's token; one that differs is noted in the audit.

    The answer is the same either way: the asker compares for itself and trusts nothing that is said here.
    """
    if expected is not None:
        with suppress(Refusal):
            enrolment_of(request).check_foreign(expected)
    return Response(request.app.state.ca_pem, media_type="application/x-pem-file")


@router.post("/enrol")
def enrol(request: Request, body: EnrolRequest) -> dict[str, Any]:
    """Let a node in for a token."""
    return asdict(enrolment_of(request).enrol(body))


@router.get("/nodes/me")
def standing(node: ByNode) -> dict[str, str]:
    """Whether the asking node is enrolled; one that is not gets the error that says why."""
    return {"name": node.name, "node_id": node.id, "status": "active"}


@router.post("/nodes/rotate")
def rotate(request: Request, node: ByNode, body: Claim) -> dict[str, Any]:
    """Replace a node's keys; the old identity key signs the request."""
    return asdict(enrolment_of(request).rotate(node.id, body))


@router.post("/nodes/leave")
def leave(request: Request, node: ByNode) -> dict[str, str]:
    """A node goes by its own will."""
    enrolment_of(request).leave(node.id)
    return {"name": node.name, "status": "left"}
