"""ServerApp of a real run without a task: Fedward's round engine over a model of so many parameters.

Told by the run configuration "bench" (JSON): database (of the SuperLink),
root (the run's directory), config (RunConfig), parameters, and for a secure run members (a file with the roster).
Leaves `memory.json` beside the events: the process's memory before the first round and at its peak.
"""

import json
from pathlib import Path

import numpy as np
from fedward_common.algorithms.registry import build
from fedward_common.config import RunConfig
from fedward_common.update import Kind, Layout, TensorSpec
from fedward_server.collecting import PlainCollector, SecureCollector
from fedward_server.direct import DirectRuntime
from fedward_server.events import EventLog
from fedward_server.grid import FlowerTransport, NumberedDirectory, RosterDirectory
from fedward_server.paths import RunPaths
from fedward_server.rounds import Rounds
from fedward_server.transport import Clock
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    told = json.loads(str(context.run_config["bench"]))
    paths = RunPaths(Path(told["root"]))
    config = RunConfig.model_validate(told["config"])
    weight = TensorSpec("weight", (told["parameters"],), "float32", Kind.TRAINABLE)
    model = np.random.default_rng(0).standard_normal(told["parameters"], dtype=np.float32)
    members = RosterDirectory(Path(told["members"])) if "members" in told else None
    runtime = DirectRuntime(Path(told["database"]), grid.run.run_id)
    transport = FlowerTransport(grid, members or NumberedDirectory(), runtime)
    transport.online()  # the connection to the SuperLink is part of the process as it stands before a round
    layout, algorithm, clock = Layout((weight,)), build(config.algorithm), Clock()
    collector = PlainCollector(config, algorithm, layout, transport, clock)
    if members is not None:
        collector = SecureCollector.over(
            transport, clock, paths.root.name, config, algorithm, layout, (), members.roster, paths.ledger
        )
    rounds = Rounds(
        config=config,
        algorithm=algorithm,
        layout=layout,
        collector=collector,
        initial={"model": model},
        transport=transport,
        paths=paths,
        epoch=1,
        log=EventLog(paths.events),
        grace=5.0,
    )
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    outcome = rounds.run()
    memory = {"before": before, "peak": status_bytes("VmHWM"), "status": outcome.status, "reason": outcome.reason}
    (paths.root / "memory.json").write_text(json.dumps(memory))


def status_bytes(field: str) -> int:
    """A size in /proc/self/status."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024
