"""What a server, or a node, that lies can try in a secure round.

Each attack runs against ours, where it learns nothing and runs into a rule that the test names, and against builds
without the check in question, where it succeeds: what it ends with is the victim's vector, or the sum of the few that
it singled out. Where several checks are in the way, all but one of them gone still hold it up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from fedward_common import summand
from fedward_common.errors import UpdateError
from fedward_common.secagg import client as client_module
from fedward_common.secagg import shamir
from fedward_common.secagg.client import Client, Guarantees, Refusal
from fedward_common.secagg.graph import Parameters, choose, draw_holders
from fedward_common.secagg.keys import KeyPairs, Keyring, SealKey
from fedward_common.secagg.masks import Words
from fedward_common.secagg.messages import Dealt, Unmasking, joined
from fedward_common.secagg.packing import pack
from fedward_common.secagg.server import Aborted, Rejected, Server
from fedward_common.secagg.terms import Terms
from fedward_common.summand import Group, Shape, WrongSum, decode

from . import cohort as cohort_module
from .builds import Build, Patch, both, builds, judge, named, ours, verify_each_once, without
from .cohort import BITS, RUN, Cohort
from .hostile import KEY, SEED, HostileServer


@pytest.fixture(autouse=True)
def fast(monkeypatch: Patch) -> None:
    verify_each_once(monkeypatch)


def begin(cohort: Cohort, terms: Terms | None = None, corrupt: Collection[int] = (), **asked: Any) -> HostileServer:
    """A round in which all nodes have been told the same terms and have dealt."""
    clients = {i: cohort.client(i, terms, **asked) for i in range(1, cohort.n + 1)}
    hostile = HostileServer(terms or cohort.terms, clients, corrupt)
    hostile.deal()
    return hostile


def mask(hostile: HostileServer, cohort: Cohort, silent: Collection[int] = ()) -> None:
    """Every node sends its masked vector, having been told the truth; `silent` ones drop out, or so the server says."""
    for i in sorted(hostile.everyone - set(silent)):
        hostile.mask(i, cohort.sites[i - 1].words)


def unmask(hostile: HostileServer, silent: Collection[int] = ()) -> None:
    """Agreement and unmasking as they should be."""
    survivors = hostile.everyone - set(silent)
    for i in sorted(survivors):
        hostile.agree(i, survivors)
    for i in sorted(survivors):
        hostile.unmask(i, survivors, silent)


# --- both secrets of one node

SECRETS_STAY = named("secrets stay after unmasking", without("wipe"))


@builds(
    "out of turn",
    both(SECRETS_STAY, without("_check_signed_set", "_check_signatures")),
    holds={
        without("_check_signed_set", "_check_signatures"): "out of turn",
        both(SECRETS_STAY, without("_check_signatures")): "not those that this node signed",
        both(SECRETS_STAY, without("_check_signed_set")): "0 survivors signed this set",
    },
)
def test_unmask_twice_with_other_sets(build: Build, rule: str | None, monkeypatch: Patch) -> None:
    """The victim survives in the first request and is dropped in the second: its seed and its mask key."""
    build(monkeypatch)
    cohort, victim = Cohort(5), 2
    hostile = begin(cohort)
    mask(hostile, cohort)
    unmask(hostile)
    for i in hostile.everyone - {victim}:
        hostile.unmask(i, hostile.everyone - {victim}, [victim])
    judge(rule, hostile.vector_of(victim), cohort.sites[victim - 1].words, hostile)


def statement_of_any_round(monkeypatch: Patch) -> None:
    """What survivors sign does not say in which round."""
    monkeypatch.setattr(
        client_module, "survivors_statement", lambda terms, sharers, survivors: joined([sharers, survivors])
    )


@builds(
    "out of turn",
    both(SECRETS_STAY, without("_check_signed_set"), statement_of_any_round),
    holds={
        both(SECRETS_STAY, statement_of_any_round): "not those that this node signed",
        both(SECRETS_STAY, without("_check_signed_set")): "is wrong",
    },
)
def test_replay_of_an_earlier_rounds_unmask_request(build: Build, rule: str | None, monkeypatch: Patch) -> None:
    """The victim dropped out of round 1, and all signed that. In round 2 it did not."""
    build(monkeypatch)
    cohort, victim = Cohort(5), 2
    first = begin(cohort)
    mask(first, cohort, [victim])
    unmask(first, [victim])
    survivors = first.everyone - {victim}
    old = first.signatures[first.bitmap(survivors)]
    assert len(old) == 4
    hostile = begin(cohort, cohort.new_terms(2))
    mask(hostile, cohort)
    unmask(hostile)
    for i in survivors:
        hostile.unmask(i, survivors, [victim], old)
    judge(rule, hostile.vector_of(victim), cohort.sites[victim - 1].words, hostile)


@pytest.mark.parametrize(
    ("build", "rule"),
    [
        (ours, "named as survivors and as dropped"),
        (without("_check_split"), ""),
        (without("_check_split", "_check_signed_set"), ""),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_survivor_and_dropped_in_one_request(build: Build, rule: str, monkeypatch: Patch) -> None:
    """To some in both sets, to others in one. No build falls to this: of a node's two shares a holder gives one."""
    build(monkeypatch)
    cohort, victim = Cohort(5), 2
    hostile = begin(cohort)
    mask(hostile, cohort)
    for i in hostile.everyone:
        hostile.agree(i, hostile.everyone)
    for i in hostile.everyone:
        hostile.unmask(i, hostile.everyone, [victim] if i != 5 else ())
    judge(rule, hostile.vector_of(victim), None, hostile)


