"""Every error leaves the service as {"error": code, "message": text}; what is not meant for people stays in the log."""

from __future__ import annotations

import logging
import secrets

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fedward_common.errors import FedwardError
from starlette.exceptions import HTTPException

from fedward_server.refusal import Refusal

log = logging.getLogger(__name__)


TOO_LARGE = "too_large"


def error_answer(code: str, message: str, status: int) -> JSONResponse:
    """The service's form of an error."""
    return JSONResponse({"error": code, "message": message}, status_code=status)


def install_errors(app: FastAPI) -> None:
    """Answer every exception in the service's form."""

    @app.exception_handler(Refusal)
    def refused(_: Request, error: Refusal) -> JSONResponse:
        return error_answer(error.code, str(error), error.status)

    @app.exception_handler(FedwardError)
    def wrong(_: Request, error: FedwardError) -> JSONResponse:
        return error_answer("bad_request", str(error), 400)

    @app.exception_handler(RequestValidationError)
    def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        # Without the input: it may hold a secret.
        lines = (".".join(str(part) for part in item["loc"]) + ": " + item["msg"] for item in error.errors())
        return error_answer("bad_request", "; ".join(lines), 422)

    @app.exception_handler(HTTPException)
    def http(_: Request, error: HTTPException) -> JSONResponse:
        code = TOO_LARGE if error.status_code == 413 else "http"
        return error_answer(code, f"{error.detail}.", error.status_code)

    @app.exception_handler(Exception)
    def unexpected(request: Request, error: Exception) -> JSONResponse:
        incident = secrets.token_hex(4)
        log.error("incident %s in %s %s", incident, request.method, request.url.path, exc_info=error)
        return error_answer("internal", f"the server failed; its log has the details under {incident}.", 500)
