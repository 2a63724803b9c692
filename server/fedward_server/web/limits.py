"""A limit on request bodies, kept while they arrive: the length that a sender states is not to be trusted."""

from __future__ import annotations

from collections.abc import Set

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedward_server.web.errors import TOO_LARGE, error_answer


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
                # FastAPI lets no other exception through while it reads a body.
                raise HTTPException(413, self._message())
            return message

        stated = dict(scope["headers"]).get(b"content-length", b"0")
        if not stated.isdigit() or int(stated) > self._limit:
            await error_answer(TOO_LARGE, self._message(), 413)(scope, receive, send)
            return
        await self._app(scope, limited, send)

    def _message(self) -> str:
        return f"the request is larger than the {self._limit} bytes allowed"
