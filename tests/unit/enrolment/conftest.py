from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from enrolment.site import Site


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    with made.running():
        yield made
    made.store.close()
