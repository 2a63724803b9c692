"""Adapters against brute force, and in whole runs. One file: importing peft takes seconds."""

from __future__ import annotations

import copy
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fedward_common.config import RunConfig, parse_config
from fedward_common.errors import ConfigError, TaskError
from fedward_common.local import LocalRunner
from fedward_common.messages import Purpose, Reason, Request
from fedward_common.model import fresh_model, laid_out
from fedward_common.node import MemoryStore, Participant
from fedward_common.task import Data
from fedward_common.update import Kind, names
from fedward_common.work import PRIVATE, Work
from fedward_common.worker import sandbox
from fedward_common.worker.parent import Worker
from fedward_common.worker.setup import Setup
from fedward_server.checkpoint import Checkpoints
from fedward_server.model_file import load_model
from fedward_server.paths import RunPaths
from fedward_server.plan import forecast
from fedward_server.simulation import simulate
from safetensors.numpy import load_file, save_file
from torch import nn
from torch.utils.data import TensorDataset

pytest.importorskip("peft")
torch.set_num_threads(1)


def configure(lora: Mapping[str, Any] | None, algorithm: str = "fedavg", **more: Any) -> RunConfig:
    tables: dict[str, Any] = {
        "name": "adapters", "task": "tests:Task", "rounds": 1, "algorithm": {"name": algorithm},
        "local": {"lr": 0.5, "steps": 4, "batch_size": 8}, "secure_sum": {"enabled": False}, **more,
    }  # fmt: skip
    return parse_config(tables if lora is None else {**tables, "lora": dict(lora)})


class Layers(nn.Module):
    """Square layers, so that a transposed product has the right shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, dtype=torch.float64)
        self.second = nn.Linear(6, 6, dtype=torch.float64)
        self.head = nn.Linear(6, 3, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Points:
    """Three classes of points in float64, each node's its own. config: seed."""

    metric_names = ("accuracy",)

    def model(self) -> nn.Module:
        return Layers()

    def data(self, config: Mapping[str, Any]) -> Data:
        generator = torch.Generator().manual_seed(config["seed"])
        x = torch.randn(40, 6, generator=generator, dtype=torch.float64) + config["seed"]
        parts = [TensorDataset(x[part], x[part, :3].argmax(1)) for part in (slice(30), slice(30, 40))]
        return Data(*parts)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).double().mean()}