# --- who is said to have survived


def tell_each(cohort: Cohort, told: Mapping[int, frozenset[int]], all_sign: bool = False) -> HostileServer:
    """Node i hears that told[i] survived, signs it, and sees what signatures of it there are. all_sign: all survivors
    of all these sets are asked for a signature before."""
    hostile = begin(cohort)
    mask(hostile, cohort)
    for survivors in set(told.values()) if all_sign else ():
        for i in sorted(survivors):
            hostile.agree(i, survivors)
    for i, survivors in told.items():
        hostile.agree(i, survivors)
    for i, survivors in told.items():
        hostile.unmask(i, survivors, hostile.everyone - survivors)
    return hostile


def spread(n: int, threshold: int, few: frozenset[int], most: int) -> dict[int, frozenset[int]]:
    """Survivor sets, one a node: none leaves out more than `most`, yet `threshold` leave out each node not in `few`."""
    told = {i: frozenset(range(1, n + 1)) for i in range(1, n + 1)}
    for gone in sorted(set(told) - few):
        for i in sorted(set(told) - {gone}, key=lambda i: (-len(told[i]), i))[:threshold]:
            told[i] -= {gone}
    assert min(map(len, told.values())) >= n - most
    return told


def signs_again(monkeypatch: Patch) -> None:
    """A node signs one survivor set after another."""
    agree = Client.agree

    def again(self: Client, survivors: bytes) -> bytes:
        self._stage = client_module._Stage.MASKED
        return agree(self, survivors)

    monkeypatch.setattr(Client, "agree", again)


@builds(
    "signed this set, 24 must have",
    without("_check_signatures"),
    signs_again,
    holds={without("_check_survivors"): "signed this set, 24 must have"},
)
def test_another_survivor_set_to_each_of_thirty(build: Build, rule: str | None, monkeypatch: Patch) -> None:
    """Each node hears of 24 survivors or more, as many as a sum must have; the sum of 21 comes out."""
    build(monkeypatch)
    cohort, few = Cohort(30), frozenset(range(1, 22))
    assert cohort.parameters.survivors == 24
    told = spread(30, cohort.parameters.threshold, few, 6)
    hostile = tell_each(cohort, told, all_sign=build is signs_again)
    judge(rule, hostile.sum_of(few), cohort.total(few), hostile)
    if build is ours:
        hostile = tell_each(Cohort(30), told, all_sign=True)
        judge("agreeing on survivors out of turn", hostile.sum_of(few), None, hostile)


@builds(
    "9 survivors, a sum needs 24",
    without("_check_signatures", "_check_survivors"),
    holds={
        without("_check_signatures"): "9 survivors, a sum needs 24",
        without("_check_survivors"): "survivors signed this set, 24 must have",
    },
)
def test_the_sum_of_eight_of_thirty(build: Build, rule: str | None, monkeypatch: Patch) -> None:
    """Each node hears that it survived with the same eight and nobody else."""
    build(monkeypatch)
    cohort, eight = Cohort(30), frozenset(range(3, 11))
    hostile = tell_each(cohort, {i: eight | {i} for i in range(1, 31)})
    judge(rule, hostile.sum_of(eight), cohort.total(eight), hostile)


