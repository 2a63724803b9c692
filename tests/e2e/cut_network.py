"""A federation one of whose nodes is on another host, whose cable is pulled in the middle of a run and put back: a
script for `test_cut_network.py`, which runs it as the first process of fresh namespaces. It prints one JSON line."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from federation import BIN, Federation, Process, until

SERVER, FAR = "10.77.0.1", "10.77.0.2"
CUT = 45.0
"""Seconds: longer than a call is held and answered, so that the node has given the old line up."""

RUN = """
name = "cut"
task = "toy.task:Toy"
rounds = 400

[algorithm]
name = "fedavg"

[local]
lr = 0.1
steps = 5

[secure_sum]
enabled = false

[cohort]
nodes = ["a", "b", "far"]
min_nodes = 3
quorum = 2
wait = 120
deadline = 30
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def set_up() -> None:
    """Two hosts and a cable."""
    # Names of namespaces are kept here; the mount namespace keeps it from everybody else.
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)
    ip("link", "set", "lo", "up")
    ip("netns", "add", "far")
    ip("link", "add", "out0", "type", "veth", "peer", "name", "far0")
    ip("link", "set", "far0", "netns", "far")
    for name, cable, address, where in (("here", "out0", SERVER, ()), ("far", "far0", FAR, ("-n", "far"))):
        ip(*where, "addr", "add", f"{address}/24", "dev", cable)
        ip(*where, "link", "set", cable, "up")
        if name == "far":
            ip(*where, "link", "set", "lo", "up")


def rounds(federation: Federation, run: str) -> list[dict[str, object]]:
    return federation.events(run, "round")


def main(root: Path) -> None:
    set_up()
    federation = Federation(root, names=("localhost", SERVER))
    try:
        federation.up()
        for i, name in enumerate(("a", "b", "far")):
            federation.join(name, {"site": i})
        for name in ("a", "b"):
            federation.start_node(name)
        told = root / "far" / "node.json"
        told.write_text(told.read_text().replace("localhost", SERVER))
        far = Process(
            ["ip", "netns", "exec", "far", str(BIN / "fedward"), "node", "up", "--dir", str(root / "far"),
             "--config", str(root / "far.toml")],
            root / "far.log",
        )  # fmt: skip
        federation.nodes["far"] = far
        far.start()
        until("far connected", lambda: "connected" in far.text(), 60)
        run = federation.submit(RUN)
        until("two rounds of all", lambda: sum("far" in e["replies"] for e in rounds(federation, run)) >= 2, 120)

        ip("link", "set", "out0", "down")
        cut, before = time.monotonic(), len(rounds(federation, run))
        without = lambda: sum("far" not in e["replies"] for e in rounds(federation, run))  # noqa: E731
        until("a round without far", without, 120)
        noticed = time.monotonic() - cut
        # The first one waits for it, for the deadline and once more with the evaluation; the next knows better.
        until("another one", lambda: without() >= 2, 60)
        time.sleep(max(0.0, CUT - (time.monotonic() - cut)))
        during = rounds(federation, run)[before:]
        ip("link", "set", "out0", "up")
        back, count = time.monotonic(), len(rounds(federation, run))
        until("a round with far", lambda: any("far" in e["replies"] for e in rounds(federation, run)[count:]), 90)
        found = {
            "noticed": noticed,
            "during": len(during),
            "slowest": max(e["seconds"] for e in during),
            "failures": sorted({str(e["failures"].get("far", "")) for e in during}),
            "back": time.monotonic() - back,
            "ended": far.popen is not None and far.popen.poll() is not None,
            "log": far.text()[-2000:],
        }
        # Alone it stops as promptly as any other.
        stopping = time.monotonic()
        federation.nodes["a"].stop()
        found["stop"] = time.monotonic() - stopping
    finally:
        federation.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
