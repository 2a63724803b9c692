"""The worked example of docs/algorithms.md, taken from the page, is an algorithm that keeps the whole contract."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
from fedward_common.algorithms import registry
from small_federation import Federation

from .cases import CASES, config, task
from .engine import NODES
from .suite import CHECKS, MODULES, run

PAGE = Path(__file__).parents[4] / "docs" / "algorithms.md"
NAME = "fedclip"


def blocks() -> list[str]:
    """The code of the section on a new algorithm."""
    section = PAGE.read_text(encoding="utf-8").partition("\n## A new algorithm\n")[2].partition("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def fedclip(tmp_path_factory):
    """The page's one file, as a module, and the page's one line in the registry."""
    file, line = blocks()
    path = tmp_path_factory.mktemp("page") / f"{NAME}.py"
    path.write_text(file, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(NAME, path)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, NAME, module)
        spec.loader.exec_module(module)
        assert line.startswith("# registry.py\n")
        [(name, found)] = eval(f"{{{line}}}", vars(module)).items()
        patch.setitem(registry.ALGORITHMS, name, found)
        yield found


def test_one_file_and_one_line_are_enough(fedclip):
    assert NAME in registry.ALGORITHMS and NAME not in CASES
    assert fedclip.__module__ == NAME


@pytest.mark.parametrize("check", CHECKS)
def test_it_keeps_the_contract(check, fedclip, tmp_path):
    run(check, NAME, tmp_path)


def test_it_does_what_it_says(fedclip):
    """The mean change has the norm that the option allows, and FedAvg's direction."""
    import numpy as np

    clipped, plain = (Federation(config(name, more), task(name), NODES) for name, more in (
        (NAME, {"max_norm": 0.01}), ("fedavg", {})
    ))  # fmt: skip
    start = plain.state.model
    clipped.round()
    plain.round()
    moved, free = clipped.state.model - start, plain.state.model - start
    assert np.linalg.norm(moved) == pytest.approx(0.01, rel=1e-4)
    np.testing.assert_allclose(moved / np.linalg.norm(moved), free / np.linalg.norm(free), atol=1e-4)


def test_the_suite_knows_all_of_its_files():
    """A file of checks that `suite.py` does not name would not be run over the example."""
    here = {path.stem for path in Path(__file__).parent.glob("test_*.py")} | {"test_contract"}
    assert here - {"test_worked_example"} == {module.__name__.rpartition(".")[2] for module in MODULES}
