"""Where federated averaging of quadratics ends, in closed form.

f_i(w) = ½ Σ_d a_id (w_d − b_id)²: a local step is an affine map of (y, velocity, w, 1), so K of them are a power of its
matrix, and a round's fixed point is a linear equation. Nothing here comes from the code under test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Setting:
    """a, b: (nodes, coordinates). examples, steps, weights: (nodes,); weights sum to 1."""

    a: np.ndarray
    b: np.ndarray
    examples: np.ndarray
    steps: np.ndarray
    weights: np.ndarray
    lr: float
    momentum: float


FixedPoint = Callable[[Setting], np.ndarray]
"""Where all rounds lead to, (coordinates,)."""


def optimum(at: Setting) -> np.ndarray:
    """The minimiser of Σ p_i f_i: Σ p a b / Σ p a."""
    return (at.weights @ (at.a * at.b)) / (at.weights @ at.a)


def drifted(mu: float = 0.0, alpha: float = 0.0) -> FixedPoint:
    """FedAvg's (FedProx's with μ): w = Σ p_i y_i(w), node by node y_i(w) = A w + c. Per-FedAvg's with α: f(w − α∇f(w))
    is a quadratic of curvature a (1 − αa)²."""

    def point(at: Setting) -> np.ndarray:
        slopes, shifts = _local(replace(at, a=at.a * (1 - alpha * at.a) ** 2), mu)
        return (at.weights @ shifts) / (1 - at.weights @ slopes)

    return point


def discounted(strength: float, floor: float) -> FixedPoint:
    """FedAvg's with weights n_i φ(d), d the Hellinger distance; labels are the signs of b's first coordinate."""

    def point(at: Setting) -> np.ndarray:
        own = np.array([[1.0, 0.0] if b < 0 else [0.0, 1.0] for b in at.b[:, 0]])
        all_ = at.examples @ own / at.examples.sum()
        distance = np.sqrt(1 - np.sqrt(own * all_).sum(1))
        weights = at.examples * (floor + (1 - floor) * np.exp(-strength * distance))
        return drifted()(replace(at, weights=weights / weights.sum()))

    return point


def normalised(at: Setting) -> np.ndarray:
    """FedNova's: Σ p_i (y_i(w) − w) / ‖a_i‖₁ = 0."""
    slopes, shifts = _local(at, 0.0)
    shares = at.weights / np.array([_coefficients(int(k), at.momentum) for k in at.steps])
    return (shares @ shifts) / (shares @ (1 - slopes))


def _local(at: Setting, mu: float) -> tuple[np.ndarray, np.ndarray]:
    """A and c, each (nodes, coordinates): y_i = A w + c after K_i steps."""
    slopes, shifts = np.empty_like(at.a), np.empty_like(at.a)
    for place in np.ndindex(at.a.shape):
        a, b = at.a[place], at.b[place]
        velocity = np.array([a + mu, at.momentum, -mu, -a * b])  # of (y, velocity, w, 1)
        step = np.stack([np.array([1.0, 0, 0, 0]) - at.lr * velocity, velocity, [0, 0, 1, 0], [0, 0, 0, 1]])
        power = np.linalg.matrix_power(step, int(at.steps[place[0]]))
        slopes[place], shifts[place] = power[0, 0] + power[0, 2], power[0, 3]
    return slopes, shifts


def _coefficients(steps: int, momentum: float) -> float:
    """‖a_i‖₁ of SGD with momentum, its closed form."""
    if not momentum:
        return steps
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
