"""Parameters against the published table and exact arithmetic, the draw against chance, connectivity by counting."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction

import pytest
from fedward_common.secagg import graph
from fedward_common.secagg.graph import (
    NoProtection,
    Parameters,
    choose,
    disconnection,
    draw_holders,
    isolation,
    partners_of,
)

TABLE = {
    (100, 0.05): ((12, 6), (16, 11)),
    (100, 0.1): ((22, 11), (32, 22)),
    (100, 0.2): ((40, 21), (62, 42)),
    (10_000, 0.05): ((34, 20), (62, 44)),
    (10_000, 0.1): ((54, 31), (122, 85)),
    (10_000, 0.2): ((122, 67), (482, 328)),
}


@pytest.mark.parametrize(("n", "fraction"), TABLE)
@pytest.mark.parametrize("semi_malicious", [False, True])
def test_the_published_table(n: int, fraction: float, semi_malicious: bool) -> None:
    chosen = choose(n, fraction, fraction, semi_malicious)
    assert (chosen.holders, chosen.threshold) == TABLE[n, fraction][semi_malicious]
    assert not chosen.complete
    assert chosen.survivors == n - chosen.drop_outs == round(n * (1 - fraction))
    assert chosen.colluders == round(n * fraction)


def at_least(population: int, marked: int, draws: int, count: int) -> Fraction:
    """P[at least `count` of `draws` are marked], exactly."""
    ways = sum(math.comb(marked, i) * math.comb(population - marked, draws - i) for i in range(count, draws + 1))
    return Fraction(ways, math.comb(population, draws))


def connected(n: int, colluders: int, lost: int, partners: int, semi_malicious: bool) -> bool:
    """Whether so many partners hold the mask graph together; with the most that may be asked to survive."""
    if not semi_malicious:
        return disconnection(n, colluders + lost, partners) < 2.0**-41
    kept = max(
        kept
        for kept in range(partners + 2)
        if n * at_least(n - 1, lost, partners, partners - kept + 1) <= Fraction(1, 2**20)
    )
    return isolation(n, colluders, partners, kept) < 2.0**-41


@pytest.mark.parametrize("semi_malicious", [False, True])
@pytest.mark.parametrize(
    ("n", "dropout", "corrupt"),
    [(31, 0.05, 0.05), (31, 0.1, 0.1), (40, 0, 0.2), (64, 0.15, 0.05), (90, 0.05, 0), (120, 0.1, 0.25)],
)
def test_k_and_t_are_the_smallest_by_exact_arithmetic(
    n: int, dropout: float, corrupt: float, semi_malicious: bool
) -> None:
    colluders, lost = (math.floor(Fraction(str(fraction)) * n) for fraction in (corrupt, dropout))

    def fits(k: int, t: int) -> bool:
        """The rules as the reference writes them; a node draws among n - 1."""
        first = t
        if semi_malicious:  # t comes of t1 by t1 <- ceil((t1 + k - 1.25) / 2), t = t1 + 1
            sources = [t1 for t1 in range(k + 1) if math.ceil((t1 + k - Fraction(5, 4)) / 2) + 1 <= t]
            if not sources:
                return False
            first = max(sources) + 1
        elif t < 2:
            return False
        secure = n * at_least(n - 1, colluders, k, first) <= Fraction(1, 2**41)
        correct = n * at_least(n - 1, lost, k, k - t + 1) <= Fraction(1, 2**20)
        return secure and correct

    chosen = choose(n, dropout, corrupt, semi_malicious)
    assert not chosen.complete
    assert fits(chosen.holders, chosen.threshold)
    assert not any(fits(chosen.holders, t) for t in range(1, chosen.threshold))
    for k in range(2, chosen.holders, 2):
        assert not connected(n, colluders, lost, k, semi_malicious) or not any(fits(k, t) for t in range(1, k + 1))


FRACTIONS = [0, 0.05, 0.1, 0.2, 0.25, 0.3, 1 / 3, 0.4, 0.49]


@pytest.mark.parametrize("n", [*range(3, 45), 60, 99, 160])
def test_what_every_choice_promises(n: int) -> None:
    for dropout, corrupt, semi_malicious in itertools.product(FRACTIONS, FRACTIONS, (False, True)):
        try:
            chosen = choose(n, dropout, corrupt, semi_malicious)
        except NoProtection:
            continue
        assert chosen.complete or n > 30
        assert 2 <= chosen.threshold <= chosen.holders <= n
        assert chosen.survivors - chosen.colluders >= 2
        assert chosen.quorum <= chosen.survivors
        # Each of two survivor sets needs a quorum; an honest node signs one of them, a colluder both.
        assert 2 * chosen.quorum > n + chosen.colluders
        assert 2 * chosen.quorum > (1 + corrupt) * n - 1e-6
        if chosen.complete:
            assert (chosen.holders, chosen.partners, chosen.kept) == (n, n - 1, chosen.survivors - 1)
            assert chosen.colluders < chosen.threshold <= chosen.survivors
            assert 2 * chosen.threshold > n
            assert not semi_malicious or 2 * chosen.threshold > n + chosen.colluders
        else:
            assert chosen.holders < n - 1
            assert chosen.holders / 2 <= chosen.partners <= chosen.holders
            few, lost = chosen.colluders, chosen.drop_outs
            assert connected(n, few, lost, chosen.partners, semi_malicious)
            if semi_malicious:
                assert chosen.partners == chosen.holders
                fewer = at_least(n - 1, lost, chosen.partners, chosen.partners - chosen.kept + 1)
                assert n * fewer <= Fraction(1, 2**20)
            else:
                assert chosen.kept == 0
                if chosen.partners > chosen.holders / 2:
                    assert not connected(n, few, lost, chosen.partners - 1, semi_malicious)


def test_hospitals() -> None:
    """What a person can work out: three to ten nodes, each holding a share of every other's secrets."""
    assert choose(3, 0.34, 0.0) == Parameters(3, 3, 2, 2, 1, True, 2, 2, 0)
    assert choose(5, 0.2, 0.2) == Parameters(5, 5, 4, 4, 3, True, 4, 4, 1)
    assert choose(10, 0.3, 0.1) == Parameters(10, 10, 6, 9, 6, True, 6, 7, 1)
    assert choose(10, 0.3, 0.3, False) == Parameters(10, 10, 6, 9, 6, True, 7, 7, 3)
    assert choose(10, 0.0, 0.0).drop_outs == 0


