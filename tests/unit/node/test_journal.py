"""The journal: every line on disk, torn ones set apart."""

from __future__ import annotations

import json
import os
import threading

from fedward_client.journal import Journal


def write(journal: Journal, round_: int, **more) -> None:
    journal.write(run="r", round=round_, attempt=0, purpose="train", outcome="answered", **more)


def test_lines_come_back(tmp_path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    assert journal.tail(5) == []
    write(journal, 1, bytes=40, tensors=["delta"], metrics=["loss"])
    journal.write(run="r", round=2, attempt=1, purpose="train", outcome="policy", rule="max_epochs = 5\nnext")
    first, second = journal.tail(5)
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "run": "r", "round": 1, "attempt": 0, "purpose": "train", "outcome": "answered", "bytes": 40,
        "rule": "", "incident": "", "tensors": ["delta"], "metrics": ["loss"],
    }  # fmt: skip
    assert second["rule"] == "max_epochs = 5\nnext"
    assert (tmp_path / "journal.jsonl").stat().st_mode & 0o777 == 0o600


def test_the_line_is_synced_before_write_returns(tmp_path, monkeypatch) -> None:
    seen = []
    sync = os.fsync

    def spy(descriptor: int) -> None:
        sync(descriptor)
        seen.append((tmp_path / "journal.jsonl").read_text().count("\n"))

    monkeypatch.setattr(os, "fsync", spy)
    journal = Journal(tmp_path / "journal.jsonl")
    write(journal, 1)
    write(journal, 2)
    assert seen == [1, 2]


def test_the_tail_of_a_long_journal(tmp_path) -> None:
    path = tmp_path / "journal.jsonl"
    with path.open("w") as file:
        for number in range(5000):
            file.write(json.dumps({"round": number, "filler": "é" * 40}, ensure_ascii=False) + "\n")
    journal = Journal(path)
    assert [entry["round"] for entry in journal.tail(3)] == [4997, 4998, 4999]
    assert [entry["round"] for entry in journal.tail(4000)] == list(range(1000, 5000))
    assert len(journal.tail(10_000)) == 5000
    assert journal.tail(0) == []


def test_a_line_cut_off_by_a_crash_harms_no_other(tmp_path) -> None:
    path = tmp_path / "journal.jsonl"
    write(Journal(path), 1)
    whole = path.read_bytes()
    for length in range(1, len(whole), 7):
        path.write_bytes(whole + whole[:length])
        journal = Journal(path)
        assert [entry["round"] for entry in journal.tail(2)] == [1]
        write(journal, 2)
        write(journal, 3)
        assert [entry["round"] for entry in journal.tail(3)] == [1, 2, 3]


def test_many_threads(tmp_path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    threads = [threading.Thread(target=lambda n=n: [write(journal, n) for _ in range(10)]) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(entry["round"] for entry in journal.tail(100)) == [n for n in range(8) for _ in range(10)]
