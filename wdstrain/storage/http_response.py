"""Responses of HTTP servers: their heads, checked, and their bodies, received without a copy.

A body of known length over plain TCP is the next bytes of a socket. They are received straight into
the scatter list, megabytes per call, without the GIL. urllib3's own reading would copy them twice.
Over TLS, and for bodies in chunks or with a content encoding, urllib3 reads.
"""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import NamedTuple

import urllib3
from urllib3.exceptions import HTTPError, InvalidHeader

from wdstrain.errors import ShardError, StorageError
from wdstrain.memory.scatter import ScatterList
from wdstrain.storage.http_request import raw_response

UNKNOWN_STOP = 1 << 62  # end of a body of unknown length

_COPIED = 256 << 10  # most bytes that urllib3 reads at a time
_TEMPORARY = frozenset({408, 425, 429, 500, 502, 503, 504})  # status codes that a retry may fix
_MODIFIED = "Last-Modified: "  # start of a version that is not an ETag
# At most 18 digits, and ASCII only: int() accepts digits of other scripts and of any count.
_NUMBER = re.compile(r"[0-9]{1,18}")
_RANGE = re.compile(rf"bytes ({_NUMBER.pattern})-({_NUMBER.pattern})/({_NUMBER.pattern}|\*)")


class TemporaryError(HTTPError):
    """A response whose status a retry may fix. retry_after: seconds that the server asks for."""

    def __init__(self, response: urllib3.BaseHTTPResponse) -> None:
        super().__init__(f"status {response.status}")
        try:
            self.retry_after = urllib3.Retry().get_retry_after(response)
        except (InvalidHeader, ValueError, OverflowError):
            self.retry_after = None


class ObjectPart(NamedTuple):
    """Bytes [start, stop) of an object of `total` bytes; total: None if unknown."""

    start: int
    stop: int
    total: int | None


