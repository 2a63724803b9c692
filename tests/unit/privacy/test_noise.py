"""Integer noise: its tables against mpmath to 2^-98, its draws against SciPy's laws, and where its words come from."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import mpmath
import numpy as np
import pytest
from fedward_common.errors import ConfigError
from fedward_common.privacy.noise import DiscreteGaussian, Noise, Skellam
from fedward_common.secagg import masks
from fedward_common.secagg.masks import Keystream
from scipy import stats

LAWS = [Skellam, DiscreteGaussian]
VARIANCES = [2.0**-20, 0.01, 0.3, 1.0, 7.3, 100.0, 2500.0]


def key(number: int) -> bytes:
    return hashlib.sha256(b"noise %d" % number).digest()


def probabilities(law, last):
    """P(X = 0) … P(X = last) by another library, to 400 bits."""
    with mpmath.workprec(400):
        v = mpmath.mpf(law.variance)
        if isinstance(law, Skellam):
            return [mpmath.besseli(k, v) * mpmath.exp(-v) for k in range(last + 1)]
        total = mpmath.jtheta(3, 0, mpmath.exp(-1 / (2 * v)))
        return [mpmath.exp(-mpmath.mpf(k) ** 2 / (2 * v)) / total for k in range(last + 1)]


def entries(noise):
    """The table's C_k, as whole numbers."""
    return [(int(high) << 64) + int(low) for high, low in zip(noise._high, noise._low, strict=True)]


def masses(noise):
    """2^127·P(|X| = k) as drawn."""
    table = entries(noise)
    return [table[0], *(b - a for a, b in pairwise(table))]


@pytest.mark.parametrize("variance", VARIANCES)
@pytest.mark.parametrize("law", LAWS)
def test_the_table_is_within_the_distance_that_is_charged(law, variance):
    """Total variation is half the sum of |table − law|, the law's tail beyond the table included."""
    noise = Noise(law(variance))
    table = masses(noise)
    assert min(table) >= 0 and sum(table) == 2**127
    with mpmath.workprec(400):
        exact = probabilities(noise.law, len(table) - 1)
        folded = [exact[0], *(2 * p for p in exact[1:])]
        off = [abs(mpmath.mpf(m) / 2**127 - p) for m, p in zip(table, folded, strict=True)]
        distance = (sum(off) + 1 - sum(folded)) / 2
        assert distance <= noise.truncation(1) == 2.0**-98
        assert distance <= 2.0**-98 / 4, "the bound has room"


@pytest.mark.parametrize("variance", VARIANCES)
@pytest.mark.parametrize("law", LAWS)
def test_weights_are_exact_out_to_the_tail(law, variance):
    last = len(Noise(law(variance))._high) - 1
    exact = probabilities(law(variance), last)
    first, *others = law(variance).weights(last)
    with mpmath.workprec(400):
        for weight, probability in zip(others, exact[1:], strict=True):
            ratio = probability / exact[0]
            assert abs(mpmath.mpf(weight) / first - ratio) <= ratio * mpmath.mpf(2) ** -102 + mpmath.mpf(2) ** -228


@pytest.mark.parametrize("law", LAWS)
def test_a_large_table_by_its_cumulants(law):
    """10^8 is beyond what mpmath computes quickly. A Skellam's 2nd, 4th and 6th cumulants are all v; the discrete
    Gaussian's are those of the normal law, v, 0 and 0, to within e^(−2π²v)."""
    v = 10**8
    table = masses(Noise(law(float(v))))
    own = v if law is Skellam else 0
    for power, moment in {2: v, 4: 3 * v**2 + own, 6: 15 * v**3 + 15 * v * own + own}.items():
        got = Fraction(sum(mass * k**power for k, mass in enumerate(table)), 2**127)
        assert abs(got / moment - 1) < 1e-23


@pytest.mark.parametrize("variance", VARIANCES[:-1])
@pytest.mark.parametrize("law", LAWS)
def test_the_bound_on_the_tail_is_one(law, variance):
    made = law(variance)
    exact = probabilities(made, 50 + int(20 * math.sqrt(variance)))
    for k in range(1, 12 * math.ceil(math.sqrt(variance)), max(1, int(math.sqrt(variance) / 2))):
        assert made.log_tail(k) >= float(mpmath.log(2 * sum(exact[k:]))) - 1e-12
        assert made.log_tail(k + 1) < made.log_tail(k)


