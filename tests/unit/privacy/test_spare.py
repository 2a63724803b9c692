"""Noise that comes off again: what is left is what was asked for, whoever drops out, against counts and draws."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fedward_common.algorithms.base import DELTA
from fedward_common.errors import ConfigError
from fedward_common.privacy import site
from fedward_common.privacy.distributed import without_carries
from fedward_common.privacy.events import Skellam, to_json
from fedward_common.privacy.ledger import verify
from fedward_common.privacy.noise import Noise
from fedward_common.privacy.spare import SpareNoise, split
from fedward_common.secagg.cells import cells_of, gather, scatter
from fedward_common.secagg.graph import choose
from fedward_common.secagg.masks import Keystream
from fedward_server.paths import RunPaths
from fedward_server.plan import privacy
from fedward_server.simulation import Faults, simulate

from .test_private_runs import N, Task, config, rounds

EXACT = {"noise_on_dropout": "exact"}
OF = site.Stamped("run", 1, 1)


def made(n: int, corrupt: float = 0.0, dropout: float = 0.2, length: int = 1000) -> site.Distributed:
    asked = config(privacy=EXACT, secure_sum={"dropout": dropout, "corrupt": corrupt})
    found = site.mechanism(asked, length, n)
    assert isinstance(found, site.Distributed)
    return found


def spare_of(n: int, corrupt: float = 0.0, dropout: float = 0.2, length: int = 1000) -> SpareNoise:
    spare = made(n, corrupt, dropout, length).spare
    assert spare is not None
    return spare


# --- who keeps what


def exact(spare: SpareNoise) -> tuple[Fraction, Fraction]:
    """The two parts of V = 1, from what they must do: n − c own parts are V, m − c of both are V."""
    n, m, c = spare.cohort, spare.survivors, spare.colluders
    own = Fraction(1, n - c)
    return own, Fraction(1, m - c) - own


@pytest.mark.parametrize(("n", "corrupt"), [(5, 0.0), (5, 0.2), (6, 0.2), (10, 0.1), (100, 0.1), (1000, 0.2)])
def test_the_laws_are_of_the_parts(n: int, corrupt: float) -> None:
    found = made(n, corrupt)
    spare, asked = found.spare, found.mechanism.variance(found.mechanism.honest)
    assert spare is not None
    for law, part in zip((spare.own, spare.spare), exact(spare), strict=True):
        assert law.variance == pytest.approx(float(part) * asked, rel=1e-12)


@pytest.mark.parametrize(
    ("n", "corrupt", "dropout"), [(5, 0.0, 0.2), (5, 0.2, 0.2), (8, 0.13, 0.4), (10, 0.0, 0.3), (10, 0.2, 0.3)]
)
def test_honest_noise_is_never_less_than_asked_for_and_at_most_one_part_more(
    n: int, corrupt: float, dropout: float
) -> None:
    """Every survivor set size, number of signatures, placing of those that did not sign (and may not exist) and of
    colluders."""
    spare = spare_of(n, corrupt, dropout)
    own, part = exact(spare)
    m, c = spare.survivors, spare.colluders
    for u in range(m, n + 1):
        survivors = frozenset(range(3, 3 + u))
        for s in range(m, u + 1):
            keep = survivors - spare.unneeded(survivors, s)
            least = min(
                (s - c) * own + len(keep - set(unsigned) - set(colluding)) * part
                for unsigned in combinations(survivors, u - s)
                for colluding in combinations(survivors - set(unsigned), c)
            )
            assert least >= 1
            if keep:
                assert least < 1 + part, (u, s)
            elif s < n:
                raise AssertionError("all came off though somebody is missing")


@pytest.mark.parametrize(("n", "corrupt"), [(6, 0.2), (10, 0.0), (30, 0.2), (100, 0.1), (101, 0.13), (1000, 0.2)])
def test_more_signatures_take_off_what_fewer_do_and_more(n: int, corrupt: float) -> None:
    spare = spare_of(n, corrupt)
    for u in {spare.survivors, (spare.survivors + n) // 2, n - 1, n}:
        survivors = frozenset(range(1, u + 1))
        off = [spare.unneeded(survivors, s) for s in range(spare.survivors, u + 1)]
        assert all(fewer <= more for fewer, more in pairwise(off))
        assert off[0] == frozenset() or u == spare.survivors == n
        assert off[-1] == survivors if u == n else off[-1] < survivors


@pytest.mark.parametrize(("n", "corrupt"), [(5, 0.0), (10, 0.2), (100, 0.1), (333, 0.2)])
def test_the_event_claims_the_least_that_is_left_and_pays_for_every_draw(n: int, corrupt: float) -> None:
    found = made(n, corrupt)
    spare, mechanism = found.spare, found.mechanism
    assert spare is not None and isinstance(found.event, Skellam)
    own, part = exact(spare)
    left, draws = [], []
    for s in range(spare.survivors, n + 1):
        keep = len(range(s)) - len(spare.unneeded(frozenset(range(s)), s))
        honest = max(0, keep - spare.colluders)
        left.append((s - spare.colluders) * own + honest * part)
        draws.append(s - spare.colluders + honest)
    assert min(left) == 1
    asked = mechanism.noise_multiplier**2 * mechanism.clip**2 * mechanism.scale**2
    assert found.event.variance == pytest.approx(asked, rel=1e-12)
    assert found.event.gap == Noise.truncation(max(draws) * mechanism.padded)
    plain = site.Distributed(mechanism).event
    assert isinstance(plain, Skellam)
    assert (found.event.l2, found.event.l1) == (plain.l2, plain.l1)


def test_where_nobody_may_drop_out_nothing_is_spare() -> None:
    for n in (3, 4):  # ⌈0.8·4⌉ = 4
        found = made(n)
        assert found.spare is None and found.event == site.Distributed(found.mechanism).event


def test_parts_that_have_no_table_are_refused() -> None:
    mechanism = made(10).mechanism
    tiny = site.distributed.Mechanism(**{**vars(mechanism), "law": site.distributed.Skellam(2.0**-20)})
    with pytest.raises(ConfigError, match=r"noise_on_dropout = 'exact'.*Use more bits, or .*'surplus'"):
        split(tiny, choose(10, 0.2, 0.0), 7)


# --- sums


def keys(n: int) -> dict[int, bytes]:
    return {i: i.to_bytes(32) for i in range(1, n + 1)}


def summed(vectors: list[Any], bits: int) -> Any:
    """Their words summed as cells, as a secure sum does."""
    count = cells_of(vectors[0].size, bits)
    cells = sum((gather(words, bits, 0, count) for words in vectors), np.zeros(count, np.uint64))
    total = np.empty_like(vectors[0])
    scatter(cells, total, bits, 0)
    return total


@pytest.mark.parametrize("bits", [12, 16, 20])
def test_what_came_off_was_never_there_word_for_word(bits: int) -> None:
    n, length = 6, 4000
    # So little noise that nothing wraps around.
    privacy_ = {**EXACT, "noise_multiplier": 0.02}
    asked = config(privacy=privacy_, secure_sum={"dropout": 0.2, "corrupt": 0.0, "bits": bits})
    found = site.mechanism(asked, length, n)
    spare, shape = found.spare, found.shape
    assert spare is not None
    rng = np.random.default_rng(bits)
    vectors = {i: found.words(rng.normal(0, 0.01, length), OF, key) for i, key in keys(n).items()}
    for off in ([], [6], [1, 4], list(keys(n))):
        total = summed(list(vectors.values()), bits)
        spare.take_off(total, [keys(n)[i] for i in off])
        parts = {i: Noise.of(spare.spare).draw(spare.length, Keystream(keys(n)[i])).astype(np.int64) for i in off}
        # Numbers in place of words and cells: each node's, read as within ±2^(b−1), summed.
        half = 1 << (bits - 1)
        numbers = sum(words[shape.noised_at :].astype(np.int64) - half for words in vectors.values())
        numbers = numbers - sum(parts.values(), np.zeros(spare.length, np.int64))
        assert np.abs(numbers).max() < half
        words = without_carries(total, bits, n, shape.noised_at)
        assert np.array_equal(words[: shape.noised_at], sum(words_[: shape.noised_at] for words_ in vectors.values()))
        assert np.array_equal(words[shape.noised_at :], (numbers + n * half) % (1 << bits))


def test_a_node_draws_both_parts_and_only_one_of_them_from_the_key() -> None:
    spare = spare_of(10, length=1 << 15)
    part = Noise.of(spare.spare).draw(spare.length, Keystream(b"k" * 32)).astype(np.int64)
    own = [spare.draw(b"k" * 32) - part for _ in range(2)]
    assert not np.array_equal(*own)
    for each in own:
        assert np.var(each) == pytest.approx(spare.own.variance, rel=0.05)
        assert abs(np.corrcoef(each, part)[0, 1]) < 0.03
    assert np.var(part) == pytest.approx(spare.spare.variance, rel=0.05)


@pytest.mark.parametrize("corrupt", [0.0, 0.2])
def test_the_variance_of_the_noise_in_a_sum_for_every_number_of_survivors(corrupt: float) -> None:
    n, length = 10, 1 << 15
    found = made(n, corrupt, length=length)
    spare, mechanism = found.spare, found.mechanism
    assert spare is not None and isinstance(found.event, Skellam)
    rng = np.random.default_rng(1)
    updates = {i: rng.normal(0, 1e-3, length) for i in keys(n)}
    vectors = {i: found.words(update, OF, keys(n)[i]) for i, update in updates.items()}
    # Without the noise that colluders bring and know.
    colluders = range(1, 1 + spare.colluders)
    close = 5 * np.sqrt(2 / length)
    for u in range(spare.survivors, n + 1):
        who = frozenset(range(1, u + 1))
        off = spare.unneeded(who, u)
        total = summed([vectors[i] for i in who], mechanism.bits)
        spare.take_off(total, [keys(n)[i] for i in sorted(off)])
        mean = found.mean(total, u, OF).groups[DELTA]
        noise = (mean * u - sum(updates[i] for i in who)) * mechanism.scale
        asked = mechanism.variance(mechanism.honest)
        assert np.var(noise) == pytest.approx(asked * (1 + found.surplus(u, len(off))), rel=close)
        known = sum(spare.own.variance + (i not in off) * spare.spare.variance for i in colluders)
        assert np.var(noise) - known >= found.event.variance * (1 - close)
        assert np.var(noise) - known <= (asked + spare.spare.variance) * (1 + close) + asked * close
        if not corrupt:
            assert np.var(noise) == pytest.approx(asked, rel=close)
            # What stays there without taking off would be seen.
            assert u == spare.survivors or not np.isclose(u / spare.survivors, 1, rtol=2 * close)


# --- runs


class Silent(Faults):
    """Replies to one purpose are lost, of one node."""

    def __init__(self, purpose: str = "", node: str = "node-3") -> None:
        self.purpose, self.node = purpose, node

    def answers(self, node: str, request: Any, reply: Any) -> Any:
        lost = request.purpose.value == self.purpose and node == self.node
        return None if lost else super().answers(node, request, reply)


def wide(tmp_path: Path, faults: Faults, name: str, **privacy_: Any) -> tuple[Any, dict[str, Any]]:
    """What a round in which nobody moves adds to a model of 12,000 parameters, and the round's event."""
    from torch import nn

    class Wide(Task):
        def model(self) -> nn.Module:
            return nn.Linear(2, 4000)

        def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
            return {}

    still = config(
        rounds=1, local={"lr": 1e-9, "steps": 1, "batch_size": 8}, privacy={"noise_multiplier": 2.0, **privacy_},
        secure_sum={"dropout": 0.34, "corrupt": 0.0},
    )  # fmt: skip
    paths = RunPaths(tmp_path / name)
    outcome = simulate(still, Wide(), N, paths, faults=faults)
    assert outcome.status == "finished", outcome.reason
    return np.asarray(outcome.state.model, np.float64), rounds(paths)[0]


