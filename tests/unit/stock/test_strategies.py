"""Flower's quickstart under each of six strategies, with `SecureSum` and the mod and without: the same model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fedward_server.secure_sum import SecureSum
from flwr.clientapp import ClientApp

from .nodes import EXAMPLE, Nodes

ROUNDS, N = 2, 3


@pytest.fixture(scope="module")
def quickstart() -> Iterator[Any]:
    sys.path.insert(0, str(EXAMPLE))
    try:
        from quickstart import client_app, server_app

        plain = ClientApp()
        plain.train()(client_app.train)
        plain.evaluate()(client_app.evaluate)
        client_app.plain = plain
        yield client_app, server_app
    finally:
        sys.path.remove(str(EXAMPLE))


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedadam", "fedyogi", "fedadagrad", "fedavgm"])
def test_the_model_is_that_of_the_plain_run(quickstart: Any, name: str) -> None:
    client, server = quickstart
    plain = server.federate(Nodes(client.plain, N), server.strategy(name, N), ROUNDS)
    nodes = Nodes(client.app, N)
    secure = server.federate(nodes, SecureSum(server.strategy(name, N)), ROUNDS)

    assert list(secure.arrays) == list(plain.arrays)
    for key, expected in plain.arrays.items():
        found = secure.arrays[key].numpy()
        assert found.dtype == expected.numpy().dtype and found.shape == expected.numpy().shape
        np.testing.assert_allclose(found, expected.numpy(), atol=2e-3)
    for ours, theirs in (
        (secure.train_metrics_clientapp, plain.train_metrics_clientapp),
        (secure.evaluate_metrics_clientapp, plain.evaluate_metrics_clientapp),
    ):
        assert set(ours) == set(theirs) == {1, 2}
        for number, record in theirs.items():
            assert set(ours[number]) == set(record)
            for metric, value in record.items():
                assert ours[number][metric] == pytest.approx(value, abs=5e-3)
    assert plain.evaluate_metrics_clientapp[2]["eval_acc"] > 0.3
