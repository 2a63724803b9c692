"""Why the service says no: a fixed code for programs, a text for people, an HTTP status."""

from __future__ import annotations

from fedward_common.errors import FedwardError


class Refusal(FedwardError):
    """A request is refused. The text goes to whoever asked: it holds no secret and no path of this machine."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.code = code
        self.status = status