@pytest.mark.parametrize(
    ("lost", "in_sum", "off"), [("", 6, 6), ("train", 5, 3), ("mask", 5, 3), ("agree", 6, 3), ("unmask", 6, 6)]
)
def test_runs_whose_nodes_fall_silent_at_any_stage(tmp_path: Path, lost: str, in_sum: int, off: int) -> None:
    """Of six, four must be left: own parts of V/6, spare ones of V/12. Without one, V/6 are missing: two spare parts
    stay, and a third in place of one that did not sign."""
    (first, event), (second, _) = (wide(tmp_path, Silent(lost), name, **EXACT) for name in "ab")
    assert len(event["replies"]) == in_sum
    assert event["secure_sum"]["spare_parts_off"] == off
    left = in_sum / 6 + (in_sum - off) / 12
    assert event["privacy"]["surplus"] == pytest.approx(left - 1, abs=1e-9)
    found = np.std(first - second) / np.sqrt(2)
    asked = 2.0 * 0.5 / in_sum
    assert found == pytest.approx(asked * np.sqrt(left), rel=0.04)
    assert found != pytest.approx(asked * np.sqrt(in_sum / 4), rel=0.02)


def test_without_the_option_the_surplus_stays_and_is_told(tmp_path: Path) -> None:
    _, event = wide(tmp_path, Silent(), "a")
    assert event["secure_sum"]["spare_parts_off"] == 0
    assert event["privacy"]["surplus"] == pytest.approx(6 / 4 - 1)


