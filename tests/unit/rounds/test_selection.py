from collections import Counter

from fedward_common.messages import Failure, Reason
from fedward_server.selection import Members, draw
from fedward_server.transport import Peer

NAMES = [f"node-{i}" for i in range(20)]
OFFLINE = Failure(Reason.OFFLINE)


def test_same_seed_and_round_same_cohort_in_any_order_of_names():
    first = draw(NAMES, {}, 5, seed=3, round_=7)
    assert first == draw(reversed(NAMES), {}, 5, 3, 7)
    assert first.cohort == tuple(sorted(first.cohort)) and len(first.cohort) == 5
    assert first != draw(NAMES, {}, 5, 3, 8) and first != draw(NAMES, {}, 5, 4, 7)


def test_every_node_has_the_same_chance():
    counts = Counter(name for r in range(4000) for name in draw(NAMES, {}, 5, 1, r).cohort)
    # 4000 draws with p = 1/4: mean 1000, standard deviation 27.
    assert set(counts) == set(NAMES) and all(abs(count - 1000) < 5 * 27.4 for count in counts.values())


def test_unavailable_nodes_are_replaced_by_the_next_in_order():
    whole = draw(NAMES, {}, 5, 1, 1).cohort
    gone = whole[2]
    without = draw(NAMES, {gone: OFFLINE}, 5, 1, 1)
    assert set(whole) - {gone} < set(without.cohort) and len(without.cohort) == 5
    assert without.passed_over == {gone: OFFLINE}
    # One that was not drawn is not missed.
    other = next(name for name in NAMES if name not in whole)
    assert draw(NAMES, {other: OFFLINE}, 5, 1, 1).passed_over == {}


def test_all_nodes_by_default_and_fewer_than_asked():
    away = dict.fromkeys(NAMES[:17], OFFLINE)
    assert draw(NAMES, {}, None, 1, 1).cohort == tuple(sorted(NAMES))
    few = draw(NAMES, away, 5, 1, 1)
    assert few.cohort == tuple(NAMES[17:]) and set(few.passed_over) == set(away)


def test_members_by_name_tag_and_holdout():
    tagged = Members(named=(), tags=("ct", "adult"), holdout=("h",))
    assert tagged.trains(Peer("a", ("adult", "ct", "x")))
    assert not tagged.trains(Peer("b", ("ct",)))
    assert not tagged.trains(Peer("h", ("ct", "adult"))) and tagged.wants(Peer("h"))
    named = Members(named=("a", "b"), tags=(), holdout=())
    assert named.trains(Peer("a")) and not named.wants(Peer("c"))
