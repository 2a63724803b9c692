"""HTTP to the Fedward service: pinned CA, signed requests, errors as the service states them."""

from __future__ import annotations

import ssl
from collections.abc import Generator
from types import TracebackType
from typing import Any, Self

import httpx
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedward_common.errors import FedwardError
from fedward_common.signing import authorize

TIMEOUT = httpx.Timeout(30.0, connect=10.0)


class Unreachable(FedwardError):
    """The service cannot be reached, or is not who it should be."""


class NotTrusted(Unreachable):
    """Who answers has no certificate for this address by the pinned CA."""


class ServiceError(FedwardError):
    """The service answered with an error. code: its fixed word for it; status: the HTTP status."""

    def __init__(self, code: str, message: str, status: int) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


class RequestSigner(httpx.Auth):
    """Signs each request with an Ed25519 key; nothing that could be replayed later is sent."""

    requires_request_body = True

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """One signed request."""
        target = request.url.raw_path.decode("ascii")
        request.headers["Authorization"] = authorize(self._key, request.method, target, request.content)
        yield request


def pinned(ca_pem: str) -> ssl.SSLContext:
    """A TLS context that trusts this CA and no other."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(cadata=ca_pem)
    return context


class Service:
    """A client of one Fedward service. Threads may share it."""

    def __init__(self, server: str, ca_pem: str, key: Ed25519PrivateKey | None = None) -> None:
        """server: https URL. key: signs every request, if given."""
        self.server = server.rstrip("/")
        self._client = httpx.Client(
            base_url=self.server,
            verify=pinned(ca_pem),
            auth=None if key is None else RequestSigner(key),
            timeout=TIMEOUT,
            # No proxy, no .netrc: the machine's environment has no say in who is spoken to.
            trust_env=False,
        )

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """One request; `options` as for httpx (json, params, files, timeout).

        Raises `Unreachable`, `ServiceError`.
        """
        try:
            response = self._client.request(method, path, **options)
        except httpx.HTTPError as error:
            if _certificate_refused(error):
                raise NotTrusted(
                    f"{self.server} shows a certificate that is not for this address or not by the federation's CA: "
                    f"{error}. Either the address is not among the server's names ('fedward server init --san'), or "
                    "somebody stands between (man in the middle). Nothing has been sent."
                ) from error
            raise Unreachable(
                f"{self.server} cannot be reached: {error or type(error).__name__}. "
                "Check the address, and that the server is up."
            ) from error
        if response.is_success:
            return response
        raise service_error(response)

    def get(self, path: str, **options: Any) -> Any:
        """GET; the JSON answer."""
        return _json(self.request("GET", path, **options))

    def post(self, path: str, **options: Any) -> Any:
        """POST; the JSON answer."""
        return _json(self.request("POST", path, **options))

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _certificate_refused(error: BaseException) -> bool:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _json(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError as error:
        raise Unreachable(f"{response.url} did not answer in JSON: not a Fedward service?") from error


def service_error(response: httpx.Response) -> ServiceError:
    """The error in an answer; a plain one if it is not in the service's own form."""
    try:
        body = response.json()
        return ServiceError(str(body["error"]), str(body["message"]), response.status_code)
    except (ValueError, KeyError, TypeError):
        status = response.status_code
        return ServiceError("http", f"{response.url} answered with status {status}.", status)