class Reader(nn.Module):
    """A small transformer: the class of a sequence of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
        return self.head(self.encoder(self.embed(x), src_key_padding_mask=padding).mean(1))


class Sequences(Points):
    """Which of three tokens is the most frequent; every node sees mostly one of them. config: partition."""

    def model(self) -> nn.Module:
        return Reader()

    def data(self, config: Mapping[str, Any]) -> Data:
        generator = torch.Generator().manual_seed(7 + config["partition"])
        y = torch.randint(0, 3, (60,), generator=generator)
        y[:30] = config["partition"] % 3
        x = torch.randint(0, 12, (60, 8), generator=generator)
        x[torch.rand(60, 8, generator=generator) < 0.5] = 0
        x = torch.where(torch.rand(60, 8, generator=generator) < 0.6, y[:, None], x)
        return Data(TensorDataset(x[:48], y[:48]), TensorDataset(x[48:], y[48:]))

    def central_data(self, config: Mapping[str, Any]) -> Data:
        return Data(self.data({"partition": 99}).train)


BOTH = {"targets": ["first", "second"], "rank": 2, "alpha": 6.0}
ENCODER = {"targets": ["encoder.layers.*.linear?"], "rank": 4, "alpha": 16.0}


def with_random_b(model: nn.Module) -> nn.Module:
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            nn.init.normal_(parameter)
    return model


def weight(layer: Any) -> torch.Tensor:
    """What a linear layer multiplies by, found by asking it."""
    with torch.no_grad():
        unit = torch.eye(6, dtype=torch.float64)
        return (layer(unit) - layer(torch.zeros_like(unit))).T


# The layer.


@pytest.mark.parametrize("transposed", [False, True], ids=["Linear", "Conv1D"])
def test_a_layer_multiplies_by_w_plus_scaled_b_a(transposed: bool) -> None:
    from transformers.pytorch_utils import Conv1D

    class Task(Points):
        def model(self) -> nn.Module:
            model = Layers()
            if transposed:
                model.second = Conv1D(6, 6).double()
                nn.init.normal_(model.second.weight)
            return model

    before = Task().model()
    torch.manual_seed(0)
    config = configure(BOTH)
    model = with_random_b(fresh_model(config, Task()))
    layer: Any = model.second
    a, b = layer.lora_A.shared.weight.numpy(force=True), layer.lora_B.shared.weight.numpy(force=True)
    w = layer.base_layer.weight.numpy(force=True)
    bias = layer.base_layer.bias.numpy(force=True)
    x = np.random.default_rng(0).normal(size=(5, 6))
    expected = np.empty((5, 6))
    for row in range(5):
        for out in range(6):
            expected[row, out] = bias[out] + sum(x[row, i] * (w[i, out] if transposed else w[out, i]) for i in range(6))
            for r in range(2):
                expected[row, out] += 6.0 / 2 * b[out, r] * sum(a[r, i] * x[row, i] for i in range(6))
    np.testing.assert_allclose(layer(torch.from_numpy(x)).detach().numpy(), expected, rtol=1e-12, atol=1e-12)
    assert a.shape == (2, 6) and type(before.second) is type(layer.base_layer)


def test_the_new_model_is_the_tasks() -> None:
    config = configure({**BOTH, "private": True})
    torch.manual_seed(config.seed)
    plain = fresh_model(configure(None), Points())
    x = torch.randn(4, 6, dtype=torch.float64)
    assert torch.equal(fresh_model(config, Points())(x), plain(x))


def test_a_is_the_same_wherever_it_is_drawn() -> None:
    class Restless(Points):
        drawn = 0

        def model(self) -> nn.Module:
            model = Layers()
            type(self).drawn += 1
            torch.rand(self.drawn)  # another state of the generator each time
            return model

    config, task = configure({**BOTH, "targets": ["*"]}), Restless()
    one, two = fresh_model(config, task), fresh_model(config, task)
    digests = {laid_out(config, task, model).digest() for model in (one, two)}
    assert len(digests) == 1
    values = [one.get_submodule(f"{name}.lora_A.shared").weight.detach() for name in ("first", "second", "head")]
    assert not torch.equal(values[0], values[1])
    every = torch.cat([value.reshape(-1) for value in values])
    assert every.abs().max() <= 1 / math.sqrt(6) and every.min() < 0 < every.max()
    other = config.model_copy(update={"seed": 1})
    assert not torch.equal(fresh_model(other, task).first.lora_A.shared.weight, values[0])


def test_a_is_uniform() -> None:
    class Wide(Points):
        def model(self) -> nn.Module:
            return nn.Sequential(nn.Linear(400, 400))

    model: Any = fresh_model(configure({"targets": ["0"], "rank": 200}), Wide())
    a = model[0].lora_A.shared.weight.numpy(force=True) * 20
    # 80 000 numbers: the mean within 5 standard errors of 0, the share below any point within 5 of the law's.
    assert abs(a.mean()) < 5 / math.sqrt(3 * a.size)
    for point in (-0.9, -0.5, 0.0, 0.3, 0.8):
        share = (1 + point) / 2
        assert abs((a < point).mean() - share) < 5 * math.sqrt(share * (1 - share) / a.size)


# The mean.


def trained_weights(config: RunConfig) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Each of three nodes' weights of the second layer after a round, and that of the mean of what they send."""
    nodes, deltas = [], []
    for i in range(3):
        runner = LocalRunner(config, Points(), f"n{i}", {"seed": i})
        start = {key: value for key, value in runner.do(Work("initial")).vectors.items() if key != "counter"}
        if not config.lora.freeze_a:  # type: ignore[union-attr]
            # With B = 0 the first gradient of A is zero: begin in mid-run.
            model = with_random_b(fresh_model(config, Points()))
            start["model"] = runner.layout.pack(model.state_dict(), Kind.TRAINABLE)
        deltas.append(runner.do(Work("train", 1, start)).vectors["delta"])
        nodes.append(weight(runner._built.model.second))
    mean = fresh_model(config, Points())
    runner.layout.load(mean, start["model"] + np.mean(deltas, axis=0), Kind.TRAINABLE)
    return nodes, weight(mean.second)


