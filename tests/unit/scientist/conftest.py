"""Task projects are imported from folders of their own; each test starts without those of others."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(autouse=True)
def forgotten_projects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    projects = (str(tmp_path_factory.getbasetemp()), str(EXAMPLES))
    yield
    sys.path[:] = [path for path in sys.path if not path.startswith(projects)]
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(projects):
            del sys.modules[name]
