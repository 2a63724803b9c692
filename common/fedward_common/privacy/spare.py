"""Noise that comes off again: a sum is left with what was asked for, however many drop out.

Noise that is sized for the fewest survivors (`distributed`) is more than was asked for where more are left. So each
node's noise is made of two parts, of which the second can be taken off the sum when it is known who is in it. With n
nodes in the cohort, m the fewest survivors, c the colluders, and V the variance asked for in a coordinate of the sum:

    own part V/(n − c), from randomness that nobody else ever has;
    spare part V/(m − c) − V/(n − c), from the stream of a shared key (`secagg.spare`).

If s survivors signed, s − c of them at least are honest. Their own parts lack V·(n − s)/(n − c), which is no more than

    h(s) = ⌈(n − s)(m − c)/(n − m)⌉

honest spare parts have: none at s = n, all m − c at s = m. Up to c colluders can be among those that keep theirs, and
of u survivors the u − s that did not sign may not exist: the first h(s) + c + (u − s) survivors keep their spare parts,
and all others' come off. A larger s takes off what a smaller one does and more, since the order is that of the survivor
set, which all honest nodes know alike.

(After Jiang, Wang, Chen, "Dordis: Efficient Federated Learning with Dropout-Resilient Differential Privacy", EuroSys
2024. There the spare noise of a node is in as many layers as nodes may drop out, and each layer comes off all nodes or
none. Parts that come off single nodes need one layer and one draw for each of them.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedward_common.errors import ConfigError
from fedward_common.privacy.distributed import Mechanism
from fedward_common.privacy.noise import Law, Noise, Skellam, Whole
from fedward_common.secagg.cells import Words, cells_of, gather, scatter
from fedward_common.secagg.graph import Parameters
from fedward_common.secagg.masks import Keystream


@dataclass(frozen=True)
class SpareNoise:
    """Both parts of the nodes' noise in one round: a `secagg.spare.Spare`. Made by `split`.

    cohort, survivors, colluders: n, m, c. own, spare: the laws of the two parts in one coordinate. bits: of a word.
    start, length: where the noised words begin, and how many they are.
    """

    cohort: int
    survivors: int
    colluders: int
    own: Law
    spare: Law
    bits: int
    start: int
    length: int

    def draw(self, key: bytes) -> Whole:
        """A node's noise, int32 of shape (length,). key: of its spare part."""
        noise = self._spare_part(key)
        noise += Noise.of(self.own).draw(self.length)
        return noise

    def unneeded(self, survivors: frozenset[int], signed: int) -> frozenset[int]:
        """The survivors whose spare part comes off."""
        return frozenset(sorted(survivors)[self.keepers(len(survivors), signed) :])

    def keepers(self, survivors: int, signed: int) -> int:
        """How many of u survivors keep their spare part, where s signed."""
        if signed >= self.cohort:
            return 0
        return min(survivors, self._honest(signed) + self.colluders + survivors - signed)

    def take_off(self, total: Words, keys: Sequence[bytes]) -> None:
        """Subtract the spare parts of these keys from the words of a sum, in place: what is left is, word for word, the
        sum of vectors that never had them (unless one of them wrapped around; see `distributed.without_carries`)."""
        if not keys:
            return
        parts = np.zeros(total.size, np.int64)
        for key in keys:
            parts[self.start :] += self._spare_part(key)
        count = cells_of(total.size, self.bits)
        cells = gather(total, self.bits, 0, count)
        cells -= gather(parts, self.bits, 0, count)
        scatter(cells, total, self.bits, 0)

    @property
    def variance(self) -> float:
        """The least that honest nodes' noise has in a coordinate of any sum, in units of 1/s²: V but for rounding."""
        return min(
            (signed - self.colluders) * self.own.variance + self._honest(signed) * self.spare.variance
            for signed in self._signed
        )

    @property
    def draws(self) -> int:
        """Most draws for a coordinate that are behind this noise."""
        return max(signed - self.colluders + self._honest(signed) for signed in self._signed)

    def left(self, survivors: int, taken_off: int) -> float:
        """The variance of all survivors' noise in the sum, less so many spare parts."""
        return survivors * self.own.variance + (survivors - taken_off) * self.spare.variance

    @property
    def _signed(self) -> range:
        """Signatures with which a sum is unmasked."""
        return range(self.survivors, self.cohort + 1)

    def _honest(self, signed: int) -> int:
        """h(s): honest spare parts that must stay."""
        lost, tolerated = self.cohort - signed, self.cohort - self.survivors
        return -(-lost * (self.survivors - self.colluders) // tolerated)

    def _spare_part(self, key: bytes) -> Whole:
        return Noise.of(self.spare).draw(self.length, Keystream(key))


def split(mechanism: Mechanism, parameters: Parameters, start: int) -> SpareNoise | None:
    """The noise of `mechanism`, sized for the fewest honest survivors of `parameters`, in two parts; None where no node
    may drop out, so that nothing is ever too much. start: where the noised words begin.

    Raises `ConfigError` for parts too small for a table.
    """
    n, m, c = parameters.n, parameters.survivors, parameters.colluders
    if m == n:
        return None
    whole = mechanism.law.variance
    own = whole * (m - c) / (n - c)
    try:
        laws = Skellam(own), Skellam(whole - own)
    except ConfigError as error:
        raise ConfigError(
            f"privacy.noise_on_dropout = 'exact': a node's noise of variance {whole:.3g} in whole numbers cannot be "
            f"split into {own:.3g} and {whole - own:.3g}. Use more bits, or noise_on_dropout = 'surplus'."
        ) from error
    return SpareNoise(n, m, c, *laws, mechanism.bits, start, mechanism.padded)
