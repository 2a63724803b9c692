"""The privacy report of a run: numbers against the accountants and closed forms, what it refuses, and the page itself.

Ledgers are real ones, written by the ledger's own writer; what a whole run leaves is in `test_report_command.py`."""

from __future__ import annotations

import json
import math
import re
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from fedward_common.config import RunConfig, parse_config
from fedward_common.privacy import accounting, ledger, report
from fedward_common.privacy.amplification import Drawn, unseen
from fedward_common.privacy.events import DiscreteGaussian, Event, Gaussian, Relation, Skellam, to_json
from fedward_common.privacy.exact_gaussian import epsilon_of
from fedward_common.privacy.ledger import Ledger, Release, Unit
from fedward_common.privacy.report import PrivacyReport, ReportError
from fedward_common.privacy.report_page import page

RUN = "5ee0" * 8
DELTA = 1e-5
SKELLAM = Skellam(100.0, 1000.0, 1.6e5)
NOW = datetime(2026, 11, 30, tzinfo=UTC)
SVG = "{http://www.w3.org/2000/svg}"


def config(rounds: int = 10, mechanism: str = "distributed", **tables: Any) -> RunConfig:
    return parse_config(
        {
            "name": "trial", "task": "t:Task", "rounds": rounds, "algorithm": {"name": "fedavg"},
            "local": {"lr": 0.1, "steps": 5, "batch_size": 8}, "evaluation": {"every": 0},
            "privacy": {"unit": "site", "mechanism": mechanism, "clip": 1.0, "noise_multiplier": 4.0,
                        **tables.pop("privacy", {})},
            **tables,
        }
    )  # fmt: skip


class Left:
    """What a run left: its ledger in a file, its events in a list."""

    def __init__(self, folder: Path, event: Event = SKELLAM, sites: int = 8) -> None:
        self.path = folder / "ledger.jsonl"
        self.event = event
        self._ledger = Ledger(self.path, RUN)
        self.events: list[dict[str, Any]] = [{"event": "run_started", "run": RUN, "nodes": ["s"] * sites}]

    def release(self, number: int, attempt: int = 0, count: int = 1, **changed: Any) -> None:
        fields = {"run": RUN, "unit": Unit.SITE, "event": to_json(self.event), **changed}
        time = NOW + timedelta(minutes=number, seconds=attempt)
        self._ledger.append(
            Release(
                fields["run"], number, attempt, "train", RUN, fields["unit"], "server", fields["event"], count, "", time
            )
        )

    def round(self, number: int, cohort: int = 8, available: int = 8, colluders: int = 1, **changed: Any) -> None:
        self.release(number, **changed)
        self.tell(number, cohort, available, colluders)

    def tell(self, number: int, cohort: int = 8, available: int = 8, colluders: int = 1) -> None:
        self.events.append(
            {"event": "round", "round": number, "cohort": ["s"] * cohort, "available": available,
             "secure_sum": {"colluders_survived": colluders}, "privacy": {"noise_multiplier": 4.0}}
        )  # fmt: skip

    def failed(self, number: int, reason: str) -> None:
        self.events.append({"event": "round_failed", "round": number, "reason": reason, "failures": {}})

    def end(self, status: str = "finished", reason: str = "") -> None:
        self.events.append({"event": "run_finished", "status": status, "reason": reason})

    def report(self, run: str = RUN, **tables: Any) -> PrivacyReport:
        return report.make(run, config(**tables), self.events, ledger.verify(self.path), NOW)


@pytest.fixture
def left(tmp_path: Path) -> Left:
    return Left(tmp_path)


def test_what_is_claimed_is_what_the_accountant_says_of_the_same_events(left: Left) -> None:
    for number in range(1, 11):
        left.round(number)
    left.end()
    found = left.report()
    claim = accounting.spent([(SKELLAM, 10)], DELTA)
    assert found.claim == claim and found.unseen == claim
    assert [(each.round, each.epsilon) for each in found.spent] == [
        (number, accounting.spent([(SKELLAM, number)], DELTA).epsilon) for number in range(1, 11)
    ]
    assert (found.status, found.rounds, found.of, found.sites) == ("finished", 10, 10, 8)
    assert [(each.count, each.first, each.last) for each in found.released] == [(10, 1, 10)]
    assert found.lost == () and found.lines == 10


