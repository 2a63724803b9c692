"""A server that lies, made to be edited: one function a lie, `LIES` below says which are tried.

    python server.py --dir .demo-hostile/server --run RUN [--plain RUN] [LIE ...]

It holds what `stolen.py` says and speaks to live nodes over the real link. A lie asks the nodes for something that they
must not give and returns what they answered; it has succeeded if one of them gave anything but a fresh public key.
Exit code 1 if a lie succeeded, or was refused for another reason than the one that `LIES` names.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from fedward_common import records
from fedward_common.errors import FedwardError
from fedward_common.messages import Purpose, Reason, Reply, Request
from fedward_common.roster import KIND, Roster
from fedward_common.secagg.keys import Advertisement, KeyPairs
from fedward_common.secagg.server import Aborted
from fedward_common.signing import public_text, sign_envelope
from fedward_common.steps import ADVERTISEMENT
from fedward_common.summand import WrongSum

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "digits")]

from stolen import Replies, Round, Stolen  # noqa: E402

LIES = {
    # function: what is in the text of the refusal that meets it
    "both_secrets_of_one_node": "named as survivors and as dropped",
    "keys_that_nobody_signed": "not signed by its identity",
    "keys_that_the_server_signed": "not signed by its identity",
    "keys_of_invented_nodes": "not in the roster",
    "a_lower_threshold": "threshold = 2, the rules give 4",
    "a_smaller_cohort": "min_cohort = 4, the round is for 3",
    "another_roster_to_one": "roster",
    "another_model_to_one": "does not open",
    "another_configuration": "manifest is wrong",
    "a_sum_of_one": "1 survivors, a sum needs 4",
    "other_survivors_to_each": "1 survivors signed this set, 4 must have",
    "an_unmask_request_of_an_earlier_round": "not those that this node signed",
    "unmasking_twice": "is not under way",
    "fewer_holders": "holders = 3, the rules give 5",
    "a_victim_that_hears_of_nobody_else": "1 nodes dealt shares",
    "an_advertisement_used_again": "used already",
    "a_round_played_again": "was answered already",
    "a_vector_of_nobodys_making": "zero words are not zero",
    "training_without_terms": "carries no terms of a secure sum",
    "training_under_another_name": "has no 'collect'",
    "training_as_a_query": "carries no terms of a secure sum",
    "a_plain_run": "require_secure_sum = true",
}

LIVE_ONLY = ("another_configuration", "a_plain_run")
"""These need the SuperLink's database."""


# --- both secrets of one node: its self-mask's seed and its mask key together lay its vector open


def both_secrets_of_one_node(server: Stolen) -> Replies:
    """One unmask request that names the victim as a survivor and as dropped."""
    now = masked(server)
    now.agree()
    return now.unmask(now.all(now.unmasking(now.names, dropped=now.names[:1])))


def unmasking_twice(server: Stolen) -> Replies:
    """The round is over and its sum is known; now the victim is said to have dropped out."""
    now = masked(server)
    now.agree()
    now.unmask()
    now.sum()
    return now.unmask(now.all(now.unmasking(now.others(now.names[0]))))


def an_unmask_request_of_an_earlier_round(server: Stolen) -> Replies:
    """The victim dropped out of one round, and all signed that. In the next it did not; they see those signatures."""
    before = Round(server)
    before.start()
    rest = before.others(before.names[0])
    before.mask(dict.fromkeys(rest, before.names))
    before.agree()
    old = before.unmasking(rest)
    before.unmask()
    now = masked(server)
    now.agree()
    return now.unmask(now.all(old))


# --- keys in the place of the nodes' own


def keys_that_nobody_signed(server: Stolen) -> Replies:
    """The server is in the middle: the victim is to mask with keys that the server made."""
    return forged(server, lambda real: KeyPairs.make(real.node, server.run, None).advertisement)


def keys_that_the_server_signed(server: Stolen) -> Replies:
    """The same, signed by a key of the server's."""
    own = Ed25519PrivateKey.generate()
    return forged(server, lambda real: KeyPairs.make(real.node, server.run, own).advertisement)


def keys_of_invented_nodes(server: Stolen) -> Replies:
    """The victim's peers are nodes that nobody has enrolled."""
    own = Ed25519PrivateKey.generate()
    return forged(server, lambda real: KeyPairs.make(bytes(reversed(real.node)), server.run, own).advertisement)


def an_advertisement_used_again(server: Stolen) -> Replies:
    """Its mask key may be known from a round in which it was said to have dropped out."""
    before = Round(server)
    before.start()
    return Round(server, advertised=before.advertised).start()


# --- less protection than the rules give, or other terms to other nodes


def a_lower_threshold(server: Stolen) -> Replies:
    """With t = 2, two nodes would give the victim's seed and two others its mask key."""
    now = Round(server)
    low = replace(now.truth.parameters, threshold=2, quorum=2, survivors=2)
    return now.start(now.all(now.altered(parameters=low)))


