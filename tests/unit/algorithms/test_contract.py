"""What every registered algorithm must do, half by half; `contract/` has them in whole runs.

A new one is tested by its line in the registry alone. What it needs for that, if anything, is in `contract/cases.py`.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from contract.cases import NAMES, NONE, config, options, task
from fedward_common.algorithms.base import AlgorithmOptions, Cohort, ServerState, SumAlgorithm
from fedward_common.algorithms.registry import ALGORITHMS, build, parse_options
from fedward_common.config import RunConfig
from fedward_common.update import Kind, Update, check_update
from fedward_common.work import PRIVATE
from safetensors.numpy import load, save
from small_federation import Federation, mean

NODES = {f"n{i}": {"n": 8, "seed": i, "test": 5} for i in range(3)}

pytestmark = pytest.mark.parametrize("name", NAMES)


def federation(name, nodes=NODES, more=NONE, **of_task):
    return Federation(config(name, more), task(name, **of_task), nodes)


def test_options_name_the_algorithm_and_survive_json(name):
    kind = ALGORITHMS[name]
    parsed = parse_options(options(name))
    assert isinstance(parsed, kind.Options)
    assert isinstance(parsed, AlgorithmOptions)
    assert parsed.name == name
    assert type(build(parsed)) is kind
    assert issubclass(kind, SumAlgorithm)
    run = config(name)
    assert RunConfig.model_validate(json.loads(run.model_dump_json())) == run


def test_unknown_option_is_refused(name):
    with pytest.raises(ValueError, match="colour"):
        parse_options(options(name, {"colour": "red"}))


def test_updates_pass_the_gate_and_carry_what_is_declared(name):
    fed = federation(name)
    sends = fed.algorithm.sends(fed.layout)
    shapes = {group: fed.layout.extent(extent) for group, extent in sends.items()}
    for reply in fed.round():
        check_update(Update(reply.vectors, reply.weight, reply.metrics), shapes, 1e7)
        assert reply.weight == (1 if fed.algorithm.uniform else 8)
        assert reply.metrics["examples"] == 12
    private = {PRIVATE} if fed.layout.size(Kind.PRIVATE) else set()
    for node in fed.nodes:
        assert set(fed.kept(node)) == {*fed.algorithm.keeps(fed.layout), *private}


def test_neutral_settings_are_fedavg(name):
    kind = ALGORITHMS[name]
    neutral = kind.neutral
    if neutral is None:
        pytest.skip("no settings make it FedAvg")
    # One that counts every node the same is FedAvg only where all have as many examples.
    nodes = {node: {**data, "n": 8 if kind.uniform else 5 + 3 * i} for i, (node, data) in enumerate(NODES.items())}
    mine, plain = (federation(which, nodes, more) for which, more in ((name, neutral), ("fedavg", NONE)))
    start = plain.state.model
    mine.round()
    plain.round()
    np.testing.assert_allclose(mine.state.model, plain.state.model, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(mine.state.vectors["statistic"], plain.state.vectors["statistic"], rtol=1e-6)
    assert np.abs(plain.state.model - start).max() > 1e-3


def test_a_node_with_one_example_takes_part(name):
    fed = federation(name, {"lonely": {"n": 1, "seed": 1}, "n0": {"n": 9, "seed": 2}})
    for _ in range(3):
        fed.round()
    assert all(np.isfinite(vector).all() for vector in fed.state.vectors.values())


def test_batch_norm_buffers_are_averaged_plainly(name):
    """The new float buffers are the mean of the nodes' buffers, whatever else the algorithm does."""
    fed = federation(name)
    if not fed.layout.size(Kind.STATISTIC):
        pytest.skip("its float buffers stay on the node")
    for _ in range(3):
        before = fed.state.vectors["statistic"].astype(np.float64)
        replies = fed.round()
        ends = [before + reply.vectors["statistic"] for reply in replies]
        expected = np.average(ends, axis=0, weights=[reply.weight for reply in replies])
        np.testing.assert_allclose(fed.state.vectors["statistic"], expected, rtol=1e-6)
    variance = fed.layout.unpack(fed.state.vectors["statistic"], Kind.STATISTIC)["norm.running_var"]
    assert (variance >= 0).all()