def test_gaussian_noise_against_the_closed_form(tmp_path: Path) -> None:
    """Balle & Wang 2018, for a site (Δ = C) and for a patient of one (Δ = 2C, an update for another)."""
    left = Left(tmp_path, Gaussian(4.0))
    for number in range(1, 10):
        left.round(number)
    found = left.report()
    site, patient = epsilon_of(DELTA, 3 / 4), epsilon_of(DELTA, 2 * 3 / 4)
    assert found.claim.epsilon == pytest.approx(site)
    assert [(person.who, person.meaning.epsilon) for person in found.persons] == [
        ("one patient of a site", pytest.approx(patient)),
        ("one whole site", pytest.approx(site)),
    ]
    assert found.persons[0].meaning.factor == pytest.approx(math.exp(patient))
    # The formulas themselves, once more: e^ε·0.01 + δ and (e^ε + δ)/(e^ε + 1) where these are the smaller bounds.
    meaning = found.persons[1].meaning
    assert meaning.right == pytest.approx((math.exp(site) + DELTA) / (math.exp(site) + 1))
    assert meaning.found == pytest.approx(
        min(math.exp(site) * 0.01 + DELTA, 1 - math.exp(-site) * (1 - DELTA - 0.01))
    )


def test_counts_of_a_release_count(left: Left) -> None:
    left.round(1, count=7)
    assert left.report().claim == accounting.spent([(SKELLAM, 7)], DELTA)
    assert left.report().released[0].count == 7


def test_a_failed_attempt_is_counted_and_told(left: Left) -> None:
    left.round(1)
    left.release(2, 0)
    left.failed(2, "the sum counts 7 participants")
    left.round(2, attempt=1)
    left.release(3, 0)
    left.end("failed", "gave up")
    found = left.report()
    assert found.claim == accounting.spent([(SKELLAM, 4)], DELTA)
    assert [(lost.round, lost.attempt) for lost in found.lost] == [(2, 0), (3, 0)]
    assert found.lost[0].why == "the sum counts 7 participants" and "process" in found.lost[1].why
    assert (found.rounds, found.status, found.reason) == (2, "failed", "gave up")
    assert "the sum counts 7 participants" in page(found)


def test_the_budget_and_what_is_left(left: Left) -> None:
    for number in range(1, 4):
        left.round(number)
    found = left.report(privacy={"max_epsilon": 5.0})
    assert (found.budget, found.left) == (5.0, 5.0 - found.claim.epsilon)
    assert left.report().budget is None and left.report().left is None
    target = left.report(privacy={"noise_multiplier": None, "target_epsilon": 0.1})
    assert (target.budget, target.left, target.noise_multiplier) == (0.1, 0.0, 4.0)


@pytest.mark.parametrize("event", [SKELLAM, DiscreteGaussian(100.0, 400.0, 1, 1000)], ids=lambda event: event.kind)
def test_two_numbers_where_few_are_drawn(tmp_path: Path, event: Event) -> None:
    left = Left(tmp_path, event, sites=100)
    for number in range(1, 6):
        left.round(number, cohort=5, available=100)
    for number in range(6, 11):
        left.round(number, cohort=5, available=50)
    found = left.report(cohort={"size": 5})
    assert found.claim == accounting.spent([(event, 10)], DELTA)
    drawn = [(Drawn(event, 5, 100), 5), (Drawn(event, 5, 50), 5)]
    assert found.unseen == unseen(drawn, DELTA) and found.unseen.epsilon < found.claim.epsilon / 2
    assert found.spent[-1].unseen == found.unseen.epsilon
    assert "5 % to 10 %" in found.sampling
    # For a patient both are dearer, the second never less than for a site.
    epsilons = [person.meaning.epsilon for person in found.persons]
    assert len(epsilons) == 4 and epsilons[0] > epsilons[2] and epsilons[1] >= epsilons[3]
    assert epsilons[1] == unseen(drawn, DELTA, Relation.REPLACE_ONE).epsilon