def test_rounds_stand_in_the_ledgers_with_the_least_noise_that_can_be_left(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    asked = config(rounds=2, privacy=EXACT)
    assert simulate(asked, Task(), N, paths).status == "finished"
    event = site.mechanism(asked, 6, N).event
    assert [release.event for release in verify(paths.ledger).releases] == [to_json(event)] * 2


def test_plan_says_how_much_stays_beyond_what_was_asked_for() -> None:
    def told(**more: Any) -> tuple[float, float]:
        return privacy(config(privacy=more, secure_sum={"dropout": 0.2, "corrupt": 0.2}), 1000, 10, 10).surplus

    # Of ten, two may drop out and two collude.
    assert told() == pytest.approx((10 / 6 - 1, 10 / 6 - 1))
    # With all: ten own parts of V/8. With nine, 3 honest spare parts of V/24 and 2 of colluders: 9/8 + 5/24 = 4/3.
    assert told(**EXACT) == pytest.approx((10 / 8 - 1, 4 / 3 - 1))


def test_noise_that_is_never_too_much_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"noise_on_dropout = 'exact'.*mechanism = 'central'.*server adds all"):
        config("central", privacy=EXACT)
    by_record = {"unit": "record", "mechanism": None, "sampling_rate": 0.1}
    with pytest.raises(ConfigError, match=r"noise_on_dropout = 'exact'.*unit = 'record'.*for its own data"):
        config(privacy={**EXACT, **by_record})
    assert config(privacy=by_record).privacy is not None


@pytest.fixture(autouse=True)
def two_tables() -> Iterator[None]:
    """What a test's laws leave in the cache is of no use to the next."""
    yield
    Noise.of.cache_clear()
