"""Who takes part in a benchmark's secure runs, in one file: the roster, as the server reads it, and beside it what is
secret on a real node."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from fedward_common.roster import KIND, Roster, RosterNode
from fedward_common.secure import Standing
from fedward_common.signing import generate, public_text

_IDENTITIES = "identities"


def write(path: Path, flower_ids: Mapping[str, int]) -> Path:
    """The members' file, with a fresh identity for each node of that name."""
    identities = {name: generate() for name in flower_ids}
    nodes = tuple(
        RosterNode(name=name, node_id=uuid.uuid4().hex, flower_id=str(number), identity=public_text(identities[name]))
        for name, number in flower_ids.items()
    )
    roster = Roster(version=1, federation="bench", nodes=nodes)
    private = {name: identity.private_bytes_raw().hex() for name, identity in identities.items()}
    path.write_text(json.dumps({KIND: roster.model_dump_json(), _IDENTITIES: private}))
    return path


def standing(path: Path, name: str) -> Standing:
    """Who that node is to its peers."""
    told = json.loads(path.read_text())
    roster = Roster.model_validate_json(told[KIND])
    node = roster.node(name)
    assert node is not None
    identity = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(told[_IDENTITIES][name]))
    return Standing(node.id_bytes, identity, lambda: roster, lambda: roster, least=2)