def test_where_no_sparse_graph_will_do_the_graph_is_complete() -> None:
    assert choose(30, 0.05, 0.05).complete
    assert not choose(31, 0.05, 0.05).complete
    tight = choose(40, 0.33, 0.33)
    assert (tight.complete, tight.holders, tight.threshold, tight.partners) == (True, 40, 27, 39)


@pytest.mark.parametrize(
    ("n", "dropout", "survivors", "corrupt", "colluders"),
    [(10, 0.1, 9, 0.1, 1), (10, 1 - 0.9, 9, 1 - 0.9, 1), (100, 0.07, 93, 0.29, 29), (50, 0.14, 43, 0.06, 3)],
)
def test_counts_are_those_of_the_decimal_fraction(
    n: int, dropout: float, survivors: int, corrupt: float, colluders: int
) -> None:
    """0.29 * 100 is 28.999999999999996 and 10 * (1 - 0.9) is 0.9999999999999998 to a float."""
    chosen = choose(n, dropout, corrupt)
    assert (chosen.survivors, chosen.colluders) == (survivors, colluders)


@pytest.mark.parametrize(
    ("n", "dropout", "corrupt", "reason"),
    [
        (2, 0.0, 0.0, "has 2 nodes.*at least 3"),
        (0, 0.0, 0.0, "has 0 nodes"),
        (70_000, 0.1, 0.1, "up to 65535"),
        (10, 0.5, 0.1, "dropout is 0.5"),
        (10, -0.1, 0.1, "dropout is -0.1"),
        (10, math.nan, 0.1, "dropout is nan"),
        (10, 0.1, 0.5, "corrupt is 0.5"),
        (10, 0.1, -1, "corrupt is -1"),
        (3, 0.34, 0.34, "one honest node"),
        (5, 0.4, 0.4, "one honest node"),
        (10, 0.4, 0.2, "of 10 nodes 4 may drop out, but 7 must stay.*Let at most 3 drop out"),
        (1000, 0.4, 0.3, "of 1000 nodes 400 may drop out, but 651 must stay.*Let at most 349 drop out"),
        (6, 0.34, 0.34, "of 6 nodes 2 may drop out, but 5 must stay.*Let at most 1 drop out"),
    ],
)
def test_refusals(n: int, dropout: float, corrupt: float, reason: str) -> None:
    with pytest.raises(NoProtection, match=reason):
        choose(n, dropout, corrupt)


