"""Claims against published values, dp-accounting, Opacus, and divergences summed up by hand."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
import time

import numpy as np
import pytest
from fedward_common.privacy import accounting
from fedward_common.privacy.accounting import ORDERS, AccountingError, Claim, rdp, spent
from fedward_common.privacy.events import (
    DiscreteGaussian,
    FixedSizeGaussian,
    Gaussian,
    Relation,
    SampledGaussian,
    Skellam,
)
from fedward_common.privacy.exact_gaussian import epsilon_of
from scipy.special import ive

DELTA = 1e-5
ORACLES = {  # events: (Opacus' RDP, its agreement with ours, PLD)
    (SampledGaussian(0.01, 4.0), 10_000): (1.0355, 1e-6, 0.9470),
    (SampledGaussian(256 / 60_000, 1.1), 14_062): (2.5966, 1e-6, 2.3817),
    (SampledGaussian(0.04, 1.5), 2_250): (7.3291, 1e-4, None),
}
GRID = [(SampledGaussian(rate, noise), rounds) for rate, noise, rounds in [(0.001, 0.7, 1000), (0.2, 2.0, 200)]]
FIXED = (FixedSizeGaussian(1000, 100, 4.0), 100)
WHOLE = tuple(float(order) for order in range(2, 64))
HARD = Skellam(50.0, 2500.0, 90_000.0)


def dp_sgd(event, rounds):
    """The same in dp-accounting's words."""
    import dp_accounting

    gaussian = dp_accounting.GaussianDpEvent(event.noise_multiplier)
    sampled = dp_accounting.PoissonSampledDpEvent(event.sampling_rate, gaussian)
    return dp_accounting.SelfComposedDpEvent(sampled, rounds)


def opacus(name, event, rounds):
    from opacus.accountants import create_accountant

    accountant = create_accountant(name)
    accountant.history = [(event.noise_multiplier, event.sampling_rate, rounds)]
    return accountant.get_epsilon(DELTA)


def worst_pair(rate, noise, rounds):
    """ε by PLD at dp-accounting's finest losses: sampling at `rate`, somebody present or not."""
    from dp_accounting.pld import PLDAccountant

    return PLDAccountant().compose(dp_sgd(SampledGaussian(rate, noise), rounds)).get_epsilon(DELTA)


def renyi(p, q, alpha):
    """Of two laws given by their logarithms on one grid."""
    return float(np.logaddexp.reduce(alpha * p + (1 - alpha) * q) / (alpha - 1))


def curve(event, orders, relation=Relation.ADD_OR_REMOVE_ONE):
    return accounting.divergences(event, relation, tuple(orders))


@pytest.mark.parametrize("row", ORACLES, ids=str)
def test_published_values(row):
    printed, _, pld = ORACLES[row]
    opacus_orders = [*(1 + tenth / 10 for tenth in range(1, 100)), *range(12, 64)]
    assert rdp([row], DELTA, opacus_orders).epsilon == pytest.approx(printed, rel=5e-5)
    if pld is not None:
        claim = spent([row], DELTA)
        assert claim.epsilon == pytest.approx(pld, rel=1e-3)
        assert claim.accountant == "PLD"


@pytest.mark.slow
@pytest.mark.parametrize("row", ORACLES, ids=str)
def test_rdp_as_opacus_at_its_orders(row):
    from opacus.accountants import RDPAccountant

    claim = rdp([row], DELTA, RDPAccountant.DEFAULT_ALPHAS)
    assert claim.epsilon == pytest.approx(opacus("rdp", *row), rel=ORACLES[row][1])
    assert claim.accountant == "RDP"


@pytest.mark.slow
@pytest.mark.parametrize("row", [*list(ORACLES)[:2], *GRID], ids=str)
def test_never_below_pld_at_finer_losses(row):
    event, rounds = row
    peer = worst_pair(event.sampling_rate, event.noise_multiplier, rounds)
    claim = spent([row], DELTA)
    assert claim.accountant == "PLD"
    assert peer <= claim.epsilon <= peer * 1.01
    assert claim.epsilon <= rdp([row], DELTA, tuple(range(2, 64))).epsilon


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.7])
@pytest.mark.parametrize("noise", [0.5, 2.0])
@pytest.mark.parametrize("delta", [1e-7, 1e-4])
def test_one_sampled_release_in_closed_form(rate, noise, delta):
    """((1 − q)P₀ + qP₁ − e^ε·P₀)₊ = q(P₁ − e^ε'·P₀)₊ with e^ε' = 1 + (e^ε − 1)/q: the worse of the two directions."""
    truth = math.log1p(rate * math.expm1(epsilon_of(delta / rate, 1 / noise)))
    assert truth * (1 - 1e-9) <= spent([(SampledGaussian(rate, noise), 1)], delta).epsilon <= truth * 1.002 + 1e-5


