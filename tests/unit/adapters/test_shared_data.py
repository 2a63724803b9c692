"""A public data set in local training: which examples, in what share, and what still counts a node's own alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fedward_common.config import RunConfig, load_config, parse_config
from fedward_common.errors import ConfigError, TaskError
from fedward_common.local import LocalRunner
from fedward_common.task import Data
from fedward_common.work import Work
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

torch.set_num_threads(1)


def configure(share: float | None, **more: Any) -> RunConfig:
    task = {"entry": "tests:Task", **({} if share is None else {"shared": {"share": share}})}
    tables: dict[str, Any] = {
        "name": "shared", "task": task, "rounds": 1, "algorithm": {"name": "fedavg"},
        "local": {"lr": 0.1, "epochs": 1, "batch_size": 10}, "secure_sum": {"enabled": False},
    }  # fmt: skip
    return parse_config({**tables, **more})


class Listed(Dataset[Any]):
    """A map-style dataset of numbers, not of tensors."""

    def __init__(self, values: list[float]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> float:
        return self.values[index]


class Means:
    """½ (w − b)²: own examples have b = 1, 2, 3 …, public ones −1, −2, −3 …. `seen`: all that went through the loss."""

    def __init__(self, public: int = 1000, style: str = "tensors") -> None:
        self.public = public
        self.style = style
        self.seen: list[float] = []

    def model(self) -> nn.Module:
        model = nn.Module()
        model.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        return model

    def _dataset(self, values: torch.Tensor) -> Dataset[Any]:
        if self.style == "tensors":
            return TensorDataset(values)
        if self.style == "subset":
            return Subset(TensorDataset(torch.cat([values, torch.zeros(3)])), range(len(values)))
        return Listed(values.tolist())

    def data(self, config: Mapping[str, Any]) -> Data:
        own = self._dataset(torch.arange(1.0, config["n"] + 1))
        collate = (lambda items: [torch.tensor(items)]) if self.style == "collate" else None
        return Data(own, own, collate)

    def shared_data(self, config: Mapping[str, Any]) -> Dataset[Any]:
        return self._dataset(-torch.arange(1.0, self.public + 1))

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        b = batch[0] if isinstance(batch, list) else batch
        self.seen += b.tolist()
        return (0.5 * (model.w - b) ** 2).mean()

    def metrics(self, model: Any, batch: Any) -> dict[str, float]:
        return {}


def trained(task: Means, share: float | None, n: int, node: str = "a", **more: Any) -> Any:
    task.seen = []
    runner = LocalRunner(configure(share, **more), task, node, {"n": n})
    return runner.do(Work("train", 1, {"model": np.zeros(1)}))


@pytest.mark.parametrize("style", ["tensors", "subset", "list", "collate"])
@pytest.mark.parametrize(("share", "n", "public"), [(0.2, 80, 20), (0.5, 30, 30), (0.1, 25, 3), (0.75, 10, 30)])
def test_a_pass_has_all_own_examples_and_a_share_of_public_ones(style: str, share: float, n: int, public: int) -> None:
    task = Means(style=style)
    done = trained(task, share, n)
    own = sorted(value for value in task.seen if value > 0)
    others = [value for value in task.seen if value < 0]
    assert own == list(range(1, n + 1))
    # 25 · 0.1 / 0.9 = 2.8.
    assert len(others) == len(set(others)) == public
    assert done.weight == n and done.metrics["examples"] == n + public
    assert done.info["steps"] == -(-(n + public) // 10)


def test_the_step_is_on_all_of_them() -> None:
    """One step over everything: w = η · mean(b)."""
    task = Means()
    done = trained(task, 0.4, 30, local={"lr": 0.1, "steps": 1, "batch_size": 100})
    assert len(task.seen) == 50
    np.testing.assert_allclose(done.vectors["delta"], [0.1 * np.mean(task.seen)], rtol=1e-12)


def test_the_draw_is_random_by_node_and_the_same_each_round() -> None:
    task = Means()
    trained(task, 0.5, 40)
    first = sorted(value for value in task.seen if value < 0)
    trained(task, 0.5, 40)
    assert first == sorted(value for value in task.seen if value < 0)
    assert min(first) < -100  # not the first ones of the set
    trained(task, 0.5, 40, node="b")
    assert first != sorted(value for value in task.seen if value < 0)
    runner = LocalRunner(configure(0.5), task, "a", {"n": 40})
    for round_ in (1, 2):
        task.seen = []
        runner.do(Work("train", round_, {"model": np.zeros(1)}))
        assert first == sorted(value for value in task.seen if value < 0)


def test_every_public_example_may_be_drawn() -> None:
    task = Means(public=30)
    trained(task, 0.5, 30)
    assert sorted(value for value in task.seen if value < 0) == [-float(i) for i in range(30, 0, -1)]


def test_evaluations_and_counts_are_of_own_examples() -> None:
    task = Means()
    runner = LocalRunner(configure(0.5), task, "a", {"n": 20})
    assert runner.do(Work("count")).metrics["examples"] == 20
    for split in ("train", "test"):
        task.seen = []
        found = runner.do(Work("evaluate", 1, {"model": np.zeros(1)}, split=split)).metrics
        assert found["examples"] == 20 and min(task.seen) == 1


def test_without_the_table_nothing_is_mixed() -> None:
    task = Means()
    assert trained(task, None, 20).metrics["examples"] == 20 and min(task.seen) == 1


def test_too_few_public_examples_are_refused_before_round_1() -> None:
    runner = LocalRunner(configure(0.5), Means(public=20), "a", {"n": 30})
    with pytest.raises(TaskError, match=r"share = 0.5.* 30 examples .* 30 public ones, but .* has 20") as e:
        runner.do(Work("prepare"))
    # The way out works, and is no smaller than it has to be.
    assert "Lower share to 0.4 or less" in str(e.value)
    trained(Means(public=20), 0.4, 30)
    with pytest.raises(TaskError):
        trained(Means(public=20), 0.41, 30)


class NoPublic(Means):
    shared_data = None  # type: ignore[assignment]


class Odd(Means):
    made: Any = None

    def shared_data(self, config: Mapping[str, Any]) -> Dataset[Any]:
        return self.made  # type: ignore[no-any-return]


def test_bad_public_data_is_refused() -> None:
    with pytest.raises(TaskError, match=r"\[task.shared\] needs shared_data\(config\).*NoPublic"):
        trained(NoPublic(), 0.2, 20)
    task = Odd()
    for made, text in (
        (iter([1.0]), "shared_data.. returned .*iterator"),
        (TensorDataset(torch.zeros(50, 2)), r"shapes and dtypes \[\(\(2,\)"),
        (TensorDataset(torch.zeros(50, dtype=torch.float64)), "float64.*float32"),
        (TensorDataset(torch.zeros(50), torch.zeros(50)), "make them the same"),
    ):
        task.made = made
        with pytest.raises(TaskError, match=text):
            trained(task, 0.2, 20)


def test_a_subclass_of_tensor_dataset_keeps_its_own_items() -> None:
    class Doubled(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            return tuple(2 * x for x in super().__getitem__(index))

    task = Odd()
    task.made = Doubled(-torch.arange(1.0, 101))
    trained(task, 0.5, 20)
    assert all(value % 2 == 0 for value in task.seen if value < 0)
    runner = LocalRunner(configure(0.5), task, "a", {"n": 20})
    assert isinstance(runner._training.train, ConcatDataset) and type(LocalRunner(
        configure(0.5), Means(), "a", {"n": 20})._training.train) is TensorDataset  # fmt: skip


def test_scaffolds_full_gradient_is_over_the_same_examples() -> None:
    """Option I: c_i = ∇f_i(0) = −mean(b), with the public examples in f_i, as in the steps."""
    task = Means()
    tables = {"algorithm": {"name": "scaffold", "option": "I"}, "local": {"lr": 0.1, "steps": 1, "batch_size": 100}}
    task.seen = []
    runner = LocalRunner(configure(0.5, **tables), task, "a", {"n": 20})
    done = runner.do(Work("train", 1, {"model": np.zeros(1), "c": np.zeros(1)}))
    assert len(task.seen) == 80  # a step and a pass
    np.testing.assert_allclose(done.state["c_i"], [-np.mean(task.seen)], rtol=1e-12)


def test_label_counts_are_of_own_examples() -> None:
    class Labelled(Means):
        def labels(self, dataset: Any) -> torch.Tensor:
            return (dataset.tensors[0] > 15).long()

    config = configure(0.5, algorithm={"name": "fedadaptive", "classes": 2})
    runner = LocalRunner(config, Labelled(), "a", {"n": 20})
    state = {"labels": np.zeros(2), "told": np.zeros(1)}
    done = runner.do(Work("train", 1, {"model": np.zeros(1)}, state))
    # The public ones would be 20 more of class 0.
    np.testing.assert_allclose(done.vectors["labels"] * done.weight, [15, 5])


PRIVACY = {"clip": 1e4, "sampling_rate": 1.0, "noise_multiplier": 1e-6}


def test_by_record_public_examples_are_records_like_others() -> None:
    pytest.importorskip("opacus")

    class Linear(Means):
        def model(self) -> nn.Module:
            return nn.Linear(1, 1, bias=False)

        def loss(self, model: Any, batch: Any) -> torch.Tensor:
            self.seen += batch[0].tolist()
            return (0.5 * (model(torch.ones(len(batch[0]), 1))[:, 0] - batch[0]) ** 2).mean()

    task = Linear()
    more = {
        "privacy": {"unit": "record", **PRIVACY}, "secure_sum": {"enabled": True}, "evaluation": {"every": 0},
        "local": {"lr": 0.1, "steps": 1, "batch_size": 200},
    }  # fmt: skip
    runner = LocalRunner(configure(0.5, **more), task, "a", {"n": 20})
    done = runner.do(Work("train", 1, {"model": np.zeros(1, np.float32)}))
    # By patient 20 units would be drawn; here 40, each by itself, and U = 40.
    last = task.seen[-40:]
    assert sorted(last)[20:] == list(range(1, 21)) and max(sorted(last)[:20]) < 0
    np.testing.assert_allclose(done.vectors["delta"], [0.1 * np.mean(last)], rtol=1e-3)


def test_by_patient_it_is_refused() -> None:
    more = {"secure_sum": {"enabled": True}, "evaluation": {"every": 0}}
    with pytest.raises(ConfigError, match=r"\[task.shared\] with privacy.unit = 'patient'.*unit = 'record' or 'site'"):
        configure(0.5, privacy={"unit": "patient", **PRIVACY}, **more)
    configure(None, privacy={"unit": "patient", **PRIVACY}, **more)
    by_site = {"unit": "site", "mechanism": "distributed", "clip": 1.0, "noise_multiplier": 1.0}
    configure(0.5, privacy=by_site, **more)


# The configuration.


def test_the_task_may_be_a_table(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'name = "x"\nrounds = 1\n[task]\nentry = "a.b:C"\n[task.shared]\nshare = 0.25\n'
        '[algorithm]\nname = "fedavg"\n[local]\nlr = 0.1\nsteps = 1\n'
    )
    config = load_config(file)
    assert config.task == "a.b:C" and config.shared is not None and config.shared.share == 0.25
    assert parse_config(config.model_dump(mode="json")) == config
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("task", "text"),
    [
        ({"entry": "a:B", "shared": {"share": 0}}, r"task\.shared\.share = 0: must be more than 0"),
        ({"entry": "a:B", "shared": {"share": 1.0}}, r"task\.shared\.share = 1\.0: must be less than 1"),
        ({"entry": "a:B", "shared": {"share": "x"}}, r'task\.shared\.share = "x": must be a number'),
        ({"entry": "a:B", "shared": {}}, r"task\.shared\.share: missing"),
        ({"entry": "a:B", "shared": {"shre": 1}}, r"task\.shared\.shre = 1: unknown key\. Did you mean 'share'"),
        ({"entry": "a:B", "shared": 0.2}, r"task\.shared = 0\.2: must be a table.*\[task\.shared\]"),
        ({"entry": "a:B", "share": 0.2}, r"task\.share = 0\.2: unknown key\. \[task\] has entry and .*task\.shared"),
        ({"shared": {"share": 0.2}}, r"task\.entry: missing"),
        ({"entry": "a"}, r"task = \"a\": must be 'module:Class'"),
    ],
)
def test_a_bad_table_is_refused(task: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        configure(None, task=task)


def test_there_is_one_place_for_it() -> None:
    with pytest.raises(ConfigError, match=r"shared = .*unknown key\. Did you mean 'task\.shared'"):
        configure(None, shared={"share": 0.2})
