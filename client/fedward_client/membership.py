"""Who this node is in its federation, and who else counts here: the identity from enrolment, the newest roster, the
site's rules about it, the link they give."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedward_common.errors import FedwardError
from fedward_common.http import ServiceError
from fedward_common.members import Kind, Member, members, only
from fedward_common.roster import Roster, RosterError, RosterNode, accept_roster, open_roster, read_roster
from fedward_common.signing import SignatureError, load_private, parse_public, public_text

from fedward_client.enrol import Enrolled, own_entry, standing
from fedward_client.kept_roster import keep_roster
from fedward_client.link import Link
from fedward_client.member_approval import MemberApprovals
from fedward_client.paths import NodePaths
from fedward_client.policy import Policy, load_policy
from fedward_client.roster_log import RosterLog
from fedward_client.status import StatusFile
from fedward_client.traffic import Traffic


class RosterPinned(RosterError):
    """The roster is not the one that this site's policy pins."""


class Membership:
    """Raises `FedwardError` if the state directory holds no enrolled node.

    What the authority signed is one thing, what counts on this node another: with `approve_roster_changes` only
    members that the site admin approved, and this node itself, as long as the newest roster still holds them with the
    same keys; with `pinned_roster` that roster and no other.
    """

    def __init__(self, paths: NodePaths, policy: Policy) -> None:
        self.paths = paths
        self.policy = policy
        self._enrolled = Enrolled.load(paths)
        self._authority = parse_public(self._enrolled.authority)
        self._own_key = public_text(load_private(paths.identity_key))
        self._newest = open_roster(read_roster(paths.roster), self._authority)
        self._approvals = MemberApprovals(paths.members)
        self._log = RosterLog(paths.roster_log)
        self._last_refusal = ""

    @classmethod
    def open(cls, paths: NodePaths) -> Membership:
        """With the policy in the state directory. One that is not enrolled has none, and is told the first of it."""
        Enrolled.load(paths)
        return cls(paths, load_policy(paths.policy))

    @property
    def name(self) -> str:
        """This node's name."""
        return self._enrolled.name

    @property
    def node_id(self) -> str:
        """Fedward's stable id of this node."""
        return self._enrolled.node_id

    @property
    def own_key(self) -> str:
        """Public half (base64url) of this node's identity key: what other sites compare before they approve it."""
        return self._own_key

    @property
    def server(self) -> str:
        """Address of the Fedward service."""
        return self._enrolled.server

    @property
    def authority(self) -> str:
        """Public key (base64url) of the enrolment authority."""
        return self._enrolled.authority

    def newest(self) -> Roster:
        """The newest roster seen, as the authority signed it."""
        return self._newest

    def roster(self) -> Roster:
        """Who counts on this node now: the newest roster, without the members that wait for approval.

        Its version is the newest one's. An approval that came meanwhile counts. Raises `RosterPinned`.
        """
        newest = self._newest
        self._check_pin(newest)
        waiting = self._waiting(newest)
        return only(newest, frozenset(members(newest)) - waiting) if waiting else newest

    def pending(self) -> tuple[Member, ...]:
        """Members of the newest roster that do not count here until the site admin approves them."""
        newest = self._newest
        waiting = self._waiting(newest)
        return tuple(member for member in members(newest) if member in waiting)

    def approved(self) -> frozenset[Member]:
        """Members of the newest roster that the site admin approved, whether the policy asks for it or not."""
        return self._approvals.approved(members(self._newest))

    def unapproved(self) -> tuple[Member, ...]:
        """Members of the newest roster that can be approved: all others, but for this node itself."""
        approved = self.approved()
        return tuple(member for member in members(self._newest) if not self.is_own(member) and member not in approved)

    def approve(self, member: Member) -> None:
        """The site admin says yes to a member of the newest roster: it counts at once, in a running guard too."""
        self._log.approved(self._newest.version, member)
        self._approvals.approve(member)

    def why_not(self, member: Member) -> str:
        """The rule by which a pending member does not count, for a refusal."""
        return (
            f"approve_roster_changes = true: {member} with the key {member.key_id} waits for "
            f"'fedward node roster approve {member.kind.value}:{member.name}' on {self.name}"
        )

    def listed(self) -> bool:
        """Whether the newest roster holds this node with its present key. If not, the authority has still to sign."""
        return self._own_entry() is not None

    def accept_roster(self, envelope: Mapping[str, Any]) -> None:
        """Take a newer roster in, and log what changed. Raises `SignatureError`, `RosterError`, `RosterPinned`."""
        try:
            roster = accept_roster(envelope, self._authority, self._newest)
            self._check_pin(roster)
        except (SignatureError, RosterError) as error:
            # A server that sends the same one with every request must not fill the disk.
            if str(error) != self._last_refusal:
                self._last_refusal = str(error)
                self._log.refused(str(error))
            raise
        if roster == self._newest:
            return
        keep_roster(
            self.paths, self._newest, roster, envelope, self.policy.approve_roster_changes, self._own_key
        )
        self._newest = roster

    def link(self, traffic: Traffic) -> Link:
        """A link to the server, not connected yet, that counts in `traffic` what it sends."""
        address, ca_pem = self._enrolled.fleet_address, self.paths.ca.read_bytes()
        return Link(address, ca_pem, self.paths.flower_key, self._flower_id(), traffic)

    def _flower_id(self) -> int | None:
        """Flower's id of this node, by which a session that a killed guard left open is ended."""
        entry = self._own_entry()
        if entry is not None:
            return int(entry.flower_id) if entry.flower_id is not None else None
        # Not in the roster until the authority has signed: as the server told the last guard.
        last = StatusFile(self.paths.status).read() or {}
        return int(last["flower_id"]) if "flower_id" in last else None

    def _own_entry(self) -> RosterNode | None:
        return own_entry(self._newest, self._enrolled, self._own_key)

    def _waiting(self, roster: Roster) -> frozenset[Member]:
        if not self.policy.approve_roster_changes:
            return frozenset()
        others = frozenset(member for member in members(roster) if not self.is_own(member))
        return others - self._approvals.approved(others)

    def is_own(self, member: Member) -> bool:
        """Whether that is this node itself, with its present key."""
        return (member.kind, member.name, member.node_id, member.key) == (
            Kind.NODE, self.name, self.node_id, self._own_key
        )  # fmt: skip

    def _check_pin(self, roster: Roster) -> None:
        pinned = self.policy.pinned_roster
        if pinned is not None and roster.sha256() != pinned:
            raise RosterPinned(
                f"pinned_roster = {pinned}: version {roster.version} has the SHA-256 {roster.sha256()}"
            )

    def why_refused(self) -> str | None:
        """What the service says of this node's standing (revoked, left …), None if it says nothing."""
        try:
            standing(self.paths)
        except ServiceError as error:
            return str(error)
        except FedwardError:
            # The service is down too: the link's own words must do.
            return None
        return None
