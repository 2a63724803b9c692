"""Layouts, flat vectors, and the update gate."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from fedward_common.errors import TaskError, UpdateError
from fedward_common.update import Kind, Layout, Update, check_update
from torch import nn

SHAPES = {"delta": (3, np.dtype(np.float32)), "statistic": (2, np.dtype(np.float32))}


def update(weight=1.0, metrics=None, **groups):
    vectors = {"delta": np.ones(3, np.float32), "statistic": np.ones(2, np.float32), **groups}
    return Update({k: v for k, v in vectors.items() if v is not None}, weight, metrics or {})


def test_a_good_update_passes():
    check_update(update(metrics={"examples": 3.0, "loss": -1.0}), SHAPES, 10)
    check_update(update(weight=10), SHAPES, 10)
    check_update(update(weight=np.float32(2)), SHAPES, 10)


@pytest.mark.parametrize(("bad", "rule"), [
    (update(delta=np.array([1, np.nan, 1], np.float32)), "'delta' holds values that are not finite"),
    (update(delta=np.array([1, np.inf, 1], np.float32)), "not finite"),
    (update(delta=np.ones(1, np.float32)), r"shape \(1,\), expected \(3,\)"),
    (update(delta=np.ones((3, 1), np.float32)), r"shape \(3, 1\)"),
    (update(delta=np.float32(1)), "expected an array"),
    (update(delta=[1.0, 1.0, 1.0]), "is a list, expected an array"),
    (update(delta=np.ones(3)), "dtype float64, expected float32"),
    (update(delta=np.ones(3, np.int64)), "dtype int64"),
    (update(statistic=None), r"groups \['delta'\], expected"),
    (update(extra=np.ones(1, np.float32)), "extra"),
    (update(weight=0), r"weight is not in"),
    (update(weight=-1.0), r"weight is not in"),
    (update(weight=10.1), r"weight is not in"),
    (update(weight=float("nan")), r"weight is not in"),
    (update(weight=float("inf")), r"weight is not in"),
    (update(weight="3"), r"weight is not in"),
    (update(metrics={"loss": float("nan")}), "metric is not finite"),
    (update(metrics={"loss": None}), "metric is not finite"),
    (update(metrics={"examples": -1.0}), "examples is negative"),
])  # fmt: skip
def test_the_gate_refuses(bad, rule):
    with pytest.raises(UpdateError, match=rule):
        check_update(bad, SHAPES, 10)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 3)
        self.norm = nn.BatchNorm1d(3)
        self.b = nn.Linear(3, 1)
        self.b.bias.requires_grad_(False)


def test_kinds_by_default():
    kinds = {spec.name: spec.kind for spec in Layout.of(Mixed()).tensors}
    assert kinds == {
        "a.weight": "trainable",
        "a.bias": "trainable",
        "norm.weight": "trainable",
        "norm.bias": "trainable",
        "norm.running_mean": "statistic",
        "norm.running_var": "statistic",
        "norm.num_batches_tracked": "counter",
        "b.weight": "trainable",
        "b.bias": "frozen",
    }


def test_frozen_tensors_are_part_of_the_layout_by_their_values():
    torch.manual_seed(0)
    model = Mixed()
    layout = Layout.of(model)
    bias = next(spec for spec in layout.tensors if spec.name == "b.bias")
    assert bias.value == hashlib.sha256(model.b.bias.detach().numpy().tobytes()).hexdigest()
    assert Layout.from_json(layout.to_json()) == layout
    assert layout.size(Kind.STATISTIC) == 6
    with torch.no_grad():
        model.a.bias += 1
    assert Layout.of(model).digest() == layout.digest()
    with torch.no_grad():
        model.b.bias += 1
    assert Layout.of(model).digest() != layout.digest()
    model.a.register_parameter("scale", nn.Parameter(torch.tensor(2.0, dtype=torch.bfloat16), requires_grad=False))
    assert sum(bool(spec.value) for spec in Layout.of(model).tensors) == 2


def test_a_tensor_that_the_optimiser_moves_cannot_be_frozen():
    with pytest.raises(TaskError, match=r"'b\.weight' is declared 'frozen' but has requires_grad=True"):
        Layout.of(Mixed(), {"b.weight": "frozen"})


def test_patterns_change_kinds_first_match_wins():
    layout = Layout.of(Mixed(), {"b.bias": "statistic", "b.*": "private", "norm.*": Kind.PRIVATE})
    kinds = {spec.name: spec.kind for spec in layout.tensors}
    assert (kinds["b.bias"], kinds["b.weight"]) == ("statistic", "private")
    assert layout.size(Kind.COUNTER) == 0
    assert layout.size(Kind.PRIVATE) == 3 + 3 * 4 + 1
    # A counter among private tensors would lose bits in float32.
    assert layout.dtype(Kind.PRIVATE) == np.float64


@pytest.mark.parametrize(("kinds", "message"), [
    ({"c.*": "private"}, r"match no tensor: \['c\.\*'\]"),
    ({"norm.num*": "statistic"}, "int64.*only float tensors"),
    ({"norm.num*": "trainable"}, "only float tensors"),
    ({"norm.running_mean": "trainable"}, "no parameter with requires_grad=True"),
    ({"b.bias": "trainable"}, "no parameter with requires_grad=True"),
    ({"a.bias": "counter"}, "which is for integers"),
    ({"*": "private"}, "no trainable tensor"),
])  # fmt: skip
def test_kinds_that_cannot_be(kinds, message):
    with pytest.raises(TaskError, match=message):
        Layout.of(Mixed(), kinds)


def test_tied_weights_stand_once():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(4, 2)
            self.out = nn.Linear(2, 4, bias=False)
            self.out.weight = self.embed.weight

    layout = Layout.of(Tied())
    assert [spec.name for spec in layout.tensors] == ["embed.weight"]
    assert [spec.name for spec in Layout.of(Tied(), {"out.*": "private", "embed.*": "trainable"}).tensors]


def test_pack_and_load_are_inverse_for_every_kind():
    torch.manual_seed(1)
    source, target = Mixed(), Mixed()
    with torch.no_grad():
        source.norm.num_batches_tracked.add_(2**40 + 1)
    layout = Layout.of(source)
    for kind in (Kind.TRAINABLE, Kind.STATISTIC, Kind.COUNTER, Kind.FROZEN):
        vector = layout.pack(source.state_dict(), kind)
        assert vector.dtype == layout.dtype(kind)
        frozen = np.frombuffer(vector.tobytes(), vector.dtype)
        layout.load(target, frozen, kind)
    for name, tensor in source.state_dict().items():
        assert torch.equal(tensor, target.state_dict()[name]), name


def test_pack_copies():
    model = Mixed()
    layout = Layout.of(model)
    vector = layout.pack(model.state_dict(), Kind.TRAINABLE)
    vector += 1
    assert not np.array_equal(vector, layout.pack(model.state_dict(), Kind.TRAINABLE))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype):
    model = nn.Linear(2, 2).to(dtype)
    layout = Layout.of(model)
    vector = layout.pack(model.state_dict(), Kind.TRAINABLE)
    assert vector.dtype == (np.float64 if dtype is torch.float64 else np.float32)
    other = nn.Linear(2, 2).to(dtype)
    layout.load(other, vector, Kind.TRAINABLE)
    assert torch.equal(other.weight, model.weight)


def test_loading_never_broadcasts():
    layout = Layout.of(Mixed())
    with pytest.raises(UpdateError, match=r"shape \(1,\)"):
        layout.load(Mixed(), np.ones(1, np.float32), Kind.TRAINABLE)


def test_json_and_digest():
    layout = Layout.of(Mixed())
    assert Layout.from_json(layout.to_json()) == layout
    assert Layout.from_json(layout.to_json()).digest() == layout.digest()
    assert Layout.of(Mixed(), {"b.*": "private"}).digest() != layout.digest()
