"""What this node's data sets have given away, and what they still may: the ledger, held against the policy.

A release is in the ledger, and its head in the anchor, before the first byte of it leaves.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from pathlib import Path

from fedward_common.errors import FedwardError
from fedward_common.messages import Failure, Reason
from fedward_common.node import Refused
from fedward_common.privacy import anchor
from fedward_common.privacy.budget import Limits, accounted, would_exceed
from fedward_common.privacy.ledger import Ledger, LedgerError, Release, ReleaseRefused

log = logging.getLogger("fedward.node")

BROKEN = "this node's privacy ledger is not as it was, or cannot be written: see its log"


class NodeAccounts:
    """The accounts of one guard. dataset: what its policy's limits count for. server: who asks."""

    def __init__(self, path: Path, node_id: str, place: Path, limits: Limits, dataset: str, server: str) -> None:
        """place: the anchor's file. Raises `LedgerError` if the ledger is not the one that was anchored."""
        problem = anchor.compare(path, anchor.local(place))
        if problem is not None:
            raise LedgerError(problem)
        self._ledger = Ledger(path, node_id)
        self._place = place
        self._limits = limits
        self._dataset = dataset
        self._server = server
        self._lock = threading.Lock()
        # Now, while all is as it was: a ledger that is deleted from here on is missed.
        anchor.write_anchor(place, self._ledger.head())

    def check(self, release: Release) -> None:
        """Raises `Refused` if `release` would cross a limit of the policy."""
        named = self._named(release)
        try:
            rule = would_exceed(self._ledger.releases(), named, self._limits, accounted)
        except FedwardError as error:
            raise self._refused(error) from error
        if rule is not None:
            raise Refused(Failure(Reason.POLICY, rule))

    def write(self, release: Release) -> None:
        """Raises `Refused` if it would cross a limit, or cannot be written down."""
        named = self._named(release)
        with self._lock:
            try:
                head = self._ledger.append(
                    named, lambda releases: would_exceed(releases, named, self._limits, accounted)
                )
                anchor.write_anchor(self._place, head)
            except FedwardError as error:
                raise self._refused(error) from error

    def _named(self, release: Release) -> Release:
        return replace(release, dataset=self._dataset, server=self._server)

    @staticmethod
    def _refused(error: FedwardError) -> Refused:
        if isinstance(error, ReleaseRefused):
            return Refused(Failure(Reason.POLICY, str(error)))
        # Paths and what the admin is to do are for this site's log alone.
        log.error("privacy ledger: %s", error)
        return Refused(Failure(Reason.POLICY, BROKEN))
