"""Many nodes of a stock Flower run in one process: real links, replies as Flower's FedAvg wants them.

    python -m bench.stock_nodes FLEET-ADDRESS CA-FILE KEYS-FILE

Only for comparing ServerApps: 50 stock SuperNodes, each with a ClientApp of its own, do not fit one machine.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import numpy as np
from fedward_client.link import Link, LinkDown
from fedward_client.pace import Pace
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict


class StockNode(threading.Thread):
    """Answers every training with the model, changed a little."""

    def __init__(self, link: Link, number: int) -> None:
        super().__init__()
        self._link = link
        self._number = number

    def run(self) -> None:
        self._link.connect()
        pace = Pace()
        while True:
            try:
                received = self._link.receive_message()
                if received is None:
                    time.sleep(pace.seconds(True))
                    continue
                message, metadata = received
                model = message.content.array_records["arrays"]["weight"].numpy()
                changed = ArrayRecord({"weight": Array(model + np.float32(1e-6 * (1 + self._number)))})
                content = RecordDict({"arrays": changed, "metrics": MetricRecord({"num-examples": 1})})
                message.metadata.__dict__["_message_id"] = metadata.message_id
                self._link.send(self._link.pack_message(Message(content, reply_to=message)))
                pace.busy()
            except LinkDown as error:
                print(f"node {self._number}: link down: {error}", flush=True)


def main() -> None:
    """Hold the nodes of the command line."""
    address, ca_file, keys_file = sys.argv[1:]
    ca = Path(ca_file).read_bytes()
    for number, key in enumerate(json.loads(Path(keys_file).read_text())):
        StockNode(Link(address, ca, Path(key), None), number).start()


if __name__ == "__main__":
    main()