def test_no_draw_is_counted_where_the_theorem_does_not_hold(tmp_path: Path) -> None:
    """A round that was tried twice, one that failed before it released, one whose event is of an older server."""
    left = Left(tmp_path, sites=100)
    left.round(1, cohort=5, available=100)
    left.release(2, 0)
    left.round(2, cohort=5, available=100, attempt=1)
    left.failed(3, "no quorum")
    left.round(3, cohort=5, available=100, attempt=1)
    left.round(4, cohort=5, available=100)
    del left.events[-1]["available"]
    found = left.report(cohort={"size": 5})
    assert found.unseen == unseen([(Drawn(SKELLAM, 5, 100), 1), (Drawn(SKELLAM, 1, 1), 4)], DELTA)
    assert "4 releases count whole" in found.sampling


def test_one_number_where_the_draw_gains_nothing(left: Left) -> None:
    left.round(1, cohort=4)
    found = left.report(cohort={"size": 4})
    assert found.unseen == found.claim and "counts twice" in found.sampling
    assert 'class="two"' not in page(found)
    # For a patient, whose data count twice without a draw already, it does.
    assert [person.who for person in found.persons] == ["one patient of a site"] * 2 + ["one whole site"]


def test_thousands_of_rounds(left: Left) -> None:
    for number in range(1, 301):
        left.round(number)
    found = left.report(rounds=300)
    shown = [each.round for each in found.spent]
    assert (shown[0], shown[-1], len(shown)) == (1, 300, 40) and found.spent[-1].epsilon == found.claim.epsilon
    gaps = [after - before for before, after in pairwise(shown)]
    assert max(gaps) - min(gaps) <= 1


def test_who_is_told_what(left: Left) -> None:
    left.round(1)
    by_who = {one.who: one for one in left.report().recipients}
    assert "with the noise in it" in by_who["The server, honest but curious"].what
    assert by_who["A server that lies"].holds.startswith("ε holds, also with up to 1 of")
    assert by_who["The sites that took part"].holds.startswith("ε holds against up to 1")
    trusting = left.report(secure_sum={"honest_server": True}).recipients
    assert trusting[1].holds.startswith("Nothing is claimed")
    central = {one.who: one for one in left.report(mechanism="central").recipients}
    assert "without noise" in central["The server, honest but curious"].what
    assert central["The server, honest but curious"].holds.startswith("No ε holds")
    assert central["A server that lies"].holds.startswith("Nothing is claimed")
    assert "everybody but the server" in left.report(mechanism="central").persons[0].whom


def test_sites_that_know_their_own_noise(left: Left) -> None:
    """Where nobody's noise was planned to be missing, a site that takes its own off has less before it."""
    left.round(1)
    left.round(2, colluders=0)
    sites = next(one for one in left.report().recipients if one.who == "The sites that took part")
    assert "is not calculated" in sites.holds
    assert "not the sites that took part" in left.report().persons[0].whom


def test_nothing_released_yet(left: Left) -> None:
    found = left.report()
    assert (found.claim.epsilon, found.spent, found.status, found.head) == (0.0, (), "under way", "")
    ElementTree.fromstring(page(found).removeprefix("<!DOCTYPE html>"))


# --- what is refused


def test_a_run_without_privacy(left: Left) -> None:
    plain = RunConfig.model_validate({**config().model_dump(mode="json"), "privacy": None})
    with pytest.raises(ReportError, match=r"no \[privacy\]"):
        report.make(RUN, plain, left.events, ledger.verify(left.path))


def test_a_ledger_that_does_not_verify_gives_no_report(left: Left) -> None:
    for number in range(1, 4):
        left.round(number)
    assert left.report().rounds == 3
    data = left.path.read_bytes()
    assert data.count(b"160000") == 3
    left.path.write_bytes(data.replace(b"160000", b"990000", 1))
    with pytest.raises(ReportError, match="damaged"):
        left.report()
    # A whole chain that ends too early.
    left.path.write_bytes(b"".join(data.splitlines(keepends=True)[:-1]))
    with pytest.raises(ReportError, match=r"lacks 1 rounds.* round 3"):
        left.report()
    left.path.unlink()
    with pytest.raises(ReportError, match=r"lacks 3 rounds"):
        left.report()


def test_a_ledger_of_another_run_or_unit(left: Left, tmp_path: Path) -> None:
    left.round(1)
    with pytest.raises(ReportError, match=f"the ledger is that of {RUN}"):
        left.report(run="another")
    left.release(2, unit=Unit.RECORD)
    with pytest.raises(ReportError, match="releases by record"):
        left.report()