def test_counters_are_neither_sent_nor_averaged(name):
    fed = federation(name)
    counters = {spec.name for spec in fed.layout.of_kind(Kind.COUNTER)}
    stay = {spec.name for spec in fed.layout.of_kind(Kind.PRIVATE)}
    assert counters == {"norm.num_batches_tracked"} - stay
    for _ in range(2):
        for reply in fed.round():
            assert Kind.COUNTER not in set(fed.algorithm.sends(fed.layout).values())
            assert all(vector.dtype.kind == "f" for vector in reply.vectors.values())


def test_server_state_survives_storage(name):
    fed = federation(name)
    for _ in range(2):
        fed.round()
    stored = save(dict(fed.state.vectors)), json.dumps(fed.state.round)
    again = ServerState(load(stored[0]), json.loads(stored[1]))
    update = mean([fed.ask(node) for node in fed.nodes])
    cohort = Cohort(3, 3, 3, 3)
    one, two = fed.algorithm.server(fed.state, update, cohort), fed.algorithm.server(again, update, cohort)
    assert one.round == two.round == 3
    assert {k: v.tobytes() for k, v in one.vectors.items()} == {k: v.tobytes() for k, v in two.vectors.items()}


def test_server_half_is_pure_and_keeps_dtypes(name):
    fed = federation(name)
    fed.round()
    update = mean([fed.ask(node) for node in fed.nodes])
    before = {key: vector.copy() for key, vector in fed.state.vectors.items()}
    groups = {key: vector.copy() for key, vector in update.groups.items()}
    after = fed.algorithm.server(fed.state, update, Cohort(2, 3, 3, 3))
    for key, vector in before.items():
        np.testing.assert_array_equal(fed.state.vectors[key], vector)
        assert after.vectors[key].dtype == vector.dtype
        assert after.vectors[key].shape == vector.shape
    assert set(after.vectors) == set(before)
    for key, vector in groups.items():
        np.testing.assert_array_equal(update.groups[key], vector)


def test_a_zero_update_is_fine(name):
    fed = federation(name)
    sends = fed.algorithm.sends(fed.layout)
    zero = Update({group: np.zeros(fed.layout.extent(extent)[0]) for group, extent in sends.items()}, 1.0)
    after = fed.algorithm.server(fed.state, zero, Cohort(1, 3, 3, 3))
    assert after.round == 1
    np.testing.assert_array_equal(after.model, fed.state.model)
    assert all(np.isfinite(vector).all() for vector in after.vectors.values())


def test_equal_runs_are_equal_bit_for_bit(name):
    one, two = federation(name), federation(name)
    for _ in range(3):
        one.round()
    two.round()
    two.ask("n1")  # work that is thrown away leaves no trace
    for _ in range(2):
        two.round()
    assert {k: v.tobytes() for k, v in one.state.vectors.items()} == {
        k: v.tobytes() for k, v in two.state.vectors.items()
    }


def test_private_tensors_stay(name):
    fed = federation(name, kinds={"head.*": "private"})
    private = fed.layout.size(Kind.PRIVATE)
    assert private >= 6 * 3 + 3
    fed.round()
    first = {node: fed.kept(node)["private"].copy() for node in fed.nodes}
    for reply in fed.round():
        assert all(len(vector) != private for vector in reply.vectors.values())
    heads = [fed.kept(node)["private"] for node in fed.nodes]
    assert not np.array_equal(heads[0], heads[1])
    for node, head in zip(fed.nodes, heads, strict=True):
        assert not np.array_equal(head, first[node])


def test_float64_models_stay_float64(name):
    import torch

    fed = federation(name, dtype=torch.float64)
    for reply in fed.round():
        assert all(vector.dtype == np.float64 for vector in reply.vectors.values())
    assert all(vector.dtype == np.float64 for vector in fed.state.vectors.values())