def test_with_a_frozen_the_mean_of_b_is_the_mean_of_the_weights() -> None:
    nodes, mean = trained_weights(configure(BOTH))
    assert (nodes[0] - nodes[1]).abs().max() > 1e-2  # there is something to average
    torch.testing.assert_close(mean, torch.stack(nodes).mean(0), rtol=0, atol=1e-14)


def test_with_a_trained_it_is_not() -> None:
    nodes, mean = trained_weights(configure({**BOTH, "freeze_a": False}))
    apart = (mean - torch.stack(nodes).mean(0)).abs().max()
    assert apart > 0.01 * max((node - mean).abs().max() for node in nodes)


def test_merged_weights_do_the_same() -> None:
    model: Any = with_random_b(fresh_model(configure({**BOTH, "private": True}), Points()))
    x = torch.randn(4, 6, dtype=torch.float64)
    before = model(x)
    for part in model.modules():
        if hasattr(part, "merge"):
            part.merge()
    torch.testing.assert_close(F.linear(x, model.second.base_layer.weight), F.linear(x, weight(model.second)))
    torch.testing.assert_close(model(x), before)


# What travels.


def test_b_travels_and_nothing_else() -> None:
    config = configure(BOTH)
    layout = laid_out(config, Points(), fresh_model(config, Points()))
    assert names(layout.of_kind(Kind.TRAINABLE)) == ["first.lora_B.shared.weight", "second.lora_B.shared.weight"]
    assert layout.size(Kind.TRAINABLE) == 2 * 6 * 2
    assert layout.size(Kind.FROZEN) == 2 * (36 + 6) + 21 + 2 * 2 * 6
    both = configure({**BOTH, "freeze_a": False})
    assert laid_out(both, Points(), fresh_model(both, Points())).size(Kind.TRAINABLE) == 2 * (2 * 6 + 6 * 2)


def test_a_new_head_is_trained_in_full() -> None:
    config = configure({**BOTH, "train": ["head.*"]})
    layout = laid_out(config, Points(), fresh_model(config, Points()))
    assert {"head.weight", "head.bias"} < set(names(layout.of_kind(Kind.TRAINABLE)))
    everything = configure({**BOTH, "train": ["*"]})
    frozen = laid_out(everything, Points(), fresh_model(everything, Points())).of_kind(Kind.FROZEN)
    assert names(frozen) == ["first.lora_A.shared.weight", "second.lora_A.shared.weight"]


def test_a_node_with_another_base_is_refused() -> None:
    class Other(Points):
        def model(self) -> nn.Module:
            model = super().model()
            with torch.no_grad():
                model.first.weight[0, 0] += 1e-9
            return model

    config = configure(BOTH)
    asked = LocalRunner(config, Points(), "server", {"seed": 0}).layout.digest()
    for task, reason in ((Points(), None), (Other(), Reason.LAYOUT_DIFFERS)):
        node = Participant(config, MemoryStore(), LocalRunner(config, task, "n", {"seed": 0}).do)
        failure = node.handle(Request(Purpose.PREPARE, "run", 0, 0, settings={"layout": asked})).failure
        assert (failure.reason if failure else None) == reason


def test_a_task_may_keep_a_layers_adapter_at_home() -> None:
    class Layered(Points):
        tensor_kinds: Mapping[str, str] = {"second.lora_B.*": "private"}

    config = configure(BOTH)
    layout = laid_out(config, Layered(), fresh_model(config, Layered()))
    assert names(layout.of_kind(Kind.TRAINABLE)) == ["first.lora_B.shared.weight"]
    assert names(layout.of_kind(Kind.PRIVATE)) == ["second.lora_B.shared.weight"]


# The private adapter.