@pytest.mark.parametrize("row", [*list(ORACLES)[:2], *GRID], ids=str)
def test_between_the_bounds_of_prv(row):
    """An implementation of somebody else: ε within ± 0.01, δ within ± δ/1000."""
    from opacus.accountants import PRVAccountant

    peer = PRVAccountant()
    event, rounds = row
    peer.history = [(event.noise_multiplier, event.sampling_rate, rounds)]
    least, _, most = peer._get_dprv(0.01, DELTA / 1000).compute_epsilon(DELTA, DELTA / 1000, 0.01)
    assert most == peer.get_epsilon(DELTA)
    assert least <= spent([row], DELTA).epsilon <= most


@pytest.mark.parametrize(
    ("events", "epsilon"),
    [([(Gaussian(1.0), 1)], 4.37718), ([(Gaussian(4.0), 1)], 0.92634), ([(Gaussian(5.0), 100)], 9.99726)],
    ids=str,
)
def test_plain_noise_is_exact(events, epsilon):
    claim = spent(events, DELTA)
    assert claim.epsilon == pytest.approx(epsilon, rel=1e-5)
    assert (claim.accountant, claim.delta, claim.relation) == ("exact Gaussian", DELTA, Relation.ADD_OR_REMOVE_ONE)


def test_different_plain_noise_composes_to_one():
    """1/3² + 2·1/6² + 4·1/12² = 7/36 = 1/z²."""
    events = [(Gaussian(3.0), 1), (Gaussian(12.0), 4), (Gaussian(6.0), 2)]
    assert spent(events, DELTA).epsilon == pytest.approx(epsilon_of(DELTA, math.sqrt(7) / 6))


def test_plain_and_sampled_noise_together():
    from dp_accounting import ComposedDpEvent, GaussianDpEvent, SelfComposedDpEvent
    from dp_accounting.pld import PLDAccountant

    events = [(Gaussian(8.0), 5), (SampledGaussian(0.02, 1.2), 300), (SampledGaussian(0.1, 3.0), 40)]
    whole = [SelfComposedDpEvent(GaussianDpEvent(8.0), 5), *(dp_sgd(*part) for part in events[1:])]
    peer = PLDAccountant().compose(ComposedDpEvent(whole)).get_epsilon(DELTA)
    claim = spent(events, DELTA)
    assert claim.epsilon == pytest.approx(peer, rel=1e-3)
    assert claim.accountant == "PLD"


def test_sampling_of_a_fixed_size_counts_twice_the_clip():
    """dp-accounting's own accountant takes the sensitivity as C and says 2.29."""
    claim = spent([FIXED], DELTA)
    assert claim.epsilon == pytest.approx(5.38, abs=0.005)
    assert (claim.accountant, claim.relation) == ("RDP", Relation.REPLACE_ONE)


def test_sampling_of_a_fixed_size_is_no_better_than_its_worst_pair():
    """All others hold −C: the sum has 2C more if the one drawn holds C, against data where it holds −C like them."""
    event, rounds = FIXED
    worst = worst_pair(event.size / event.population, event.noise_multiplier / 2, rounds)
    assert worst > 2.3  # dp-accounting's 2.2941 is too little
    assert spent([FIXED], DELTA).epsilon >= worst


@pytest.mark.parametrize("noise", [1.0, 4.0])
@pytest.mark.parametrize("rate", [0.02, 0.3, 1.0])
def test_sampling_of_a_fixed_size_order_by_order(rate, noise):
    """Above the divergences of that pair, both ways, by integration; and of the pair C, −C among zeros."""
    event = FixedSizeGaussian(100, round(100 * rate), noise)
    orders = [1.5, 2.0, 3.7, 8.0, 20.0]
    x = np.linspace(-30, 40, 200_001) * noise
    base = math.log((x[1] - x[0]) / (noise * math.sqrt(2 * math.pi)))

    def sum_with(drawn, not_drawn):
        inside, outside = (-((x - mean) ** 2) / (2 * noise**2) + base for mean in (drawn, not_drawn))
        return np.logaddexp(math.log(rate) + inside, math.log1p(-rate) + outside) if rate < 1 else inside

    bounds = curve(event, orders, Relation.REPLACE_ONE)
    for p, q in [((2.0, 0.0), (0.0, 0.0)), ((0.0, 0.0), (2.0, 0.0)), ((1.0, 0.0), (-1.0, 0.0))]:
        for order, bound in zip(orders, bounds, strict=True):
            assert renyi(sum_with(*p), sum_with(*q), order) <= bound * (1 + 1e-6)


