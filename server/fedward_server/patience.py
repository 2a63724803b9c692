"""How long a stage of a round waits for the last nodes, once enough have answered."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedward_server.transport import Clock

_FACTOR = 2.0
"""A node that takes longer than this many times what the others took is not waited for."""


@dataclass
class Patience:
    """What was seen of each stage so far in a run: seconds until its last answer."""

    clock: Clock
    seen: dict[str, float] = field(default_factory=dict)

    def stage(self, name: str, needed: int, floor: float) -> Stage:
        """A stage that starts now and needs so many answers; it waits `floor` seconds at least."""
        return Stage(self, name, needed, floor, self.clock.now())


@dataclass
class Stage:
    """One stage of one round."""

    patience: Patience
    name: str
    needed: int
    floor: float
    began: float
    _answers: int = 0
    _enough_after: float | None = None

    def answered(self) -> None:
        """One more node has answered."""
        self._answers += 1
        passed = self.patience.clock.now() - self.began
        if self._answers == self.needed:
            self._enough_after = passed
        if self._answers >= self.needed:
            # The slowest that were waited for count next time too, so that a slow node stays in.
            self.patience.seen[self.name] = passed

    def over(self) -> bool:
        """Whether those who are still silent have had their time: several times what the others took, now or in
        the round before."""
        if self._enough_after is None:
            return False
        usual = max(self._enough_after, self._before)
        return self.patience.clock.now() - self.began > max(self.floor, _FACTOR * usual)

    def __post_init__(self) -> None:
        self._before = self.patience.seen.get(self.name, 0.0)
        if self.needed <= 0:
            self._enough_after = 0.0