def expected(law, values):
    """SciPy's Skellam, or the discrete Gaussian by its definition; where the variance is large, both are normal."""
    if law.variance > 1e4:
        return stats.norm.pdf(values, scale=math.sqrt(law.variance))
    if isinstance(law, Skellam):
        return stats.skellam.pmf(values, law.variance / 2, law.variance / 2)
    reach = np.arange(-int(40 * math.sqrt(law.variance) + 40), int(40 * math.sqrt(law.variance) + 41))
    return np.exp(-(values**2) / (2 * law.variance)) / np.exp(-(reach**2) / (2 * law.variance)).sum()


def chi_square(law, drawn):
    """p of Pearson's test. Neighbouring values are put together so that about 60 bins are left."""
    reach = int(8 * math.sqrt(law.variance) + 10)
    values = np.arange(-reach, reach + 1)
    mass = expected(law, values) * len(drawn)
    begins = np.cumsum(mass) - mass
    bins = np.unique(begins // (len(drawn) / 60), return_inverse=True)[1]
    wanted = np.bincount(bins, mass)
    if wanted[-1] < 50:
        bins = np.minimum(bins, len(wanted) - 2)
        wanted = np.bincount(bins, mass)
    got = np.bincount(bins, np.bincount(drawn + reach, minlength=len(values)))
    return stats.chi2.sf(((got - wanted) ** 2 / wanted).sum(), len(wanted) - 1)


@pytest.mark.parametrize("variance", [0.3, 1.0, 7.3, 400.0, 1e5, 2e8])
@pytest.mark.parametrize("law", LAWS)
def test_draws_follow_the_law(law, variance):
    """Keys are fixed, so that it passes or fails for ever. The test finds noise that is 2 % too small."""
    made = law(variance)
    drawn = Noise(made).draw(300_000, Keystream(key(1)))
    assert drawn.dtype == np.int32 and drawn.shape == (300_000,)
    assert chi_square(made, drawn) > 1e-3
    assert chi_square(law(variance * 1.04), drawn) < 1e-6


@pytest.mark.parametrize("variance", [0.3, 50.0, 1e7])
@pytest.mark.parametrize("law", LAWS)
def test_moments_of_fresh_draws(law, variance):
    """Mean and variance within six standard errors; with 0.7 of the noise the variance would be far outside."""
    count = 200_000
    made = law(variance)
    values = np.arange(-int(9 * math.sqrt(variance) + 9), int(9 * math.sqrt(variance) + 10))
    true, fourth = (float(expected(made, values) @ values.astype(float) ** power) for power in (2, 4))
    drawn = Noise(made).draw(count).astype(float)
    error = math.sqrt((fourth - true**2) / count)
    assert abs(drawn.mean()) < 6 * math.sqrt(true / count)
    assert abs((drawn**2).mean() - true) < 6 * error
    assert abs(((0.7 * drawn) ** 2).mean() - true) > 60 * error


def test_the_sign_is_a_fair_coin_whatever_the_size():
    drawn = Noise(Skellam(4.0)).draw(400_000, Keystream(key(2)))
    for size in range(1, 6):
        plus, minus = np.count_nonzero(drawn == size), np.count_nonzero(drawn == -size)
        assert abs(plus - minus) < 5 * math.sqrt(plus + minus)


@pytest.mark.parametrize("nodes", [2, 10])
def test_a_sum_of_skellams_is_one(nodes):
    noise = Noise(Skellam(1.7))
    total = sum(noise.draw(200_000, Keystream(key(10 + node))) for node in range(nodes))
    assert chi_square(Skellam(1.7 * nodes), total) > 1e-3
    assert chi_square(Skellam(1.7 * nodes * 1.04), total) < 1e-6
    assert chi_square(Skellam(1.7 * (nodes - 1)), total) < 1e-6, "one node less is noticed"


class Words:
    """A stream that gives the 64-bit words it was made with."""

    def __init__(self, *words):
        self._words = np.array(words, "<u8").view("<u4")

    def words(self, count):
        given, self._words = self._words[:count], self._words[count:]
        assert len(given) == count
        return given


def by_definition(table, top, rest):
    """|X| for U = 2^64·top + rest: the entries ≤ U."""
    return sum(entry <= (top << 64) + rest for entry in table)


@pytest.mark.parametrize(
    "law", [Skellam(2.0**-20), Skellam(0.3), Skellam(60.0), DiscreteGaussian(2.0), DiscreteGaussian(60.0)]
)
def test_a_word_is_looked_up_as_the_table_says(law):
    """Beside every entry, at every cell of the guide, and at the ends; both signs."""
    noise = Noise(law)
    table = entries(noise)
    cells = [i << int(noise._shift) for i in range(len(noise._guide))]
    spots = {0, 1, 2**63 - 1, *cells, *(cell - 1 for cell in cells)}
    spots |= {(entry >> 64) + step for entry in table for step in (-2, -1, 1, 2)}
    ties = {entry >> 64 for entry in table}
    tops = sorted(spot for spot in spots if 0 <= spot < 2**63 and spot not in ties)
    words = [2 * top + sign for top in tops for sign in (0, 1)]
    drawn = noise.draw(len(words), Words(*words)).reshape(-1, 2)
    sizes = [by_definition(table, top, 0) for top in tops]
    assert drawn[:, 0].tolist() == sizes and drawn[:, 1].tolist() == [-size for size in sizes]


@pytest.mark.parametrize("law", [Skellam(0.3), Skellam(60.0), DiscreteGaussian(2.0)])
def test_64_more_bits_decide_where_63_are_those_of_an_entry(law):
    noise = Noise(law)
    table = entries(noise)
    tops = sorted({entry >> 64 for entry in table if entry >> 64 < 2**63})
    assert len(tops) > 5
    for top in tops:
        own = {entry % 2**64 + step for entry in table if entry >> 64 == top for step in (-1, 0, 1)}
        for rest in {0, 2**64 - 1, *own}:
            if 0 <= rest < 2**64:
                # The draw after it shows that it took one word more and no other.
                drawn = noise.draw(2, Words(2 * top, 0, rest)).tolist()
                assert drawn == [by_definition(table, top, rest), by_definition(table, 0, 0)]


def test_a_key_gives_the_same_noise_again_and_another_key_other_noise():
    noise = Noise(Skellam(1000.0))
    first, again, other = (noise.draw(100_000, Keystream(key(number))) for number in (1, 1, 2))
    assert np.array_equal(first, again)
    for a, b in [(first, other), (first[:-1], first[1:])]:
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / math.sqrt(100_000)


def test_a_stream_goes_on_from_draw_to_draw():
    noise, stream = Noise(Skellam(9.0)), Keystream(key(3))
    first, second = noise.draw(1000, stream), noise.draw(1000, stream)
    assert np.array_equal(np.append(first, second), noise.draw(2000, Keystream(key(3))))


def test_no_two_calls_share_a_keystream(monkeypatch):
    asked = []

    def urandom(count):
        asked.append(key(len(asked)))
        return asked[-1][:count]

    monkeypatch.setattr(masks.os, "urandom", urandom)
    noise = Noise(Skellam(100.0))
    draws = [noise.draw(1000) for _ in range(3)]
    assert len(asked) == len(set(asked)) == 3
    for made, drawn in zip(asked, draws, strict=True):
        assert np.array_equal(drawn, noise.draw(1000, Keystream(made)))


def test_draws_of_several_parts_and_of_none():
    noise = Noise(Skellam(9.0))
    assert noise.draw(0).shape == (0,)
    drawn = noise.draw(200_001, Keystream(key(4)))
    assert chi_square(noise.law, drawn) > 1e-3
    assert not np.array_equal(drawn[: 1 << 16], drawn[1 << 16 : 1 << 17])


def test_what_is_charged_grows_with_the_draws():
    noise = Noise(Skellam(9.0))
    assert noise.truncation(10**6) == 10**6 * noise.truncation(1)
    assert noise.truncation(2**20 * 100 * 1000) < 1e-15


def test_the_last_tables_are_kept():
    assert Noise.of(Skellam(9.0)) is Noise.of(Skellam(9.0))
    assert Noise.of(Skellam(9.0)) is not Noise.of(DiscreteGaussian(9.0))


@pytest.mark.parametrize("variance", [0, -1.0, math.nan, math.inf, 1.01e10, 2.0**-21, True, "1", None])
@pytest.mark.parametrize("law", LAWS)
def test_other_variances_are_refused(law, variance):
    with pytest.raises(ConfigError, match=r"variance = .*from 2\^-20 to 1e\+10.*Use fewer bits for a smaller one"):
        law(variance)


@dataclass(frozen=True)
class Coin:
    """A law with three values, as anyone may bring one."""

    variance: float = 0.5

    def log_tail(self, k):
        return math.log(0.5) if k == 1 else -math.inf

    def weights(self, last):
        return [2, 1, *(0 for _ in range(last - 1))]


def test_another_law():
    drawn = Noise(Coin()).draw(100_000, Keystream(key(5)))
    assert set(drawn.tolist()) == {-1, 0, 1}
    assert abs(np.count_nonzero(drawn) - 50_000) < 5 * math.sqrt(25_000)


@pytest.mark.slow
@pytest.mark.parametrize("law", LAWS)
def test_the_largest_table(law):
    noise = Noise(law(1e10))
    drawn = noise.draw(1 << 20, Keystream(key(6))).astype(float)
    assert stats.kstest(drawn / 1e5, "norm").pvalue > 1e-3
    assert sum(masses(noise)) == 2**127
