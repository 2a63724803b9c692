"""Who belongs to the federation: the signed roster for all, the nodes' state for data scientists."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import APIRouter, Request
from fedward_common.errors import FedwardError

from fedward_server.publication import no_roster, signed_envelope
from fedward_server.store import active_nodes
from fedward_server.web.auth import ByScientist

log = logging.getLogger(__name__)
router = APIRouter()


@router.get("/roster")
def roster(request: Request) -> dict[str, Any]:
    """The signed roster."""
    envelope = signed_envelope(request.app.state.paths)
    if envelope is None:
        raise no_roster()
    return envelope


@router.get("/nodes")
def nodes(request: Request, _: ByScientist) -> dict[str, Any]:
    """Enrolled nodes: name, node_id, tags, enrolled (Unix seconds), link ("online" | … | "unknown"), last_seen."""
    links: dict[str, Any] = {}
    try:
        links = {str(node.flower_id): node for node in request.app.state.control.list_nodes()}
    except FedwardError as error:
        log.warning("the nodes' links are not known: %s", error)
    with request.app.state.store.transaction() as session:
        found = active_nodes(session)
    return {
        "nodes": [
            {
                "name": node.name,
                "node_id": node.node_id,
                "tags": node.tags,
                "enrolled": node.enrolled,
                "link": getattr(links.get(node.flower_id or ""), "status", "unknown"),
                "last_seen": getattr(links.get(node.flower_id or ""), "last_seen", ""),
            }
            for node in found
        ]
    }