class HttpResponse:
    """A response whose body is read forward.

    position: the byte of the object that comes next. part: the bytes that the body holds.
    process: the process that reads it. Bytes that a forked child took from the connection would be
    missing in its parent.
    """

    def __init__(self, response: urllib3.BaseHTTPResponse, silence: float) -> None:
        """silence: seconds without a byte after which a read fails."""
        self.status, self.headers, self.reason = response.status, response.headers, response.reason
        self.part, self.position, self.process = ObjectPart(0, UNKNOWN_STOP, None), 0, os.getpid()
        self._response, self._raw, self._silence = response, raw_response(response), silence
        self._is_direct = (
            type(self._raw.socket) is socket.socket
            and not self._raw.chunked
            and self._raw.length is not None
            and response.headers.get("Content-Encoding", "identity") == "identity"
        )
        self._is_buffer_empty = False  # the buffer into which http.client read the head

    def locate(self, shown: str, requested: int) -> None:
        """Set `part` and `position` from the headers.

        shown: the address, for errors. requested: first byte of the requested range.
        Raises StorageError if the response has another range.
        """
        if self.status == 206:
            header = self.headers.get("Content-Range", "")
            match = _RANGE.fullmatch(header)
            if match is None or int(match[1]) != requested:
                raise StorageError(
                    f"{shown}: the server sent the range {header!r} for a request that begins at "
                    f"byte {requested}. Check the server."
                )
            total = None if match[3] == "*" else int(match[3])
            self.part = ObjectPart(requested, int(match[2]) + 1, total)
        else:
            length = self.headers.get("Content-Length", "")
            total = int(length) if _NUMBER.fullmatch(length) else None
            self.part = ObjectPart(0, UNKNOWN_STOP if total is None else total, total)
        self.position = self.part.start

    def body_begins(self, patience: float | None = None) -> bool:
        """Return whether a first byte of the body arrives, if it has any.

        http.client takes a connection that ends within the head for the end of the head.
        patience: most seconds to wait, then the result is True; None: the silence limit, then
        TimeoutError is raised. After a call with a patience the body must not be read.
        """
        raw = self._raw
        if raw.isclosed() or raw.length == 0:
            return True
        if patience is not None:
            raw.socket.settimeout(patience)
        try:
            return bool(raw.fp.peek(1))
        except TimeoutError:
            if patience is None:
                raise
            return True

    def read_into(self, target: ScatterList) -> int:
        """Fill the target with at least one of the next bytes.

        Returns the number of bytes; 0 at the end of the body. Raises HTTPError, HTTPException or
        OSError.
        """
        if self._is_direct:
            count = self._read_directly(target)
        else:
            data = self._response.read1(min(target.left, _COPIED))
            target.write(data)
            count = len(data)
        self.position += count
        return count

    def stop(self) -> None:
        """End a read that another thread is in."""
        if not self._raw.isclosed() and isinstance(self._raw.socket, socket.socket):
            # SSLSocket.shutdown would drop TLS: the reader would get encrypted bytes.
            socket.socket.shutdown(self._raw.socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection, unless the whole body was read: then it is kept for reuse."""
        self._response.close()
        self._response.release_conn()

    def _read_directly(self, target: ScatterList) -> int:
        raw = self._raw
        left = raw.length or 0
        wanted = min(target.left, left)
        if not wanted:
            return 0
        count = (
            self._receive(target, wanted) if self._is_buffer_empty else self._drain(target, wanted)
        )
        raw.length = left - count
        if not raw.length:
            raw.close()
            self._response.release_conn()
        return count

    def _drain(self, target: ScatterList, wanted: int) -> int:
        """Take bytes from the buffer into which http.client read the head."""
        buffered = len(self._raw.fp.peek())
        count = min(buffered, wanted)
        target.write(self._raw.fp.read(count))
        if count == buffered:
            self._is_buffer_empty = True
            # With a timeout of Python, a receive returns after some KB. http.client sets it again
            # for the next request.
            self._raw.socket.settimeout(None)
            timeout = struct.pack("ll", int(self._silence), int(self._silence % 1 * 1e6))
            self._raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        return count

    def _receive(self, target: ScatterList, wanted: int) -> int:
        try:
            return target.receive(self._raw.socket, wanted)
        except BlockingIOError:
            raise TimeoutError(f"no byte arrived for {self._silence:g} s") from None


def check_head(response: HttpResponse, shown: str, *, is_shard: bool) -> None:
    """Raise an error for a response that does not carry bytes of an object.

    shown: the address, for errors. is_shard: whether an HTML page cannot be the object.
    Raises ShardError if the object changed, StorageError if a retry is useless.
    """
    if response.status == 412:
        raise ShardError(changed(shown))
    if response.status not in (200, 206):
        raise StorageError(
            f"{shown}: the server answered {response.status} {response.reason or ''}. "
            f"Check the address."
        )
    if is_shard and response.headers.get("Content-Type", "").startswith("text/html"):
        raise StorageError(
            f"{shown}: the server sent an HTML page instead of a shard. Check the address."
        )
    coding = response.headers.get("Transfer-Encoding", "chunked")
    # http.client returns the bytes of any other coding as if they were the object's.
    if coding.lower() not in ("chunked", "identity"):
        raise StorageError(
            f"{shown}: the server sent the transfer coding {coding[:80]!r}; only chunked can be "
            f"read. Check the server."
        )


def check_status(response: urllib3.BaseHTTPResponse) -> None:
    """Raise TemporaryError for a status that a retry may fix."""
    if response.status in _TEMPORARY:
        raise TemporaryError(response)


def changed(shown: str) -> str:
    """Return the error text for an object that was replaced while it was read."""
    return (
        f"{shown} changed while it was read. Start again; if it has an index, make the index "
        f"again: wdstrain index"
    )


def strong_etag(version: str | None) -> str | None:
    """Return a version if it is an ETag for If-Match: a strong one, equal only for equal bytes."""
    return version if version and not version.startswith(("W/", _MODIFIED)) else None


def version_of(headers: Mapping[str, str]) -> str | None:
    """Return the version of an object: its ETag, else its modification time, else None.

    Modification times have a resolution of one second. A time within one second of the response is
    not a version, because the object may change again in that second.
    """
    tag, modified = headers.get("ETag"), headers.get("Last-Modified")
    if tag or not modified:
        return tag or None
    try:
        age = parsedate_to_datetime(headers.get("Date", "")) - parsedate_to_datetime(modified)
    except (TypeError, ValueError, IndexError, OverflowError):  # not dates
        return None
    return _MODIFIED + modified if age.total_seconds() > 1 else None


def has_version(headers: Mapping[str, str], version: str) -> bool:
    """Return False if the headers say that the object has another version."""
    if version.startswith(_MODIFIED):
        return headers.get("Last-Modified") in (None, version.removeprefix(_MODIFIED))
    tag = headers.get("ETag")
    return tag in (None, version) or (
        version.startswith("W/") and tag == version.removeprefix("W/")
    )
