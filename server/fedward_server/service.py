"""`python -m fedward_server.service`: enrolment, runs and health over HTTPS, and the run manager behind them."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol

import uvicorn
from anyio import to_thread
from fastapi import FastAPI
from fedward_common.errors import FedwardError
from fedward_common.files import owner_folder

from fedward_server import logs
from fedward_server.authority import open_server
from fedward_server.control import Control
from fedward_server.enrolment import Enrolment, NodeControl
from fedward_server.paths import ServerPaths
from fedward_server.publication import read_signed
from fedward_server.readiness import check_parts
from fedward_server.runs import FlowerControl, RunManager
from fedward_server.settings import Settings
from fedward_server.store import Store
from fedward_server.web import metrics, runs
from fedward_server.web.app import create_app

SHUTDOWN = 2
"""Seconds that open requests (long polls) have to end at a stop."""


RECONCILE = 15.0
"""Seconds between two looks at whether the SuperLink knows the nodes that are enrolled, and no others."""

log = logging.getLogger(__name__)


class SuperLinkControl(NodeControl, FlowerControl, Protocol):
    """What the service needs of the SuperLink."""


async def keep_membership(reconcile: Callable[[], int], pause: float = RECONCILE) -> None:
    """Keep Flower's list of nodes like ours, until cancelled: a node that was revoked while the SuperLink was down
    is cut off once it is up, and all nodes are registered again if its database was lost."""
    answered = True
    while True:
        try:
            changed = await to_thread.run_sync(reconcile)
        except FedwardError as error:
            if answered:
                log.warning("the nodes' registrations cannot be checked now: %s", error)
            answered = False
        except Exception:
            # A full disk or a locked store must not end the watch: it tries again.
            log.exception("the nodes' registrations cannot be checked; trying again")
        else:
            answered = True
            if changed:
                log.warning("%d registrations at the SuperLink differed from the roster and were corrected", changed)
        await asyncio.sleep(pause if answered else 1.0)


def build(
    paths: ServerPaths, settings: Settings, store: Store, control: SuperLinkControl, supervisor: int
) -> FastAPI:
    """The application with its run manager, which works while the application does.

    supervisor: the process that started this one and the SuperLink.
    """
    enrolment = Enrolment(paths, settings, store, control)
    manager = RunManager(
        paths, store, control, lambda: read_signed(paths), enrolment.reconcile, settings.max_runs
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # What a crash left of uploads belongs to no run.
        shutil.rmtree(app.state.uploads, ignore_errors=True)
        owner_folder(app.state.uploads)
        manager.start()
        membership = asyncio.create_task(keep_membership(enrolment.reconcile))
        yield
        membership.cancel()
        await to_thread.run_sync(manager.close)

    def parts() -> dict[str, str]:
        return check_parts(settings.fleet_port, paths.public_ca, control.ping, supervisor)

    def online() -> int:
        return sum(node.status == "online" for node in control.list_nodes())

    app = create_app(
        paths, store, enrolment, control, routers=(runs.router, metrics.router), checks=(parts,), lifespan=lifespan
    )
    app.state.runs = manager
    # On the file system of the runs' directories: a starting model is moved there, not copied.
    app.state.uploads = paths.root / "uploads"
    app.state.upload_slots = asyncio.Semaphore(runs.UPLOADS_AT_ONCE)
    app.state.metrics = metrics.make_registry(paths, store, online)
    return app


def main() -> int:
    """Serve the state directory in the environment until SIGTERM; the exit code."""
    logs.configure()
    paths = ServerPaths.default()
    try:
        settings, store = open_server(paths)
        control = Control(paths, settings.control_port)
        app = build(paths, settings, store, control, os.getppid())
    except FedwardError as error:
        print(f"ERROR {error}", file=sys.stderr)
        return 1
    config = uvicorn.Config(
        app,
        host="0.0.0.0",
        port=settings.service_port,
        ssl_certfile=paths.server_certificate,
        ssl_keyfile=paths.server_key,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN,
    )
    uvicorn.Server(config).run()
    store.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
