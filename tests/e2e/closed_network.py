"""A whole federation in a network namespace of its own, and everything that left it or tried to: a script for
`test_closed_network.py`, which runs it as the first process of fresh network, mount and process namespaces.

It prints one JSON line. There is one way out: a cable (`out0`) that every address not on this machine is routed to,
the resolver's too, and that nobody answers on. So whoever tries to reach somebody has a packet sent, and seen.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from federation import ENVIRONMENT, Federation

OWN, RESOLVER = "198.51.100.2", "198.51.100.53"
EVERY_PROTOCOL = 3
PACKET, STATISTICS = 263, 6
IPV4, IPV6 = 0x0800, 0x86DD

RUN = """
name = "closed"
task = "toy.task:Toy"
rounds = 2

[algorithm]
name = "scaffold"

[local]
lr = 0.1
steps = 5

[secure_sum]
enabled = false

[cohort]
nodes = ["a", "b"]
min_nodes = 2
wait = 120
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def set_up(root: Path) -> None:
    """Loopback; a cable with the default routes; a resolver at its far end."""
    ip("link", "set", "lo", "up")
    ip("link", "add", "out0", "type", "veth", "peer", "name", "far0")
    for end in ("out0", "far0"):
        # Without these the kernel itself would speak: neighbour discovery, router solicitation.
        ip("link", "set", end, "addrgenmode", "none", "arp", "off")
        ip("link", "set", end, "up")
    ip("addr", "add", f"{OWN}/24", "dev", "out0")
    ip("route", "add", "default", "dev", "out0")
    if Path("/proc/net/if_inet6").exists():
        ip("-6", "addr", "add", "2001:db8::2/64", "dev", "out0", "nodad")
        ip("-6", "route", "add", "default", "dev", "out0")
    resolver = root / "resolv.conf"
    resolver.write_text(f"nameserver {RESOLVER}\noptions timeout:1 attempts:1\n")
    subprocess.run(["mount", "--bind", str(resolver), "/etc/resolv.conf"], check=True)


def destination(protocol: int, packet: bytes) -> str:
    """Where an IP packet goes; the protocol's number for anything else."""
    if protocol == IPV4:
        return socket.inet_ntop(socket.AF_INET, packet[16:20])
    if protocol == IPV6:
        return socket.inet_ntop(socket.AF_INET6, packet[24:40])
    return f"protocol {protocol:#06x}"


def stays_here(where: str) -> bool:
    return where.startswith("127.") or where in ("::1", "::ffff:127.0.0.1")


class Sniffer:
    """Counts by interface and destination: all packets on the cable, and those on loopback that are for others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: Counter[str] = Counter()
        self.looked_at: Counter[str] = Counter()
        self._sockets = {}
        for interface in ("lo", "out0"):
            one = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0)
            # Model updates pass on loopback: room for what comes while this thread waits for its turn.
            with contextlib.suppress(PermissionError):
                one.setsockopt(socket.SOL_SOCKET, 33, 256 << 20)
            one.bind((interface, EVERY_PROTOCOL))
            self._sockets[interface] = one
            threading.Thread(target=self._watch, args=(interface, one), daemon=True).start()

    def _watch(self, interface: str, one: socket.socket) -> None:
        while True:
            packet, address = one.recvfrom(64)
            where = destination(address[1], packet)
            with self._lock:
                self.looked_at[interface] += 1
                if interface != "lo" or not stays_here(where):
                    self._seen[f"{interface} {where}"] += 1

    def taken(self) -> dict[str, int]:
        """What was seen since the last call."""
        with self._lock:
            seen, self._seen = dict(self._seen), Counter()
        return seen

    def missed(self) -> int:
        """Packets that came faster than they were looked at, since the last call."""
        figures = [one.getsockopt(PACKET, STATISTICS, 8) for one in self._sockets.values()]
        return sum(struct.unpack("II", two)[1] for two in figures)


def child(code: str) -> None:
    """A process that tries to reach somebody: exactly what must not go unseen."""
    environment = {**ENVIRONMENT, "FLWR_TELEMETRY_ENABLED": "1"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=False, stderr=subprocess.DEVNULL, timeout=60)
    time.sleep(0.5)


def main(root: Path) -> dict[str, object]:
    """Set up, run the federation, then the controls."""
    set_up(root)
    # What keeps Fedward quiet must be its own doing, not this harness's.
    for name in ("FLWR_TELEMETRY_ENABLED", "FLWR_DISABLE_UPDATE_CHECK", "HTTPS_PROXY", "https_proxy"):
        ENVIRONMENT.pop(name, None)
    ENVIRONMENT["HOME"] = str(root)
    sniffer = Sniffer()
    time.sleep(2.0)
    found: dict[str, object] = {"before": sniffer.taken()}
    federation = Federation(root)
    try:
        federation.up()
        for i, name in enumerate(("a", "b")):
            federation.join(name, {"site": i})
            federation.start_node(name)
        run = federation.submit(RUN)
        found["status"] = federation.finished(run, 300)["status"]
        found["rounds"] = len(federation.events(run, "round"))
        found["model"] = len(federation.model(run))
    finally:
        federation.close()
    time.sleep(1.0)
    found["missed"] = sniffer.missed()
    found["loopback"] = sniffer.looked_at["lo"]
    found["federation"] = sniffer.taken()
    connect = "import socket; s = socket.socket({family}); s.settimeout(1); s.connect(({host!r}, 443))"
    child(connect.format(family="", host="192.0.2.1"))
    found["connect"] = sniffer.taken()
    child("import socket; socket.getaddrinfo('telemetry.flower.ai', 443)")
    found["name"] = sniffer.taken()
    child(connect.format(family="", host=OWN))
    found["own"] = sniffer.taken()
    if Path("/proc/net/if_inet6").exists():
        child(connect.format(family="socket.AF_INET6", host="2001:db8:1::1"))
        found["connect6"] = sniffer.taken()
    child("import flwr.supercore.telemetry as t; t.event(t.EventType.PING).result()")
    found["telemetry"] = sniffer.taken()
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
