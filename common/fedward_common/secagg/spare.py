"""A part of every vector that can be taken off the sum again: what is added in case others drop out.

Where the terms of a run ask for it, a node shares a third secret with its holders: the seed of its spare part. When the
sum is unmasked they reveal it for those survivors whose part is not needed; never for another survivor, nor for a node
that dropped out. How many are needed follows from how many survivors **signed** their set. The set itself may have
members that the server made up from keys of an earlier round (`Client._check_signatures`), in whose name nobody added
anything; they cannot sign.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fedward_common.secagg.cells import Words


class Spare(Protocol):
    """What the spare parts of a round's nodes are, the same on nodes and server."""

    def unneeded(self, survivors: frozenset[int], signed: int) -> frozenset[int]:
        """The survivors whose part comes off, where so many of them signed.

        The sets for one `survivors` are nested, a larger one for more signatures: a server that shows its signatures to
        some holders only learns nothing that it would not from showing all to all.
        """

    def take_off(self, total: Words, keys: Sequence[bytes]) -> None:
        """Subtract the parts made from these keys (`keys.spare_key`) from the words of a sum, in place."""
