"""What (ε, δ) means for one person: how well anybody could tell whether their data were used.

Somebody who sees all that was released and wants to know that runs a test. (ε, δ)-privacy holds for the test in both
directions, with data and without, so of its true positives and false positives (Wasserman & Zhou 2010; Kairouz, Oh &
Viswanath 2015, "The Composition Theorem for Differential Privacy", theorem 2.1)

    TPR ≤ e^ε·FPR + δ    and    1 − FPR ≤ e^ε·(1 − TPR) + δ.

These are bounds: no test does better, whatever it knows besides. Attacks that exist mostly do much worse.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FALSE_ALARMS = 0.01
"""The share of false alarms at which reports give the share of true ones."""


@dataclass(frozen=True)
class Meaning:
    """(ε, δ) in numbers that need no logarithm.

    factor: e^ε, by which a conclusion can be likelier than without the data (but for δ); infinite past floats.
    right: share of right guesses of the best test, if with and without the data were as likely before (½: a coin).
    found: the share of true positives of the best test with `FALSE_ALARMS` false ones.
    """

    epsilon: float
    delta: float
    factor: float
    right: float
    found: float

    @classmethod
    def of(cls, epsilon: float, delta: float) -> Meaning:
        """epsilon: ≥ 0, may be infinite. delta: within [0, 1]."""
        factor = math.exp(epsilon) if epsilon < 700 else math.inf
        return cls(epsilon, delta, factor, accuracy(epsilon, delta), true_positives(epsilon, delta, FALSE_ALARMS))


def true_positives(epsilon: float, delta: float, false_positives: float) -> float:
    """The largest TPR at an FPR: min(1, e^ε·FPR + δ, 1 − e^−ε·(1 − δ − FPR))."""
    _check(epsilon, delta)
    if not 0 <= false_positives <= 1:
        raise ValueError(f"false_positives = {false_positives}: a share is within [0, 1]")
    low = delta if false_positives == 0 else math.exp(min(epsilon, 700.0)) * false_positives + delta
    return min(1.0, low, 1 - math.exp(-epsilon) * max(0.0, 1 - delta - false_positives))


def accuracy(epsilon: float, delta: float) -> float:
    """The largest share of right guesses at even odds, (1 + TPR − FPR)/2: (e^ε + δ)/(e^ε + 1), where both bounds
    meet."""
    _check(epsilon, delta)
    out = math.exp(-epsilon)
    return (1 + delta * out) / (1 + out)


def _check(epsilon: float, delta: float) -> None:
    if not epsilon >= 0 or not 0 <= delta <= 1:  # true for NaN
        raise ValueError(f"epsilon = {epsilon}, delta = {delta}: ε is not negative, δ within [0, 1]")
