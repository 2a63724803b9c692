"""Flower's own ServerApp with its own FedAvg, nothing of Fedward's. Evaluation off.

Told by the run configuration "bench" (JSON): root, nodes, parameters, rounds, seconds. Leaves `stock.json`: times at
which rounds ended, replies in the sum of each round, memory before the first round and at its peak.
"""

import json
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


class Counted(FedAvg):
    """FedAvg that notes how many replies it was given."""

    def __init__(self, **options):
        super().__init__(**options)
        self.counts = []

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        self.counts.append(sum(reply.has_content() for reply in replies))
        return super().aggregate_train(server_round, replies)


@app.main()
def main(grid: Grid, context: Context) -> None:
    told = json.loads(str(context.run_config["bench"]))
    while len(list(grid.get_node_ids())) < told["nodes"]:
        time.sleep(0.5)
    model = np.random.default_rng(0).standard_normal(told["parameters"], dtype=np.float32)
    arrays = ArrayRecord({"weight": Array(model)})
    ended = []

    def after_round(server_round, arrays):
        ended.append(time.time())

    nodes = told["nodes"]
    strategy = Counted(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    strategy.start(grid, arrays, num_rounds=told["rounds"], timeout=told["seconds"], evaluate_fn=after_round)
    result = {"ended": ended, "counts": strategy.counts, "before": before, "peak": status_bytes("VmHWM")}
    Path(told["root"], "stock.json").write_text(json.dumps(result))


def status_bytes(field: str) -> int:
    """A size in /proc/self/status."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024
