"""The server of Flower's quickstart. What makes it secure is `SecureSum` around the strategy, nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from fedward_server.secure_sum import SecureSum
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedProx, FedYogi, Result, Strategy

from quickstart.task import Net

app = ServerApp()


def strategy(name: str, nodes: int) -> Strategy:
    """One of Flower's strategies, for so many nodes."""
    least = {"min_train_nodes": nodes, "min_evaluate_nodes": nodes, "min_available_nodes": nodes}
    match name:
        case "fedavg":
            return FedAvg(**least)
        case "fedprox":
            return FedProx(**least, proximal_mu=0.1)
        case "fedadam":
            return FedAdam(**least, eta=0.02)
        case "fedyogi":
            return FedYogi(**least, eta=0.02)
        case "fedadagrad":
            return FedAdagrad(**least, eta=0.02)
        case "fedavgm":
            return FedAvgM(**least, server_momentum=0.9)
    raise ValueError(f"strategy = {name!r}: give fedavg, fedprox, fedadam, fedyogi, fedadagrad or fedavgm.")


def federate(grid: Grid, chosen: Strategy, rounds: int) -> Result:
    """The whole run."""
    torch.manual_seed(0)
    arrays = ArrayRecord(Net().state_dict())
    return chosen.start(grid=grid, initial_arrays=arrays, num_rounds=rounds, train_config=ConfigRecord({"lr": 0.2}))


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Told by the run configuration: strategy, rounds, secure, nodes, and a file for the result (JSON)."""
    told = context.run_config
    chosen = strategy(str(told["strategy"]), int(told["nodes"]))
    result = federate(grid, SecureSum(chosen) if told["secure"] else chosen, int(told["rounds"]))
    if told["result"]:
        written = {
            "arrays": {name: array.numpy().tolist() for name, array in result.arrays.items()},
            "train": {number: dict(record) for number, record in result.train_metrics_clientapp.items()},
            "evaluate": {number: dict(record) for number, record in result.evaluate_metrics_clientapp.items()},
        }
        Path(str(told["result"])).write_text(json.dumps(written))
