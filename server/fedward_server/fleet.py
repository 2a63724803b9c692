"""Flower's Fleet API with what Fedward's nodes ask for in headers: a call for messages that is held until there is one,
and a small message's objects in the same call. Stock SuperNodes send no header and get what they know."""

from __future__ import annotations

import contextlib
import importlib
from pathlib import Path
from typing import Any, cast

import grpc
from fedward_common import parcels
from fedward_common.messages import WAIT_HEADER
from flwr.common.constant import Status
from flwr.common.serde import message_from_proto
from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse, PushMessagesRequest, PushMessagesResponse
from flwr.server.superlink.fleet.grpc_rere.fleet_servicer import FleetServicer
from flwr.server.superlink.utils import check_abort
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.inflatable.inflatable_object import UnexpectedObjectContentError
from flwr.supercore.inflatable.inflatable_utils import validate_object_content
from sqlalchemy.exc import IntegrityError

from fedward_server.arrivals import Arrivals
from fedward_server.database import LinkState

_OVER = [Status.PENDING, Status.STARTING, Status.FINISHED]
"""States of a run that takes no replies."""


class Fleet(FleetServicer):
    """The API that this process serves."""

    arrivals: Arrivals

    def PullMessages(self, request: PullMessagesRequest, context: Any) -> PullMessagesResponse:
        """Flower's, held for a node that waits, and with the objects of small messages for one that takes them so."""

        def look() -> PullMessagesResponse:
            return FleetServicer.PullMessages(self, request, context)

        seconds = _seconds(context)
        found = self.arrivals.hold(request.node.node_id, seconds, look, context.is_active) if seconds > 0 else look()
        if found.messages_list and _header(context, parcels.HEADER) is not None:
            self._state.take_whole(found.messages_list)
        return found

    def PushMessages(self, request: PushMessagesRequest, context: Any) -> PushMessagesResponse:
        """Flower's; a message that holds its objects is stored with them. None is taken in another node's name."""
        for sent in request.messages_list:
            # Flower holds a reply against its request alone: who knows its id could answer for its node.
            if sent.metadata.src_node_id != request.node.node_id:
                context.abort(grpc.StatusCode.PERMISSION_DENIED, "the message is not that of the node that sends it")
                raise PermissionError
        try:
            objects = parcels.take(request.messages_list[0]) if request.messages_list else {}
            if objects:
                parcels.verify(request.messages_list[0].metadata.message_id, objects)
            for content in objects.values():
                validate_object_content(content)
        except (parcels.ParcelError, UnexpectedObjectContentError) as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise
        if not objects:
            return FleetServicer.PushMessages(self, request, context)
        message = message_from_proto(request.messages_list[0])
        # What is not stored is late, or there already, or lacks a part. For the node it is done, as with stock Flower.
        with contextlib.suppress(IntegrityError), self._state.session():
            over = check_abort(message.metadata.run_id, _OVER, self._state)
            if over:
                raise FlowerError(ApiErrorCode.FLEET_RUN_STATUS_NOT_ALLOWED, f"node {request.node.node_id}: {over}")
            self._state.store_whole(message, objects)
        return PushMessagesResponse(results={message.metadata.message_id: 0})

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
