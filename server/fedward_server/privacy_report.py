"""The privacy report of a run's directory: a real run's or a simulated one's."""

from __future__ import annotations

import json
import logging

from fedward_common.config import RunConfig, parse_config
from fedward_common.files import write_atomic
from fedward_common.manifest import Manifest
from fedward_common.privacy import report
from fedward_common.privacy.ledger import verify
from fedward_common.privacy.report import PrivacyReport, ReportError
from fedward_common.privacy.report_page import page

from fedward_server.events import read_events
from fedward_server.paths import RunPaths

log = logging.getLogger(__name__)


def read(paths: RunPaths) -> PrivacyReport:
    """The report as of now. Raises `ReportError` where there is no run, none with [privacy], or a ledger that is not
    whole; `LedgerError` if it cannot be read."""
    config = _config(paths)
    # The ledger is read last: a release stands in it before its round is told.
    told = [event for event, _ in read_events(paths.events)]
    # A simulated run's folder may have been renamed.
    run = next((str(event["run"]) for event in told if event["event"] == "run_started"), paths.root.name)
    return report.make(run, config, told, verify(paths.ledger))


def write(paths: RunPaths) -> PrivacyReport:
    """Write the report into the run's directory, as HTML and as JSON. Raises as `read` does."""
    found = read(paths)
    write_atomic(paths.report, page(found).encode())
    write_atomic(paths.report_json, found.to_json().encode())
    return found


def write_if_private(paths: RunPaths) -> None:
    """What is done when a run ends, however it ends. A report that cannot be made must not keep it from ending: there
    is none then, and one of an earlier end is taken away."""
    try:
        if _config(paths).privacy is not None:
            write(paths)
    except Exception:
        log.exception("there is no privacy report of the run", extra={"run": paths.root.name})
        paths.report.unlink(missing_ok=True)
        paths.report_json.unlink(missing_ok=True)


def _config(paths: RunPaths) -> RunConfig:
    if paths.manifest.exists():
        envelope = json.loads(paths.manifest.read_text(encoding="utf-8"))
        return Manifest.model_validate_json(envelope["manifest"]).run_config()
    if not paths.config.exists():
        raise ReportError(
            f"{paths.root}: is no run's folder: it has neither manifest.json nor config.json. Give the folder that "
            "'fedward simulate' names, or a run's id."
        )
    return parse_config(json.loads(paths.config.read_text(encoding="utf-8")))