def test_the_private_adapter_stays_and_is_the_nodes_own() -> None:
    config = configure({**BOTH, "private": True})
    runners = [LocalRunner(config, Points(), f"n{i}", {"seed": i}) for i in range(2)]
    layout = runners[0].layout
    own = [f"{layer}.lora_{m}.private.weight" for layer in ("first", "second") for m in "AB"]
    assert names(layout.of_kind(Kind.PRIVATE)) == own
    assert not [name for name in names(layout.of_kind(Kind.TRAINABLE)) if "private" in name]
    start = {"model": runners[0].do(Work("initial")).vectors["model"]}
    done = [runner.do(Work("train", 1, start)) for runner in runners]
    assert all(set(each.vectors) == {"delta"} and len(each.vectors["delta"]) == 24 for each in done)
    assert not np.array_equal(done[0].state[PRIVATE], done[1].state[PRIVATE])
    # It helps where it belongs: evaluated with it, a node does better on its own data.
    trained = {"model": start["model"] + done[1].vectors["delta"]}
    losses = [
        runners[1].do(Work("evaluate", 1, trained, state, split="train")).metrics["loss"]
        for state in (done[1].state, {})
    ]
    assert losses[0] < losses[1]


def test_both_adapters_add() -> None:
    model: Any = with_random_b(fresh_model(configure({**BOTH, "private": True}), Points()))
    layer = model.second
    added = [layer.lora_B[name].weight @ layer.lora_A[name].weight for name in ("shared", "private")]
    torch.testing.assert_close(weight(layer), (layer.base_layer.weight + 3.0 * (added[0] + added[1])).detach())


# Evaluation.


@pytest.mark.parametrize("padded", [False, True])
def test_evaluation_goes_through_the_adapters(padded: bool) -> None:
    """PyTorch's fused encoder layers would pass them by, in eval mode only."""
    config = configure(ENCODER)
    model = with_random_b(fresh_model(config, Sequences()))
    x = torch.randint(0, 12, (5, 8), generator=torch.Generator().manual_seed(0))
    padding = torch.arange(8)[None] >= torch.tensor([8, 7, 6, 8, 3])[:, None] if padded else None
    plain = fresh_model(configure(None), Sequences()).eval()
    with torch.no_grad():
        evaluated = model.eval()(x, padding)
        assert (evaluated - plain(x, padding)).abs().max() > 0.1
        torch.testing.assert_close(evaluated, model.train()(x, padding))


# Whole runs.


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold"])
def test_a_transformer_learns_under_a_secure_sum(algorithm: str, tmp_path: Path) -> None:
    config = configure(
        {**ENCODER, "train": ["head.*"]}, algorithm, rounds=6, secure_sum={"enabled": True},
        local={"lr": 0.3, "steps": 8, "batch_size": 16}, evaluation={"central": True},
    )  # fmt: skip
    task, paths = Sequences(), RunPaths(tmp_path)
    outcome = simulate(config, task, 4, paths)
    assert outcome.status == "finished"
    events = [json.loads(line) for line in paths.events.read_text().splitlines()]
    losses = [e["central"]["loss"] for e in events if e["event"] == "round" and e.get("central")]
    assert len(losses) == 6 and losses[-1] < 0.8 * losses[0]

    checkpoint = Checkpoints(paths).newest()
    assert checkpoint is not None
    sent = {f"encoder.layers.{i}.linear{j}.lora_B.shared.weight" for i in (0, 1) for j in (1, 2)}
    file = tmp_path / "model.safetensors"
    file.write_bytes(checkpoint.model_bytes())
    arrays = load_file(file)
    assert set(arrays) == sent | {"head.weight", "head.bias"}
    assert len(outcome.state.model) == 2 * (32 * 4 + 16 * 4) + 3 * 16 + 3

    # The base is as the task makes it, bit for bit, also in the model that is loaded from the file.
    model = load_model(config, task, file)
    torch.manual_seed(config.seed)
    plain = task.model().state_dict()
    loaded = {name.replace(".base_layer", ""): tensor for name, tensor in model.state_dict().items()}
    assert all(torch.equal(loaded[name], plain[name]) for name in plain if not name.startswith("head."))
    for name, array in arrays.items():
        np.testing.assert_array_equal(model.state_dict()[name].numpy(), array)
    x, y = task.central_data({}).train.tensors
    with torch.no_grad():
        assert F.cross_entropy(model(x), y).item() == pytest.approx(losses[-1], rel=1e-5)