@builds(
    "a sum needs 8",
    without("_check_signatures", "_check_survivors"),
    holds={without("_check_signatures"): "a sum needs 8", without("_check_survivors"): "signed, but is no survivor"},
)
def test_all_but_one_declared_dropped(build: Build, rule: str | None, monkeypatch: Patch) -> None:
    """A sum of one."""
    build(monkeypatch)
    cohort, victim = Cohort(10), 4
    hostile = begin(cohort)
    mask(hostile, cohort)
    for i in hostile.everyone:
        hostile.agree(i, [victim])
    for i in hostile.everyone:
        hostile.unmask(i, [victim], hostile.everyone - {victim})
    judge(rule, hostile.vector_of(victim), cohort.sites[victim - 1].words, hostile)


def a_quorum_of_signatures(monkeypatch: Patch) -> None:
    """A node is content with the signatures that make a survivor set the only one; it asks for no more."""
    check = Client._check_signatures

    def quorum_only(self: Client, request: Unmasking, survivors: frozenset[int]) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Client, "_fewest", lambda self: self.terms.parameters.quorum)
            check(self, request, survivors)

    monkeypatch.setattr(Client, "_check_signatures", quorum_only)


@builds("7 survivors signed this set, 8 must have", a_quorum_of_signatures)
def test_ghosts_that_only_seem_to_survive(build: Build, rule: str | None, monkeypatch: Patch) -> None:
    """Three nodes dropped out of earlier rounds, which revealed their mask keys. The server brings back what they
    advertised then, as only they could tell, and says that they dealt and survived: a sum of seven passes for one of
    ten, though the rules and these nodes' policies ask for eight."""
    build(monkeypatch)
    cohort, ghosts = Cohort(10), {}
    for number, gone in enumerate(([9, 10], [8]), 1):
        earlier = begin(cohort, cohort.new_terms(number))
        mask(earlier, cohort, gone)
        unmask(earlier, gone)
        for i in gone:
            key = earlier.secret(i, KEY)
            assert key is not None
            ghosts[i] = earlier.terms.advertisement(i), key
    told = cohort.new_terms(3)
    advertisements = tuple(
        ghosts[i][0] if i in ghosts else advertisement for i, advertisement in enumerate(told.advertisements, 1)
    )
    terms = replace(told, advertisements=advertisements)
    real = frozenset(range(1, 8))
    hostile = HostileServer(terms, {i: cohort.client(i, terms, least=8) for i in real})
    hostile.mask_keys |= {i: key for i, (_, key) in ghosts.items()}
    hostile.deal()
    for i in real:
        hostile.mask(i, cohort.sites[i - 1].words, sharers=hostile.everyone)
    for i in real:
        hostile.agree(i, hostile.everyone)
    for i in real:
        hostile.unmask(i, hostile.everyone, ())
    judge(rule, hostile.sum_of(real), cohort.total(real), hostile)


# --- keys


def unsigned(cohort: Cohort, i: int) -> KeyPairs:
    return KeyPairs.make(cohort.sites[i - 1].node, RUN, None)


def signed_by_the_server(cohort: Cohort, i: int) -> KeyPairs:
    return KeyPairs.make(cohort.sites[i - 1].node, RUN, Ed25519PrivateKey.generate())


def with_the_nodes_signature(cohort: Cohort, i: int) -> KeyPairs:
    made = unsigned(cohort, i)
    signature = cohort.terms.advertisement(i).signature
    return KeyPairs(replace(made.advertisement, signature=signature), made.mask, made.seal)


def of_invented_nodes(cohort: Cohort, i: int) -> KeyPairs:
    return KeyPairs.make(bytes([i]) * 16, RUN, Ed25519PrivateKey.generate())


