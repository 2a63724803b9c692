"""What secure aggregation costs: CPU of a node and of the server, bytes up a node; Flower's SecAgg+ beside it.

    nice -n 0 python -m bench.secagg

Figures of CPU are process time, all threads, wire forms of all messages included. What a machine can do at its best is
measured in the same moments: the keystreams and signatures that the protocol is made of.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from fedward_common.messages import Purpose, Reply
from fedward_common.pipeline import Clip, Flat, Quantize, Road
from fedward_common.records import reply_to_message
from fedward_common.secagg.client import Client, Guarantees
from fedward_common.secagg.graph import Parameters, choose
from fedward_common.secagg.keys import Keyring
from fedward_common.secagg.masks import Keystream
from fedward_common.secagg.messages import (
    SHARE,
    Dealt,
    Delivery,
    Unmasking,
    entries_from_bytes,
    entries_to_bytes,
    members_to_bytes,
)
from fedward_common.secagg.packing import pack
from fedward_common.secagg.server import Server
from fedward_common.secagg.terms import Terms, survivors_statement
from fedward_common.secure import schema
from fedward_common.steps import ADVERTISEMENT, DEALT, MASKED, REVEALED, SIGNATURES, blob
from fedward_common.summand import Group, Shape, Words, decode
from fedward_common.update import Update
from flwr.app import Message, Metadata, RecordDict
from flwr.app.message import make_message

from bench import figures, flower_secagg
from bench.cpu import Cpu
from bench.figures import Figure

BITS = 20
RUN = "0123456789abcdef0123456789abcdef"
_CHUNK = 128 * 1024


@dataclass(frozen=True)
class Site:
    """One node of the cohort."""

    node: bytes
    identity: Ed25519PrivateKey
    keyring: Keyring


class Cohort:
    """n enrolled nodes with the terms of one secure round of FedAvg over `length` coordinates.

    signed: whether nodes look at signatures; without, only an honest server is safe.
    """

    def __init__(self, parameters: Parameters, length: int, signed: bool = True) -> None:
        sites = []
        for _ in range(parameters.n):
            node, identity = os.urandom(16), Ed25519PrivateKey.generate()
            sites.append(Site(node, identity, Keyring(node, RUN, identity)))
        self.parameters = parameters
        self.signed = signed
        self.sites = sorted(sites, key=lambda site: site.node)
        self.shape = Shape((Group("delta", length, 1.0),), schema(True, False, ()), BITS, parameters.n)
        self._identities = {site.node: site.identity.public_key() for site in sites}
        self.terms = Terms(
            run=RUN,
            round=1,
            attempt=1,
            purpose=Purpose.TRAIN.value,
            model=hashlib.sha256(b"model").hexdigest(),
            config=hashlib.sha256(b"config").hexdigest(),
            roster=f"1:{hashlib.sha256(b'roster').hexdigest()}",
            shape=self.shape.to_json(),
            length=self.shape.length,
            bits=BITS,
            parameters=parameters,
            advertisements=tuple(site.keyring.advertise() for site in self.sites),
        )

    @property
    def indices(self) -> range:
        """1 … n."""
        return range(1, self.parameters.n + 1)

    def client(self, index: int, careful: bool = True) -> Client:
        """The node's half. careful: checks signatures, if the cohort's nodes do."""
        site = self.sites[index - 1]
        identities = self._identities.get if self.signed and careful else None
        return Client(self.terms, site.node, site.keyring, site.identity, Guarantees(self.parameters, 2, identities))

    def server(self) -> Server:
        """The server's half."""
        return Server(self.terms, self._identities.get if self.signed else None)

    def update(self, index: int) -> Flat:
        """What the node's training gave."""
        (group,) = self.shape.groups
        rng = np.random.default_rng(index)
        delta = rng.uniform(-group.range, group.range, group.length).astype(np.float32)
        return Flat(Update({group.name: delta}, 1.0, dict.fromkeys(self.shape.metrics, float(index))))

    def words(self, index: int) -> Words:
        """The node's summand."""
        return Road.of(Clip(self.shape)).then(Quantize(self.shape, Keystream()))(self.update(index))


@dataclass(frozen=True)
class NodeCost:
    """Of one node in one round. seconds: CPU. floor: CPU of the keystreams of k + 1 masks and their sum; signatures:
    of the signing and verifying that it did, `verified` of these. bytes_up: of all that it sent, of which the packed
    vector is `vector`."""

    seconds: float
    floor: float
    signatures: float
    verified: int
    bytes_up: int
    vector: int


