"""Flower's Fleet API with what Fedward's nodes ask for in a header: a call for messages that is held until there is
one, and a message's objects in one call. Stock SuperNodes send no header and get what they know."""

from __future__ import annotations

import contextlib
import importlib
from pathlib import Path
from typing import Any, cast

import grpc
from fedward_common import parcels
from fedward_common.messages import WAIT_HEADER
from flwr.app import ArrayRecord
from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse
from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse, PushObjectRequest, PushObjectResponse
from flwr.server.superlink.fleet.grpc_rere.fleet_servicer import FleetServicer
from flwr.supercore.inflatable.inflatable_object import get_object_head_values_from_object_content

from fedward_server.arrivals import Arrivals
from fedward_server.database import LinkState


class _NotStored(Exception):
    """Takes back what of a parcel was stored."""


class Fleet(FleetServicer):
    """The API that this process serves."""

    arrivals: Arrivals

    def PullMessages(self, request: PullMessagesRequest, context: Any) -> PullMessagesResponse:
        """Flower's, held for a node that waits."""

        def look() -> PullMessagesResponse:
            return FleetServicer.PullMessages(self, request, context)

        seconds = _seconds(context)
        if seconds <= 0:
            return look()
        return self.arrivals.hold(request.node.node_id, seconds, look, context.is_active)

    def PullObject(self, request: PullObjectRequest, context: Any) -> PullObjectResponse:
        """Flower's; with the header a parcel of the object and all below it, if they are few, small and there."""
        found = FleetServicer.PullObject(self, request, context)
        if _header(context, parcels.HEADER) is None or not found.object_available:
            return found
        objects = self._family(request, found.object_content)
        if objects is None:
            return found
        return PullObjectResponse(object_found=True, object_available=True, object_content=parcels.wrap(objects))

    def _family(self, request: PullObjectRequest, content: bytes) -> dict[str, bytes] | None:
        objects = {request.object_id: content}
        size, below = len(content), [content]
        while below:
            kind, children, _ = get_object_head_values_from_object_content(below.pop())
            if kind == ArrayRecord.__qualname__:
                return None
            for child in children:
                part = self._state.get_object(request.run_id, child)
                size += len(part or b"")
                if not part or size > parcels.LIMIT:
                    return None
                objects[child] = part
                below.append(part)
        return objects

    def PushObject(self, request: PushObjectRequest, context: Any) -> PushObjectResponse:
        """Flower's; with the header for each object of a parcel, all or none of them."""
        if _header(context, parcels.HEADER) is None:
            return FleetServicer.PushObject(self, request, context)
        try:
            objects = parcels.unwrap(request.object_content)
        except parcels.ParcelError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise
        one = PushObjectRequest(node=request.node, run_id=request.run_id, session_id=request.session_id)
        try:
            with self._state.session():
                for object_id, content in objects.items():
                    one.object_id, one.object_content = object_id, content
                    if not FleetServicer.PushObject(self, one, context).stored:
                        raise _NotStored
        except _NotStored:
            return PushObjectResponse(stored=False)
        return PushObjectResponse(stored=True)

    @property
    def _state(self) -> LinkState:
        return cast(LinkState, self.state_factory.state())


def _header(context: Any, name: str) -> str | None:
    return next((value for key, value in context.invocation_metadata() if key == name), None)


def _seconds(context: Any) -> float:
    """For which the caller waits; 0 if it says nothing that is a number."""
    with contextlib.suppress(ValueError):
        return float(_header(context, WAIT_HEADER) or 0.0)
    return 0.0


def use(database: Path) -> None:
    """Have Flower serve its Fleet API so, before it is started."""
    # By its full name: the package's attribute of that name is the function.
    superlink = importlib.import_module("flwr.superlink.cli.flower_superlink")
    Fleet.arrivals = Arrivals(database)
    vars(superlink)["FleetServicer"] = Fleet
