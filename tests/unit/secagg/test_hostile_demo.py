"""The lies of `examples/hostile/server.py`, told to nodes in memory: each is refused by the rule that it names, and
their judge sees a lie that succeeds. `make demo-hostile` tells them to live nodes."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fedward_common.messages import Failure, Purpose, Reason, Reply
from fedward_common.secagg.client import Client
from fedward_common.secagg.keys import Keyring
from fedward_common.secure import SecureParticipant
from fedward_server.simulation import MemoryTransport

from .federation import LAYOUT, RUN, WIDTH, Federation
from .test_attacks_requests import in_the_open

HOSTILE = Path(__file__).parents[3] / "examples" / "hostile"

BULLETS = {
    "both b_u and sk_u of one client": {"both_secrets_of_one_node"},
    "keys replaced": {"keys_that_nobody_signed", "keys_that_the_server_signed", "keys_of_invented_nodes"},
    "t lowered, cohort shrunk": {"a_lower_threshold", "a_smaller_cohort", "fewer_holders"},
    "another roster, model or config": {"another_roster_to_one", "another_model_to_one", "another_configuration"},
    "survivors": {"a_sum_of_one", "other_survivors_to_each"},
    "replay": {"an_unmask_request_of_an_earlier_round", "unmasking_twice", "a_round_played_again"},
    "neighbours": {"fewer_holders", "a_victim_that_hears_of_nobody_else"},
    "advertisements are single-use": {"an_advertisement_used_again"},
    "a lying node": {"a_vector_of_nobodys_making"},
    "training under another name": {
        "training_without_terms", "training_under_another_name", "training_as_a_query", "a_plain_run",
    },
}  # fmt: skip
"""What a server that lies can try, as the reference lists it, and the lies that try it."""


@pytest.fixture(scope="module")
def hostile() -> Any:
    before = list(sys.path)
    sys.path.insert(0, str(HOSTILE))
    try:
        yield importlib.import_module("server")
    finally:
        sys.path[:] = before
        for name in ("server", "stolen"):
            sys.modules.pop(name, None)


def stolen(hostile: Any, federation: Federation) -> Any:
    names = list(federation.nodes)
    transport = MemoryTransport({name: federation._handler(name) for name in names}, (), federation.faults)
    made = hostile.Stolen(
        transport, RUN, federation.config, lambda: federation.roster, {"model": np.ones(WIDTH)}, LAYOUT, (), names
    )
    for site in federation.sites.values():
        site.examples = 100.0  # within the scale of weights that the attacker tells
    return made


def test_every_kind_of_lie_is_tried(hostile: Any) -> None:
    assert set().union(*BULLETS.values()) == set(hostile.LIES)
    assert all(getattr(hostile, lie).__doc__ for lie in hostile.LIES)


def in_memory() -> list[str]:
    text = (HOSTILE / "server.py").read_text(encoding="utf-8")
    lies = [lie for group in BULLETS.values() for lie in group if f"def {lie}" in text]
    return sorted({*lies} - {"another_configuration", "a_plain_run"})


@pytest.mark.parametrize("lie", in_memory())
def test_the_lie_is_refused_for_what_it_is(lie: str, hostile: Any) -> None:
    verdict = hostile.tried(lie, stolen(hostile, Federation(least=4)))
    assert verdict.good, verdict


def skip(cls: type, *checks: str) -> Any:
    def build(monkeypatch: pytest.MonkeyPatch) -> None:
        for check in checks:
            monkeypatch.setattr(cls, check, lambda self, *arguments: None)

    return build


def used_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Keyring, "take", lambda self, advertisement: self._outstanding.get(advertisement.serial))


@pytest.mark.parametrize(
    ("lie", "build"),
    [
        ("both_secrets_of_one_node", skip(Client, "_check_split")),
        ("keys_of_invented_nodes", skip(Client, "_check_advertisements", "_verify")),
        ("a_lower_threshold", skip(Client, "_check_parameters")),
        ("other_survivors_to_each", skip(Client, "_check_signatures")),
        ("a_victim_that_hears_of_nobody_else", skip(Client, "_check_sharers")),
        ("an_advertisement_used_again", used_keys),
        ("a_round_played_again", skip(SecureParticipant, "_check_new")),
        ("training_without_terms", in_the_open),
        ("training_under_another_name", in_the_open),
    ],
)
def test_a_lie_that_succeeds_is_seen(
    lie: str, build: Any, hostile: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(monkeypatch)
    assert hostile.tried(lie, stolen(hostile, Federation(least=4))).verdict == hostile.SUCCEEDED


def test_silence_and_other_refusals_are_no_proof(hostile: Any) -> None:
    server = stolen(hostile, Federation(least=4))

    def answer(reason: Reason, rule: str) -> Any:
        def lie(server: Any) -> Any:
            replies = {"a": Reply(Purpose.TRAIN, RUN, failure=Failure(reason, rule))}
            server.heard.append(("a", Purpose.TRAIN, replies["a"]))
            return replies

        return {"a_sum_of_one": lie}

    text = hostile.LIES["a_sum_of_one"]
    cases = ((Reason.SECURE_SUM, text), (Reason.SECURE_SUM, "x"), (Reason.INTERNAL, text), (Reason.NO_REPLY, ""))
    verdicts = [hostile.tried("a_sum_of_one", server, answer(*case)).verdict for case in cases]
    assert verdicts == [hostile.REFUSED, *[hostile.UNCLEAR] * 3]