def node_costs(cohort: Cohort, measured: Iterable[int]) -> list[NodeCost]:
    """The cost of each measured node in a round where nobody drops out. The others deal and sign, no more."""
    terms, measured = cohort.terms, sorted(measured)
    nodes = {index: _Node(cohort, index) for index in measured}
    server = Server(terms, None)
    for index in cohort.indices:
        dealt = nodes[index].deal() if index in nodes else cohort.client(index, careful=False).deal().to_bytes()
        server.deal(index, Dealt.from_bytes(dealt))
    deliveries = server.close_dealing()
    everybody = members_to_bytes(cohort.indices, terms.n)
    statement = survivors_statement(terms, everybody, everybody)
    signatures = {index: cohort.sites[index - 1].identity.sign(statement) for index in cohort.indices}
    request = Unmasking(everybody, members_to_bytes((), terms.n), signatures)
    return [nodes[index].rest(deliveries[index], everybody, request) for index in measured]


class _Node:
    """A node whose cost is counted."""

    def __init__(self, cohort: Cohort, index: int) -> None:
        self._cohort = cohort
        self._index = index
        self._cpu = Cpu()
        self._bytes = 0

    def deal(self) -> bytes:
        with self._cpu:
            self._client = self._cohort.client(self._index)
            dealt = self._client.deal()
            told = dealt.to_bytes()
        self._drawn = set(dealt.sealed)
        self._sent(Purpose.TRAIN, {DEALT: blob(told)})
        return told

    def rest(self, delivery: Delivery, survivors: bytes, request: Unmasking) -> NodeCost:
        cohort, terms = self._cohort, self._cohort.terms
        words = cohort.words(self._index)
        floor = floor_seconds(cohort.parameters.holders + 1, terms.length)
        with self._cpu:
            self._client.mask(delivery, words)
            packed = pack(words, terms.bits)
        with self._cpu:
            signature = self._client.agree(survivors)
        with self._cpu:
            shares = entries_to_bytes(self._client.unmask(request))
            following = cohort.sites[self._index - 1].keyring.advertise().to_bytes()
        self._sent(Purpose.MASK, {MASKED: packed})
        self._sent(Purpose.AGREE, {SIGNATURES: blob(signature)})
        self._sent(Purpose.UNMASK, {REVEALED: blob(shares), ADVERTISEMENT: blob(following)})
        # Advertisements of those that it drew or that drew it, and its own; the least survivors' signatures.
        known = len(self._drawn | set(delivery.sealed)) + cohort.parameters.complete
        verified = known + cohort.parameters.survivors if cohort.signed else 0
        signatures = signature_seconds(2, verified)
        return NodeCost(self._cpu.seconds, floor, signatures, verified, self._bytes, packed.nbytes)

    def _sent(self, purpose: Purpose, vectors: Mapping[str, Any]) -> None:
        metadata = Metadata(1, "0" * 64, 0, 1, "", "1", 0.0, 600.0, "query.mask", 1, 1)
        asked = make_message(metadata=metadata, content=RecordDict())
        message: Message = reply_to_message(Reply(purpose, RUN, 1, 1, vectors, info={"seconds": 0.1234}), asked)
        self._bytes += flower_secagg.wire_bytes(message)