def test_everybody_drawn_is_no_sampling():
    events = [(FixedSizeGaussian(50, 50, 4.0), 10)]
    assert spent(events, DELTA).epsilon == pytest.approx(epsilon_of(DELTA, 2 * math.sqrt(10) / 4))


@pytest.mark.parametrize("rate", [0.01, 0.3])
@pytest.mark.parametrize("noise", [0.8, 3.0])
def test_poisson_sampling_when_one_is_replaced(rate, noise):
    """Above the divergence between C and −C in the place of one, by integration; never above no sampling at all."""
    x = np.linspace(-30, 30, 200_001) * noise
    base = math.log((x[1] - x[0]) / (noise * math.sqrt(2 * math.pi)))
    normal = {mean: -((x - mean) ** 2) / (2 * noise**2) + base for mean in (-1, 0, 1)}
    p, q = (np.logaddexp(math.log(rate) + normal[mean], math.log1p(-rate) + normal[0]) for mean in (1, -1))
    orders = [1.3, 2.0, 5.0, 16.0]
    replaced = curve(SampledGaussian(rate, noise), orders, Relation.REPLACE_ONE)
    for order, bound in zip(orders, replaced, strict=True):
        assert renyi(p, q, order) <= bound <= 2 * order / noise**2 * (1 + 1e-9)


@pytest.mark.parametrize("other", [Gaussian(20.0), SampledGaussian(0.01, 1.0), HARD], ids=lambda event: event.kind)
def test_relations_are_converted_before_they_are_mixed(other):
    """A replacement moves twice as far; and it is said."""
    claim = spent([FIXED, (other, 3)], DELTA)
    assert claim.relation is Relation.REPLACE_ONE
    assert any("converted" in words for words in claim.assumptions)
    assert not any("converted" in words for words in spent([FIXED], DELTA).assumptions)
    twice = {Gaussian(20.0): Gaussian(10.0), HARD: Skellam(100.0, 5000.0, 90_000.0)}.get(other)
    if twice is not None:
        separate = 100 * curve(FIXED[0], WHOLE, Relation.REPLACE_ONE) + 3 * curve(twice, WHOLE)
        assert claim.epsilon == pytest.approx(accounting._convert(separate, np.array(WHOLE), DELTA))


