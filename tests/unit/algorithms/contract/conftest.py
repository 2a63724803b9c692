import os

import pytest


@pytest.fixture(autouse=True)
def _processes_die_here_not_disks(monkeypatch):
    """What was written stays written, so nothing has to wait for the disk."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