def fewer_holders(server: Stolen) -> Replies:
    """Who holds a node's shares is not the server's to choose; here it wants only three of them to."""
    now = Round(server)
    return now.start(now.all(now.altered(parameters=replace(now.truth.parameters, holders=3))))


def a_smaller_cohort(server: Stolen) -> Replies:
    """A round of three that is said to be of five."""
    now = Round(server)
    three = now.names[:3]
    told = now.altered(
        advertisements=now.truth.advertisements[:3], parameters=server.config.secure_sum.parameters(3)
    )
    return now.start(dict.fromkeys(three, told))


def another_roster_to_one(server: Stolen) -> Replies:
    """The victim gets a roster in which all its peers have a key of the server's. It is signed by the server, who is
    not the enrolment authority."""
    now = Round(server)
    own = Ed25519PrivateKey.generate()
    entries = tuple(
        node if node.name == now.names[0] else node.model_copy(update={"identity": public_text(own)})
        for node in server.roster().nodes
    )
    false: Roster = server.roster().model_copy(update={"version": server.roster().version + 1, "nodes": entries})
    envelope = json.dumps(sign_envelope(KIND, false.model_dump(mode="json"), own)).encode()
    return now.start({now.names[0]: now.altered(roster=false.digest, envelope=envelope)})


def another_model_to_one(server: Stolen) -> Replies:
    """The others get a model from which nothing can be learned, so that the sum would be the victim's update."""
    now = Round(server)
    dead = {name: np.zeros_like(vector) for name, vector in server.broadcast.items()}
    now.start({name: now.altered(broadcast=dead) if name != now.names[0] else now.truth for name in now.names})
    return now.mask()


def another_configuration(server: Stolen) -> Replies:
    """The server turns secure aggregation off in the manifest that its database holds."""

    def off(manifest: dict[str, dict[str, dict[str, bool]]]) -> None:
        manifest["config"]["secure_sum"]["enabled"] = False

    with server.edited(off):
        server.ask_all(Purpose.PREPARE)
        return server.ask_all(Purpose.TRAIN, vectors=server.broadcast, settings={"cohort": len(server.names)})


def a_plain_run(server: Stolen) -> Replies:
    """A run without secure aggregation that a data scientist did sign."""
    plain = server.plain or server
    replies = plain.ask_all(Purpose.TRAIN, vectors=plain.broadcast, settings={"cohort": len(server.names)})
    if plain is not server:
        server.heard += plain.heard
        plain.heard.clear()
    return replies


# --- who is in the sum


def a_sum_of_one(server: Stolen) -> Replies:
    """All but the victim are said to have dropped out."""
    now = masked(server)
    victim = now.names[0]
    now.agree(now.all([victim]))
    return now.unmask(now.all(now.unmasking([victim])))


def other_survivors_to_each(server: Stolen) -> Replies:
    """Each node hears of four survivors, as many as a sum must have, but each of other four."""
    now = masked(server)
    told = {name: now.others(now.names[(now.index(name)) % len(now.names)]) for name in now.names}
    now.agree(told)
    return now.unmask({name: now.unmasking(survivors) for name, survivors in told.items()})


def a_victim_that_hears_of_nobody_else(server: Stolen) -> Replies:
    """It is to mask with its own seed alone, which the others would then reveal."""
    now = Round(server)
    now.start()
    victim = now.names[0]
    return now.mask({victim: [victim]})


def a_round_played_again(server: Stolen) -> Replies:
    """A second sum of the same round, without the victim: what lies between the two is the victim's."""
    first = masked(server)
    first.agree()
    first.unmask()
    first.sum()
    return Round(server, attempt=first.attempt).start()


def a_vector_of_nobodys_making(server: Stolen) -> Replies:
    """A node that lies sends any vector; played here by what the server puts in the place of one. A sum with it must
    not pass for the cohort's."""
    now = masked(server)
    now.masked[now.names[0]] = np.flip(now.masked[now.names[0]]).copy()
    now.agree()
    replies = now.unmask()
    now.sum()
    return replies


# --- what leaves a node is the node's to say, not the message's


def training_without_terms(server: Stolen) -> Replies:
    """As in a plain run: the update, its weight and metrics in the reply."""
    return server.ask_all(Purpose.TRAIN, vectors=server.broadcast, settings={"cohort": len(server.names)})


def training_under_another_name(server: Stolen) -> Replies:
    """The broadcast and all that a training wants, as each kind of request there is, to one node."""
    victim = server.names[0]
    told = {"cohort": len(server.names), "seconds": 60.0, "hold": True, "split": "train"}
    replies = [
        server.ask({victim: Request(purpose, server.run, 1, 1, server.broadcast, settings=told)})[victim]
        for purpose in (*Purpose, Purpose.COLLECT)
    ]
    return {f"{victim} ({reply.purpose.value} {i})": reply for i, reply in enumerate(replies)}


def training_as_a_query(server: Stolen) -> Replies:
    """A training whose Flower message calls itself a query."""
    with patch.dict(records._TYPES, {Purpose.TRAIN: "query.train"}):
        return training_without_terms(server)


