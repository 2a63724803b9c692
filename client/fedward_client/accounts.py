"""What this node's data sets have given away, and what they still may: the ledger, held against the policy.

A release is in the ledger, and its head in the anchor, before the first byte of it leaves. The server remembers the
head, too, and names it in its questions: a ledger that does not hold it was rolled back together with its anchor, or
the server lies. Either way this node answers no run with [privacy] until its admin has decided.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from pathlib import Path

from fedward_common.chain import Head
from fedward_common.errors import ConfigError, FedwardError
from fedward_common.messages import Failure, Reason
from fedward_common.node import Refused
from fedward_common.privacy import anchor
from fedward_common.privacy.budget import Limits, accounted, would_exceed
from fedward_common.privacy.ledger import Ledger, LedgerError, Release, ReleaseRefused

log = logging.getLogger("fedward.node")

_DECIDES = "its site admin finds out with 'fedward node ledger verify' and decides with 'fedward node ledger accept'"
BROKEN = f"this node's privacy ledger is not as it was, or cannot be written: {_DECIDES}"


class NodeAccounts:
    """The accounts of one guard. dataset: what its policy's limits count for. server: who asks."""

    def __init__(self, path: Path, node_id: str, place: Path, limits: Limits, dataset: str, server: str) -> None:
        """place: the anchor's file. Raises `LedgerError` if the ledger is not the one that was anchored, or lacks the
        head that the server named last."""
        problem = anchor.compare(path, {**anchor.local(place), **anchor.named(path)})
        if problem is not None:
            raise LedgerError(problem)
        self._path = path
        self._ledger = Ledger(path, node_id)
        self._place = place
        self._limits = limits
        self._dataset = dataset
        self._server = server
        self._lock = threading.Lock()
        self._named = anchor.read_anchor(anchor.server_place(path))
        self._missing: Head | None = None
        """What the server named and the ledger does not hold."""
        # Now, while all is as it was: a ledger that is deleted from here on is missed.
        anchor.write_anchor(place, self._ledger.head())

    def head(self) -> Head:
        """The ledger's last line."""
        return self._ledger.head()

    def confirm(self, named: object) -> None:
        """Raises `Refused` if the ledger does not hold the head that the server names, or one that it named before."""
        with self._lock:
            if named is not None and self._missing is None:
                self._compare(named)
            self._check_missing()

    def _compare(self, text: object) -> None:
        try:
            head = Head.parse(str(text))
        except ConfigError as error:
            raise Refused(Failure(Reason.BAD_REQUEST, f"ledger_{error}")) from error
        try:
            if self._named is None or self._named.head != head:
                # For the admin to see, and for the next guard to miss.
                anchor.write_anchor(anchor.server_place(self._path), head)
                self._named = anchor.Anchor(head)
            if not self._ledger.holds(head):
                self._missing = head
        except FedwardError as error:
            raise self._refused(error) from error

    def _check_missing(self) -> None:
        if self._missing is None:
            return
        log.error(
            "privacy ledger: the server names the head %s, which %s does not hold: the ledger was rolled back or "
            "changed together with its anchor, or the server lies. No run with [privacy] is answered until that is "
            "settled. Stop the guard and look: fedward node ledger verify. Restore the ledger from a backup that has "
            "all its lines; if they are lost or never were, go on without: fedward node ledger accept --why '…'",
            self._missing, self._path,
        )  # fmt: skip
        rule = f"this node's privacy ledger does not hold line {self._missing.number}, of which the server was told"
        raise Refused(Failure(Reason.POLICY, f"{rule}: {_DECIDES}"))

    def check(self, release: Release) -> None:
        """Raises `Refused` if `release` would cross a limit of the policy."""
        self._check_missing()
        named = self._for_us(release)
        try:
            rule = would_exceed(self._ledger.releases(), named, self._limits, accounted)
        except FedwardError as error:
            raise self._refused(error) from error
        if rule is not None:
            raise Refused(Failure(Reason.POLICY, rule))

    def write(self, release: Release) -> None:
        """Raises `Refused` if it would cross a limit, or cannot be written down."""
        named = self._for_us(release)
        with self._lock:
            self._check_missing()
            try:
                head = self._ledger.append(
                    named, lambda releases: would_exceed(releases, named, self._limits, accounted)
                )
                anchor.write_anchor(self._place, head)
            except FedwardError as error:
                raise self._refused(error) from error

    def _for_us(self, release: Release) -> Release:
        return replace(release, dataset=self._dataset, server=self._server)

    @staticmethod
    def _refused(error: FedwardError) -> Refused:
        if isinstance(error, ReleaseRefused):
            return Refused(Failure(Reason.POLICY, str(error)))
        # Paths and what the admin is to do are for this site's log alone.
        log.error("privacy ledger: %s", error)
        return Refused(Failure(Reason.POLICY, BROKEN))
