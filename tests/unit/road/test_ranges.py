"""The next round's ranges from the last round's sum."""

from __future__ import annotations

import numpy as np
import pytest
from fedward_common.pipeline import Flat, build
from fedward_common.ranges import HEADROOM, SHARE, Scale, Scales, first, following
from fedward_common.summand import Group, Shape, decode
from fedward_common.update import Update

NODES, SIZE = 10, 1_000_000
ALLOWED = SHARE * NODES * SIZE
"""How many coordinates of the cohort may be clipped."""


def mean(peak, clipped=0.0, weight=1.0):
    """What ten nodes of that weight gave: one coordinate at -peak, the others at half of it."""
    vector = np.full(SIZE, peak / 2)
    vector[7] = -peak
    return Update({"x": vector}, NODES * weight, {"clipped.x": clipped})


def after(scale, *means, weight=1.0):
    scales = Scales({"x": scale}, weight)
    for one in means:
        scales = following(scales, one, NODES)
    return scales.groups["x"]


def test_the_first_ranges_are_powers_of_two_not_under_what_was_asked():
    scales = first({"a": 1.0, "b": 0.3, "c": 5.0}, 300.0)
    assert {name: scale.range for name, scale in scales.groups.items()} == {"a": 1.0, "b": 0.5, "c": 8.0}
    assert scales.weight == 512
    assert scales.shape_groups({"b": 3, "a": 2}) == (Group("b", 3, 0.5), Group("a", 2, 1.0))


def test_headroom_times_the_largest_mean_rounded_up():
    assert after(Scale(1.0), mean(1 / HEADROOM)) == Scale(1.0)
    assert after(Scale(1.0), mean(1.01 / HEADROOM)) == Scale(2.0)
    assert after(Scale(1.0), mean(0.51 / HEADROOM)) == Scale(1.0)
    assert after(Scale(1.0), mean(0.49 / HEADROOM)) == Scale(0.5)
    assert after(Scale(1.0), mean(100 / HEADROOM)) == Scale(128.0), "growth has no limit"


def test_shrinks_by_four_at_most():
    assert after(Scale(1.0), mean(1e-9)) == Scale(0.25)
    assert after(Scale(1.0), mean(1e-9), mean(1e-9)) == Scale(1 / 16)


def test_a_group_that_did_not_move_keeps_its_range():
    """SCAFFOLD's control variates while it warms up."""
    assert after(Scale(1.0), mean(0.0), mean(0.0)) == Scale(1.0)


def test_too_much_clipping_widens_at_once():
    """R had fallen behind the mean: headroom is as good as it was."""
    assert after(Scale(1.0), mean(1.5 / HEADROOM, ALLOWED + 1)) == Scale(2.0)
    assert after(Scale(1.0), mean(20 / HEADROOM, ALLOWED + 1)) == Scale(32.0)


def test_clipping_in_spite_of_the_headroom_doubles_it():
    grown = after(Scale(1.0), mean(0.9 / HEADROOM, ALLOWED + 1))
    assert grown == Scale(2.0, 2 * HEADROOM)
    assert after(Scale(1.0), mean(0.01 / HEADROOM, ALLOWED + 1)) == grown, "nodes cancel each other in the mean"
    assert after(grown, mean(0.9 / HEADROOM, 1)) == grown, "what it took is kept, were it only just enough"


def test_little_clipping_changes_nothing():
    assert after(Scale(1.0), mean(0.9 / HEADROOM, ALLOWED)) == Scale(1.0)


def test_headroom_that_is_not_needed_shrinks_back_to_its_start():
    calm = [mean(0.9 / HEADROOM)] * 16
    assert after(Scale(4.0, 4 * HEADROOM), *calm).headroom == pytest.approx(2 * HEADROOM)
    assert after(Scale(4.0, 4 * HEADROOM), *calm, *calm, *calm) == Scale(1.0, HEADROOM)


