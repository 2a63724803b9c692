"""ServerApp that asks all nodes at once for a full update, without waves, and counts what comes back.

Told by the run configuration "bench" (JSON): database (of the SuperLink),
root, run, nodes (how many to wait for), parameters, seconds. Leaves
`exchange.json`: replies and failures by node.
"""

import json
import time
from pathlib import Path

import numpy as np
from fedward_common.messages import Purpose, Request
from fedward_server.direct import DirectRuntime
from fedward_server.grid import FlowerTransport, NumberedDirectory
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    told = json.loads(str(context.run_config["bench"]))
    transport = FlowerTransport(grid, NumberedDirectory(), DirectRuntime(Path(told["database"]), grid.run.run_id))
    while len(peers := transport.online()) < told["nodes"]:
        time.sleep(0.5)
    model = np.random.default_rng(0).standard_normal(told["parameters"], dtype=np.float32)
    requests = {peer.name: Request(Purpose.TRAIN, told["run"], 1, 0, {"model": model}) for peer in peers}
    whole, failures = [], {}
    began = time.monotonic()
    for name, reply in transport.exchange(requests, told["seconds"]):
        if reply.failure is not None:
            failures[name] = str(reply.failure)
        elif reply.vectors["delta"].size == told["parameters"]:
            whole.append(name)
        del reply
    result = {"asked": len(requests), "whole": whole, "failures": failures, "seconds": time.monotonic() - began}
    Path(told["root"], "exchange.json").write_text(json.dumps(result))
