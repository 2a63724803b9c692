"""The ServerApp of every Fedward run: what a bundle's `serverapp = "fedward_server.app:app"` names.

Only our code runs in this process. What the task contributes (the model, central evaluation) runs in a sandboxed
worker.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping

from fedward_common.algorithms.registry import build
from fedward_common.config import RunConfig
from fedward_common.errors import FedwardError
from fedward_common.manifest import Manifest
from fedward_common.update import Vectors
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedward_server.anchoring import AnchoringTransport
from fedward_server.collecting import Collector, PlainCollector, SecureCollector
from fedward_server.direct import DirectRuntime
from fedward_server.events import EventLog
from fedward_server.fencing import Fenced, take_over
from fedward_server.grid import FlowerTransport, RosterDirectory
from fedward_server.ledger_heads import LedgerHeads
from fedward_server.paths import RunPaths, ServerPaths
from fedward_server.rounds import Rounds
from fedward_server.taskhost import TaskHost
from fedward_server.transport import Clock, Transport

app = ServerApp()

_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run one attempt at a run: take it over, build the model, run the rounds."""
    paths = ServerPaths.default()
    manifest = _manifest(context)
    run = paths.run(manifest.run)
    ownership = take_over(run, int(str(context.run_config["fedward-epoch"])))
    log = EventLog(run.events)
    # Flower throws a ServerApp's output away; the run's directory keeps what we need to know.
    logging.basicConfig(filename=run.root / "server.log", level=logging.INFO, format=_FORMAT, force=True)
    for name in ("httpx", "flwr"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        _rounds(grid, paths, run, manifest.run_config(), ownership.epoch, log)
    except Fenced:
        raise
    except FedwardError as error:
        # Trying again would end the same way; a crash of any other kind is resumed by the service.
        log.append("run_finished", status="failed", reason=str(error), round=0, best_round=None, seconds=0.0)
    except Exception:
        logging.exception("this attempt broke; the service starts the next one")
        raise
    finally:
        ownership.release()


def _manifest(context: Context) -> Manifest:
    # The service verified the signature before it submitted the run; each node does so itself.
    envelope = json.loads(str(context.run_config["fedward-manifest"]))
    return Manifest.model_validate_json(envelope["manifest"])


def _rounds(
    grid: Grid, paths: ServerPaths, run: RunPaths, config: RunConfig, epoch: int, log: EventLog
) -> None:
    host = TaskHost(config, paths, run, data={})
    try:
        layout, initial, metric_names = host.initial(run.initial if run.initial.exists() else None)
        if not config.evaluation.central:
            host.close()

        def central(vectors: Vectors) -> Mapping[str, float]:
            return host.evaluate(0, vectors, config.cohort.deadline)

        algorithm, clock, directory = build(config.algorithm), Clock(), RosterDirectory(paths.roster)
        transport: Transport = FlowerTransport(
            grid, directory, DirectRuntime(paths.superlink_database, grid.run.run_id)
        )
        if config.privacy is not None:
            transport = AnchoringTransport(transport, directory.roster, LedgerHeads(paths.ledger_heads), log)
        collector: Collector = PlainCollector(config, algorithm, layout, transport, clock)
        if config.secure_sum.enabled:
            told = (transport, clock, run.root.name, config, algorithm, layout, metric_names)
            collector = SecureCollector.over(*told, directory.roster, run.ledger, directory.envelope)
        Rounds(
            config=config,
            algorithm=algorithm,
            layout=layout,
            initial=initial,
            transport=transport,
            collector=collector,
            clock=clock,
            paths=run,
            epoch=epoch,
            log=log,
            central=central if config.evaluation.central else None,
            prepare_settings=lambda: {"roster": json.loads(directory.envelope())},
        ).run()
    finally:
        host.close()
