"""GET /metrics: totals for Prometheus, made from the store and the runs' events. No run, node or person is named."""

from __future__ import annotations

import bisect
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fedward_common.errors import FedwardError
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from fedward_server.events import Event, read_events
from fedward_server.paths import ServerPaths
from fedward_server.store import RunStatus, Store, active_nodes, list_runs

log = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BUCKETS = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


class _Totals:
    """Sums over all events of all runs, each event counted once."""

    def __init__(self) -> None:
        self._offsets: dict[Path, int] = {}
        self.counts: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.buckets = [0] * (len(BUCKETS) + 1)
        self.seconds = 0.0

    def read(self, folder: Path) -> None:
        """Take in what is new since the last call."""
        for path in sorted(folder.glob("*/events.jsonl")):
            for event, offset in read_events(path, self._offsets.get(path, 0)):
                self._offsets[path] = offset
                self._add(event)

    def _add(self, event: Event) -> None:
        if event["event"] == "round":
            self.counts["rounds"] += 1
            self.counts["replies"] += len(event.get("replies", ()))
            self.counts["bytes_down"] += int(event.get("bytes_down", 0))
            self.counts["bytes_up"] += int(event.get("bytes_up", 0))
            seconds = float(event.get("seconds", 0.0))
            self.seconds += seconds
            self.buckets[bisect.bisect_left(BUCKETS, seconds)] += 1
        elif event["event"] == "round_failed":
            self.counts["rounds_failed"] += 1
        if event["event"] in ("round", "round_failed"):
            # "policy (max_epochs …) [incident …]": the reason is the first word, from a fixed list.
            self.failures.update(str(text).split(" ", 1)[0] for text in event.get("failures", {}).values())


class FederationCollector(Collector):
    """Prometheus asks it at each scrape. online: how many nodes are; raises `FedwardError` if nobody can tell."""

    def __init__(self, paths: ServerPaths, store: Store, online: Callable[[], int]) -> None:
        self._paths = paths
        self._store = store
        self._online = online
        self._totals = _Totals()
        self._lock = threading.Lock()

    def collect(self) -> Iterator[Metric]:
        """The metrics at this moment."""
        with self._store.transaction() as session:
            enrolled = len(active_nodes(session))
            statuses = Counter(str(run.status) for run in list_runs(session))
        yield GaugeMetricFamily("fedward_nodes_enrolled", "Nodes that belong to the federation.", enrolled)
        try:
            yield GaugeMetricFamily("fedward_nodes_online", "Nodes with a live link.", self._online())
        except FedwardError as error:
            # Better no figure than a wrong one: the SuperLink may be restarting.
            log.warning("nodes online are not known: %s", error)
        runs = GaugeMetricFamily("fedward_runs", "Runs by status.", labels=["status"])
        for status in RunStatus:
            runs.add_metric([str(status)], statuses[str(status)])
        yield runs
        with self._lock:
            self._totals.read(self._paths.runs)
            yield from self._from_events()

    def _from_events(self) -> Iterator[Metric]:
        counts = self._totals.counts
        yield CounterMetricFamily("fedward_rounds", "Rounds done.", counts["rounds"])
        yield CounterMetricFamily("fedward_rounds_failed", "Rounds that failed.", counts["rounds_failed"])
        yield CounterMetricFamily("fedward_replies", "Updates that were in a round's sum.", counts["replies"])
        failures = CounterMetricFamily("fedward_failures", "Nodes that did not contribute.", labels=["reason"])
        for reason, number in sorted(self._totals.failures.items()):
            failures.add_metric([reason], number)
        yield failures
        traffic = CounterMetricFamily("fedward_round_bytes", "Bytes of the rounds' messages.", labels=["direction"])
        traffic.add_metric(["down"], counts["bytes_down"])
        traffic.add_metric(["up"], counts["bytes_up"])
        yield traffic
        cumulative, below = [], 0
        for limit, number in zip([*map(str, BUCKETS), "+Inf"], self._totals.buckets, strict=True):
            below += number
            cumulative.append((limit, float(below)))
        yield HistogramMetricFamily(
            "fedward_round_seconds", "Seconds that a round took.", buckets=cumulative, sum_value=self._totals.seconds
        )


def make_registry(paths: ServerPaths, store: Store, online: Callable[[], int]) -> CollectorRegistry:
    """A registry with the federation's metrics alone."""
    registry = CollectorRegistry()
    registry.register(FederationCollector(paths, store, online))
    return registry


router = APIRouter()


@router.get("/metrics")
def metrics(request: Request) -> Response:
    """Prometheus text format."""
    return Response(generate_latest(request.app.state.metrics), media_type=CONTENT_TYPE)
