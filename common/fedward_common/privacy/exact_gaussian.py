"""The exact trade-off between ε and δ of the Gaussian mechanism (Balle & Wang 2018, "Improving the Gaussian Mechanism
for Differential Privacy", theorem 8), also of many: releases with noise multipliers z_i are together one with
μ = √Σ1/z_i² (Dong, Roth & Su 2022, corollary 3.3).

With Q(x) = 1 − Φ(x), a = ε/μ − μ/2 and b = a + μ,

    δ(ε; μ) = Q(a) − e^ε·Q(b) = φ(a)·(m(a) − m(b)),    m = Q/φ (Mills' ratio),

since e^ε·φ(b) = φ(a). m falls slowly, so the second form holds its digits far out in the tail, where the first
subtracts nearly equal numbers.
"""

from __future__ import annotations

import math

_ROOT_2PI = math.sqrt(2 * math.pi)
_FAR = 25.0
"""From here on the series for m has all the digits of a float after seven terms."""


def delta_of(epsilon: float, mu: float) -> float:
    """The least δ for which the mechanism is (ε, δ)-private. epsilon: ≥ 0. mu: sensitivity/σ, ≥ 0."""
    if not epsilon >= 0 or not mu >= 0:  # true for NaN
        raise ValueError(f"epsilon = {epsilon}, mu = {mu}: neither is negative")
    if mu == 0 or math.isinf(epsilon):
        return 0.0
    if math.isinf(mu):
        return 1.0
    a = epsilon / mu - mu / 2
    density = math.exp(-a * a / 2) / _ROOT_2PI
    if a < 0:
        return _tail(a) - density * _mills(a + mu)
    return max(0.0, density * (_mills(a) - _mills(a + mu)))


def epsilon_of(delta: float, mu: float) -> float:
    """The least ε (to some ten digits) for which the mechanism is (ε, δ)-private; 0 if none is
    needed, infinite if mu is. delta: within (0, 1). mu: sensitivity/σ, ≥ 0."""
    if not 0 < delta < 1 or not mu >= 0:
        raise ValueError(f"delta = {delta}, mu = {mu}: δ must be within (0, 1) and μ not negative")
    if delta_of(0.0, mu) <= delta:
        return 0.0
    if math.isinf(mu):
        return math.inf
    low, high = 0.0, 1.0
    while delta_of(high, mu) > delta:
        low, high = high, 2 * high
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if delta_of(middle, mu) > delta else (low, middle)
    return high


def _tail(x: float) -> float:
    """Q(x)."""
    return math.erfc(x / math.sqrt(2)) / 2


def _mills(x: float) -> float:
    """Q(x)/φ(x) for x ≥ 0."""
    if x < _FAR:
        return _tail(x) * _ROOT_2PI * math.exp(x * x / 2)
    term, total = 1 / x, 0.0
    for odd in range(1, 15, 2):
        total += term
        term *= -odd / (x * x)
    return total
