"""A limit on request bodies, kept while they arrive: the length that a sender states is not to be trusted."""

from __future__ import annotations

from collections.abc import Set

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedward_server.refusal import Refusal
from fedward_server.web.errors import error_answer


class BodyLimit:
    """ASGI middleware: bodies over `limit` bytes get 413. `exempt`: (method, path) of routes with their own limit."""

    def __init__(self, app: ASGIApp, limit: int, exempt: Set[tuple[str, str]]) -> None:
        self._app = app
        self._limit = limit
        self._exempt = exempt

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http" or (scope["method"], scope["path"]) in self._exempt:
            await self._app(scope, receive, send)
            return
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._limit:
                raise self._refusal()
            return message

        stated = dict(scope["headers"]).get(b"content-length", b"0")
        if not stated.isdigit() or int(stated) > self._limit:
            refusal = self._refusal()
            await error_answer(refusal.code, str(refusal), refusal.status)(scope, receive, send)
            return
        await self._app(scope, limited, send)

    def _refusal(self) -> Refusal:
        return Refusal("too_large", f"the request is larger than the {self._limit} bytes allowed.", 413)