@pytest.mark.parametrize("forge", [unsigned, signed_by_the_server, with_the_nodes_signature, of_invented_nodes])
@builds("", without("_check_advertisements", "_verify"))
def test_keys_of_all_others_replaced(
    forge: Callable[[Cohort, int], KeyPairs], build: Build, rule: str | None, monkeypatch: Patch
) -> None:
    """The man in the middle: all the victim's peers are the server."""
    build(monkeypatch)
    cohort = Cohort(5)
    site = cohort.sites[1]
    made = [forge(cohort, i) for i in (1, 3, 4, 5)]
    advertisements = sorted((cohort.terms.advertisement(2), *(m.advertisement for m in made)), key=lambda a: a.node)
    terms = replace(cohort.terms, advertisements=tuple(advertisements))
    victim = terms.index(site.node)
    assert victim is not None
    own = {terms.index(m.advertisement.node) or 0: m for m in made}
    asked = Guarantees(cohort.parameters, 2, cohort.identities)
    if rule is not None:
        with pytest.raises(Refusal, match=r"not signed by its identity|not in the roster"):
            Client(terms, site.node, site.keyring, site.identity, asked)
        return
    hostile = HostileServer(terms, {victim: Client(terms, site.node, site.keyring, site.identity, asked)})
    hostile.deal()
    hostile.open_shares(victim, {i: m.seal for i, m in own.items()})
    hostile.mask_keys |= {i: m.mask.private_bytes_raw() for i, m in own.items()}
    hostile.mask(victim, site.words, sharers=hostile.everyone)
    judge(rule, hostile.vector_of(victim), site.words, hostile)


def keeps_used_keys(monkeypatch: Patch) -> None:
    """A node takes part with keys that it used before."""
    monkeypatch.setattr(Keyring, "take", lambda self, advertisement: self._outstanding.get(advertisement.serial))


@builds("", keeps_used_keys)
def test_an_advertisement_used_again(build: Build, rule: str | None, monkeypatch: Patch) -> None:
    """The victim is dropped from round 1, which reveals its mask key, and survives round 2 with the same key."""
    build(monkeypatch)
    cohort, victim = Cohort(5), 3
    first = begin(cohort)
    mask(first, cohort, [victim])
    unmask(first, [victim])
    key = first.secret(victim, KEY)
    assert key is not None
    told = cohort.new_terms(2)
    again = [cohort.terms.advertisement(i) if i == victim else told.advertisement(i) for i in first.everyone]
    terms = replace(told, advertisements=tuple(again))
    if rule is not None:
        with pytest.raises(Refusal, match="used already"):
            begin(cohort, terms)
        return
    hostile = begin(cohort, terms)
    hostile.mask_keys[victim] = key
    mask(hostile, cohort)
    unmask(hostile)
    judge(rule, hostile.vector_of(victim), cohort.sites[victim - 1].words, hostile)


# --- parameters


@builds("", without("_check_parameters"))
def test_a_lower_threshold(build: Build, rule: str | None, monkeypatch: Patch) -> None:
    """With t = 2, two nodes are asked for the victim's seed and two others for its mask key."""
    build(monkeypatch)
    cohort, victim = Cohort(6), 1
    low = replace(cohort.parameters, threshold=2, quorum=2, survivors=2)
    terms = replace(cohort.terms, parameters=low)
    if rule is not None:
        for name, value in (("threshold", 2), ("quorum", 2), ("survivors", 2)):
            with pytest.raises(Refusal, match=f"{name} = 2, the rules give"):
                cohort.client(victim, replace(terms, parameters=replace(cohort.parameters, **{name: value})))
        return
    hostile = begin(cohort, terms)
    mask(hostile, cohort)
    for survivors in ([1, 2, 3], [4, 5]):
        asked = [i for i in survivors if i != victim]
        for i in asked:
            hostile.agree(i, survivors)
        for i in asked:
            hostile.unmask(i, survivors, hostile.everyone - set(survivors))
    judge(rule, hostile.vector_of(victim), cohort.sites[victim - 1].words, hostile)


@builds("", without("_check_parameters"))
def test_fewer_holders(build: Build, rule: str | None, monkeypatch: Patch) -> None:
    """With k = 4 and t = 1 some node of 32 draws one of the 8 that side with the server (but once in 10^12)."""
    build(monkeypatch)
    cohort = Cohort(40)
    few = replace(cohort.parameters, holders=4, threshold=1, partners=4)
    terms = replace(cohort.terms, parameters=few)
    if rule is not None:
        with pytest.raises(Refusal, match="holders = 4, the rules give 28"):
            cohort.client(1, replace(cohort.terms, parameters=replace(cohort.parameters, holders=4)))
        with pytest.raises(Refusal, match="threshold = 1, the rules give 19"):
            cohort.client(1, terms)
        return
    hostile = begin(cohort, terms, corrupt=range(33, 41))
    mask(hostile, cohort)
    found = {i: hostile.vector_of(i) for i in range(1, 33)}
    victim = next(i for i in found if hostile.secret(i, SEED) and hostile.secret(i, KEY))
    judge(rule, found[victim], cohort.sites[victim - 1].words, hostile)