@pytest.mark.parametrize("shift", [1, 3, 10])
@pytest.mark.parametrize("variance", [1.0, 9.0, 100.0, 3000.0])
def test_skellam_order_by_order(variance, shift):
    """Above the divergence of the shifted law, summed over Z; at large variance close to it."""
    reach = int(40 * math.sqrt(variance)) + 300
    with np.errstate(divide="ignore"):
        law = np.log(ive(np.abs(np.arange(-reach, reach + 1)), variance))
    law = law[np.isfinite(law)]
    assert np.exp(law) @ (np.arange(len(law)) - len(law) // 2) ** 2 == pytest.approx(variance)  # μ is the variance
    orders = [1.2, 2.0, 2.5, 3.0, 7.5, 16.0]
    bounds = curve(Skellam(shift, shift, variance), orders)
    for order, bound in zip(orders, bounds, strict=True):
        truth = renyi(law[shift:], law[:-shift], order)
        assert truth <= bound
        if variance == 3000 and order.is_integer():
            assert bound <= truth * 1.02


@pytest.mark.parametrize(
    ("event", "order", "by_hand"),
    [
        (Skellam(3.0, 5.0, 2.0), 2.0, 2 * 9 / 4 + (3 * 9 + 30) / 16),
        (Skellam(1.0, 1.0, 0.5), 10.0, 10.0 + 3.0),
        (Skellam(3.0, 5.0, 2.0), 2.25, (0.75 * 8.0625 + 0.25 * 2 * (27 / 4 + 15 / 4)) / 1.25),  # the chord from 2 to 3
        (Skellam(3.0, 5.0, 2.0), 1.25, 8.0625),  # from 1, where it is 0, to 2
    ],
)
def test_skellam_by_hand(event, order, by_hand):
    """In one dimension the truth is so near to αΔ²/2μ that the rest of the bound has no say."""
    assert curve(event, [order]) == pytest.approx(by_hand)


@pytest.mark.parametrize("z", [1.0, 4.0, 20.0])
def test_skellam_becomes_gaussian(z):
    """At 2^20 coordinates, when a step of the grid is small against the noise: order by order, and never less."""
    l2 = 2.0**22
    event = Skellam(l2, l2 * 2.0**10, (z * l2) ** 2)
    assert np.allclose(curve(event, WHOLE), np.array(WHOLE) / (2 * z * z), rtol=1e-3)
    assert spent([(event, 10)], DELTA).epsilon >= spent([(Gaussian(z), 10)], DELTA).epsilon


@pytest.mark.parametrize(
    ("bits", "printed", "tolerance"), [(14, 0.57, 0.01), (16, 0.0395, 5e-4), (18, 0.0025, 1e-4), (20, 0.0002, 5e-5)]
)
def test_the_surcharge_of_integer_noise(bits, printed, tolerance):
    """Over Gaussian noise, at 2^20 coordinates, 100 nodes and z = 4, after 100 rounds: the published table."""
    d, n, z, kappa = 2**20, 100, 4.0, 3.9  # c = ρ = 1
    local = z / math.sqrt(n)
    scale = math.sqrt(2 ** (2 * bits) - n * kappa**2) / (2 * kappa * math.sqrt(n**2 / d + n * local**2))
    l2 = min(scale + math.sqrt(d), math.sqrt(scale**2 + d / 4 + scale + math.sqrt(d) / 2))
    event = Skellam(l2, min(math.sqrt(d), l2) * l2, n * (scale * local) ** 2)
    orders = tuple(range(2, 256))
    surcharge = rdp([(event, 100)], DELTA, orders).epsilon / rdp([(Gaussian(z), 100)], DELTA, orders).epsilon - 1
    assert surcharge == pytest.approx(printed, abs=tolerance)
    if bits == 20:
        assert surcharge <= 0.001


@pytest.mark.parametrize("nodes", [1, 2, 3, 10])
@pytest.mark.parametrize("sigma", [0.5, 0.7, 1.0])
@pytest.mark.parametrize("shift", [(1,), (2,), (1, 1, 1)], ids=str)
def test_discrete_gaussians_order_by_order(shift, sigma, nodes):
    """Above the divergence between the sum's law and the shifted one, coordinate by coordinate (they add up)."""
    whole = np.arange(-25, 26)
    one = np.exp(-(whole**2) / (2 * sigma**2))
    law = one / one.sum()
    for _ in range(nodes - 1):
        law = np.convolve(law, one / one.sum())
    with np.errstate(divide="ignore"):
        law = np.log(law)
    orders = [1.3, 2.0, 5.0]
    norm = math.sqrt(sum(step**2 for step in shift))
    bounds = curve(DiscreteGaussian(norm, sigma, nodes, len(shift)), orders)
    for order, bound in zip(orders, bounds, strict=True):
        parts = []
        for step in shift:
            p, q = law[step:], law[:-step]
            both = np.isfinite(p) & np.isfinite(q)
            parts.append(renyi(p[both], q[both], order))
        assert sum(parts) <= bound * (1 + 1e-9)


def test_many_discrete_gaussians_of_some_width_are_one():
    """Their sum's law is that of one to 1e-70; per node σ = 3."""
    event = DiscreteGaussian(120.0, 3.0, 10_000, 1 << 20)
    assert np.allclose(curve(event, ORDERS), np.array(ORDERS) / 2 * (120 / 300) ** 2, rtol=1e-12)


@pytest.mark.parametrize("event", [Skellam(50.0, 2500.0, 90_000.0), DiscreteGaussian(50.0, 30.0, 100, 1000)], ids=str)
def test_integer_noise_adds_up_with_all_others(event):
    claim = spent([(event, 10), (Gaussian(30.0), 10), (SampledGaussian(0.01, 1.0), 50)], DELTA)
    curves = 10 * curve(event, WHOLE) + 10 * curve(Gaussian(30.0), WHOLE)
    curves = curves + 50 * curve(SampledGaussian(0.01, 1.0), WHOLE)
    assert claim.epsilon == pytest.approx(accounting._convert(curves, np.array(WHOLE), DELTA))
    assert claim.epsilon > spent([(event, 10)], DELTA).epsilon
    assert claim.accountant == "RDP"


@pytest.mark.parametrize("gap", [1e-13, 1e-9, 3e-8])
def test_a_gap_between_the_noise_and_its_law_is_paid_from_delta(gap):
    epsilon = spent([(dataclasses.replace(HARD, gap=gap), 10)], DELTA).epsilon
    rest = DELTA - (1 + math.exp(epsilon)) * 10 * gap
    assert spent([(HARD, 10)], rest).epsilon <= epsilon
    assert spent([(HARD, 10)], rest * (1 + 1e-6)).epsilon == pytest.approx(epsilon, rel=1e-6)
    if gap == 3e-8:
        assert epsilon > 1.005 * spent([(HARD, 10)], DELTA).epsilon


def test_a_gap_that_delta_cannot_pay():
    assert spent([(Skellam(50.0, 2500.0, 90_000.0, 1e-6), 10)], DELTA).epsilon == math.inf
    assert spent([(Skellam(50.0, 2500.0, 1e12, 4e-6), 1)], DELTA).epsilon < 1
    assert spent([(Skellam(50.0, 2500.0, 1e12, 6e-6), 1)], DELTA).epsilon == math.inf


@pytest.mark.parametrize("delta", [1e-5, 1e-9, 1e-11, 1e-12, 1e-14])
def test_rounding_in_the_fft_does_not_lower_epsilon(delta):
    """A coin that falls wrong once in 10^12: no sampling, in truth, but PLD as ever."""
    claim = spent([(SampledGaussian(1 - 1e-12, 100.0), 10_000)], delta)
    assert claim.epsilon >= epsilon_of(delta, 1.0) * (1 - 1e-9)


def test_the_orders_are_dense():
    """ε loses under 0.2 % to the best of all orders."""
    alpha = np.exp(np.linspace(math.log(1.02), math.log(1e5), 20_000))
    for z in (1.0, 2.0, 4.0, 10.0, 37.0, 100.0, 200.0, 450.0):
        best = accounting._convert(alpha / (2 * z * z), alpha, DELTA)
        assert best <= rdp([(Gaussian(z), 1)], DELTA).epsilon <= best * 1.002
    assert best > 0.005


@pytest.mark.parametrize("events", [[], [(Gaussian(1.0), 0)], [(SampledGaussian(0.0, 1.0), 50)]], ids=str)
def test_nothing_released_is_nothing_spent(events):
    assert spent(events, DELTA).epsilon == 0.0


@pytest.mark.parametrize("delta", [0.5, 0.1, 1e-3])
def test_never_below_zero(delta):
    """Where Opacus reports a negative ε (its issue 585)."""
    for event in (Gaussian(1e4), SampledGaussian(1e-4, 50.0), Skellam(1.0, 1.0, 1e9)):
        for claim in (spent([(event, 1)], delta), rdp([(event, 1)], delta, (2.0, 8.0, 63.0))):
            assert claim.epsilon >= 0.0
    assert rdp([(Gaussian(1e4), 1)], 0.5, (2.0, 8.0, 63.0)).epsilon == 0.0


@pytest.mark.parametrize("wrong", [-1e-3, math.nan])
def test_what_the_library_got_wrong_is_no_privacy(monkeypatch, wrong):
    import dp_accounting

    event = SampledGaussian(0.0123, 1.0)
    monkeypatch.setattr(dp_accounting.rdp.RdpAccountant, "rdp", property(lambda self: np.full(3, wrong)))
    try:
        assert rdp([(event, 1), (Gaussian(1.0), 1)], DELTA, (2.0, 3.0, 4.0)).epsilon == math.inf
    finally:
        accounting.divergences.cache_clear()


def test_hardly_any_noise_is_no_privacy():
    assert spent([(SampledGaussian(0.5, 1e-6), 10**9)], DELTA).epsilon > 1e15
    assert spent([(FixedSizeGaussian(10, 1, 1e-6), 10**9)], DELTA).epsilon > 1e15
    assert spent([(Skellam(1e60, 1e60, 1e-60), 1)], DELTA).epsilon > 1e170


@pytest.mark.parametrize("epsilon", [-1e-9, math.nan])
def test_no_claim_of_what_nothing_spends(epsilon):
    with pytest.raises(AccountingError, match="epsilon = "):
        Claim(epsilon, DELTA, "RDP", Relation.REPLACE_ONE, ())


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, 2.0, math.nan])
def test_delta_outside_its_range(delta):
    for ask in (spent, rdp):
        with pytest.raises(AccountingError, match=f"delta = {delta}"):
            ask([(Gaussian(1.0), 1)], delta)


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ([(Gaussian(1.0), -1)], "count = -1"),
        ([(Gaussian(1.0), 1.0)], "count = 1.0"),
        ([(Gaussian(1.0), True)], "count = True"),
        ([("gaussian", 1)], "'gaussian': no accountant knows this event"),
        ([(None, 0)], "None: no accountant knows this event"),
    ],
)
def test_what_cannot_be_counted_is_refused(events, says):
    with pytest.raises(AccountingError, match=says):
        spent(events, DELTA)