def test_by_record_a_whole_batch_without_noise_is_a_plain_step() -> None:
    pytest.importorskip("opacus")
    privacy = {"unit": "record", "clip": 1e3, "sampling_rate": 1.0, "noise_multiplier": 1e-6}
    one = {"lr": 0.5, "steps": 1, "batch_size": 30}
    quiet = {"evaluation": {"every": 0}, "local": one}
    private = configure(BOTH, privacy=privacy, **{**quiet, "secure_sum": {"enabled": True}})
    deltas = []
    for config in (private, configure(BOTH, **quiet)):
        runner = LocalRunner(config, Points(), "n", {"seed": 1})
        start = {"model": runner.do(Work("initial")).vectors["model"]}
        deltas.append(runner.do(Work("train", 1, start)).vectors["delta"])
    assert np.abs(deltas[1]).max() > 0.01
    np.testing.assert_allclose(deltas[0], deltas[1], atol=1e-3)


# The model's file.


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Path]:
    config = configure(BOTH, seed=3)
    paths = RunPaths(tmp_path_factory.mktemp("run"))
    simulate(config, Points(), {f"n{i}": {"seed": i} for i in range(3)}, paths)
    file = paths.root / "model.safetensors"
    checkpoint = Checkpoints(paths).newest()
    assert checkpoint is not None
    file.write_bytes(checkpoint.model_bytes())
    return config, file


def test_a_file_of_b_alone_begins_another_run(finished: tuple[RunConfig, Path], tmp_path: Path) -> None:
    config, file = finished
    by_hand = fresh_model(config, Points())
    tensors = {name: torch.from_numpy(array) for name, array in load_file(file).items()}
    assert by_hand.load_state_dict(tensors, strict=False).unexpected_keys == []
    x = torch.randn(4, 6, dtype=torch.float64)
    assert torch.equal(load_model(config, Points(), file)(x), by_hand(x))
    # Nor does it need our metadata, and frozen tensors may stand in it.
    save_file({**load_file(file)}, tmp_path / "plain.safetensors")
    load_model(config, Points(), tmp_path / "plain.safetensors")
    whole = {name: tensor.numpy() for name, tensor in by_hand.state_dict().items()}
    save_file(whole, tmp_path / "whole.safetensors")
    assert torch.equal(load_model(config, Points(), tmp_path / "whole.safetensors")(x), by_hand(x))


def test_b_of_another_base_or_another_a_is_refused(finished: tuple[RunConfig, Path], tmp_path: Path) -> None:
    config, file = finished
    with pytest.raises(ConfigError, match=r"trained beside other frozen tensors.*same seed"):
        load_model(config.model_copy(update={"seed": 4}), Points(), file)
    whole = {name: tensor.numpy().copy() for name, tensor in fresh_model(config, Points()).state_dict().items()}
    whole["first.base_layer.bias"][0] += 1
    save_file(whole, tmp_path / "other.safetensors")
    with pytest.raises(ConfigError, match=r"first\.base_layer\.bias: frozen, and with other values"):
        load_model(config, Points(), tmp_path / "other.safetensors")


def test_stock_flower_arrays_may_leave_frozen_tensors_out() -> None:
    from fedward_server.strategy import arrays_of, vectors_of
    from flwr.app import ArrayRecord

    config = configure(BOTH)
    model = with_random_b(fresh_model(config, Points()))
    layout = laid_out(config, Points(), model)
    vectors = vectors_of(layout, ArrayRecord(model.state_dict()))
    np.testing.assert_array_equal(vectors["model"], layout.pack(model.state_dict(), Kind.TRAINABLE))
    small = arrays_of(layout, vectors)
    assert set(small) == {"first.lora_B.shared.weight", "second.lora_B.shared.weight"}
    assert vectors_of(layout, small).keys() == vectors.keys()
    with torch.no_grad():
        model.head.bias[0] += 1  # type: ignore[union-attr, operator]
    with pytest.raises(ConfigError, match=r"other values .*head\.bias"):
        vectors_of(layout, ArrayRecord(model.state_dict()))


def test_the_plan_tells_what_travels() -> None:
    config = configure({**BOTH, "private": True})
    found = forecast(config, Points(), 3, None)
    assert (found.parameters, found.up) == (24, 24 * 8)
    assert found.frozen == 2 * 42 + 21 + 24 and found.kept == 2 * (12 + 12)


# Refusals.


class Held(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.two = self.one

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x))


