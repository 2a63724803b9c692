"""Loading and checking a task: each thing that is missing is named with the way out."""

from __future__ import annotations

import sys

import pytest
import torch
from fedward_common.errors import TaskError
from fedward_common.task import Data, NoDataError, Task, check_data, check_task, load_task
from torch.utils.data import IterableDataset, TensorDataset

GOOD = """
class Good:
    def model(self): ...
    def data(self, config): ...
    def loss(self, model, batch): ...
    def metrics(self, model, batch): ...

good = Good()

class Needy(Good):
    def __init__(self, path): ...

class Half:
    def model(self): ...
    loss = 3
"""


@pytest.fixture
def bundle(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "sample_task.py").write_text(GOOD)
    (tmp_path / "needs_more.py").write_text("import a_library_nobody_has\n")
    yield tmp_path
    sys.modules.pop("sample_task", None)


@pytest.mark.parametrize("reference", ["sample_task:Good", "sample_task:good"])
def test_a_class_or_an_instance(bundle, reference):
    task = load_task(reference, bundle)
    assert isinstance(task, Task)
    assert type(task).__name__ == "Good"


@pytest.mark.parametrize(("reference", "message"), [
    ("sample_task", "module:Class"),
    (":Good", "module:Class"),
    ("no_such_module:Good", "cannot import 'no_such_module' in "),
    ("needs_more:Good", "cannot import 'a_library_nobody_has'"),
    ("sample_task:Bad", r"no 'Bad'; it has \['Good', 'good', 'Needy', 'Half'\]"),
    ("sample_task:Needy", "without arguments .*path"),
])  # fmt: skip
def test_references_that_lead_nowhere(bundle, reference, message):
    with pytest.raises(TaskError, match=message):
        load_task(reference, bundle)


def test_each_missing_method_comes_with_an_example(bundle):
    with pytest.raises(TaskError) as caught:
        load_task("sample_task:Half", bundle)
    text = str(caught.value)
    assert "lacks data, loss, metrics" in text
    assert "def loss(self, model, batch)" in text
    assert "def model" not in text
    with pytest.raises(TaskError, match="NoneType"):
        check_task(None)


SOME = TensorDataset(torch.ones(2, 1))


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self):
        return iter([])


def test_good_data_is_returned_as_it_is():
    for data in (Data(SOME), Data(SOME, SOME), Data(SOME, TensorDataset(torch.ones(0, 1)))):
        assert check_data(data) is data


@pytest.mark.parametrize(("data", "message"), [
    (SOME, "returned TensorDataset, expected"),
    (None, "returned NoneType"),
    (Data(Stream()), "Data.train must be a map-style dataset"),
    (Data(SOME, Stream()), "Data.test must be a map-style dataset"),
    (Data(None), "Data.train must be a map-style dataset"),
])  # fmt: skip
def test_data_of_the_wrong_kind(data, message):
    with pytest.raises(TaskError, match=message):
        check_data(data)


def test_no_data_is_its_own_error():
    with pytest.raises(NoDataError, match=r"no example to train on.*\[data\]"):
        check_data(Data(TensorDataset(torch.ones(0, 1))))
