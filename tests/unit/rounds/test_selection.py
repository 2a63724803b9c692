from collections import Counter
from itertools import pairwise

from fedward_common.messages import Failure, Reason
from fedward_server.selection import Members, Secret, Seeded, draw
from fedward_server.transport import Peer

NAMES = [f"node-{i}" for i in range(20)]
OFFLINE = Failure(Reason.OFFLINE)


def test_same_seed_and_round_same_cohort_in_any_order_of_names():
    first = draw(NAMES, {}, 5, Seeded(3), round_=7)
    assert first == draw(reversed(NAMES), {}, 5, Seeded(3), 7)
    assert first.cohort == tuple(sorted(first.cohort)) and len(first.cohort) == 5
    assert first != draw(NAMES, {}, 5, Seeded(3), 8) and first != draw(NAMES, {}, 5, Seeded(4), 7)


def test_every_node_has_the_same_chance():
    counts = Counter(name for r in range(4000) for name in draw(NAMES, {}, 5, Seeded(1), r).cohort)
    # 4000 draws with p = 1/4: mean 1000, standard deviation 27.
    assert set(counts) == set(NAMES) and all(abs(count - 1000) < 5 * 27.4 for count in counts.values())


def test_unavailable_nodes_are_replaced_by_the_next_in_order():
    whole = draw(NAMES, {}, 5, Seeded(1), 1).cohort
    gone = whole[2]
    without = draw(NAMES, {gone: OFFLINE}, 5, Seeded(1), 1)
    assert set(whole) - {gone} < set(without.cohort) and len(without.cohort) == 5
    assert without.passed_over == {gone: OFFLINE}
    # One that was not drawn is not missed.
    other = next(name for name in NAMES if name not in whole)
    assert draw(NAMES, {other: OFFLINE}, 5, Seeded(1), 1).passed_over == {}


def test_all_nodes_by_default_and_fewer_than_asked():
    away = dict.fromkeys(NAMES[:17], OFFLINE)
    assert draw(NAMES, {}, None, Seeded(1), 1).cohort == tuple(sorted(NAMES))
    few = draw(NAMES, away, 5, Seeded(1), 1)
    assert few.cohort == tuple(NAMES[17:]) and set(few.passed_over) == set(away)


def test_members_by_name_tag_and_holdout():
    tagged = Members(named=(), tags=("ct", "adult"), holdout=("h",))
    assert tagged.trains(Peer("a", ("adult", "ct", "x")))
    assert not tagged.trains(Peer("b", ("ct",)))
    assert not tagged.trains(Peer("h", ("ct", "adult"))) and tagged.wants(Peer("h"))
    named = Members(named=("a", "b"), tags=(), holdout=())
    assert named.trains(Peer("a")) and not named.wants(Peer("c"))


def test_a_secret_lot_is_drawn_fairly_and_the_same_again(tmp_path):
    lot = Secret.kept(tmp_path / "lot.key")
    assert (tmp_path / "lot.key").stat().st_mode & 0o777 == 0o600 and len(lot.key) == 32
    drawn = [draw(NAMES, {}, 5, lot, r).cohort for r in range(4000)]
    counts = Counter(name for cohort in drawn for name in cohort)
    # As above; of pairs of rounds, 5 · 5/20 names in common on average, deviation 0.87/√4000.
    assert set(counts) == set(NAMES) and all(abs(count - 1000) < 5 * 27.4 for count in counts.values())
    common = sum(len(set(a) & set(b)) for a, b in pairwise(drawn)) / 3999
    assert abs(common - 1.25) < 5 * 0.87 / 4000**0.5
    assert draw(reversed(NAMES), {}, 5, Secret.kept(tmp_path / "lot.key"), 7).cohort == drawn[7]
    other = Secret.kept(tmp_path / "other.key")
    assert [draw(NAMES, {}, 5, other, r).cohort for r in range(20)] != drawn[:20]


def test_how_many_a_cohort_was_drawn_from():
    away = dict.fromkeys(NAMES[:3], OFFLINE)
    assert draw(NAMES, {}, 5, Seeded(1), 1).available == 20
    # Whether or not those who are away come up in the draw.
    assert {draw(NAMES, away, 5, Seeded(1), r).available for r in range(20)} == {17}
