"""Fixtures of the end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from federation import Federation


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    """A server that is up; tests add nodes."""
    made = Federation(tmp_path)
    try:
        made.up()
        yield made
    finally:
        made.close()
