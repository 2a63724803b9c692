"""Who this node is in its federation: the identity from enrolment, the newest roster, the link they give."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fedward_common.errors import FedwardError
from fedward_common.http import ServiceError
from fedward_common.roster import Roster, accept_roster, open_roster, read_roster, write_roster
from fedward_common.signing import parse_public

from fedward_client.enrol import Enrolled, standing
from fedward_client.link import Link
from fedward_client.paths import NodePaths
from fedward_client.traffic import Traffic

log = logging.getLogger("fedward.node")


class Membership:
    """Raises `FedwardError` if the state directory holds no enrolled node."""

    def __init__(self, paths: NodePaths) -> None:
        self.paths = paths
        self._enrolled = Enrolled.load(paths)
        self._authority = parse_public(self._enrolled.authority)
        self._roster = open_roster(read_roster(paths.roster), self._authority)

    @property
    def name(self) -> str:
        """This node's name."""
        return self._enrolled.name

    @property
    def node_id(self) -> str:
        """Fedward's stable id of this node."""
        return self._enrolled.node_id

    @property
    def server(self) -> str:
        """Address of the Fedward service."""
        return self._enrolled.server

    def roster(self) -> Roster:
        """The newest roster seen."""
        return self._roster

    def accept_roster(self, envelope: Mapping[str, Any]) -> None:
        """Take a newer roster in, and log what changed. Raises `SignatureError`, `RosterError`."""
        roster = accept_roster(envelope, self._authority, self._roster)
        if roster == self._roster:
            return
        before, after = ({n.name: n.identity for n in r.nodes} for r in (self._roster, roster))
        for name in sorted(set(before) | set(after)):
            if before.get(name) != after.get(name):
                what = "new" if name not in before else "gone" if name not in after else "new key"
                log.info("roster version %d: node %s: %s", roster.version, name, what)
        write_roster(self.paths.roster, envelope)
        self._roster = roster

    def link(self, traffic: Traffic) -> Link:
        """A link to the server, not connected yet, that counts in `traffic` what it sends."""
        entry = self._roster.node(self.name)
        flower_id = int(entry.flower_id) if entry is not None and entry.flower_id is not None else None
        ca = self.paths.ca.read_bytes()
        return Link(self._enrolled.fleet_address, ca, self.paths.flower_key, flower_id, traffic)

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