def floor_seconds(streams: int, length: int) -> float:
    """CPU seconds of so many AES-128 keystreams of `length` words, and of adding each to a vector; in chunks that stay
    in the cache."""
    ciphers = [Cipher(algorithms.AES(os.urandom(16)), modes.CTR(os.urandom(16))).encryptor() for _ in range(streams)]
    zeros, made = bytes(_CHUNK), np.empty(_CHUNK // 4, np.uint32)
    vector = np.ones(length, np.uint32)
    cpu = Cpu()
    with cpu:
        for start in range(0, length, len(made)):
            part = vector[start : start + len(made)]
            stream = made[: len(part)]
            for cipher in ciphers:
                cipher.update_into(zeros[: part.nbytes], stream.data.cast("B"))
                part += stream
    return cpu.seconds


def signature_seconds(signs: int, verifies: int) -> float:
    """CPU seconds of so many Ed25519 signatures and verifications of texts as long as ours."""
    key, text = Ed25519PrivateKey.generate(), bytes(200)
    public, cpu = key.public_key(), Cpu()
    with cpu:
        for _ in range(signs):
            signature = key.sign(text)
        for _ in range(verifies):
            public.verify(signature, text)
    return cpu.seconds


@dataclass(frozen=True)
class WholeRound:
    """A round of a whole cohort. server: CPU seconds. wrong: words of the sum that are not the true one. count: what
    the sum itself says of its participants."""

    server: float
    wrong: int
    count: int


def whole_round(cohort: Cohort, lost: Collection[int]) -> WholeRound:
    """All nodes take all steps, but for the `lost`, which say nothing more once they have dealt their shares."""
    terms, cpu = cohort.terms, Cpu()
    clients = {index: cohort.client(index) for index in cohort.indices}
    dealt = {index: client.deal().to_bytes() for index, client in clients.items()}
    with cpu:
        server = cohort.server()
        for index in dealt:
            server.deal(index, Dealt.from_bytes(dealt[index]))
        deliveries = server.close_dealing()
    true = np.zeros(terms.length, np.uint32)
    staying = [index for index in cohort.indices if index not in lost]
    for index in staying:
        words = cohort.words(index)
        true += words
        clients[index].mask(deliveries[index], words)
        packed = pack(words, terms.bits)
        with cpu:
            server.masked(index, packed)
    with cpu:
        survivors = server.close_masking()
    signatures = {index: clients[index].agree(survivors) for index in staying}
    with cpu:
        for index in staying:
            server.signed(index, signatures[index])
        request = server.close_agreement()
    revealed = {index: entries_to_bytes(clients[index].unmask(request)) for index in staying}
    with cpu:
        for index in staying:
            server.revealed(index, entries_from_bytes(revealed[index], SHARE))
        total = server.unmask()
    decode(cohort.shape, total, len(staying))  # looks at the check words
    return WholeRound(cpu.seconds, int(np.count_nonzero(total != true)), int(total[0]))


def complete(n: int, colluders: int, lost: int) -> Parameters:
    """A complete graph for a cohort for which the rules would draw a sparse one."""
    quorum = (n + colluders) // 2 + 1
    return Parameters(n, n, quorum, n - 1, n - lost - 1, True, quorum, n - lost, colluders)


# --- the table


@dataclass(frozen=True)
class Sizes:
    """How large the benchmark is. length: d. n, many: cohorts of most rows and of the last. sample: nodes whose CPU is
    measured. peer_length: d of Flower's rounds."""

    length: int
    n: int
    many: int
    sample: int
    peer_length: int


class Bench:
    """The rows of the table."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self._fifth = sizes.n // 5
        self._third = 3 * sizes.n // 10
        self._threshold = complete(sizes.n, self._fifth, 0).threshold

    # Flower's rounds: each is measured once, whatever rows it stands in.

    @cached_property
    def _flower(self) -> flower_secagg.Round:
        sizes = self._sizes
        return flower_secagg.Round(sizes.n, sizes.peer_length, sizes.n, self._threshold)

    @cached_property
    def _flower_lost(self) -> flower_secagg.Round:
        sizes = self._sizes
        return flower_secagg.Round(sizes.n, sizes.peer_length, sizes.n, self._threshold, range(self._third))

    @cached_property
    def _flower_sparse(self) -> flower_secagg.Round:
        # 34 neighbours and oneself. So few answer that the round ends there; what they did is all that is asked.
        sizes = self._sizes
        silent = range(sizes.sample, sizes.n)
        return flower_secagg.Round(sizes.n, sizes.peer_length, 35, 21, silent)

    def node(self) -> Iterator[Figure]:
        """CPU of one node."""
        sizes, parameters = self._sizes, choose(self._sizes.n, 0.2, 0.2)
        cohort = Cohort(parameters, sizes.length)
        costs = node_costs(cohort, self._sample(parameters.n))
        what = f"client CPU, {self._of(parameters)}, signatures on"
        ours = statistics.median(cost.seconds for cost in costs)
        best = statistics.median(cost.floor + cost.signatures for cost in costs)
        yield Figure(f"{what}, over the keystream floor plus signatures", ours / best, "", "<= 1.5")
        dense, sparse = (statistics.median(r.clients) for r in (self._flower, self._flower_sparse))
        yield Figure(what, 1e3 * ours, "ms", "<= 70", peer=1e3 * dense, ratio=ours / dense)
        yield Figure(f"Flower's client CPU at k = {sizes.n - 1} over Fedward's", dense / ours, "times", ">= 15")
        yield Figure("Flower's client CPU at k = 34 over Fedward's", sparse / ours, "times", ">= 8")
        floor = statistics.median(cost.floor for cost in costs)
        yield Figure(f"keystream floor: {parameters.holders + 1} streams and additions", 1e3 * floor, "ms")
        signatures = statistics.median(cost.signatures for cost in costs)
        verified = round(statistics.median(cost.verified for cost in costs))
        yield Figure(f"signatures: 2 made, {verified} verified", 1e3 * signatures, "ms")
        yield Figure(f"clip, quantise and lay out, d = {sizes.length:,}", 1e3 * self._road(parameters), "ms")

    def _road(self, parameters: Parameters) -> float:
        cohort = Cohort(parameters, self._sizes.length)
        road = Road.of(Clip(cohort.shape)).then(Quantize(cohort.shape, Keystream()))
        seconds = []
        for index in self._sample(parameters.n):
            update, cpu = cohort.update(index), Cpu()
            with cpu:
                road(update)
            seconds.append(cpu.seconds)
        return statistics.median(seconds)

    def server(self) -> Iterator[Figure]:
        """CPU of the server."""
        rounds: list[tuple[int, str, Callable[[], flower_secagg.Round], str]] = [
            (0, "without drop-outs", lambda: self._flower, "<= 0.15"),
            (self._third, "30 % dropped after dealing", lambda: self._flower_lost, "<= 1.5"),
        ]
        for lost, how, peer, target in rounds:
            parameters = complete(self._sizes.n, self._fifth, lost)
            done = whole_round(Cohort(parameters, self._sizes.length), range(1, lost + 1))
            what = f"server CPU, complete graph, {self._of(parameters)}, {how}"
            flower = peer().server
            yield Figure(what, done.server, "s", target, peer=flower, ratio=done.server / flower)
            yield Figure(f"Flower's server CPU over Fedward's, {how}", flower / done.server, "times", ">= 50")
            yield Figure(f"{what}: words of the sum that are wrong", done.wrong, "", "<= 0")

    def bytes_up(self) -> Iterator[Figure]:
        """Bytes that a node sends."""
        sizes = self._sizes
        flower = statistics.median(self._flower.bytes_up) / 1e6
        for honest, target in ((False, None), (True, "<= 10")):
            parameters = choose(sizes.n, 0.2, 0.2, not honest)
            cost = max(node_costs(Cohort(parameters, sizes.length), self._sample(sizes.n)), key=lambda c: c.bytes_up)
            what = f"bytes up a client, {self._of(parameters)}, {BITS} bits"
            yield Figure(what, cost.bytes_up / 1e6, "MB", "<= 2.6", peer=flower, ratio=cost.bytes_up / 1e6 / flower)
            yield Figure(f"{what}: without the vector", (cost.bytes_up - cost.vector) / 1e3, "kB", target)

    def many(self) -> Iterator[Figure]:
        """A large cohort of which a tenth drops out."""
        sizes = self._sizes
        for honest, target in ((False, "<= 250"), (True, "<= 80")):
            parameters = choose(sizes.many, 0.1, 0.1, not honest)
            what = f"{self._of(parameters)} ({'semi-honest' if honest else 'semi-malicious'})"
            short = Cohort(parameters, 1000, signed=not honest)
            done = whole_round(short, range(1, parameters.drop_outs + 1))
            yield Figure(f"{what}, 10 % dropped: words of the sum that are wrong", done.wrong, "", "<= 0")
            signed = node_costs(Cohort(parameters, sizes.length), self._sample(sizes.many))
            bare = node_costs(Cohort(parameters, sizes.length, signed=False), self._sample(sizes.many))
            yield Figure(f"{what}: client CPU", 1e3 * statistics.median(c.seconds for c in signed), "ms", target)
            unsigned = 1e3 * statistics.median(cost.seconds for cost in bare)
            yield Figure(f"{what}: client CPU without signatures", unsigned, "ms")
            floor = 1e3 * statistics.median(c.floor for c in bare)
            yield Figure(f"{what}: keystream floor, {parameters.holders + 1} streams and additions", floor, "ms")

    def _sample(self, n: int) -> list[int]:
        """Nodes spread over the indices."""
        return [1 + i * n // self._sizes.sample for i in range(self._sizes.sample)]

    def _of(self, parameters: Parameters) -> str:
        k = parameters.n - 1 if parameters.complete else parameters.holders
        return f"n = {parameters.n}, k = {k}, d = {self._sizes.length:,}"


def main() -> None:
    """Measure and write bench/results/secagg.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=1_000_000, help="d")
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--many", type=int, default=1000)
    parser.add_argument("--sample", type=int, default=9, help="nodes whose CPU is measured")
    parser.add_argument("--peer-length", type=int, default=1_000_000, help="d of Flower's rounds")
    parser.add_argument("--only", choices=("node", "server", "bytes", "many"))
    parser.add_argument("--results", type=Path, default=figures.RESULTS)
    options = parser.parse_args()
    bench = Bench(Sizes(options.length, options.nodes, options.many, options.sample, options.peer_length))
    pieces = {"node": bench.node, "server": bench.server, "bytes": bench.bytes_up, "many": bench.many}
    name = "secagg" if options.only is None else f"secagg-{options.only}"
    chosen = [make for key, make in pieces.items() if options.only in (None, key)]
    figures.write(name, (figure for make in chosen for figure in make()), options.results)


if __name__ == "__main__":
    main()