@pytest.mark.parametrize(
    ("made", "lora", "text"),
    [
        (Layers, {"targets": ["third"]}, r"lora\.targets: 'third' matches no linear layer.*'first', 'second', 'head'"),
        (Layers, {"targets": ["first", "irst"]}, "'irst' matches no linear layer"),
        (Layers, {"targets": ["first"], "rank": 7}, r"lora\.rank = 7 is more than the layer 'first' of 6 × 6"),
        (Layers, {**BOTH, "train": ["body.*"]}, r"lora\.train: 'body\.\*' matches no parameter"),
        (Layers, {**BOTH, "train": ["*lora_A*"]}, "matches no parameter beside the adapters"),
        (lambda: nn.Linear(3, 3), {"targets": ["*"]}, "no linear layer"),
        (Reader, {"targets": ["out_proj"]}, "nn.MultiheadAttention.*never calls it"),
        (Held, {"targets": ["one"], "rank": 2}, "'one' stands in the model under several names"),
    ],
)
def test_what_cannot_be_adapted_is_refused(made: Any, lora: dict[str, Any], text: str) -> None:
    class Task(Points):
        def model(self) -> nn.Module:
            return made()

    with pytest.raises(TaskError, match=text):
        fresh_model(configure(lora), Task())


def test_a_name_is_matched_whole() -> None:
    class Task(Points):
        def model(self) -> nn.Module:
            deep = nn.ModuleDict({"in": nn.ModuleDict({"q": nn.Linear(4, 4)})})
            return nn.ModuleDict({"in": nn.ModuleDict({"q": nn.Linear(4, 4)}), "out": deep})

    def adapted(*targets: str) -> set[str]:
        model = fresh_model(configure({"targets": targets, "rank": 2}), Task())
        return {name.partition(".lora_B")[0] for name, _ in model.named_parameters() if ".lora_B" in name}

    assert adapted("q") == adapted("*.q") == {"in.q", "out.in.q"}
    assert adapted("in.q") == adapted("in.*") == {"in.q"}  # peft itself would match the ends of names


def test_without_peft_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(TaskError, match=r"'peft' is not installed here: pip install 'fedward\[lora\]'"):
        fresh_model(configure(BOTH), Points())


# In a worker.

WATCHED = '''
import os
import sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
from fedward_common.task import Data

seen = []

def hook(event, arguments):
    if event.startswith("socket.") or event in ("subprocess.Popen", "os.posix_spawn", "os.fork"):
        seen.append(f"{event} {arguments}")
    writes = event == "os.mkdir" or (event == "open" and isinstance(arguments[0], str) and arguments[2] & 3)
    if writes and arguments[0] != "/dev/null" and not str(arguments[0]).startswith(os.environ["TMPDIR"]):
        seen.append(f"{event} {arguments}")

class Toy:
    def model(self):
        sys.addaudithook(hook)
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    def data(self, config):
        assert "peft" in sys.modules
        assert not seen, seen
        return Data(TensorDataset(torch.randn(8, 4), torch.arange(8) % 2))
    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])
    def metrics(self, model, batch):
        return {}
'''


@pytest.mark.skipif(sandbox.available() == 0, reason="no Landlock here")
@pytest.mark.slow
def test_peft_works_in_the_sandbox_and_calls_nobody(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "watched.py").write_text(WATCHED)
    config = configure({"targets": ["0"], "rank": 2}, local={"lr": 0.1, "steps": 2, "batch_size": 4})
    setup = Setup(
        config.model_copy(update={"task": "watched:Toy"}).model_dump_json(), bundle, "site",
        scratch=tmp_path / "scratch", log=tmp_path / "worker.log",
    )  # fmt: skip
    with Worker(setup) as worker:
        worker.do(Work("prepare"), 120)
        start = {"model": np.zeros(4 * 2, np.float32)}
        done = worker.do(Work("train", 1, start), 60)
    assert done.vectors["delta"].shape == (8,) and np.abs(done.vectors["delta"]).max() > 0


def test_the_configuration_goes_through_json() -> None:
    config = configure({**BOTH, "dropout": 0.1, "private": True, "train": ["head.*"]})
    assert RunConfig.model_validate_json(config.model_dump_json()) == config
    assert copy.deepcopy(config) == config