@pytest.mark.parametrize("orders", [(), (1.0, 2.0), (0.5,), (math.inf,), (math.nan,)], ids=str)
def test_orders_that_are_none(orders):
    with pytest.raises(AccountingError, match="orders = "):
        rdp([(Gaussian(1.0), 1)], DELTA, orders)


def test_neither_order_nor_grouping_matters():
    one, two = SampledGaussian(0.02, 1.3), Gaussian(9.0)
    whole = spent([(one, 5), (two, 3)], DELTA)
    assert spent([(two, 1), (one, 2), (two, 2), (Gaussian(1.0), 0), (one, 3)], DELTA) == whole
    assert spent([(SampledGaussian(1.0, 9.0), 3), (one, 5)], DELTA) == whole


def test_claims_say_what_they_rest_on():
    sampled = " ".join(spent([(SampledGaussian(0.01, 1.0), 10)], DELTA).assumptions)
    assert "whether any one unit is among the data" in sampled
    assert "Amplified by Poisson sampling" in sampled
    assert "did not depend on what was released before" in sampled
    fixed = " ".join(spent([FIXED], DELTA).assumptions)
    assert "how many there are is public" in fixed
    assert "Amplified by sampling without replacement" in fixed
    assert "up to 2C" in fixed
    plain = " ".join(spent([(Gaussian(1.0), 1)], DELTA).assumptions)
    assert "Amplified" not in plain
    assert "those, too, who know who took part" in plain
    # So little noise, and so many rounds, that sampling is not worth its accountant.
    assert "Amplified" not in " ".join(spent([(FixedSizeGaussian(10, 9, 0.1), 50)], DELTA).assumptions)
    assert "nobody took off" in " ".join(spent([(HARD, 1)], DELTA).assumptions)