def test_an_event_that_no_accountant_knows(left: Left) -> None:
    left.round(1, event='{"kind":"laplace","scale":1.0}')
    with pytest.raises(Exception, match="laplace"):
        left.report()


# --- the forms


def test_the_json_says_all_and_has_no_number_that_is_none(left: Left) -> None:
    left.round(1)
    found = left.report()
    told = json.loads(found.to_json(), parse_constant=lambda text: pytest.fail(text))
    assert told["format"] == 1 and told["claim"]["epsilon"] == found.claim.epsilon
    assert told["released"][0]["event"] == json.loads(to_json(SKELLAM))
    assert told["persons"][0]["meaning"]["right"] == found.persons[0].meaning.right
    assert set(told) == {"format", *PrivacyReport.__dataclass_fields__}


def test_an_infinite_number_is_null_and_drawn_nowhere(tmp_path: Path) -> None:
    left = Left(tmp_path, Skellam(100.0, 1000.0, 1.6e5, 1e-3))
    left.round(1)
    found = left.report()
    assert found.claim.epsilon == math.inf
    assert json.loads(found.to_json())["claim"]["epsilon"] is None
    text = page(found)
    assert "∞" in text and "<svg" not in text and "not protected" in text


def test_the_page_is_whole_and_asks_for_nothing_from_elsewhere(tmp_path: Path) -> None:
    left = Left(tmp_path, sites=100)
    for number in range(1, 6):
        left.round(number, cohort=5, available=100)
    left.failed(6, "<script>alert('&')</script>")
    left.release(6)
    left.end("stopped", "by \"ada\" <b>")
    text = page(left.report(cohort={"size": 5}, privacy={"max_epsilon": 2.0}))
    assert text.startswith("<!DOCTYPE html>")
    tree = ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>"))
    assert not [node for node in tree.iter() if node.tag.rpartition("}")[2] in ("script", "link", "img", "iframe", "a")]
    names = {name.rpartition("}")[2] for node in tree.iter() for name in node.attrib}
    assert not names & {"src", "href", "srcset", "data", "action", "onload", "style", "background"}
    # Addresses are names of XML namespaces, nothing else; the style imports nothing.
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/1999/xhtml", "http://www.w3.org/2000/svg"}
    assert "url(" not in text and "@import" not in text and "default-src 'none'" in text
    assert "&lt;script&gt;" in text and "prefers-color-scheme: dark" in text and "@media print" in text


def test_the_curves_are_the_numbers(tmp_path: Path) -> None:
    left = Left(tmp_path, sites=100)
    for number in range(1, 9):
        left.round(number, cohort=5, available=100)
    found = left.report(cohort={"size": 5})
    tree = ElementTree.fromstring(page(found).removeprefix("<!DOCTYPE html>"))
    curves = {line.attrib["class"]: line.attrib["points"].split() for line in tree.iter(f"{SVG}polyline")}
    heights = {kind: [float(point.split(",")[1]) for point in points] for kind, points in curves.items()}
    marks = [(float(mark.attrib["y"]) - 4, float(mark.text or "")) for mark in tree.iter(f"{SVG}text")
             if mark.attrib.get("text-anchor") == "end" and "class" not in mark.attrib]  # fmt: skip
    (low, zero), (high, top) = marks[0], marks[-1]
    assert zero == 0 and top >= found.claim.epsilon and 0 < high < low < 300
    assert all(high <= height <= low for line in heights.values() for height in line)
    known, models_only = [each.epsilon for each in found.spent], [each.unseen for each in found.spent]
    for kind, values in (("one", known), ("two", models_only)):
        drawn = [(low - height) / (low - high) * top for height in heights[kind]]
        assert drawn == pytest.approx([0.0, *values], abs=top / 1000)


def test_numbers_in_words_are_rounded_up() -> None:
    from fedward_common.privacy import wording

    assert [wording.up(value) for value in (1.0, 2.714, 0.12341, 55.32, 1234.5, 0.0)] == [
        "1.00", "2.72", "0.124", "55.4", "1240", "0",
    ]  # fmt: skip
    assert [wording.percent(share) for share in (0.5, 0.7001, 0.01, 0.99999, 1.0)] == [
        "50 %", "70.1 %", "1 %", "100 %", "100 %",
    ]  # fmt: skip
    assert wording.chance(1e-5) == "1 in 100,000" and wording.chance(1 / 3) == "1 in 3"
