"""What a server could work out in a round, from all that left the nodes: counted, not computed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

from fedward_common.secagg.client import Client
from fedward_common.secagg.graph import Parameters, partners_of
from fedward_common.secagg.messages import Unmasking, members_from_bytes


class Oracle:
    """clients: all nodes of the round. colluders: those whose shares the server has anyway. parameters: what the rules
    give, whatever the nodes were told."""

    def __init__(self, clients: Mapping[int, Client], colluders: Collection[int], parameters: Parameters) -> None:
        self._clients = clients
        self._colluders = frozenset(colluders)
        self._parameters = parameters
        self._seeds: dict[int, set[int]] = defaultdict(set)
        self._keys: dict[int, set[int]] = defaultdict(set)
        self._sets: set[tuple[bytes, bytes]] = set()
        self.masked: set[int] = set()
        """Nodes whose masked vector left them."""

    def unmask(self, index: int, request: Unmasking) -> dict[int, bytes]:
        """`Client.unmask`, with a record of what it revealed."""
        client = self._clients[index]
        held, sharers = dict(client._held), client._sharers_bytes
        revealed = client.unmask(request)
        for dealer, share in revealed.items():
            of_seed, of_key = held[dealer]
            assert share in (of_seed, of_key)
            (self._seeds if share == of_seed else self._keys)[dealer].add(index)
        if index not in self._colluders:
            self._sets.add((sharers, request.survivors))
        return revealed

    def check(self) -> None:
        """No secret has leaked: raises `AssertionError`."""
        honest = self._clients.keys() - self._colluders
        seeds, keys = self._known(self._seeds), self._known(self._keys)
        assert not seeds & keys & honest, f"both secrets of nodes {sorted(seeds & keys & honest)}"
        assert len(self._sets) <= 1, "two survivor sets were unmasked"
        for _, survivors in self._sets:
            members = members_from_bytes(survivors, self._parameters.n)
            assert len(members) >= self._parameters.survivors, f"{len(members)} survivors were unmasked"
        least = self._parameters.survivors - len(self._colluders)
        for part in self._parts(honest & self.masked, keys | self._colluders):
            closed = all(self._edges(i) - keys - self._colluders <= part for i in part) and all(
                i in self._edges(j) for i in part for j in self._edges(i) & part
            )
            assert not (closed and part <= seeds) or len(part) >= least, f"the sum over {sorted(part)} alone"

    def _known(self, revealed: Mapping[int, set[int]]) -> set[int]:
        """Nodes of whose secret enough shares are known; a colluder that was dealt one is counted, asked or not."""
        known = set()
        for dealer, client in self._clients.items():
            places = {*client._holders, dealer} if self._parameters.complete else set(client._holders)
            if len(revealed[dealer] | self._colluders & places) >= self._parameters.threshold:
                known.add(dealer)
        return known

    def _edges(self, index: int) -> frozenset[int]:
        """With whom a node has masked."""
        client = self._clients[index]
        drawn = client._sharers.intersection(partners_of(client.terms.parameters, client._holders))
        told = {dealer for dealer, drew in client._drew.items() if self._parameters.complete or index in drew}
        return drawn | told

    def _parts(self, nodes: set[int] | frozenset[int], known: Collection[int]) -> list[set[int]]:
        """The parts into which nodes fall that no unknown mask connects."""
        parts: list[set[int]] = []
        rest = set(nodes)
        while rest:
            part, edge = set[int](), {rest.pop()}
            while edge:
                one = edge.pop()
                part.add(one)
                near = {two for two in rest if two in self._edges(one) or one in self._edges(two)}
                edge |= {two for two in near if one not in known and two not in known}
                rest -= edge
            parts.append(part)
        return parts
