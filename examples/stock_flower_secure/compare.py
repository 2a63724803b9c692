"""One strategy with secure sums and without, in Flower's simulation runtime: how far apart the two models are.

    python compare.py --strategy fedadam --nodes 5 --rounds 3
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from fedward_server.secure_sum import SecureSum
from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result, Strategy
from flwr.simulation import run_simulation
from quickstart import client_app
from quickstart.server_app import federate, strategy


def simulate(client: ClientApp, chosen: Strategy, nodes: int, rounds: int) -> Result:
    """One run."""
    server, results = ServerApp(), []

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        results.append(federate(grid, chosen, rounds))

    resources: Any = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, num_supernodes=nodes, backend_config=resources)
    return results[0]


def plain_client() -> ClientApp:
    """The same app without the mod."""
    app = ClientApp()
    app.train()(client_app.train)
    app.evaluate()(client_app.evaluate)
    return app


def main() -> None:
    """Both runs, and a line for each array and metric."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", default="fedadam")
    parser.add_argument("--nodes", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    told = parser.parse_args()
    plain = simulate(plain_client(), strategy(told.strategy, told.nodes), told.nodes, told.rounds)
    chosen = SecureSum(strategy(told.strategy, told.nodes))
    secure = simulate(client_app.app, chosen, told.nodes, told.rounds)
    for name, array in plain.arrays.items():
        apart = np.abs(array.numpy() - secure.arrays[name].numpy()).max()
        print(f"{name:12}  largest {np.abs(array.numpy()).max():.4f}  apart by up to {apart:.1e}")
    for what, result in (("plain", plain), ("secure", secure)):
        print(f"{what:12}  {dict(result.evaluate_metrics_clientapp[told.rounds])}")


if __name__ == "__main__":
    main()