@pytest.mark.parametrize(("peak", "clipped"), [(1e-300, 0), (1e300, NODES * SIZE)])
def test_ranges_end_somewhere(peak, clipped):
    end = after(Scale(1.0), *[mean(peak, clipped)] * 50).range
    assert end == (2.0**-40 if peak < 1 else 2.0**40)
    assert Shape((Group("x", 1, end),), (), 20, NODES)


def test_the_weight_scale_follows_and_ranges_stay_on_its_scale():
    """Weights of 300 with W = 64: y = 300/64·x. At W = 512 the same y is an eighth, and so is the range."""
    scales = following(Scales({"x": Scale(8.0)}, 64.0), mean(1e-9, weight=300.0), NODES)
    assert scales == Scales({"x": Scale(0.25)}, 512.0), "8·64/512, shrunk by 4"
    scales = following(Scales({"x": Scale(8.0)}, 64.0), mean(0.0, weight=300.0), NODES)
    assert scales == Scales({"x": Scale(1.0)}, 512.0), "kept"
    scales = following(Scales({"x": Scale(8.0)}, 64.0), mean(3.0 / HEADROOM, weight=300.0), NODES)
    assert scales == Scales({"x": Scale(2.0)}, 512.0), "3·300/512 = 1.76"


def test_equal_weights_stay_at_one():
    assert following(Scales({"x": Scale(1.0)}, 1.0), mean(1.0), NODES).weight == 1.0


def test_json():
    scales = Scales({"delta": Scale(0.25, 37.3), "c": Scale(2.0**-40)}, 512.0)
    assert Scales.from_json(scales.to_json()) == scales


class Seeded:
    """Uniform words, the same in every run."""

    def __init__(self):
        self._rng = np.random.default_rng(0)

    def words(self, count):
        return self._rng.integers(0, 1 << 32, count, dtype=np.uint32)


def federation(rounds, nodes, size, spread):
    """Rounds of (updates, weights): normal coordinates whose scale falls and then jumps up a hundredfold. Every
    node moves a part of the coordinates alone (`spread` times as far), as labels do that only one site has."""
    rng = np.random.default_rng(5)
    weights = rng.integers(50, 800, nodes).astype(float)
    alone = rng.integers(0, nodes, size)
    for r in range(rounds):
        scale = 0.05 * 0.8 ** (r if r < rounds // 2 else r - rounds // 2 - 20)
        common = rng.normal(0, scale, size)
        own = rng.normal(0, scale * spread, (nodes, size)) * (alone == np.arange(nodes)[:, None])
        yield (common + rng.normal(0, scale, (nodes, size)) + own).astype(np.float32), weights


@pytest.mark.parametrize(("nodes", "spread"), [(3, 1.0), (10, 10.0), (30, 30.0)])
def test_a_whole_run(nodes, spread):
    """Started much too narrow; errors and bounds settle within five rounds. Seen at most 1.7e-3."""
    size, stream = 4000, Seeded()
    scales = first({"x": 0.01})
    wrong, clipped = [], []
    for vectors, weights in federation(40, nodes, size, spread):
        shape = Shape(scales.shape_groups({"x": size}), (), 20, nodes, scales.weight)
        total = np.zeros(shape.length, np.uint32)
        road = build(shape, stream, lambda words, total=total: np.add(total, words, out=total).tobytes())
        for vector, weight in zip(vectors, weights, strict=True):
            road(Flat(Update({"x": vector}, float(weight))))
        got = decode(shape, total, nodes)
        exact = np.average(vectors.astype(float), axis=0, weights=weights)
        wrong.append(np.linalg.norm(got.groups["x"] - exact) / np.linalg.norm(exact))
        clipped.append(got.metrics["clipped.x"] / (nodes * size))
        scales = following(scales, got, nodes)
    settled = [r for r in range(5, 40) if not 20 <= r < 25]
    assert max(clipped[r] for r in settled) <= SHARE
    assert max(wrong[r] for r in settled) < 0.0035
