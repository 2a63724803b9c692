"""Diagonal Gaussians through a neural network in closed form, without sampling.

Two sources: the moments of a Gaussian times a sigmoid (Wu et al. 2023, AAAI, "FedNP", appendix A), and layers that take
and give means and variances (Wang, Shi, Yeung 2016, NeurIPS, "Natural-Parameter Networks").
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

_ZETA2 = math.pi / 8


class Gaussian(NamedTuple):
    """N(mean, variance), each coordinate by itself; both tensors of one shape."""

    mean: torch.Tensor
    variance: torch.Tensor


class Factor(NamedTuple):
    """exp(linear·z − precision·z²/2), each coordinate by itself: what turns one Gaussian into another."""

    linear: torch.Tensor
    precision: torch.Tensor


def power_of_sigmoid(power: int, c: Gaussian) -> torch.Tensor:
    """E σ(C)^power for C ~ c: σ^d by a probit of the same value and slope at its median, whose mean is known (Theorem
    2: a = 2d(1 − 2^(−1/d)), b = log(2^(1/d) − 1), ζ² = π/8)."""
    slope = 2 * power * (1 - 2 ** (-1 / power))
    shift = math.log(2 ** (1 / power) - 1) if power > 1 else 0.0
    return torch.sigmoid(slope * (c.mean + shift) / torch.sqrt(1 + _ZETA2 * slope**2 * c.variance))


def tilted(cavity: Gaussian, f: torch.Tensor) -> Gaussian:
    """The Gaussian with the moments of σ(f z) · cavity(z) (Theorem 1: z_m = S_1, z_s = S_2 − S_1²); f is a scalar.

    With C ~ N(f m, f² s) and r_d = E σ^d(C) / E σ(C), Theorem 1 is z_m = m + f s (1 − r_2) and z_s = s − f² s² κ with
    κ = r_2 + r_2² − 2 r_3: the same numbers without a division by f. 0 < z_s ≤ s."""
    m, s = cavity
    r2, kappa = _ratios(cavity, f)
    return Gaussian(m + f * s * (1 - r2), s * (1 - f**2 * s * kappa))


def factor(cavity: Gaussian, f: torch.Tensor) -> Factor:
    """`tilted` divided by `cavity` (Algorithm 1, line 8). For |f| ≤ 1 and s ≤ 1: 0 ≤ precision < 1/4, |linear| ≤ 1."""
    s = cavity.variance
    r2, kappa = _ratios(cavity, f)
    # 1/z_s − 1/s and z_m/z_s − m/s, written so that what cancels is not computed.
    precision = f**2 * kappa / (1 - f**2 * s * kappa)
    return Factor(precision * tilted(cavity, f).mean + f * (1 - r2), precision)


def _ratios(cavity: Gaussian, f: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    c = Gaussian(f * cavity.mean, f**2 * cavity.variance)
    e1, e2, e3 = (power_of_sigmoid(power, c) for power in (1, 2, 3))
    r2, r3 = e2 / e1, e3 / e1
    return r2, r2 + r2**2 - 2 * r3


def linear(x: Gaussian, weight: torch.Tensor, bias: torch.Tensor) -> Gaussian:
    """x W + b for independent coordinates; weight: [in, out]."""
    return Gaussian(x.mean @ weight + bias, x.variance @ weight**2)


def sigmoid(x: Gaussian) -> Gaussian:
    """Mean and variance of σ(x)."""
    mean = power_of_sigmoid(1, x)
    return Gaussian(mean, power_of_sigmoid(2, x) - mean**2)


def divergence(q: Gaussian, p: Gaussian) -> torch.Tensor:
    """KL[q ‖ p], the mean over coordinates: a scalar."""
    ratio = q.variance / p.variance
    return ((ratio - ratio.log() - 1 + (q.mean - p.mean) ** 2 / p.variance) / 2).mean()
