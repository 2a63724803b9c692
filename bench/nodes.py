"""Many Fedward nodes in one process, each with its own key, link and state, that train nothing.

    python -m bench.nodes FLEET-ADDRESS CA-FILE KEYS-FILE CONFIG-FILE PARAMETERS [MEMBERS-FILE]

The link, the pace of asking and the node's half of a run are the real ones; the worker's part is to say "here is a
small change". No two changes are equal: the SuperLink stores equal objects once. With a members' file the runs are
secure ones.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from fedward_client.link import Link, LinkDown, LinkRefused, RunGone
from fedward_client.pace import WAIT, Backoff, Pace
from fedward_common.config import RunConfig
from fedward_common.messages import Purpose
from fedward_common.node import MemoryStore, Participant
from fedward_common.secure import SecureParticipant
from fedward_common.update import Kind, Layout, TensorSpec
from fedward_common.work import Done, Work

from bench.members import standing


class NoTraining:
    """The worker's part: a change of the right size, new in each round, different on each node."""

    def __init__(self, number: int, parameters: int) -> None:
        self._number = number
        self._parameters = parameters
        self._layout = Layout((TensorSpec("weight", (parameters,), "float32", Kind.TRAINABLE),))

    def __call__(self, work: Work) -> Done:
        if work.op == "prepare":
            return Done(info={"layout": self._layout.to_json()})
        if work.op == "count":
            return Done(metrics={"examples": 1.0})
        value = 1e-7 * (1 + self._number + 1009 * (work.round % 997))
        delta = np.full(self._parameters, value, np.float32)
        return Done({"delta": delta}, weight=1.0, metrics={"examples": 1.0, "loss": 1.0})


class Node(threading.Thread):
    """One node until the process ends. connected: set after the first connect."""

    def __init__(self, link: Link, participant: Callable[[str], Participant]) -> None:
        """participant: the node's half of the run with that id."""
        super().__init__(daemon=True)
        self._link = link
        self._participant = participant
        self._runs: dict[str, Participant] = {}
        self.connected = threading.Event()

    def run(self) -> None:
        pace, backoff = Pace(), Backoff()
        while True:
            try:
                if not self.connected.is_set():
                    self._link.connect()
                    self.connected.set()
                asked = time.monotonic()
                if self._serve_one():
                    pace.busy()
                else:
                    time.sleep(pace.seconds(bool(self._runs), time.monotonic() - asked))
                backoff.reset()
            except RunGone as error:
                print(f"run gone: {error}", flush=True)
            except LinkDown as error:
                print(f"link down: {error}", flush=True)
                time.sleep(backoff.seconds())
            except LinkRefused as error:
                print(f"refused: {error}", flush=True)
                return

    def _serve_one(self) -> bool:
        incoming = self._link.receive(WAIT)
        if incoming is None:
            return False
        request = incoming.request
        if request.run not in self._runs:
            self._runs[request.run] = self._participant(request.run)
        reply = self._runs[request.run].handle(request)
        self._link.send(self._link.pack(reply, incoming.ticket))
        if request.purpose is Purpose.FINISH:
            del self._runs[request.run]
        return True


def hold(nodes: Sequence[Node]) -> None:
    """Start the nodes, say when all are connected, and stay."""
    for node in nodes:
        node.start()
    for node in nodes:
        node.connected.wait()
    print(f"connected {len(nodes)}", flush=True)
    for node in nodes:
        node.join()


def participants(key: Path, config: RunConfig, parameters: int, members: Path | None) -> Callable[[str], Participant]:
    """What makes the node's half of a run."""
    # A key's number is part of its name, so that two processes of nodes do not send equal changes.
    worker = NoTraining(int(key.stem.split("-")[1]), parameters)
    if members is None:
        return lambda run: Participant(config, MemoryStore(), worker)
    who = standing(members, key.stem)
    return lambda run: SecureParticipant(run, config, MemoryStore(), worker, who)


def main() -> None:
    """Hold the nodes of the command line."""
    address, ca_file, keys_file, config_file, parameters, *rest = sys.argv[1:]
    ca = Path(ca_file).read_bytes()
    config = RunConfig.model_validate_json(Path(config_file).read_text())
    keys = [Path(key) for key in json.loads(Path(keys_file).read_text())]
    members = Path(rest[0]) if rest else None
    hold([Node(Link(address, ca, key, None), participants(key, config, int(parameters), members)) for key in keys])


if __name__ == "__main__":
    main()