def no_policy(monkeypatch: Patch) -> None:
    """A node without a least cohort of its own."""
    monkeypatch.setattr(Client, "_fewest", lambda self: self.terms.parameters.survivors)


@builds(
    "",
    both(without("_check_parameters"), no_policy),
    holds={without("_check_parameters"): "3 nodes dealt shares, a sum needs 5"},
)
def test_a_smaller_cohort(build: Build, rule: str | None, monkeypatch: Patch) -> None:
    """A round of three, two of them the server's own, with a node that wants five."""
    build(monkeypatch)
    cohort, victim = Cohort(3), 2
    if rule == "":
        with pytest.raises(Refusal, match="min_cohort = 5, the round is for 3"):
            cohort.client(victim, least=5)
        return
    hostile = begin(cohort, corrupt=[1, 3], least=5)
    mask(hostile, cohort)
    hostile.mask_keys |= {i: keys.mask.private_bytes_raw() for i in (1, 3) if (keys := hostile.clients[i]._keys)}
    judge(rule, hostile.vector_of(victim), cohort.sites[victim - 1].words, hostile)


# --- neighbours


def the_server_draws(monkeypatch: Patch) -> None:
    """Who holds a node's shares is for the server to say: nodes 1 to k, its own."""

    def draw(parameters: Parameters, me: int) -> tuple[int, ...]:
        return tuple(range(1, parameters.holders + 1)) if me == 40 else draw_holders(parameters, me)

    monkeypatch.setattr(client_module, "draw_holders", draw)


@builds("", the_server_draws)
def test_neighbours_that_surround_the_victim(build: Build, rule: str | None, monkeypatch: Patch) -> None:
    """Of 71 nodes 14 side with the server: as many as a node has holders. It draws just these once in 10^14."""
    build(monkeypatch)
    cohort, victim = Cohort(71, dropout=0.0), 40
    corrupt = range(1, 15)
    assert len(corrupt) == cohort.parameters.colluders == cohort.parameters.holders
    hostile = HostileServer(cohort.terms, {i: cohort.client(i) for i in (*corrupt, victim)}, corrupt)
    hostile.mask_keys |= {i: keys.mask.private_bytes_raw() for i in corrupt if (keys := hostile.clients[i]._keys)}
    hostile.deal()
    for i in hostile.clients:
        hostile.mask(i, cohort.sites[i - 1].words, sharers=hostile.everyone)
    judge(rule, hostile.vector_of(victim), cohort.sites[victim - 1].words, hostile)


def half_of_the_holders_mask(monkeypatch: Patch) -> None:
    """Of a node's k holders k/2 are its mask partners; holders want to see as many of them survive as ever may."""

    def weaker(*arguments: Any) -> Parameters:
        found = choose(*arguments)
        partners = found.holders // 2
        return replace(found, partners=partners, kept=partners - found.drop_outs)

    monkeypatch.setattr(cohort_module, "choose", weaker)


@builds("", half_of_the_holders_mask)
def test_a_victim_whose_partners_are_concealed_or_named_as_lost(
    build: Build, rule: str | None, monkeypatch: Patch
) -> None:
    """No node sides with this server, but it sees whom the victim drew. Of its mask partners it conceals D from the
    victim and tells all others that D - 1 more dropped out (the victim will not sign that); what those dealt who drew
    the victim it holds back. Whoever is asked hears of as many nodes as a sum must have."""
    build(monkeypatch)
    cohort, victim = Cohort(35), 5
    hostile = begin(cohort)
    partners, most = hostile.partners(victim), cohort.parameters.drop_outs
    concealed, dropped = partners[:most], partners[most : 2 * most - 1]
    mask(hostile, cohort, [victim])
    hostile.mask(
        victim, cohort.sites[victim - 1].words, hostile.everyone - set(concealed), hostile.everyone - set(partners)
    )
    survivors = hostile.everyone - set(dropped)
    for i in survivors - {victim}:
        hostile.agree(i, survivors)
    for i in survivors - {victim}:
        hostile.unmask(i, survivors, dropped)
    assert hostile.secret(victim, SEED) is not None
    assert all(hostile.secret(i, KEY) is not None for i in dropped)
    judge(rule, hostile.vector_of(victim), cohort.sites[victim - 1].words, hostile)


