"""Seconds of a secure round over real gRPC, without training: ten nodes on this machine, and five nodes behind slow
lines with the plain round beside it.

    python -m bench.secagg_rounds

The nodes are processes of their own; TLS, node authentication, signatures and SQLite are on.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from fedward_common.config import RunConfig, parse_config
from fedward_server.events import Event, read_events
from fedward_server.paths import RunPaths

from bench import figures
from bench.federation import Federation, federation
from bench.figures import Figure
from bench.slow_link import slow_link

DEADLINE = 3000.0


@dataclass(frozen=True)
class Line:
    """Between a node and the server. delay: seconds each way. rate: bytes a second each way."""

    delay: float
    rate: float

    def __str__(self) -> str:
        return f"{1e3 * self.delay:g} ms and {8e-6 * self.rate:g} Mbit/s each way"


@dataclass(frozen=True)
class Rounds:
    """Of one run. seconds: from the end of each round to the end of the next, checkpoint included. exchanges, bytes_up:
    of the last round; exchanges is 1 for a plain one."""

    seconds: list[float]
    exchanges: int
    bytes_up: int


def settings(nodes: int, rounds: int, secure: bool) -> RunConfig:
    """FedAvg on all nodes."""
    return parse_config(
        {
            "name": "rounds",
            "task": "bench.nodes:NoTraining",
            "rounds": rounds,
            "algorithm": {"name": "fedavg"},
            "local": {"lr": 0.1, "steps": 1},
            "cohort": {"min_nodes": nodes, "quorum": nodes, "deadline": DEADLINE},
            "evaluation": {"every": 0},
            "secure_sum": {"enabled": secure},
        }
    )


def run(nodes: int, parameters: int, rounds: int, secure: bool, line: Line | None = None) -> Rounds:
    """A run of so many rounds, every node of which is in every sum."""
    config = settings(nodes, rounds, secure)
    with federation(nodes) as here, contextlib.ExitStack() as stack:
        members = here.enrol() if secure else None
        for key in here.keys:
            address = None
            if line is not None:
                port = stack.enter_context(slow_link(here.settings.fleet_port, line.delay, line.rate))
                address = f"127.0.0.1:{port}"
            here.start_nodes([key], config, parameters, members, address)
        root = here.folder / "run"
        told = {"root": str(root), "config": config.model_dump(mode="json"), "parameters": parameters}
        if members is not None:
            told["members"] = str(members)
        here.wait(here.start_run("rounds", told), 300 + DEADLINE * rounds)
        return _rounds(here, [event for event, _ in read_events(RunPaths(root).events)], nodes, rounds)


def _rounds(here: Federation, events: list[Event], nodes: int, rounds: int) -> Rounds:
    done = [event for event in events if event["event"] == "round"]
    if len(done) != rounds or any(len(event["replies"]) != nodes for event in done):
        logs = [path.read_text(errors="replace")[-2000:] for path in here.folder.glob("*.log")]
        raise RuntimeError("\n".join([str(events), *logs]))
    ended = [datetime.fromisoformat(event["time"]).timestamp() for event in done]
    exchanges = done[-1].get("secure_sum", {}).get("exchanges", 1)
    return Rounds([after - before for before, after in pairwise(ended)], exchanges, done[-1]["bytes_up"])


def here_figures(nodes: int, parameters: int, rounds: int) -> Iterator[Figure]:
    """Nodes and server on this machine."""
    secure, plain = (run(nodes, parameters, rounds, kind) for kind in (True, False))
    what = f"secure round, {nodes} nodes on this machine, d = {parameters:,}, no training"
    ours, peer = (statistics.median(kind.seconds) for kind in (secure, plain))
    yield Figure(f"{what}: median (beside it the plain round)", ours, "s", "<= 4", peer=peer, ratio=ours / peer)
    yield Figure(f"{what}: slowest", max(secure.seconds), "s", peer=max(plain.seconds))
    yield Figure(f"{what}: exchanges", secure.exchanges, "", "<= 4")


def slow_figures(nodes: int, parameters: int, rounds: int, line: Line) -> Iterator[Figure]:
    """Nodes behind slow lines."""
    secure, plain = (run(nodes, parameters, rounds, kind, line) for kind in (True, False))
    what = f"secure round, {nodes} nodes with {line}, d = {parameters:,}"
    ours, peer = (statistics.median(kind.seconds) for kind in (secure, plain))
    yield Figure(f"{what}, over the plain round", ours / peer, "times", "<= 1.2")
    yield Figure(f"{what}: median (beside it the plain round)", ours, "s", peer=peer, ratio=ours / peer)
    sizes = [kind.bytes_up / nodes / 1e6 for kind in (secure, plain)]
    yield Figure(f"{what}: vectors up a node", sizes[0], "MB", peer=sizes[1], ratio=sizes[0] / sizes[1])


def main() -> None:
    """Measure and write bench/results/secagg_rounds.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=10)
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=11, help="the first only warms up")
    parser.add_argument("--slow-nodes", type=int, default=5)
    parser.add_argument("--slow-parameters", type=int, default=10_000_000)
    parser.add_argument("--slow-rounds", type=int, default=2)
    parser.add_argument("--delay", type=float, default=0.08, help="seconds each way")
    parser.add_argument("--megabits", type=float, default=4.0, help="a second, each way")
    parser.add_argument("--only", choices=("here", "slow"))
    parser.add_argument("--results", type=Path, default=figures.RESULTS)
    options = parser.parse_args()
    line = Line(options.delay, options.megabits * 1e6 / 8)
    pieces = {
        "here": lambda: here_figures(options.nodes, options.parameters, options.rounds),
        "slow": lambda: slow_figures(options.slow_nodes, options.slow_parameters, options.slow_rounds, line),
    }
    name = "secagg_rounds" if options.only is None else f"secagg_rounds-{options.only}"
    found = [f for key, make in pieces.items() if options.only in (None, key) for f in make()]
    figures.write(name, found, options.results)


if __name__ == "__main__":
    main()
