"""Closed forms against quadrature, sampling, the paper's own equations and torch.distributions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from fedward_common.algorithms.gaussian import Gaussian, divergence, factor, linear, power_of_sigmoid, sigmoid, tilted
from torch.distributions import Normal, kl_divergence

NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(100)
WEIGHTS = WEIGHTS / WEIGHTS.sum()


def gaussian(mean, variance):
    return Gaussian(torch.tensor(mean, dtype=torch.float64), torch.tensor(variance, dtype=torch.float64))


def logistic(x):
    return 0.5 * (1 + np.tanh(x / 2))


def grid():
    mean, variance, f = np.meshgrid(
        np.linspace(-6, 6, 49), [1e-6, 0.01, 0.2, 0.6, 1.0], np.linspace(-1, 1, 21), indexing="ij"
    )
    return mean, variance, f


@pytest.mark.parametrize("power", [1, 2, 3])
def test_moments_of_the_sigmoid_are_those_of_quadrature(power):
    mean, variance, _ = grid()
    exact = (logistic(mean[..., None] + np.sqrt(variance[..., None]) * NODES) ** power * WEIGHTS).sum(-1)
    found = power_of_sigmoid(power, gaussian(mean, variance)).numpy()
    assert np.abs(found - exact).max() < 0.04


def test_tilted_has_the_moments_of_sigmoid_times_cavity():
    mean, variance, f = grid()
    z = mean[..., None] + np.sqrt(variance[..., None]) * NODES
    hybrid = logistic(f[..., None] * z) * WEIGHTS
    hybrid /= hybrid.sum(-1, keepdims=True)
    m = (hybrid * z).sum(-1)
    s = (hybrid * (z - m[..., None]) ** 2).sum(-1)
    found = tilted(gaussian(mean, variance), torch.tensor(f))
    # That is what the paper's probits cost; and how far the factor moves a cavity.
    near = np.abs(mean) <= 1
    assert np.abs(found.mean.numpy() - m)[near].max() < 0.07 and np.abs(mean - m)[near].max() > 0.55
    assert np.abs(found.mean.numpy() - m).max() < 0.25 and np.abs(mean - m).max() > 0.95
    assert np.abs(found.variance.numpy() / s - 1).max() < 0.08 and np.abs(variance / s - 1).max() > 0.2


def paper(m, s, f):
    """S_1 and S_2 as appendix A has them (Eq. 27–28 with Theorem 2's constants, Eq. 34, Eq. 37 with Eq. 39)."""
    cm, cs = f * m, f * f * s

    def moment(d):
        a, b = 2 * d * (1 - 2 ** (-1 / d)), (math.log(2 ** (1 / d) - 1) if d > 1 else 0.0)
        return logistic(a * (cm + b) / np.sqrt(1 + math.pi / 8 * a * a * cs))

    e1, e2, e3 = moment(1), moment(2), moment(3)
    c_sigma = (cm + cs) * e1 - cs * e2
    c_sigma2 = (cm + 2 * cs) * e2 - 2 * cs * e3
    s1 = c_sigma / (e1 * f)
    s2 = (cs * e1 + (cs + cm) * c_sigma - cs * c_sigma2) / (e1 * f * f)
    return s1, s2 - s1**2


def test_tilted_is_theorem_1():
    mean, variance, f = grid()
    f = np.where(np.abs(f) < 0.05, 0.3, f)
    m, s = paper(mean, variance, f)
    found = tilted(gaussian(mean, variance), torch.tensor(f))
    np.testing.assert_allclose(found.mean, m, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(found.variance, s, rtol=1e-7, atol=1e-11)


def test_the_factor_is_tilted_over_cavity_and_its_precision_is_never_negative():
    mean, variance, f = grid()
    cavity = gaussian(mean, variance)
    found, whole = factor(cavity, torch.tensor(f)), tilted(cavity, torch.tensor(f))
    assert (whole.variance > 0).all() and (whole.variance <= cavity.variance).all()
    assert (found.precision >= 0).all() and (found.precision < 0.25).all()
    assert (found.linear.abs() <= 1).all()
    np.testing.assert_array_equal(found.precision.numpy()[f == 0], 0)
    np.testing.assert_array_equal(found.linear.numpy()[f == 0], 0)
    # Algorithm 1, line 8, where the difference of two reciprocals still has digits.
    wide = variance > 0.1
    precision = 1 / whole.variance.numpy() - 1 / variance
    linear_part = whole.mean.numpy() / whole.variance.numpy() - mean / variance
    np.testing.assert_allclose(found.precision.numpy()[wide], precision[wide], rtol=1e-9, atol=1e-13)
    np.testing.assert_allclose(found.linear.numpy()[wide], linear_part[wide], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("scale", [30.0, 300.0])
def test_far_out_the_factor_stays_proper(scale):
    mean = np.linspace(-scale, scale, 201)[:, None, None]
    cavity = gaussian(*np.broadcast_arrays(mean, np.array([1e-6, 0.1, 1.0])[:, None], np.zeros(21))[:2])
    found = factor(cavity, torch.linspace(-1, 1, 21, dtype=torch.float64))
    assert torch.isfinite(found.linear).all() and (found.precision >= -1e-15).all()


def test_linear_layers_pass_mean_and_variance_on():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    bias = torch.randn(4, generator=generator, dtype=torch.float64)
    x = gaussian([0.5, -1.0, 2.0], [0.3, 1.0, 0.1])
    noise = torch.randn(400_000, 3, generator=generator, dtype=torch.float64)
    drawn = (x.mean + x.variance.sqrt() * noise) @ weight + bias
    found = linear(x, weight, bias)
    torch.testing.assert_close(found.mean, drawn.mean(0), rtol=0, atol=0.02)
    torch.testing.assert_close(found.variance, drawn.var(0), rtol=0.01, atol=0)


def test_the_sigmoids_variance_is_near_quadrature_and_never_negative():
    mean, variance = np.meshgrid(np.linspace(-12, 12, 481), [1e-9, 0.01, 0.3, 1.0, 4.0, 50.0], indexing="ij")
    found = sigmoid(gaussian(mean, variance))
    assert (found.variance > -1e-15).all()
    drawn = logistic(mean[..., None] + np.sqrt(variance[..., None]) * NODES)
    exact_mean = (drawn * WEIGHTS).sum(-1)
    exact = ((drawn - exact_mean[..., None]) ** 2 * WEIGHTS).sum(-1)
    near = variance <= 4
    assert np.abs(found.mean.numpy() - exact_mean)[near].max() < 0.025
    assert np.abs(found.variance.numpy() - exact)[near].max() < 0.03


def test_divergence_is_that_of_torch():
    generator = torch.Generator().manual_seed(1)
    m, n = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    s, t = torch.rand(2, 7, generator=generator, dtype=torch.float64) + 0.05
    expected = kl_divergence(Normal(m, s.sqrt()), Normal(n, t.sqrt())).mean()
    torch.testing.assert_close(divergence(Gaussian(m, s), Gaussian(n, t)), expected, rtol=1e-12, atol=0)
    # Of one variance, as FedNP's first: (m − n)² / 2s, as the authors' program has it.
    torch.testing.assert_close(divergence(Gaussian(m, s), Gaussian(n, s)), ((m - n) ** 2 / (2 * s)).mean())