@pytest.mark.parametrize("n", [10, 35])
@builds("1 nodes dealt shares", without("_check_sharers"))
def test_a_victim_that_hears_of_nobody_else(n: int, build: Build, rule: str | None, monkeypatch: Patch) -> None:
    build(monkeypatch)
    cohort, victim = Cohort(n), 5
    hostile = begin(cohort)
    mask(hostile, cohort, [victim])
    hostile.mask(victim, cohort.sites[victim - 1].words, sharers=[victim])
    for i in hostile.everyone - {victim}:
        hostile.agree(i, hostile.everyone)
    for i in hostile.everyone - {victim}:
        hostile.unmask(i, hostile.everyone, ())
    judge(rule, hostile.vector_of(victim), cohort.sites[victim - 1].words, hostile)


# --- what the round is about, and lying nodes

SHAPE = Shape((Group("delta", 6, 1.0),), (), BITS, 5)


def summands(cohort: Cohort) -> None:
    """Give the nodes vectors with check words, weights 1 and random coordinates."""
    rng = np.random.default_rng(3)
    for site in cohort.sites:
        site.words = SHAPE.blank({"weight": 1.0, "clipped.delta": 0.0})
        for _, part in SHAPE.parts(site.words):
            part[:] = rng.integers(0, SHAPE.levels, part.size)


def seals_of_any_round(monkeypatch: Patch) -> None:
    """Shares are sealed without a word on what the round is about."""
    make = SealKey.__init__
    monkeypatch.setattr(SealKey, "__init__", lambda self, own, other, context: make(self, own, other, b""))


def told(*names: str) -> Build:
    """Keys are not bound to these terms of the round."""

    def build(monkeypatch: Patch) -> None:
        digest = Terms.digest.func
        blank = dict.fromkeys(names, "")
        monkeypatch.setattr(Terms, "digest", property(lambda self: digest(replace(self, **blank))))

    return named(f"keys not bound to the {' '.join(names)}", build)


@pytest.mark.parametrize("name", ["model", "config", "roster"])
@pytest.mark.parametrize("bound", [True, False], ids=["ours-holds", "keys not bound-falls"])
def test_another_model_config_or_roster_to_one_node(name: str, bound: bool, monkeypatch: Patch) -> None:
    """The others get a model from which nothing can be learned (updates of zero): the sum is the victim's update."""
    if not bound:
        told(name)(monkeypatch)
    cohort, victim = Cohort(5, length=SHAPE.length), 4
    summands(cohort)
    nothing = SHAPE.blank({"weight": 1.0, "clipped.delta": 0.0})
    terms = {i: replace(cohort.terms, **{name: "true" if i == victim else "dead"}) for i in range(1, 6)}
    hostile = HostileServer(terms[1], {i: cohort.client(i, terms[i]) for i in terms})
    hostile.deal()
    for i in hostile.everyone:
        hostile.mask(i, cohort.sites[victim - 1].words if i == victim else nothing)
    unmask(hostile)
    found = hostile.sum_of(hostile.everyone)
    if found is not None:
        found = found - 4 * nothing
    judge(None if not bound else "does not open", found, cohort.sites[victim - 1].words, hostile)


def no_check_words(monkeypatch: Patch) -> None:
    """A sum is read whatever its count and zero words are."""
    monkeypatch.setattr(summand, "_check_sum", lambda check, count: None)


def any_share(monkeypatch: Patch) -> None:
    """Revealed shares are not held against their commitments."""
    monkeypatch.setattr(shamir, "check", lambda *arguments: True)


def any_seed(monkeypatch: Patch) -> None:
    """A seed that was put together is not held against its commitment."""
    monkeypatch.setattr(Server, "_seed", lambda self, dealer, seed: seed)


Lie = Callable[[Cohort, dict[int, Client]], None]


