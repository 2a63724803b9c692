"""The Fedward service as an ASGI application, put together from its parts."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, FastAPI
from starlette.types import Lifespan

from fedward_server.enrolment import Enrolment, NodeControl
from fedward_server.paths import ServerPaths
from fedward_server.store import Store
from fedward_server.web import enrolment as enrolment_routes
from fedward_server.web import health, roster
from fedward_server.web.auth import Gate
from fedward_server.web.errors import install_errors
from fedward_server.web.limits import BodyLimit

MAX_BODY = 256 * 1024
"""Bytes of a request body; submissions of runs have their own limit."""
UPLOADS = frozenset({("POST", "/runs")})


def create_app(
    paths: ServerPaths,
    store: Store,
    enrolment: Enrolment,
    control: NodeControl,
    *,
    routers: Sequence[APIRouter] = (),
    checks: Sequence[health.Checks] = (),
    lifespan: Lifespan[FastAPI] | None = None,
) -> FastAPI:
    """The application. routers: further routes (runs, metrics); checks: what `/ready` asks.

    Routes find their parts in `app.state`: paths, store, enrolment, control, gate, checks.
    """
    app = FastAPI(title="Fedward", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.state.paths = paths
    app.state.store = store
    app.state.enrolment = enrolment
    app.state.control = control
    app.state.gate = Gate(store, enrolment.refusals)
    app.state.checks = tuple(checks)
    app.state.ca_pem = paths.public_ca.read_bytes()
    for router in (enrolment_routes.router, roster.router, health.router, *routers):
        app.include_router(router)
    install_errors(app)
    app.add_middleware(BodyLimit, limit=MAX_BODY, exempt=UPLOADS)
    return app