def test_the_way_out_of_a_refusal_works() -> None:
    assert choose(10, 0.3, 0.2).drop_outs == 3
    assert choose(1000, 0.349, 0.3).drop_outs == 349


@pytest.mark.parametrize("case", [(40, 10, 12), (99, 20, 62), (99, 0, 10), (30, 15, 29), (200, 1, 3)])
def test_tails_against_exact_sums(case: tuple[int, int, int]) -> None:
    population, marked, draws = case
    for count in range(draws + 2):
        exact = at_least(population, marked, draws, count)
        if count * population > marked * draws:
            assert graph._tail(population, marked, draws, count) == pytest.approx(float(exact), rel=1e-11)
        else:
            assert graph._tail(population, marked, draws, count) == 1


def closed(nodes: Iterable[int], edges: set[frozenset[int]]) -> list[frozenset[int]]:
    """Every non-empty part of `nodes`, of at most half of them, that no edge leaves towards the rest."""
    everyone = frozenset(nodes)
    parts = (
        frozenset(part)
        for size in range(1, len(everyone) // 2 + 1)
        for part in itertools.combinations(sorted(everyone), size)
    )
    return [s for s in parts if not any(len(edge & s) == 1 and edge <= everyone for edge in edges)]


@pytest.mark.parametrize(
    ("n", "absent", "partners"), [(4, 0, 1), (4, 1, 1), (4, 2, 2), (5, 0, 1), (5, 1, 2), (5, 2, 1), (6, 3, 1)]
)
def test_the_bound_counts_the_parts_cut_off(n: int, absent: int, partners: int) -> None:
    """Over all draws, one by one: the sum is the expected number of parts cut off, so no less than P[some part is]."""
    choices = [list(itertools.combinations([j for j in range(n) if j != i], partners)) for i in range(n)]
    cut = parts = draws = 0
    for drawn in itertools.product(*choices):
        edges = {frozenset((i, j)) for i, others in enumerate(drawn) for j in others}
        found = closed(range(n - absent), edges)
        draws += 1
        parts += len(found)
        cut += bool(found)
    bound = disconnection(n, absent, partners)
    assert bound == pytest.approx(min(parts / draws, 1), rel=1e-12)
    assert bound >= cut / draws


@pytest.mark.parametrize(("n", "absent", "partners", "trials"), [(14, 4, 2, 2000), (24, 8, 3, 2000), (12, 0, 1, 1000)])
def test_graphs_as_drawn_fall_apart_as_often_as_the_bound_says(n: int, absent: int, partners: int, trials: int) -> None:
    parameters = Parameters(n, 2 * partners, 2, partners, 0, False, n, n, 0)
    staying = set(range(1, n - absent + 1))
    apart = 0
    for _ in range(trials):
        reach: dict[int, set[int]] = {x: set() for x in staying}
        for x in range(1, n + 1):
            for y in partners_of(parameters, draw_holders(parameters, x)):
                if {x, y} <= staying:
                    reach[x].add(y)
                    reach[y].add(x)
        seen, edge = {1}, [1]
        while edge:
            new = reach[edge.pop()] - seen
            seen |= new
            edge.extend(new)
        apart += seen != staying
    bound = disconnection(n, absent, partners)
    spread = 6 * math.sqrt(bound * (1 - bound) / trials)
    assert apart / trials <= bound + spread
    assert apart / trials >= bound * 0.7 - spread


@pytest.mark.parametrize(
    ("n", "colluders", "partners", "kept"), [(4, 1, 2, 2), (5, 1, 2, 2), (5, 2, 2, 2), (5, 0, 1, 1), (4, 0, 1, 1)]
)
def test_the_isolation_bound_counts_the_parts_that_could_be_cut_off(
    n: int, colluders: int, partners: int, kept: int
) -> None:
    """Over all draws: the expected number of parts each of whose nodes drew `kept` in the part or among colluders."""
    choices = [list(itertools.combinations([j for j in range(n) if j != i], partners)) for i in range(n)]
    honest, corrupt = range(colluders, n), set(range(colluders))
    parts = [set(part) for size in range(1, len(honest) // 2 + 1) for part in itertools.combinations(honest, size)]
    draws = found = 0
    for drawn in itertools.product(*choices):
        draws += 1
        found += sum(all(len((part | corrupt).intersection(drawn[i])) >= kept for i in part) for part in parts)
    assert isolation(n, colluders, partners, kept) == pytest.approx(min(found / draws, 1), rel=1e-12)


@pytest.mark.parametrize("case", [(100, 20, 58, 38), (100, 10, 29, 19), (90, 0, 30, 20), (61, 12, 40, 28)])
def test_the_isolation_bound_against_exact_sums(case: tuple[int, int, int, int]) -> None:
    n, colluders, partners, kept = case
    honest = n - colluders
    exact = sum(
        math.comb(honest, s) * at_least(n - 1, colluders + s - 1, partners, kept) ** s
        for s in range(1, honest // 2 + 1)
    )
    assert isolation(*case) == pytest.approx(float(exact), rel=1e-9)


def mask_graph(parameters: Parameters) -> tuple[dict[int, set[int]], dict[int, set[int]]]:
    """A draw: node -> its own partners, and node -> all that it shares a mask with."""
    own = {x: set(partners_of(parameters, draw_holders(parameters, x))) for x in range(1, parameters.n + 1)}
    return own, {x: own[x] | {y for y in own if x in own[y]} for x in own}


def test_a_server_that_names_the_lost_nodes_cuts_one_off_only_without_kept_partners() -> None:
    """Colluders are the last nodes. The victim's honest partners are few enough to be named lost, all of them: its
    masks are then all known, and its value is in the open. Its own drawn partners give the lie away."""
    n = 1000
    parameters = replace(choose(n, 0.1, 0.1), partners=54, kept=33)
    colluders = set(range(n - parameters.colluders + 1, n + 1))
    own, shares_mask = mask_graph(parameters)
    for victim in range(1, n - parameters.colluders + 1):
        lost = shares_mask[victim] - colluders
        survivors = set(own) - lost
        if len(survivors) >= parameters.survivors:
            break
    else:
        raise AssertionError("this attack was never possible here")
    assert not shares_mask[victim] & survivors - colluders
    assert len(own[victim] & survivors) < parameters.kept


def log2_all(nodes: int, population: int, marked: int, draws: int, count: int) -> float:
    """log2 P[each of so many nodes draws at least `count` of the marked]."""
    exact = at_least(population, min(marked, population), draws, count)
    one = math.log2(exact.numerator) - math.log2(exact.denominator) if exact else -math.inf
    return nodes * one if nodes else 0.0


@pytest.mark.parametrize(("n", "fraction"), [(31, 0.05), (40, 0.2), (100, 0.05), (100, 0.1)])
def test_no_part_is_cut_off_by_telling_nodes_different_things(n: int, fraction: float) -> None:
    """The server may conceal from some nodes that others dealt; these sign nothing that the rest signs, and n - D must
    sign, so that those lied to and those named as lost are D at most. It may hold back what was dealt to a part S of s
    honest nodes from outside. S comes off if each node in it drew, in S or among the colluders, all but 2(k - t) of its
    k partners if it was lied to, and else all but k - t; or with the lost nodes named: all but k - t, and all, in S,
    among the colluders or the lost."""
    chosen = choose(n, fraction, fraction)
    k, t, lost = chosen.holders, chosen.threshold, chosen.drop_outs
    honest = n - chosen.colluders
    total = 0.0
    for s, lied_to in itertools.product(range(1, honest // 2 + 1), range(lost + 1)):
        if lied_to > s:
            continue
        near = chosen.colluders + s - 1
        others, named = s - lied_to, lost - lied_to
        any_lost = log2_all(lied_to, n - 1, near, k, 2 * t - k) + log2_all(others, n - 1, near, k, t)
        these_lost = log2_all(lied_to, n - 1, near + named, k, t) + log2_all(others, n - 1, near + named, k, k)
        these_lost += math.log2(math.comb(honest - s, named))
        parts = math.log2(math.comb(honest, s)) + math.log2(math.comb(s, lied_to))
        total += 2.0 ** (parts + min(any_lost, these_lost))
    assert total < 2.0**-41


def test_honest_rounds_keep_enough_partners() -> None:
    parameters = choose(200, 0.1, 0.1)
    for lost in (range(1, 21), range(181, 201), range(3, 200, 10)):
        own, _ = mask_graph(parameters)
        assert len(lost) == parameters.drop_outs
        assert all(len(own[x].difference(lost)) >= parameters.kept for x in own)


@pytest.mark.parametrize(("partners", "kept"), [(5, 4), (6, 4)])
def test_no_choice_of_lost_nodes_beats_the_isolation_bound(partners: int, kept: int) -> None:
    """Every survivor set that the kept partners allow, tried, in small graphs; of nodes 1 to 10 the last is corrupt."""
    parameters = Parameters(10, 8, 2, partners, kept, False, 6, 7, 1)
    trials, beaten = 80, 0
    for _ in range(trials):
        own, shares_mask = mask_graph(parameters)
        edges = {frozenset((x, y)) for x in own for y in shares_mask[x]}
        beaten += any(
            all(len(own[x].difference(lost)) >= kept for x in set(range(1, 10)).difference(lost))
            and bool(closed(set(range(1, 10)).difference(lost), edges))
            for size in range(parameters.drop_outs + 1)
            for lost in itertools.combinations(range(1, 10), size)
        )
    bound = isolation(10, 1, partners, kept)
    assert bound < 1
    assert beaten / trials <= bound + 6 * math.sqrt(bound * (1 - bound) / trials)


def test_more_partners_than_half_where_connectivity_needs_them() -> None:
    """100 nodes, 5 % lost and 5 % corrupt: with 6 of 12 holders as partners one node in 2^24 would stand alone."""
    chosen = choose(100, 0.05, 0.05, False)
    assert disconnection(100, 10, 6) > 2.0**-24
    assert (chosen.holders, chosen.partners) == (12, 9)


def test_more_holders_where_all_as_partners_are_not_enough() -> None:
    """Nobody lost, nobody corrupt: two holders would do for the shares, but not for one connected mask graph."""
    chosen = choose(50, 0, 0, False)
    assert (chosen.holders, chosen.threshold) == (4, 2)


def test_on_a_complete_graph_all_others_hold_shares() -> None:
    parameters = choose(6, 0.0, 0.0)
    assert draw_holders(parameters, 1) == partners_of(parameters, draw_holders(parameters, 1)) == (2, 3, 4, 5, 6)
    assert draw_holders(parameters, 4) == (1, 2, 3, 5, 6)
    assert draw_holders(parameters, 6) == (1, 2, 3, 4, 5)


@pytest.mark.parametrize("me", [1, 17, 31])
def test_a_draw_is_of_distinct_others_and_uniform(me: int) -> None:
    """χ² over holders and over partners. 29 degrees of freedom: above 105 once in 10^10."""
    parameters = choose(31, 0.1, 0.1)
    others = set(range(1, 32)) - {me}
    holders: Counter[int] = Counter()
    partners: Counter[int] = Counter()
    trials = 3000
    for _ in range(trials):
        drawn = draw_holders(parameters, me)
        assert len(drawn) == len(set(drawn)) == parameters.holders
        assert set(drawn) <= others
        holders.update(drawn)
        partners.update(partners_of(parameters, drawn))
    for counts, size in ((holders, parameters.holders), (partners, parameters.partners)):
        assert counts.total() == trials * size
        # Without replacement the counts vary less, by (30 - size) / 29.
        expected = trials * size / 30
        spread = expected * (30 - size) / 29
        assert sum((counts[x] - expected) ** 2 for x in others) / spread < 105


@pytest.mark.parametrize("me", [0, 32, -1])
def test_only_a_node_of_the_cohort_draws(me: int) -> None:
    with pytest.raises(ValueError, match="not one of 1 to 31"):
        draw_holders(choose(31, 0.1, 0.1), me)