# --- helpers


def masked(server: Stolen) -> Round:
    """A round in which all nodes have sent their masked vectors, having been told the truth."""
    now = Round(server)
    now.start()
    now.mask()
    return now


def forged(server: Stolen, forge: Callable[[Advertisement], Advertisement]) -> Replies:
    """The victim hears forged advertisements of all its peers."""
    now = Round(server)
    victim = now.names[0]
    made = [real if name == victim else forge(real) for name, real in now.advertised.items()]
    made.sort(key=lambda advertisement: advertisement.node)
    return now.start({victim: now.altered(advertisements=tuple(made))})


# --- the judge

RULES = {Reason.SECURE_SUM, Reason.POLICY, Reason.MANIFEST_INVALID, Reason.BAD_REQUEST, Reason.NOTHING_HELD}
"""Reasons by which a node refuses. Others (a crash, silence) say nothing about the lie."""
REFUSED, ABORTED, SUCCEEDED, UNCLEAR = "refused", "aborted", "SUCCEEDED", "UNCLEAR"


@dataclass(frozen=True)
class Verdict:
    """What came of a lie. answers: the first rule that each node named."""

    lie: str
    verdict: str
    answers: dict[str, str]

    @property
    def good(self) -> bool:
        return self.verdict in (REFUSED, ABORTED)


def tried(lie: str, server: Stolen, functions: dict[str, object] | None = None) -> Verdict:
    """Try a lie."""
    server.heard.clear()
    function: Callable[[Stolen], Replies] = (functions or globals())[lie]  # type: ignore[assignment]
    try:
        replies = function(server)
    except (WrongSum, Aborted) as error:
        return _judged(lie, ABORTED, {"the sum": str(error)})
    refusals = _rules(server)
    if any(gives(reply) for reply in replies.values()):
        return Verdict(lie, SUCCEEDED, refusals)
    failures = [reply.failure for reply in replies.values() if reply.failure is not None]
    unclear = {f.reason for f in failures} - RULES or (not failures and {"no refusal"})
    if unclear:
        return Verdict(lie, UNCLEAR, {**refusals, "unclear": ", ".join(sorted(map(str, unclear)))})
    return _judged(lie, REFUSED, refusals)


def gives(reply: Reply) -> bool:
    """Whether a reply holds anything but a fresh advertisement of public keys."""
    return bool(set(reply.vectors) - {ADVERTISEMENT} or reply.metrics or reply.weight or reply.held)


def _judged(lie: str, verdict: str, answers: dict[str, str]) -> Verdict:
    seen = any(LIES.get(lie, "") in text for text in answers.values())
    return Verdict(lie, verdict if seen else UNCLEAR, answers)


def _rules(server: Stolen) -> dict[str, str]:
    found: dict[str, list[str]] = defaultdict(list)
    for name, purpose, reply in server.heard:
        if reply.failure is not None:
            found[name].append(f"{purpose.value}: {reply.failure.rule or reply.failure.reason.value}")
    return {name: " | ".join(dict.fromkeys(texts)) for name, texts in sorted(found.items())}


def told(lie: str, verdict: Verdict, lines: Callable[[str], None] = print) -> None:
    """One lie, its answers, what came of it."""
    words = " ".join(str((globals()[lie].__doc__ or "").split("\n\n")[0]).split())
    lines(f"\n* {lie.replace('_', ' ')}: {verdict.verdict}\n    tried: {words}")
    same: dict[str, list[str]] = defaultdict(list)
    for name, text in verdict.answers.items():
        same[text].append(name)
    for text, names in same.items():
        who = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        lines(f"    {who}: {text}")


def main() -> int:
    from digits.task import Digits

    parser = argparse.ArgumentParser(description="A server that lies to live nodes.")
    parser.add_argument("--dir", type=Path, required=True, help="the server's state directory")
    parser.add_argument("--run", required=True, help="a secure run that waits for nodes")
    parser.add_argument("--plain", help="a run without secure aggregation")
    parser.add_argument("--sites", type=int, default=5)
    parser.add_argument("lies", nargs="*", metavar="LIE", help=f"some of: {', '.join(LIES)}")
    arguments = parser.parse_args()
    names = [f"site-{number}" for number in range(1, arguments.sites + 1)]
    lies = arguments.lies or [lie for lie in LIES if arguments.plain or lie != "a_plain_run"]
    try:
        server = Stolen.from_disk(arguments.dir, arguments.run, Digits(), names)
        if arguments.plain:
            server.plain = Stolen.from_disk(arguments.dir, arguments.plain, Digits(), names)
        server.ready()
        bad = []
        for lie in lies:
            verdict = tried(lie, server)
            told(lie, verdict)
            sys.stdout.flush()
            bad += [] if verdict.good else [lie]
    except (FedwardError, TimeoutError) as error:
        print(f"\n{error}", file=sys.stderr)
        return 2
    print(f"\n{len(lies)} lies: {len(lies) - len(bad)} refused or aborted, {len(bad)} not {' '.join(bad)}".rstrip())
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
