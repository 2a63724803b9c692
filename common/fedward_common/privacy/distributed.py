"""Distributed differential privacy: every node adds a part of the noise, and only the sum, masked until it is complete,
has all of it.

A node's vector goes: clip to norm c → random rotation → times s → whole numbers, rounded at random → integer noise →
words modulo 2^b. The words of a sum, read as numbers in [−2^(b−1), 2^(b−1)), go back: divide by s, rotate back.
(Kairouz, Liu, Steinke 2021, "The Distributed Discrete Gaussian Mechanism for Federated Learning with Secure
Aggregation", algorithms 1 and 2; Agarwal, Kairouz, Liu 2021, "The Skellam Mechanism for Differentially Private
Federated Learning". Formulas and numbers of equations are those of the first paper, checked against its authors' code.)

**Nobody may see the words of one node unmasked.** They carry 1/m of the noise, m being the honest nodes that it is
sized for: an ε of the sum is about √m·ε for one node's words alone.

The words wrap around and are not summands in the sense of `summand`: the words of one node are not below 2^b/n. Each is
a number plus 2^(b−1), so that all are positive, and a sum of n of them is known to hold n times 2^(b−1). Where several
words are masked as one cell (`secagg.cells`), this says what was carried from word to word, and `without_carries` takes
it off.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from fedward_common.errors import ConfigError, UpdateError
from fedward_common.privacy.clip import check_clip, clip
from fedward_common.privacy.noise import LARGEST_VARIANCE, SMALLEST_VARIANCE, Law, Noise, Skellam, Whole
from fedward_common.privacy.rotation import padded_length, rotate, rotate_back
from fedward_common.secagg.cells import Words, cells_of, gather, scatter
from fedward_common.secagg.masks import Keystream
from fedward_common.update import Vector

WRAP = 1e-4
BETA = math.exp(-0.5)

_PART = 1 << 14
_MOST_DRAWS = 1000
_EXACT = 1 + 2.0**-38
"""A sum of squares in float64 times this is not below the exact one (parts of 2^14 terms, in any order)."""


@dataclass(frozen=True)
class Mechanism:
    """A round's public parameters, the same for all nodes and the server; `plan` computes them from a run's.

    dimension: d, coordinates of an update. bits: b. summands: n, the nodes whose sum is to fit into b bits. honest: m,
    those of them that must survive and are honest, for which the noise is sized. clip: c. noise_multiplier: z, the
    standard deviation over c of the noise that these m bring. kappa: κ, the standard deviations of the sum that fit on
    each side. beta: β, the probability, at most, of a rounding over its bound, which is drawn again. scale: s. law: of
    one node's noise in one coordinate, in units of 1/s.
    """

    dimension: int
    bits: int
    summands: int
    honest: int
    clip: float
    noise_multiplier: float
    kappa: float
    beta: float
    scale: float
    law: Law

    @property
    def modulus(self) -> int:
        """2^b."""
        return 1 << self.bits

    @property
    def padded(self) -> int:
        """Words of a node, and of the sum: d filled up to a power of two."""
        return padded_length(self.dimension)

    @property
    def l2(self) -> float:
        """Δ₂ = c': the most that one node adds to the L2 norm of the sum of whole numbers, before noise. `encode` holds
        to it in exact arithmetic, whatever floating point did before."""
        return rounded_norm(self.clip * self.scale, self.padded, self.beta)

    @property
    def l1(self) -> float:
        """Δ₁ = min(√d·Δ₂, Δ₂²), the same in the L1 norm: |x| ≤ x² for whole numbers."""
        return self.l2 * min(math.sqrt(self.padded), self.l2)

    def variance(self, honest: int) -> float:
        """μ of the noise that `honest` nodes bring to one coordinate of the sum, in units of 1/s²."""
        return honest * self.law.variance

    def truncation(self, honest: int) -> float:
        """How far the noise of `honest` nodes can be from its law, in total variation: see `Noise.truncation`."""
        return Noise.truncation(honest * self.padded)

    def encode(self, vector: Vector, rotation_seed: bytes, noise: Whole | None = None) -> Words:
        """`vector`, clipped, rotated, rounded and under this node's part of the noise: uint32, shape (`padded`,).

        vector: d finite numbers, float32 or float64; one number may also have shape (). rotation_seed: the round's
        (`rotation.rotation_seed`). noise: this node's, drawn for this vector alone, where it is made of parts
        (`spare`); else it is drawn here. Rounding and noise take fresh randomness each time: a node that encodes one
        vector twice has released it twice. Never to be seen unmasked. Raises `UpdateError`.
        """
        if vector.size != self.dimension:
            raise UpdateError(f"the update has {vector.size} coordinates, the round's mechanism {self.dimension}")
        clipped, _ = clip({"update": vector.reshape(-1)}, self.clip)
        words = self._rounded(rotate(clipped["update"], rotation_seed))
        noise = Noise.of(self.law).draw(self.padded) if noise is None else noise
        words += noise.view(np.uint32)
        words += np.uint32(self.modulus >> 1)
        words &= np.uint32(self.modulus - 1)
        return words

    def decode(self, total: Words, count: int, rotation_seed: bytes) -> Vector:
        """The sum of the `count` vectors that were encoded, with the noise that is in it: float64, shape (d,).

        total: the sum of their words modulo 2^b, each word for itself; uint32, shape (`padded`,). The noise has the
        variance `variance(count)`/s² a coordinate, rounding adds at most count/4s².
        """
        if total.shape != (self.padded,) or total.dtype != np.uint32:
            raise ValueError(f"words have shape {total.shape} and dtype {total.dtype}, not ({self.padded},) uint32")
        if not 1 <= count <= self.summands:
            raise ValueError(f"count = {count}: the mechanism is for 1 to {self.summands} summands")
        half = self.modulus >> 1
        # The sum plus 2^(b−1), modulo 2^b.
        raised = (total - np.uint32((count - 1) * half % self.modulus)) & np.uint32(self.modulus - 1)
        whole = raised.astype(np.float64)
        whole -= half
        whole /= self.scale
        return rotate_back(whole, rotation_seed, self.dimension)

    def _rounded(self, rotated: Vector) -> Words:
        """⌊s·x + u⌋ modulo 2^32 with u uniform in [0, 1), all drawn again until the norm is at most `l2`.

        (Conditional randomised rounding: Kairouz, Liu, Steinke 2021, proposition 22. A draw holds with probability
        1 − β, nearly 1 where d is large.)
        """
        stream = Keystream()
        bound = self.l2**2
        words = np.empty(rotated.size, np.uint32)
        reals, fractions = np.empty((2, min(_PART, rotated.size)))
        for _ in range(_MOST_DRAWS):
            squares = []
            for start in range(0, rotated.size, _PART):
                part = rotated[start : start + _PART]
                real, fraction = reals[: part.size], fractions[: part.size]
                np.multiply(part, self.scale, out=real, dtype=np.float64)
                np.multiply(stream.words(part.size), 2.0**-32, out=fraction)
                real += fraction
                np.floor(real, out=real)
                squares.append(float(real @ real))
                words[start : start + _PART] = real.astype(np.int64)  # wraps around modulo 2^32
            if math.fsum(squares) * _EXACT <= bound:
                return words
        raise UpdateError(f"{_MOST_DRAWS} roundings in a row were over the bound of their norm")


def plan(
    *,
    dimension: int,
    bits: int,
    summands: int,
    honest: int,
    clip: float,
    noise_multiplier: float,
    wrap: float = WRAP,
    beta: float = BETA,
    law: Callable[[float], Law] = Skellam,
) -> Mechanism:
    """The mechanism of a round, from what its run asks for (the names are those of `Mechanism`).

    Each of m honest nodes adds noise of standard deviation σ = z·c/√m, in units of the update. wrap: the probability
    that the sum of n nodes wraps around in a coordinate; κ follows from it, 3.89 from 10^-4. law: of the noise, by its
    variance. The scale

        s = √(2^2b − nκ²) / (2κ·√(c²n²/d + nσ²)),  d filled up to a power of two,

    is the largest at which κ standard deviations fit on each side: 2^b = 2κ·√(s²c²n²/d + n/4 + s²nσ²), of which the
    first is the sum of n equal vectors after the rotation (ρ = 1), the second the rounding (Kairouz, Liu, Steinke 2021,
    section 4.4, equation 61). Raises `ConfigError`.
    """
    for name, whole, most in (("dimension", dimension, 1 << 40), ("summands", summands, 1 << 30)):
        if type(whole) is not int or not 1 <= whole <= most:
            raise ConfigError(f"{name} = {whole!r}: must be a whole number from 1 to {most}.")
    if type(bits) is not int or not 2 <= bits <= 32:
        raise ConfigError(f"bits = {bits!r}: words have 2 to 32 bits. 20 cost next to nothing in privacy.")
    if type(honest) is not int or not 1 <= honest <= summands:
        raise ConfigError(
            f"honest = {honest!r}: the noise is sized to 1 to {summands} of the {summands} nodes, those that must "
            "survive and are honest. Give the least number of survivors less the nodes that may collude."
        )
    check_clip(clip)
    for name, value, least, largest in (
        ("noise_multiplier", noise_multiplier, 2.0**-20, 2.0**20),
        ("wrap", wrap, 1e-15, 0.5),
        ("beta", beta, 1e-15, 1 - 1e-6),
    ):
        if type(value) not in (int, float) or not least <= value <= largest:
            raise ConfigError(f"{name} = {value!r}: must be a number from {least:g} to {largest:g}.")
    kappa = -NormalDist().inv_cdf(wrap / 2)
    room = 4.0**bits - summands * kappa**2
    if room <= 0:
        fits = math.floor(math.log2(kappa * math.sqrt(summands))) + 1
        few = math.ceil(4.0**bits / kappa**2) - 1
        raise ConfigError(
            f"bits = {bits}: rounding alone fills the sum of {summands} nodes; 4^bits must be over "
            f"{summands}·{kappa:.2f}². Use at least {fits} bits" + (f", or at most {few} nodes." if few else ".")
        )
    sigma = noise_multiplier * clip / math.sqrt(honest)
    spread = math.hypot(clip * summands / math.sqrt(padded_length(dimension)), math.sqrt(summands) * sigma)
    scale = math.sqrt(room) / (2 * kappa * spread)
    variance = (scale * sigma) ** 2
    if not SMALLEST_VARIANCE <= variance <= LARGEST_VARIANCE:
        limit, way = SMALLEST_VARIANCE, "more bits or a larger noise_multiplier"
        if variance > LARGEST_VARIANCE:
            surplus = math.ceil(math.log(variance / LARGEST_VARIANCE, 4))
            limit, way = LARGEST_VARIANCE, f"{bits - surplus} bits: more gain nothing"
        raise ConfigError(
            f"bits = {bits}: one node's noise would have the variance {variance:.3g} in whole numbers, beyond "
            f"{limit:.3g}, to where tables of it are made. Use {way}."
        )
    return Mechanism(
        dimension, bits, summands, honest, float(clip), float(noise_multiplier), kappa, beta, scale, law(variance)
    )


def rounded_norm(norm: float, dimension: int, beta: float) -> float:
    """The bound on the norm of a vector of norm ≤ `norm` after rounding of its `dimension` coordinates:
    min(x + √d, √(x² + d/4 + √(2 ln 1/β)·(x + √d/2))). The first always holds, the second but for β. (Kairouz, Liu,
    Steinke 2021, theorem 1 and proposition 22.)"""
    root = math.sqrt(dimension)
    likely = norm**2 + dimension / 4 + math.sqrt(2 * math.log(1 / beta)) * (norm + root / 2)
    return min(norm + root, math.sqrt(likely))


def without_carries(total: Words, bits: int, count: int, start: int) -> Words:
    """From `total`, the words of the sum of `count` vectors summed as `cells`: each word's own sum modulo 2^b.

    start: where the words of a mechanism begin; those before it are of sums below 2^b. A word of a sum x holds
    x + count·2^(b−1) and what was carried into it. Without (count − 1)·2^(b−1) it is x + 2^(b−1), from which nothing is
    carried unless x wraps around; then the next word of its cell is off by 1, which is next to nothing in its noise.
    """
    half = 1 << (bits - 1)
    raise_by = np.full(total.size, half, np.uint32)
    raise_by[:start] = 0
    cells = gather(total, bits, 0, cells_of(total.size, bits))
    cells -= gather(raise_by, bits, 0, len(cells)) * np.uint64(count - 1)
    words = np.empty_like(total)
    scatter(cells, words, bits, 0)
    words[start:] += np.uint32((count - 1) * half % (1 << bits))
    words &= np.uint32((1 << bits) - 1)
    return words
