"""A federation whose roster is signed on another machine, with a site that approves each member: from outstanding
signatures to a finished run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from federation import Federation, fedward, until
from fedward_common.signing import public_text
from fedward_server.roster_authority import RosterAuthority, read_unsigned

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

RUN = """
name = "apart"
task = "toy.task:Toy"
rounds = 2

[algorithm]
name = "fedavg"

[local]
lr = 0.1
steps = 5

[secure_sum]
enabled = false

[cohort]
quorum = 2
min_nodes = 2
wait = 180
deadline = 60
"""
LAX = "approved_bundles_only = false\nrequire_secure_sum = false\n"


@pytest.fixture
def office(tmp_path: Path) -> RosterAuthority:
    return RosterAuthority.create(tmp_path / "office")


@pytest.fixture
def federation(tmp_path: Path, office: RosterAuthority) -> Iterator[Federation]:
    made = Federation(tmp_path, public_text(office.public_key()))
    try:
        made.up()
        yield made
    finally:
        made.close()


def sign(federation: Federation, office: RosterAuthority) -> None:
    """From the server's machine to the authority's and back."""
    there, back = federation.root / "pending.json", federation.root / "signed.json"
    fedward("server", "roster", "export", "-o", there, "--dir", federation.state)
    back.write_text(json.dumps(office.sign(read_unsigned(there))))
    fedward("server", "roster", "install", back, "--dir", federation.state)


def test_a_run_under_an_authority_of_its_own(federation: Federation, office: RosterAuthority) -> None:
    sign(federation, office)
    federation.join("open", {"site": 0}, policy=LAX)
    careful = federation.join("careful", {"site": 1}, policy=LAX + "approve_roster_changes = true\n")
    # Guards start while their signatures are outstanding, also after being killed with an open session.
    federation.start_node("open")
    federation.start_node("careful").kill()
    process = federation.start_node("careful")
    assert "not in the roster yet" in process.text()
    assert "3 waits for the authority's signature" in fedward("server", "status", "--dir", federation.state).stdout

    sign(federation, office)
    run = federation.submit(RUN)
    waiting = until(
        "the refusal",
        lambda: [e for e in federation.events(run, "waiting") if "policy" in e["missing"].get("careful", "")], 120,
    )  # fmt: skip
    assert "scientist admin" in waiting[-1]["missing"]["careful"]
    assert "pending" in fedward("node", "roster", "show", "--dir", careful).stdout
    fedward("node", "roster", "approve", "open", "admin", "--dir", careful)
    # The guard was not restarted.
    assert federation.finished(run, 180)["status"] == "finished"
    assert all(sorted(event["replies"]) == ["careful", "open"] for event in federation.events(run, "round"))
    assert process.popen is not None and process.popen.poll() is None
