"""How much noise a target asks for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from fedward_common.errors import FedwardError
from fedward_common.privacy.accounting import spent
from fedward_common.privacy.events import Event

TOLERANCE = 1e-4
"""By how much, relatively, a noise multiplier may be larger than the least one."""
_LEAST, _LARGEST = 2.0**-10, 2.0**20


class CalibrationError(FedwardError):
    """No amount of noise meets the target, or every amount does."""


def noise_multiplier(
    target_epsilon: float, delta: float, event_of: Callable[[float], Sequence[tuple[Event, int]]]
) -> float:
    """The least z, to `TOLERANCE` and rounded up, for which `event_of(z)` spends at most `target_epsilon` at `delta`.

    event_of: the events of a whole run with noise multiplier z, more noise never spending more. Raises
    `CalibrationError`, and what `spent` raises.
    """
    if not 0 < target_epsilon < math.inf:
        raise CalibrationError(f"target_epsilon = {target_epsilon!r}: must be a positive, finite number.")

    def excess(z: float) -> float:
        """log(ε/target), nearly linear in log z."""
        epsilon = spent(event_of(z), delta).epsilon
        return math.log(epsilon / target_epsilon) if epsilon else -math.inf

    low, high = 0.5, 1.0
    while (under := excess(high)) > 0:
        low, high = high, 2 * high
        if high > _LARGEST:
            raise _unreachable(target_epsilon, delta, event_of)
    while (over := excess(low)) <= 0:
        low, high, under = low / 2, low, over
        if low < _LEAST:
            raise CalibrationError(
                f"target_epsilon = {target_epsilon:g}: is kept with hardly any noise (noise multiplier {high:g}), so "
                "it says nothing about the noise. Lower it, or check that the run has rounds."
            )
    return _narrowed(low, over, high, under, excess)


def _narrowed(low: float, over: float, high: float, under: float, excess: Callable[[float], float]) -> float:
    """`high`, brought down to `low`, where `excess` is `over` > 0 at `low` and `under` ≤ 0 at `high`: by cutting where
    the line between these is 0, an end that stays put once more counted half (the Illinois method), else by halves."""
    edge = 1 + TOLERANCE / 3  # so that in the end the other side is met, too
    last = 0.0
    while high > low * (1 + TOLERANCE):
        share = over / (over - under) if math.isfinite(over - under) else 0.5
        middle = min(max(low * (high / low) ** share, low * edge), high / edge)
        found = excess(middle)
        again = 0.5 if found * last > 0 else 1.0
        if found > 0:
            low, over, under = middle, found, under * again
        else:
            high, under, over = middle, found, over * again
        last = found
    return high


def _unreachable(
    target: float, delta: float, event_of: Callable[[float], Sequence[tuple[Event, int]]]
) -> CalibrationError:
    """Why: which events spend so much whatever z is."""
    events = event_of(_LARGEST)
    total = spent(events, delta).epsilon
    alone = {str(event): spent([(event, count)], delta).epsilon for event, count in events}
    most = max(alone, key=lambda event: alone[event])
    return CalibrationError(
        f"target_epsilon = {target:g}: even with noise multiplier {_LARGEST:g} the run spends ε = {total:g} at δ = "
        f"{delta:g}, most of it ({alone[most]:g}) by {most}, which the noise multiplier does not change enough. Raise "
        "target_epsilon or delta, or give that release more noise, or leave it out."
    )
