"""Many nodes on one server, each with its own key, link and state (all in one process here):

(a) 200 nodes, of whom 20 train in each round, for ten minutes: is any lost, does the server's memory grow?
(b) 500 nodes with nothing to do: how much of a core does the server need for them?

    python -m bench.scale --minutes 10
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from fedward_common.config import RunConfig, parse_config
from fedward_server.events import read_events
from fedward_server.paths import RunPaths

from bench import figures
from bench.federation import Federation, federation
from bench.figures import Figure
from bench.memory import MIB, database_bytes

PARAMETERS = 10_000
SETTLES = 75.0
"""Seconds after which idle nodes ask at their slowest pace: a tenth of the quiet time, six seconds at most."""


def settings(nodes: int, cohort: int) -> RunConfig:
    """Rounds without end."""
    return parse_config(
        {
            "name": "scale",
            "task": "bench.nodes:NoTraining",
            "rounds": 1_000_000,
            "algorithm": {"name": "fedavg"},
            "local": {"lr": 0.1, "steps": 1},
            "cohort": {"size": cohort, "min_nodes": nodes, "deadline": 120},
            "evaluation": {"every": 0},
            "secure_sum": {"enabled": False},
        }
    )


def wait_online(here: Federation, nodes: int, seconds: float = 300.0) -> None:
    """Until so many nodes are online. Raises `TimeoutError`."""
    until = time.monotonic() + seconds
    while here.online() < nodes:
        if time.monotonic() > until:
            log = (here.folder / "nodes.log").read_text(errors="replace")
            raise TimeoutError(f"{here.online()} of {nodes} nodes online\n{log[-2000:]}")
        time.sleep(1)


@dataclass
class Samples:
    """Resident memory of a process over time."""

    seconds: list[float] = field(default_factory=list)
    resident: list[float] = field(default_factory=list)

    def take(self, process: psutil.Process | None) -> None:
        """One more sample, if the process is there."""
        if process is not None:
            self.resident.append(process.memory_info().rss / MIB)
            self.seconds.append(time.monotonic())

    def growth(self, warm_up: float) -> tuple[float, float]:
        """(MiB a minute after the warm-up by least squares, that over the whole time as a share of the mean)."""
        start = self.seconds[0] + warm_up
        after = [(t, size) for t, size in zip(self.seconds, self.resident, strict=True) if t >= start]
        times, sizes = zip(*after, strict=True)
        slope = statistics.linear_regression(times, sizes).slope
        return 60 * slope, slope * (times[-1] - times[0]) / statistics.fmean(sizes)


def busy(nodes: int, cohort: int, minutes: float) -> Iterator[Figure]:
    """Nodes held while rounds go on."""
    config = settings(nodes, cohort)
    with federation(nodes) as here:
        here.start_nodes(here.keys, config, PARAMETERS)
        wait_online(here, nodes)
        paths = RunPaths(here.folder / "run")
        told = {"root": str(paths.root), "config": config.model_dump(mode="json"), "parameters": PARAMETERS}
        run = here.start_run("rounds", told)
        _wait_for_rounds(here, paths)
        superlink, serverapp = Samples(), Samples()
        fewest = nodes
        began = time.monotonic()
        while time.monotonic() < began + 60 * minutes:
            superlink.take(here.superlink)
            serverapp.take(here.serverapp())
            fewest = min(fewest, here.online())
            time.sleep(min(5.0, 6 * minutes))
        paths.stop.touch()
        here.wait(run, 300)
        events = [event for event, _ in read_events(paths.events)]
        rounds = [event for event in events if event["event"] == "round"]
        failed = sum(len(event["failures"]) for event in events if event["event"] in ("round", "round_failed"))
        log = (here.folder / "nodes.log").read_text(errors="replace")
        database = database_bytes(here)
    what = f"{nodes} nodes, {cohort} a round, {minutes:g} minutes"
    yield Figure(f"{what}: nodes lost (not online at the worst moment)", nodes - fewest, "", "<= 0")
    yield Figure(f"{what}: updates lost", failed, f"of {cohort * len(rounds)}", "<= 0")
    yield Figure(f"{what}: links that broke", log.count("link down") + log.count("refused"), "")
    yield Figure(f"{what}: rounds", len(rounds), "")
    yield Figure(f"{what}: seconds a round, median", statistics.median(event["seconds"] for event in rounds), "s")
    # Each of the SuperLink's 300 threads takes some memory when it is first busy; that ends after about three minutes.
    warm_up = 60 * minutes * 0.4
    for name, samples in (("SuperLink", superlink), ("ServerApp", serverapp)):
        slope, share = samples.growth(warm_up)
        yield Figure(f"{what}: {name}'s memory, growth after warm-up as a share of it", share, "", "<= 0.05")
        yield Figure(f"{what}: {name}'s memory, slope after warm-up", slope, "MiB/min")
        yield Figure(f"{what}: {name}'s memory at its largest", max(samples.resident), "MiB")
    yield Figure(f"{what}: SuperLink's database at the end", database / MIB, "MiB")


def _wait_for_rounds(here: Federation, paths: RunPaths) -> None:
    until = time.monotonic() + 300
    while not any(event["event"] == "round" for event, _ in read_events(paths.events)):
        if time.monotonic() > until:
            raise TimeoutError(f"no round\n{here.log}")
        time.sleep(1)


def idle(nodes: int, minutes: float) -> Iterator[Figure]:
    """Nodes without a run."""
    with federation(nodes) as here:
        here.start_nodes(here.keys, settings(nodes, nodes), PARAMETERS)
        wait_online(here, nodes)
        time.sleep(SETTLES)
        before, began = _cpu_seconds(here), time.monotonic()
        time.sleep(60 * minutes)
        share = (_cpu_seconds(here) - before) / (time.monotonic() - began)
        lost = nodes - here.online()
        memory = sum(process.memory_info().rss for process in here.server_processes()) / MIB
    what = f"{nodes} idle nodes, {minutes:g} minutes"
    yield Figure(f"{what}: the server's share of a core", share, "", "<= 0.5")
    yield Figure(f"{what}: nodes lost", lost, "", "<= 0")
    yield Figure(f"{what}: the server's memory", memory, "MiB")


def _cpu_seconds(here: Federation) -> float:
    times = [process.cpu_times() for process in here.server_processes()]
    return float(sum(t.user + t.system + t.children_user + t.children_system for t in times))


def main() -> None:
    """Measure and write bench/results/scale.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10, help="of rounds")
    parser.add_argument("--idle-minutes", type=float, default=2)
    parser.add_argument("--nodes", type=int, default=200)
    parser.add_argument("--idle-nodes", type=int, default=500)
    parser.add_argument("--cohort", type=int, default=20)
    parser.add_argument("--results", type=Path, default=figures.RESULTS)
    options = parser.parse_args()
    found = [*busy(options.nodes, options.cohort, options.minutes), *idle(options.idle_nodes, options.idle_minutes)]
    figures.write("scale", found, options.results)


if __name__ == "__main__":
    main()
