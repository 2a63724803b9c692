"""Taking a verified roster in: logged first, then kept as the newest that this node knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedward_common.members import What, changes, members
from fedward_common.roster import Roster, write_roster

from fedward_client.member_approval import MemberApprovals
from fedward_client.paths import NodePaths
from fedward_client.roster_log import RosterLog, State


def keep_roster(
    paths: NodePaths, known: Roster | None, roster: Roster, envelope: Mapping[str, Any], approval: bool, own: str
) -> None:
    """Make `roster` (in `envelope`, verified, not older than `known`) the newest one known here.

    approval: new members and new keys wait for the admin's yes. own: this node's own public key, which does not.
    """
    approvals, log = MemberApprovals(paths.members), RosterLog(paths.roster_log)
    before = members(known) if known is not None else ()
    for change in changes(known, roster):
        asks = approval and change.what in (What.NEW, What.NEW_KEY) and change.member.key != own
        log.changed(roster.version, change, State.PENDING if asks else State.ACCEPTED)
    # Before the roster is there for the admin to approve from, and those in the old one only: an approval that was
    # given from a roster which has gone meanwhile must not wait for its member to come back.
    approvals.keep_only(set(before) & set(members(roster)))
    write_roster(paths.roster, envelope)
