"""The members of a roster, and how two rosters differ: what a person is shown who has to say yes to a new one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fedward_common.roster import Roster
from fedward_common.signing import key_id, parse_public


class Kind(StrEnum):
    """What a member may do: take part in rounds, or start runs."""

    NODE = "node"
    SCIENTIST = "scientist"


@dataclass(frozen=True)
class Member:
    """A node or a data scientist. Another key, or another node id, makes it another member of the same name.

    key: public key (base64url). node_id: "" for a data scientist.
    """

    kind: Kind
    name: str
    key: str
    node_id: str = ""

    @property
    def key_id(self) -> str:
        """Short id of the key."""
        return key_id(parse_public(self.key))

    def __str__(self) -> str:
        return f"{self.kind.value} {self.name}"


class What(StrEnum):
    """What became of a name from one roster to the next."""

    NEW = "new"
    NEW_KEY = "new key"
    GONE = "gone"
    DETAILS = "tags or link"
    """The same member; its tags or its Flower id changed."""


@dataclass(frozen=True)
class Change:
    """One line of the difference. member: as it is now; one that is gone, as it was. was: before a new key."""

    what: What
    member: Member
    was: Member | None = None


def members(roster: Roster) -> tuple[Member, ...]:
    """Nodes, then data scientists, each in the roster's order."""
    nodes = tuple(Member(Kind.NODE, node.name, node.identity, node.node_id) for node in roster.nodes)
    return nodes + tuple(Member(Kind.SCIENTIST, person.name, person.key) for person in roster.scientists)


def only(roster: Roster, kept: frozenset[Member]) -> Roster:
    """The roster without the members that are not in `kept`; version and federation stay."""
    nodes = (node for node in roster.nodes if Member(Kind.NODE, node.name, node.identity, node.node_id) in kept)
    people = (person for person in roster.scientists if Member(Kind.SCIENTIST, person.name, person.key) in kept)
    return roster.model_copy(update={"nodes": tuple(nodes), "scientists": tuple(people)})


def changes(before: Roster | None, after: Roster) -> list[Change]:
    """What differs, by kind and name; every member is new if there was no roster before."""
    found = []
    old = {(member.kind, member.name): member for member in (members(before) if before is not None else ())}
    new = {(member.kind, member.name): member for member in members(after)}
    for place in sorted(old.keys() | new.keys()):
        was, now = old.get(place), new.get(place)
        if now is None:
            assert was is not None
            found.append(Change(What.GONE, was))
        elif was is None:
            found.append(Change(What.NEW, now))
        elif was != now:
            found.append(Change(What.NEW_KEY, now, was))
        elif before is not None and now.kind is Kind.NODE and before.node(now.name) != after.node(now.name):
            found.append(Change(What.DETAILS, now))
    return found