def another_vector(cohort: Cohort, clients: dict[int, Client]) -> None:
    """It sends what is no summand: of this shape, but with a count of three."""
    cohort.sites[LIAR - 1].words[:1] = 3
    cohort.sites[LIAR - 1].words[-6:] = SHAPE.levels


def another_context(cohort: Cohort, clients: dict[int, Client]) -> None:
    """It masks as in a round about another model."""

    def masked(delivery: Any, words: Words, mask: Any = clients[LIAR].mask) -> None:
        pair = clients[LIAR]._pair
        clients[LIAR]._pair = lambda keys, other: bytes(reversed(pair(keys, other)))  # type: ignore[method-assign]
        mask(delivery, words)

    clients[LIAR].mask = masked  # type: ignore[method-assign]


def shares_of_another_seed(cohort: Cohort, clients: dict[int, Client]) -> None:
    """What it deals is committed to, but of a seed that is not the one in its mask."""
    deal = clients[LIAR].deal

    def dealt() -> Dealt:
        client = clients[LIAR]
        seed, client._seed = client._seed, bytes(32)
        wrong = deal()
        client._seed = seed
        return replace(wrong, seed_commitment=client_module.seed_commitment(seed, client.terms.digest))

    clients[LIAR].deal = dealt  # type: ignore[method-assign]


def other_shares_revealed(cohort: Cohort, clients: dict[int, Client]) -> None:
    """It reveals other shares than it was dealt."""
    unmask = clients[LIAR].unmask
    clients[LIAR].unmask = lambda request: {i: bytes(33) for i in unmask(request)}  # type: ignore[method-assign]


LIAR = 2


def summed(cohort: Cohort, lie: Lie) -> Any:
    """The mean that an honest server makes of a round with a lying node in it."""
    clients = {i: cohort.client(i) for i in range(1, 6)}
    lie(cohort, clients)
    server = cohort.server()
    for i, client in clients.items():
        server.deal(i, client.deal())
    for i, delivery in server.close_dealing().items():
        words = cohort.sites[i - 1].words.copy()
        clients[i].mask(delivery, words)
        server.masked(i, pack(words, BITS))
    survivors = server.close_masking()
    for i, client in clients.items():
        server.signed(i, client.agree(survivors))
    request = server.close_agreement()
    for i, client in clients.items():
        try:
            server.revealed(i, client.unmask(request))
        except Rejected as error:
            assert i == LIAR and "is not the one that was dealt" in str(error)
    return decode(SHAPE, server.unmask(), 5).groups["delta"]


def lies(lie: Lie, in_ours: str, **others: Any) -> list[Any]:
    falls, holds = others["falls"], others.get("holds", {})
    cases = [(ours, in_ours), *holds.items(), (falls, None)]
    return [
        pytest.param(lie, build, rule, id=f"{lie.__name__}-{build.__name__}-{'falls' if rule is None else 'holds'}")
        for build, rule in cases
    ]


@pytest.mark.parametrize(
    ("lie", "build", "rule"),
    [
        *lies(another_vector, "counts 7 participants where 5 were expected", falls=no_check_words),
        *lies(another_context, "of its 4 zero words are not zero", falls=no_check_words),
        *lies(
            shares_of_another_seed,
            "not of the seed that it committed to",
            holds={any_seed: "zero words are not zero"},
            falls=both(any_seed, no_check_words),
        ),
        *lies(
            other_shares_revealed,
            "",
            holds={
                any_share: "make no secret|not of the seed that it committed to",
                both(any_share, any_seed): "make no secret|zero words are not zero",
            },
            falls=both(any_share, any_seed, no_check_words),
        ),
    ],
)
def test_a_node_that_lies(lie: Lie, build: Build, rule: str | None, monkeypatch: Patch) -> None:
    """It may send what it likes, as its own vector; what it cannot do is have another sum taken for that of a round."""
    build(monkeypatch)
    cohort = Cohort(5, length=SHAPE.length)
    summands(cohort)
    true = decode(SHAPE, cohort.total(range(1, 6)), 5).groups["delta"]
    if rule == "":
        assert np.array_equal(summed(cohort, lie), true)
    elif rule is None:
        with suppress(UpdateError):  # weights of noise may be negative
            assert np.abs(summed(cohort, lie) - true).max() > 0.1
    else:
        with pytest.raises((WrongSum, Aborted), match=rule):
            summed(cohort, lie)
