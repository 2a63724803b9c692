"""The ledger under any history, any edit, any crash, any order of questions."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest
from fedward_common.privacy.anchor import Anchor, accept, compare
from fedward_common.privacy.budget import Limits, would_exceed
from fedward_common.privacy.ledger import Ledger, LedgerError, Release, ReleaseRefused, Unit, verify
from fedward_common.signing import canonical
from hypothesis import given, settings
from hypothesis import strategies as st

WHEN = datetime(2026, 1, 1, tzinfo=UTC)
names = st.text(min_size=1, max_size=8)
numbers = st.floats(allow_nan=False, allow_infinity=False) | st.integers()
events = st.dictionaries(names, numbers | names, max_size=3).map(lambda event: canonical({**event, "kind": "k"}))
releases = st.builds(
    Release, run=names, round=st.integers(0), attempt=st.integers(0), purpose=names, dataset=names,
    unit=st.sampled_from(Unit), server=names, event=events, count=st.integers(1),
    model=st.just("") | st.integers(0, 2**256 - 1).map(lambda number: f"{number:064x}"),
    time=st.datetimes(timezones=st.just(UTC)),
)  # fmt: skip
histories = st.lists(releases, max_size=8, unique_by=lambda one: one.question)


@contextmanager
def ledger_file() -> Iterator[Path]:
    with TemporaryDirectory() as folder, patch.object(os, "fsync"):
        yield Path(folder) / "ledger.jsonl"


def write(path: Path, history: Sequence[Release], owner: str = "node") -> Ledger:
    ledger = Ledger(path, owner)
    for release in history:
        ledger.append(release)
    return ledger


@given(histories, names)
@settings(deadline=None)
def test_what_was_written_comes_back(history: list[Release], owner: str) -> None:
    first = {one.asked_about if one.model else one: one for one in reversed(history)}
    history = [one for one in history if one in first.values()]
    with ledger_file() as path:
        ledger = write(path, history, owner)
        again = Ledger(path, owner)
        assert list(again.releases()) == list(ledger.releases()) == history
        assert again.head() == ledger.head()
        assert verify(path).problems == []


plain = st.lists(
    st.builds(
        Release, run=st.sampled_from("ab"), round=st.integers(0, 99), attempt=st.just(0), purpose=st.just("train"),
        dataset=st.just("d"), unit=st.sampled_from(Unit), server=st.just("s"), event=st.just('{"kind":"k"}'),
        time=st.just(WHEN),
    ),
    min_size=1, max_size=6, unique_by=lambda one: one.question,
)  # fmt: skip


@given(plain, st.data())
@settings(max_examples=300, deadline=None)
def test_no_edit_goes_unseen_and_none_hides_a_release(history: list[Release], data: st.DataObject) -> None:
    """Any bytes exchanged for any others: told, or what lies before the anchor is as it was."""
    with ledger_file() as path:
        anchor = Anchor(write(path, history).head())
        before = path.read_bytes()
        start = data.draw(st.integers(0, len(before)))
        stop = data.draw(st.integers(start, min(len(before), start + 400)) | st.just(len(before)))
        lines = st.sampled_from(before.splitlines(keepends=True))
        path.write_bytes(before[:start] + data.draw(st.binary(max_size=4) | lines) + before[stop:])
        if compare(path, {"anchor": anchor}) is None:
            assert path.read_bytes().startswith(before.removesuffix(b"\n"))
            assert verify(path).releases[: len(history)] == history
        else:
            accept(path, "node", "Ada", "why", [anchor.head])
            assert compare(path, {"anchor": anchor}) is None
            Ledger(path, "node")


@given(plain, st.data())
@settings(deadline=None)
def test_after_a_crash_at_any_byte_the_ledger_goes_on(history: list[Release], data: st.DataObject) -> None:
    with ledger_file() as path:
        write(path, history)
        size = data.draw(st.integers(0, path.stat().st_size))
        path.write_bytes(path.read_bytes()[:size])
        ledger = Ledger(path, "node")
        kept = list(ledger.releases())
        assert kept == history[: len(kept)]
        for release in history[len(kept) :]:
            ledger.append(release)
        report = verify(path)
        assert (report.problems, report.releases) == ([], history)
        for release in history:
            with pytest.raises(ReleaseRefused):
                ledger.append(release)


tenths = st.integers(0, 60)
asked = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xy"), tenths, st.integers(0, 500)), max_size=40)


@given(asked, *[st.none() | st.integers(0, 150)] * 3)
@settings(deadline=None)
def test_exactly_what_fits_is_allowed(
    asked: list[tuple[str, str, int, int]], run: int | None, dataset: int | None, year: int | None
) -> None:
    """Against sums of whole tenths, kept by hand."""

    def summed(events: Sequence[tuple[str, int]], delta: float) -> float:
        return sum(json.loads(event)["e"] * count for event, count in events)

    limits = Limits(*(None if limit is None else limit / 10 for limit in (run, dataset, year)))
    done: list[Release] = []
    tally: list[tuple[str, str, int, int]] = []
    day = 0
    for number, (one_run, one_dataset, cost, days) in enumerate(asked):
        day += days
        event = canonical({"kind": "pure", "e": cost / 10})
        release = Release(
            one_run, number, 0, "train", one_dataset, Unit.RECORD, "s", event, time=WHEN + timedelta(days=day)
        )
        same = [entry for entry in tally if entry[1] == one_dataset]
        spent = (
            sum(entry[2] for entry in same if entry[0] == one_run),
            sum(entry[2] for entry in same),
            sum(entry[2] for entry in same if day - entry[3] <= 365),
        )
        fits = all(
            limit is None or before + cost <= limit
            for limit, before in zip((run, dataset, year), spent, strict=True)
        )
        problem = would_exceed(done, release, limits, summed)
        assert (problem is None) is fits, problem
        if fits:
            done.append(release)
            tally.append((one_run, one_dataset, cost, day))


@given(st.binary(max_size=300))
@settings(deadline=None)
def test_rubbish_is_no_ledger(data: bytes) -> None:
    with ledger_file() as path:
        path.write_bytes(data)
        report = verify(path)
        assert report.releases == []
        if report.problems:
            with pytest.raises(LedgerError):
                Ledger(path, "node")
        accept(path, "node", "Ada", "why")
        assert list(Ledger(path, "node").releases()) == []
