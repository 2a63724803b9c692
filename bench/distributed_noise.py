"""What a node's part of distributed differential privacy costs: CPU of `encode` for 1M coordinates, step by step.

    OMP_NUM_THREADS=1 nice -n 0 python -m bench.distributed_noise

CPU is process time, all threads, the smallest of several turns; the table of the noise is made before. As a peer, the
same noise from NumPy, whose generators are not cryptographic: two Poisson variables a coordinate.

For noise that comes off again (`noise_on_dropout = "exact"`): CPU of the server, from revealed shares to words without
it, of one turn, and how much more variance than was asked for stays; as a peer, what would stay without.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from fedward_common.privacy.clip import clip
from fedward_common.privacy.distributed import Mechanism, plan
from fedward_common.privacy.noise import DiscreteGaussian, Noise, Skellam
from fedward_common.privacy.rotation import rotate, rotation_seed
from fedward_common.privacy.spare import split
from fedward_common.secagg import shamir
from fedward_common.secagg.graph import choose
from fedward_common.secagg.keys import spare_key

from bench import figures
from bench.cpu import Cpu
from bench.figures import Figure

CLIP = 1.0
SEED = rotation_seed("bench", 1, 1)
LARGEST_SURCHARGE = 0.001


def milliseconds(work: Callable[[], object], turns: int) -> float:
    """CPU of one call at its best."""
    least = math.inf
    for _ in range(turns):
        cpu = Cpu()
        with cpu:
            work()
        least = min(least, cpu.seconds)
    return 1000 * least


def planned(length: int, bits: int, nodes: int, noise_multiplier: float = 1.0) -> Mechanism:
    """A round of which 7 nodes in 10 must survive and be honest."""
    honest = max(1, 7 * nodes // 10)
    return plan(
        dimension=length, bits=bits, summands=nodes, honest=honest, clip=CLIP, noise_multiplier=noise_multiplier
    )


def steps(length: int, bits: int, nodes: int, turns: int) -> Iterator[Figure]:
    """`encode` of a float32 vector whose norm is 2·CLIP, and what it is made of; `decode`."""
    made = planned(length, bits, nodes)
    vector = np.random.default_rng(0).normal(size=length).astype(np.float32)
    vector *= np.float32(2 * CLIP / np.linalg.norm(vector))
    size = f"{length / 1e6:g}M coordinates, {bits} bits, {nodes} nodes"
    table = milliseconds(lambda: Noise(made.law), 1)
    noise = Noise.of(made.law)
    clipped = clip({"update": vector}, CLIP)[0]["update"]
    words = made.encode(vector, SEED)
    whole = milliseconds(lambda: made.encode(vector, SEED), turns)
    yield Figure(f"encode, {size}", whole, "ms CPU", "<= 120")
    parts = {
        "clip": milliseconds(lambda: clip({"update": vector}, CLIP), turns),
        "rotation": milliseconds(lambda: rotate(clipped, SEED), turns),
        "noise": milliseconds(lambda: noise.draw(made.padded), turns),
    }
    for name, value in parts.items():
        yield Figure(f"of this, {name}", value, "ms CPU")
    yield Figure("of this, rounding and the rest", whole - sum(parts.values()), "ms CPU")
    yield Figure("encode of float64", milliseconds(lambda: made.encode(vector.astype(float), SEED), turns), "ms CPU")
    yield Figure("the table of the noise, once a law", table, "ms CPU")
    yield Figure("decode of a sum", milliseconds(lambda: made.decode(words, 1, SEED), turns), "ms CPU")


def laws(turns: int) -> Iterator[Figure]:
    """2^20 draws at several variances, and from NumPy."""
    rng = np.random.default_rng(0)

    def difference(mean: float) -> object:
        return rng.poisson(mean, 1 << 20) - rng.poisson(mean, 1 << 20)

    for law in (Skellam(1e2), Skellam(1e4), Skellam(1e8), Skellam(1e10), DiscreteGaussian(1e8)):
        own = milliseconds(partial(Noise.of(law).draw, 1 << 20), turns)
        theirs = milliseconds(partial(difference, law.variance / 2), 2)
        name = f"2^20 draws, {type(law).__name__} of variance {law.variance:g}"
        yield Figure(name, own, "ms CPU", peer=theirs, ratio=own / theirs)


def scales(length: int) -> Iterator[Figure]:
    """How much larger than c the sensitivity is made by rounding: what it costs, in noise, to send whole numbers."""
    for bits in (14, 16, 18, 20):
        made = planned(length, bits, 100, 4.0)
        extra = made.l2 / (made.clip * made.scale) - 1
        target = f"<= {LARGEST_SURCHARGE}" if bits == 20 else None
        yield Figure(f"sensitivity over the clip less 1, {bits} bits, 100 nodes, z = 4", extra, "", target)


def spread(bits: int, nodes: int) -> Iterator[Figure]:
    """The noise of as many nodes as must survive, found in their sum, over what was asked for."""
    made = planned(1 << 16, bits, nodes)
    zero = np.zeros(1 << 16, np.float32)
    total = np.zeros(1 << 16, np.uint32)
    for _ in range(made.honest):
        total += made.encode(zero, SEED)
    total &= np.uint32(made.modulus - 1)
    found = made.decode(total, made.honest, SEED).std() / (made.noise_multiplier * made.clip)
    yield Figure(f"noise in a sum of {made.honest} nodes over what was asked for", float(found), "", "<= 1.05")


def taken_off(length: int, bits: int, nodes: int, turns: int) -> Iterator[Figure]:
    """Noise that comes off, of which 3 nodes in 10 may drop out and 1 in 10 collude."""
    parameters = choose(nodes, 0.3, 0.1)
    honest = parameters.survivors - parameters.colluders
    made = plan(dimension=length, bits=bits, summands=nodes, honest=honest, clip=CLIP, noise_multiplier=1.0)
    spare = split(made, parameters, 0)
    if spare is None:
        return
    tables = milliseconds(lambda: (Noise(spare.own), Noise(spare.spare)), 1)
    Noise.of(spare.own), Noise.of(spare.spare)
    drawn = milliseconds(lambda: spare.draw(bytes(32)), turns)
    yield Figure("a node's noise in two parts", drawn, "ms CPU")
    yield Figure("the tables of both parts, once a size of the cohort", tables, "ms CPU")
    shares = dict(enumerate(shamir.split(bytes(32), range(1, parameters.holders + 1), parameters.threshold), 1))
    total = np.zeros(made.padded, np.uint32)
    for dropped in range(0, parameters.drop_outs + 1, max(1, parameters.drop_outs // 2)):
        stayed = nodes - dropped
        count = stayed - spare.keepers(stayed, stayed)

        def work(count: int = count) -> None:
            seeds = [shamir.recover(shares, parameters.threshold) for _ in range(count)]
            spare.take_off(total, [spare_key(seed, i.to_bytes(2)) for i, seed in enumerate(seeds)])

        what = f"{dropped} of {nodes} dropped"
        yield Figure(f"noise of {count} nodes taken off, {what}", milliseconds(work, 1) / 1000, "s CPU", "<= 5")
        asked = made.variance(honest)
        surplus, before = spare.left(stayed, count) / asked - 1, made.variance(stayed) / asked - 1
        yield Figure(f"variance over what was asked for, {what}", surplus, "", peer=before)


def main() -> None:
    """Measure and write bench/results/distributed_noise.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=1_000_000)
    parser.add_argument("--bits", type=int, default=20)
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--turns", type=int, default=20, help="the smallest of so many turns counts")
    parser.add_argument("--results", type=Path, default=figures.RESULTS)
    options = parser.parse_args()
    length, bits, nodes, turns = options.length, options.bits, options.nodes, options.turns
    made = [*steps(length, bits, nodes, turns), *laws(turns), *scales(1 << 20), *spread(bits, nodes)]
    made += taken_off(length, bits, nodes, turns)
    figures.write("distributed_noise", made, options.results)


if __name__ == "__main__":
    main()
