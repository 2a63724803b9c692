"""Incidents: the text stays in a private file, the id says nothing about it."""

from __future__ import annotations

from fedward_client import incidents
from fedward_client.incidents import Incidents


def test_the_text_is_private_and_the_id_random(tmp_path) -> None:
    kept = Incidents(tmp_path / "log")
    first, second = kept.write("patient Jane Doe \udcff"), kept.write("patient Jane Doe \udcff")
    assert first != second
    assert len(first) == 8 and set(first) <= set("0123456789abcdef")
    file = kept.path(first)
    assert "patient Jane Doe" in file.read_text() and first in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700


def test_old_ones_go(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(incidents, "KEPT", 3)
    (tmp_path / "worker.log").touch()
    kept = Incidents(tmp_path)
    ids = [kept.write(str(number)) for number in range(6)]
    assert len(list(tmp_path.glob("incident-*"))) == 3
    assert kept.path(ids[-1]).exists()
    assert (tmp_path / "worker.log").exists()
