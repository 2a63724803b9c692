"""Large request bodies: to disk while they arrive, hashed on the way, taken apart there.

A signed request's signature covers the hash of its body, so the body must be complete before it can be trusted; and
it may be larger than memory.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from email.message import Message
from pathlib import Path

from anyio import to_thread
from fedward_common.errors import FedwardError

_LONGEST_HEADER = 4096
_COPY = 1 << 20


class UploadError(FedwardError):
    """A body is too large or is not what it says."""


class TooLarge(UploadError):
    """A body is larger than allowed."""


@dataclass(frozen=True)
class Body:
    """A received body: a file that whoever received it removes, and the SHA-256 of its bytes in hex."""

    path: Path
    sha256: str
    size: int


async def receive(chunks: AsyncIterator[bytes], folder: Path, limit: int) -> Body:
    """Write a body to a new file in `folder`. Raises `TooLarge`, and leaves nothing behind then."""
    digest, size = hashlib.sha256(), 0
    handle, name = tempfile.mkstemp(dir=folder, prefix="upload-")
    path = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            async for chunk in chunks:
                size += len(chunk)
                if size > limit:
                    raise TooLarge(f"the request is larger than the {limit} bytes allowed.")
                digest.update(chunk)
                await to_thread.run_sync(file.write, chunk)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return Body(path, digest.hexdigest(), size)


@dataclass(frozen=True)
class Part:
    """One part of a multipart body: bytes `start` to `end` of its file."""

    path: Path
    start: int
    end: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.end - self.start

    def read(self) -> bytes:
        """All of it."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            return file.read(self.size)

    def copy(self, target: Path) -> str:
        """Copy it into a new file; the SHA-256 in hex."""
        digest, left = hashlib.sha256(), self.size
        with self.path.open("rb") as source, target.open("xb") as file:
            source.seek(self.start)
            while left:
                chunk = source.read(min(_COPY, left))
                digest.update(chunk)
                file.write(chunk)
                left -= len(chunk)
            file.flush()
            os.fsync(file.fileno())
        return digest.hexdigest()


def split(body: Body, content_type: str, most: int = 8) -> dict[str, Part]:
    """The parts of a multipart/form-data body by name (RFC 7578). Raises `UploadError`."""
    boundary = _parameter("Content-Type", content_type, "multipart/form-data", "boundary")
    dashes = b"--" + boundary.encode("ascii", "replace")
    if body.size == 0:
        raise UploadError("the request has no body.")
    found: dict[str, Part] = {}
    with body.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[: len(dashes)] != dashes:
            raise UploadError("the multipart body does not begin with its boundary.")
        at = len(dashes)
        while data[at : at + 2] != b"--":
            if data[at : at + 2] != b"\r\n" or len(found) >= most:
                raise UploadError(f"the multipart body is malformed or has more than {most} parts.")
            header_end = data.find(b"\r\n\r\n", at, at + _LONGEST_HEADER)
            end = data.find(b"\r\n" + dashes, header_end)
            if header_end < 0 or end < 0:
                raise UploadError("the multipart body breaks off.")
            name = _name(data[at + 2 : header_end])
            if name in found:
                raise UploadError(f"the part {name!r} stands in the body twice.")
            found[name] = Part(body.path, header_end + 4, max(end, header_end + 4))
            at = end + 2 + len(dashes)
    return found


def _name(header: bytes) -> str:
    for line in header.decode("utf-8", "replace").split("\r\n"):
        key, _, value = line.partition(":")
        if key.strip().lower() == "content-disposition":
            return _parameter("Content-Disposition", value.strip(), "form-data", "name")
    raise UploadError("a part of the multipart body has no name.")


def _parameter(header: str, value: str, kind: str, wanted: str) -> str:
    message = Message()
    message[header] = value
    parameters = dict(message.get_params([], header.lower()))
    found = parameters.get(wanted)
    if kind not in parameters or not isinstance(found, str) or not found:
        raise UploadError(f"{header} must be '{kind}; {wanted}=…', this is {value[:100]!r}.")
    return found
