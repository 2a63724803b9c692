"""SCAFFOLD and FedProx against Apple's `pfl`, where it is installed.

It asks for an older dp-accounting than we do, so it is no dependency: `pip install --no-deps --target DIR pfl
multiprocess dill prv-accountant`, and DIR on PYTHONPATH.

Its SCAFFOLD keeps control variates with the sign of a model's change and adds them as if they had the sign of a
gradient. The oracle is `pfl` with the two swapped where a step uses them, and nothing else of it changed.
"""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fedward_common.task import Data
from small_federation import Federation, configure
from torch import nn
from torch.utils.data import TensorDataset

pytest.importorskip("pfl", reason="pfl is not installed")

from pfl.algorithm.fedprox import FedProx, FedProxParams
from pfl.algorithm.scaffold import SCAFFOLD, SCAFFOLDParams
from pfl.data.dataset import Dataset
from pfl.data.user_state import InMemoryUserStateStorage
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.bridge.pytorch.scaffold import PyTorchSCAFFOLDBridge
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel

pytestmark = pytest.mark.slow

LR, STEPS, ROUNDS = 0.3, 5, 12
NODES = {f"n{i}": {"seed": i} for i in range(4)}
COHORTS = [["n0", "n1"], ["n1", "n2", "n3"], ["n0", "n3"], ["n0", "n1", "n2", "n3"]] * 3


class Softmax(nn.Linear):
    """Softmax regression, with what `pfl` asks of a model."""

    def __init__(self):
        super().__init__(4, 3, dtype=torch.float64)

    def loss(self, x, y, is_eval=False):
        return F.cross_entropy(self(x), y)

    def metrics(self, x, y, is_eval=True):
        return {}


def rows(seed):
    """A node's data: each has its own classes' shares."""
    generator = torch.Generator().manual_seed(seed)
    shares = torch.tensor([[8.0, 1, 1], [1, 8, 1], [1, 1, 8], [4, 1, 4]])[seed]
    y = torch.multinomial(shares, 20, replacement=True, generator=generator)
    x = torch.randn(20, 4, generator=generator, dtype=torch.float64) + y[:, None] * torch.tensor([1.0, -1, 0.5, 0])
    return x, y


class Storage(InMemoryUserStateStorage):
    """With option I pfl saves vectors that it writes over for the next user; these are copies."""

    def save_state(self, state, *where):
        super().save_state(type(state)({key: value.clone() for key, value in state.items()}), *where)


class Task:
    def model(self):
        return Softmax()

    def data(self, config):
        return Data(TensorDataset(*rows(config["seed"])))

    def loss(self, model, batch):
        return model.loss(*batch)

    def metrics(self, model, batch):
        return {}


def ours(algorithm):
    """The models after each round; every step is on all of a node's data."""
    fed = Federation(configure(algorithm, {"lr": LR, "steps": STEPS, "batch_size": 100}), Task(), NODES)
    start, models = fed.state.model.copy(), []
    for cohort in COHORTS:
        fed.round(cohort)
        models.append(fed.state.model)
    return start, models


def theirs(algorithm, parameters, start):
    module = Softmax()
    state = torch.from_numpy(start.copy())
    with torch.no_grad():
        module.weight.copy_(state[:12].reshape(3, 4))
        module.bias.copy_(state[12:])
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    training = NNTrainHyperParams(local_learning_rate=LR, local_num_epochs=STEPS, local_batch_size=None)
    users = {name: Dataset(raw_data=list(rows(data["seed"])), user_id=name) for name, data in NODES.items()}
    models = []
    for iteration, cohort in enumerate(COHORTS):
        made = parameters(len(cohort))
        (context,), model, _ = algorithm.get_next_central_contexts(
            model, iteration, made, training, NNEvalHyperParams(local_batch_size=None)
        )
        total = None
        for name in cohort:
            one, _ = algorithm.simulate_one_user(model, users[name], context)
            one = type(one)({key: value.clone() for key, value in one.items()}, weight=1.0)
            total = one if total is None else total + one
        model, _ = algorithm.process_aggregated_statistics(context, Metrics(), model, total)
        models.append(torch.cat([module.weight.flatten(), module.bias]).detach().numpy().copy())
    return models


def common(cohort):
    return {
        "central_num_iterations": len(COHORTS),
        "evaluation_frequency": 10**6,
        "train_cohort_size": cohort,
        "val_cohort_size": 0,
    }


def scaffold(option, start):
    storage = Storage()
    return theirs(
        SCAFFOLD(),
        lambda cohort: SCAFFOLDParams(
            **common(cohort),
            population=len(NODES),
            use_gradient_as_control_variate=option == "I",
            user_state_storage=storage,
        ),
        start,
    )


@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffold_is_pfls_with_its_sign_put_right(option):
    """Twelve rounds of changing cohorts, so that N and |S| differ."""
    start, found = ours({"name": "scaffold", "option": option})
    steps = PyTorchSCAFFOLDBridge.do_control_variate_sgd

    def swapped(model, dataset, parameters, local_c, server_c):
        steps(model, dataset, parameters, local_c=server_c, server_c=local_c)

    with patch.object(PyTorchSCAFFOLDBridge, "do_control_variate_sgd", staticmethod(swapped)):
        expected = scaffold(option, start)
    # pfl takes a model's change in float32.
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)
    assert np.abs(np.array(found) - ours("fedavg")[1]).max() > 1e-2
    assert np.abs(np.array(scaffold(option, start)) - expected).max() > 1e-2, "as it stands pfl is another algorithm"


@pytest.mark.parametrize("mu", [0.0, 0.7])
def test_fedprox_is_pfls(mu):
    start, found = ours({"name": "fedprox", "mu": mu})
    expected = theirs(FedProx(), lambda cohort: FedProxParams(**common(cohort), mu=mu), start)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)
    if mu:
        assert np.abs(np.array(found) - ours("fedavg")[1]).max() > 1e-2
