"""Who holds whose shares and who masks with whom: parameters from the cohort's size, and the draw.

Bell, Bonawitz, Gascón, Lepoint, Raykova, "Secure single-server aggregation with (poly)logarithmic overhead", CCS 2020.
There the server deals neighbours by a permutation, which a lying server would choose so as to surround a victim with
its own nodes. Here each node draws its own k holders, uniformly among the others: the first `partners` of them (all,
where the server may lie) are its mask partners, and two nodes share a mask when either drew the other. The rules below
are recomputed for that.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from fedward_common.errors import FedwardError
from fedward_common.secagg.shamir import MAX_X

SECURITY_BITS = 40
CORRECTNESS_BITS = 20
COMPLETE_UP_TO = 30
MIN_COHORT = 3


class NoProtection(FedwardError):
    """With this cohort, drop-out and corruption a secure sum would protect nothing, or could not be unmasked."""


@dataclass(frozen=True)
class Parameters:
    """How one cohort shares secrets and masks. Made by `choose`.

    n: nodes in the cohort. holders: k, nodes that hold a share of one node's secrets (complete graph: n, itself
    included). threshold: t, shares that give a secret. partners: drawn holders that are also mask partners (complete:
    n - 1). kept: how many of the partners that a node drew must be among the survivors, or no holder gives a share of
    its self-mask (0: not asked). survivors: least members of the survivor set, and signatures over it that a node wants
    to see before it reveals a share. quorum: at most that, and so many that two different sets never both reach it
    while no more than `colluders` sign twice. colluders: nodes that may side with the server.
    """

    n: int
    holders: int
    threshold: int
    partners: int
    kept: int
    complete: bool
    quorum: int
    survivors: int
    colluders: int

    @property
    def drop_outs(self) -> int:
        """Nodes that may be lost, at any stage."""
        return self.n - self.survivors


@lru_cache(maxsize=256)
def choose(n: int, dropout: float, corrupt: float, semi_malicious: bool = True) -> Parameters:
    """The smallest k, and for it the smallest t, that protect a cohort of n nodes.

    dropout: δ, the fraction that may be lost; corrupt: γ, the fraction that may side with the server. semi_malicious:
    the server may lie about who dropped; else it follows the protocol and only looks.

    k is even, and with C = ⌊γn⌋ corrupt and D = ⌊δn⌋ lost nodes among the n - 1 that a node draws from:
    - security: n · P[at least t corrupt holders] <= 2^-41;
    - correctness: n · P[fewer than t surviving holders] <= 2^-20;
    - semi-malicious: with c corrupt holders at most (but for 2^-41), 2t > k + c. An honest holder gives a share of one
      of a node's two secrets, a corrupt one of both, so that the server cannot get both secrets of a node;
    - connectivity, semi-honest: `disconnection` < 2^-41. The partners are k/2, or as many more of the k as that needs;
      if all k are not enough, k grows;
    - connectivity, semi-malicious: all k are partners, and `isolation` < 2^-41 with the most kept partners for which
      n · P[fewer of a node's partners survive] <= 2^-20. With fewer partners the server could conceal some from a node
      (tell it, and only it, that they dealt no shares) and name others as lost, until only corrupt ones are left. But a
      node sends its vector only if t of its holders dealt, by what it heard, and its seed is revealed only by t that
      survived, by what they signed: 2t - k at least are both, and one of these is honest and its partner.
    At least 2 shares are needed always: one holder alone knows nothing.

    Up to 30 nodes, or where that k would be n - 1 or more, the graph is complete and nothing is left to chance.
    Semi-malicious: t = ⌊(1+γ)n/2⌋ + 1, so that 2t > n + C. Semi-honest: the least majority above C (with a majority
    two halves that lost sight of each other cannot reveal one secret each).

    Raises `NoProtection`.
    """
    for name, value in (("dropout", dropout), ("corrupt", corrupt)):
        if not 0 <= value < 0.5:
            raise NoProtection(
                f"{name} is {value}; it is a fraction of the cohort and must be from 0 to less than 0.5: "
                "a secure sum needs a majority that stays and is honest."
            )
    if n < MIN_COHORT:
        raise NoProtection(
            f"the cohort has {n} nodes; a secure sum needs at least {MIN_COHORT}: of two, each knows the other's value "
            "from the sum. Bring in more nodes."
        )
    if n > MAX_X:
        raise NoProtection(f"the cohort has {n} nodes; shares are numbered up to {MAX_X}: choose a smaller cohort.")
    # A float such as 0.05 or 1 - 0.9 lies beside the fraction that is meant, and ⌊δn⌋ would be one off.
    gamma = Fraction(corrupt).limit_denominator(10**6)
    delta = Fraction(dropout).limit_denominator(10**6)
    colluders = math.floor(gamma * n)
    survivors = math.ceil((1 - delta) * n)
    quorum = math.floor((1 + gamma) * n / 2) + 1
    if survivors - colluders < 2:
        raise NoProtection(
            f"of {n} nodes {n - survivors} may drop out and {colluders} of the others may side with the server: that "
            "can leave one honest node, whose value the sum would be. Bring in more nodes, or lower dropout or corrupt."
        )
    # On a complete graph no threshold is above the quorum, so this is the test of the threshold too.
    if quorum > survivors:
        raise NoProtection(
            f"of {n} nodes {n - survivors} may drop out, but {quorum} must stay to agree on who survived (more than "
            f"half of the cohort and of the {colluders} that may sign twice): a round that lost so many could not be "
            f"unmasked. Let at most {n - quorum} drop out, lower corrupt, or bring in more nodes."
        )
    sparse = None if n <= COMPLETE_UP_TO else _sparse(n, colluders, n - survivors, semi_malicious)
    if sparse is None:
        threshold = quorum if semi_malicious else max(n // 2, colluders) + 1
        return Parameters(n, n, threshold, n - 1, survivors - 1, True, quorum, survivors, colluders)
    holders, threshold, partners, kept = sparse
    return Parameters(n, holders, threshold, partners, kept, False, quorum, survivors, colluders)


def draw_holders(parameters: Parameters, me: int) -> tuple[int, ...]:
    """The other nodes (1 to n) that shall hold shares of node `me`'s secrets.

    Complete graph: all others, in order. Else k of them, uniform and in random order, from the system's randomness.
    """
    if not 1 <= me <= parameters.n:
        raise ValueError(f"node {me} is not one of 1 to {parameters.n}")
    drawn = (
        list(range(1, parameters.n))
        if parameters.complete
        else secrets.SystemRandom().sample(range(1, parameters.n), parameters.holders)
    )
    return tuple(x + (x >= me) for x in drawn)


def partners_of(parameters: Parameters, holders: tuple[int, ...]) -> tuple[int, ...]:
    """The drawn holders that are mask partners too: the first ones, as uniform as the draw was."""
    return holders[: parameters.partners]


def disconnection(n: int, absent: int, partners: int) -> float:
    """A bound on the probability that the mask graph among the nodes that count falls apart.

    n nodes drew `partners` = q others each; `absent` of them, chosen without sight of the draw, are corrupt or lost,
    which leaves m = n - absent. If some of these, S, share no mask with the rest, the server learns the sum over S.
    For one S of s nodes that takes that no node of S drew any of the m - s others, nor any of these one of S. A draw
    of q among n - 1 misses x given nodes with probability a(x) = C(n-1-x, q) / C(n-1, q), and draws are independent,
    so P(S) = a(m-s)^s · a(s)^(m-s). One of S and the rest has at most m/2 nodes; by the union bound

        P <= sum over s = 1 .. m/2 of C(m, s) · a(m-s)^s · a(s)^(m-s).

    The term for s = 1 (one node alone, its value in the open) is nearly all of it. The bound says nothing of a server
    that calls nodes lost after it saw the draw: see `isolation`.
    """
    drawable = _log_choose(n - 1, partners)

    def missed(x: int) -> float:
        return _log_choose(n - 1 - x, partners) - drawable

    m = n - absent
    total = 0.0
    for s in range(1, m // 2 + 1):
        term = _log_choose(m, s) + s * missed(m - s) + (m - s) * missed(s)
        total += math.exp(min(term, 0.0))
    return min(total, 1.0)


def isolation(n: int, colluders: int, partners: int, kept: int) -> float:
    """The like bound where the server itself names the lost nodes, knowing the whole draw.

    A lying server that may name δn nodes lost can name all honest partners of one node, if these are no more, and read
    its value. So holders give shares of a node's self-mask only if at least `kept` of the partners that this node drew
    (it tells them, sealed with the shares, whom it drew) are among the survivors. If then S, of s honest survivors,
    share no mask with the other honest survivors, each node of S drew at least `kept` of its q partners among S and
    the C corrupt nodes, whoever is lost: with probability h(s) = P[Hypergeom(n - 1, C + s - 1, q) >= kept] each, and
    draws are independent. One of S and the rest has at most half of the m = n - C honest nodes; by the union bound
    over all S, and so over all survivor sets,

        P <= sum over s = 1 .. m/2 of C(m, s) · h(s)^s.
    """
    m = n - colluders
    half = m // 2
    # Where the bound fails it mostly does at the largest parts: one number, before thousands.
    largest = _tail(n - 1, colluders + half - 1, partners, kept)
    if largest and _log_choose(m, half) + half * math.log(largest) >= 0:
        return 1.0
    logs = _log_factorials(n)

    def log_choose(a: npt.NDArray[np.int64], b: npt.NDArray[np.int64] | int) -> npt.NDArray[np.float64]:
        b = np.asarray(b)
        return np.where(b <= a, logs[a] - logs[b] - logs[np.maximum(a - b, 0)], -np.inf)

    s = np.arange(1, half + 1)
    hit = colluders + s - 1
    tails = np.zeros(half)
    for count in range(kept, partners + 1):
        ways = log_choose(hit, count) + log_choose(n - 1 - hit, partners - count)
        more = np.exp(ways - _log_choose(n - 1, partners))
        tails += more
        if (more <= tails * 2.0**-60).all():
            break
    with np.errstate(divide="ignore"):
        terms = log_choose(np.full(half, m), s) + s * np.log(tails)
    return min(float(np.exp(np.minimum(terms, 0.0)).sum()), 1.0)


@lru_cache(maxsize=8)
def _log_factorials(n: int) -> npt.NDArray[np.float64]:
    """ln 0! to ln n!."""
    return np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, n + 1)))))


def _sparse(n: int, colluders: int, drop_outs: int, semi_malicious: bool) -> tuple[int, int, int, int] | None:
    """k, t, partners and kept partners by the rules in `choose`; None where no k under n - 1 will do."""
    security, correctness = 2.0 ** -(SECURITY_BITS + 1), 2.0**-CORRECTNESS_BITS / n
    corrupt = lost = partners = lost_partners = 0
    for k in range(2, n - 1, 2):
        corrupt = _least(n - 1, colluders, k, security / n, corrupt)
        lost = _least(n - 1, drop_outs, k, correctness, lost)
        # At most corrupt - 1 holders are corrupt, and at least k - (lost - 1) survive.
        threshold = (k + corrupt - 1) // 2 + 1 if semi_malicious else max(corrupt, 2)
        if threshold > k - lost + 1:
            continue
        partners = k if semi_malicious else max(partners, k // 2)
        while partners <= k:
            if semi_malicious:
                lost_partners = _least(n - 1, drop_outs, partners, correctness, lost_partners)
                kept = partners - lost_partners + 1
                cut_off = isolation(n, colluders, partners, kept)
            else:
                kept = 0
                cut_off = disconnection(n, colluders + drop_outs, partners)
            if cut_off < security:
                return k, threshold, partners, kept
            partners += 1  # What is too few here is too few for a larger k.
    return None


def _least(population: int, marked: int, draws: int, bound: float, start: int) -> int:
    """The least count, from `start` on, that so many draws reach or pass with probability <= bound."""
    count = start
    while _tail(population, marked, draws, count) > bound:
        count += 1
    return count


def _tail(population: int, marked: int, draws: int, count: int) -> float:
    """P[at least `count` of `draws` without replacement are marked]; 1 where `count` is not above the mean.

    Above the mean each term of the sum is smaller than the one before, so it is exact to rounding and soon done.
    """
    if count * population <= draws * marked:
        return 1.0
    if count > min(draws, marked):
        return 0.0
    rest = population - marked
    term = math.exp(_log_choose(marked, count) + _log_choose(rest, draws - count) - _log_choose(population, draws))
    total = 0.0
    while term > total * 2.0**-60:
        total += term
        term *= (marked - count) * (draws - count) / ((count + 1) * (rest - draws + count + 1))
        count += 1
    return total


def _log_choose(n: int, k: int) -> float:
    """ln C(n, k); minus infinity where k > n."""
    if k > n:
        return -math.inf
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