def test_one_more_round_is_quick():
    """The law of one release is kept: asking after each costs one convolution, whatever the number of rounds."""
    event = SampledGaussian(0.01, 1.0)
    spent([(event, 300)], DELTA)
    start = time.process_time()
    for rounds in range(301, 306):
        spent([(event, rounds)], DELTA)
    spent([(event, 100_000)], DELTA)
    assert time.process_time() - start < 6  # seen: 0.8 s
    start = time.process_time()
    for _ in range(1000):
        spent([(event, 305)], DELTA)
    assert time.process_time() - start < 1


def test_very_many_releases():
    """Composed in blocks; dp-accounting would take hours for the second."""
    many = (SampledGaussian(0.001, 2.0), 150_000)
    peer = worst_pair(0.001, 2.0, 150_000)
    assert peer <= spent([many], DELTA).epsilon <= peer * 1.0001
    event, rounds = SampledGaussian(6.8e-5, 1e8), 400_000_000
    assert 0 <= spent([(event, rounds)], DELTA).epsilon <= epsilon_of(DELTA, math.sqrt(rounds) / 1e8)


def test_noise_that_is_not_sampled_needs_no_library():
    """A guard starts fast."""
    code = """
import sys
from fedward_common.privacy.accounting import spent
from fedward_common.privacy.calibration import noise_multiplier
from fedward_common.privacy.events import Gaussian, Skellam
spent([(Gaussian(1.0), 3), (Skellam(50.0, 2500.0, 90_000.0), 5)], 1e-5)
noise_multiplier(1.0, 1e-5, lambda z: [(Gaussian(z), 3)])
print(*{"dp_accounting", "opacus", "torch", "flwr", "scipy"} & set(sys.modules))
"""
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout.split() == []
