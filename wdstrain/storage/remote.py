"""Remote files on HTTP servers and in object stores, read by position.

If a connection drops, stalls, ends early or the server fails for a time, reading continues at the
first missing byte (`retries`). An object that changes between two requests is an error.

The environment variable WDSTRAIN_RANGE_SIZE sets the most bytes of a range request. By default
they grow where a server limits the number of requests.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from wdstrain.errors import ShardError, StorageError, UsageError
from wdstrain.runtime.machine import memory
from wdstrain.runtime.options import size_setting
from wdstrain.storage.http import (
    HttpResponse,
    check_address,
    is_http,
    read_small,
    renew_addresses,
)
from wdstrain.storage.objects import PREFIXES, MissingError, ObjectResponse
from wdstrain.storage.retries import MOST_RANGE, RETRIED, TemporaryError, request_bytes, retry
from wdstrain.storage.secrets import redacted

__all__ = [
    "ALL_BYTES",
    "MOST_RANGE",
    "SCHEMES",
    "RemoteFile",
    "RemoteStream",
    "Scheme",
    "check_address",
    "gopen",
    "is_remote",
    "name_of",
    "range_size",
    "read_remote",
    "redacted",
    "renew_addresses",
    "shown_path",
]

ALL_BYTES = 1 << 62  # for `first_bytes`: a range ends with the file
_CHUNK = 256 << 10  # most bytes that are read at a time; an error loses the bytes of one chunk
_BUFFER = 1 << 20  # bytes that a file object reads; tar readers ask for 512 at a time
_LONGEST_GAP = 4 << 20  # bytes; a longer gap is skipped by a new request


class Scheme(NamedTuple):
    """How files at addresses of one scheme are read.

    request: takes an address, start and stop; returns the response to a range request, with the
    members of `http.HttpResponse`. read_small: returns the bytes of a small file, None if there is
    no such file.
    """

    request: Callable[[str, int, int], Any]
    read_small: Callable[[str], bytes | None]


def is_remote(path: str) -> bool:
    return path.startswith(tuple(SCHEMES))


def _scheme_of(path: str) -> Scheme:
    return next(row for prefix, row in SCHEMES.items() if path.startswith(prefix))


def shown_path(path: str) -> str:
    """Return a path or address for messages, without the secrets of an address."""
    return redacted(path) if is_remote(path) else path


def name_of(path: str) -> str:
    """Return the name of a file in its folder, local or remote."""
    # In addresses that are not http all characters are literal.
    return os.path.basename(unquote(urlsplit(path).path) if is_http(path) else path)


def range_size() -> int:
    """Return the most bytes of a range request."""
    return size_setting("WDSTRAIN_RANGE_SIZE", request_bytes())


def read_remote(path: str) -> bytes | None:
    """Return a small remote file; None if it does not exist."""
    return _scheme_of(path).read_small(path)


class RemoteFile(AbstractContextManager["RemoteFile"]):
    """A remote file, read by position. Only `stop` may be called by other threads.

    A read that follows the last one continues with the same response.

    size: bytes of the object. tag: the version that all responses must have. version: that of the
    first response, None if the server gives none. ranged: False if the server answers a range
    request with the whole object. fetched: bytes that were read. retries: failed attempts. cached: 0. cached_path: where the
    whole file is kept in the cache; "" if it is not.
    """

    cached, cached_path = 0, ""

    def __init__(
        self,
        path: str,
        size: int | None = None,
        tag: str | None = None,
        stopping: threading.Event | None = None,
        first_bytes: int = 1,
    ) -> None:
        """size: None requests the first bytes, whose response says size and version.

        first_bytes: how many of them; the next read of byte 0 gets them. tag: None takes the version
        of the first response; "" allows any, for bytes that are verified by checksums. stopping:
        set to end reading.
        """
        self.path, self.size, self.tag = path, -1 if size is None else size, tag
        self.version: str | None = None
        self.ranged, self.fetched, self.retries = True, 0, 0
        self._shown, self._stopping = redacted(path), stopping or threading.Event()
        self._response: Any = None
        if size is None:
            attempt = partial(self._read_some, memoryview(bytearray()), 0, first_bytes)
            retry(path, attempt, "byte 0", self._stopping)
            if first_bytes == 1 and self.ranged:
                self._end_response()

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes [offset, offset + length), fewer only at the end of the object."""
        data = bytearray(max(0, min(length, self.size - offset)))
        self.read_into(memoryview(data), offset, last=self.size)
        return bytes(data)

    def read_into(self, target: memoryview, offset: int, *, last: int | None = None) -> None:
        """Fill the target with the bytes from offset on.

        last: end of the bytes that following reads will need. One request brings them all.
        Raises ShardError if the object changed, StorageError if the server does not recover.
        """
        stop = offset + len(target)
        if stop > self.size:
            raise ShardError(
                f"{self._shown} ends at byte {self.size}, {stop - self.size} bytes before the "
                "index says.",
                "Copy it again.",
            )
        while offset < stop:
            attempt = partial(self._read_some, target, offset, max(stop, last or 0))
            count = retry(self.path, attempt, f"byte {offset}", self._stopping)
            target, offset = target[count:], offset + count

    def stop(self) -> None:
        """End a read that another thread is in."""
        self._stopping.set()
        with suppress(Exception):  # there is no response, or its reader closes it meanwhile
            self._response.interrupt()

    def close(self) -> None:
        """Close the connection, or keep it for reuse if the response was read to its end."""
        self._end_response()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end_response(self) -> None:
        """End the response, which a read continues. A subclass may have more to close."""
        if self._response is not None:
            self._response.close()
            self._response = None

    def _read_some(self, view: memoryview, offset: int, stop: int) -> int:
        """Fill the beginning of a view. Returns the number of bytes. stop: end of a new request."""
        try:
            response = self._response_at(offset, stop)
            if self._stopping.is_set():  # the memory of the view may be gone
                raise StorageError(f"{self._shown}: reading was stopped.")
            count: int = response.readinto(view[:_CHUNK])
            if view and not count:
                raise TemporaryError(
                    f"the response ended at byte {response.position} instead of {response.stop}"
                )
        except BaseException as error:
            self._end_response()
            self.retries += isinstance(error, RETRIED) and not getattr(error, "wait", 0.0)
            raise
        self.fetched += count
        return count

    def _response_at(self, offset: int, stop: int) -> Any:
        """Return a response whose next byte is at offset."""
        response = self._response
        if response is None or not self._reaches(response, offset):
            self._end_response()
            response = self._request(offset, stop)
        while response.position < offset:  # a gap, or a server without range requests
            skipped = memoryview(bytearray(min(_CHUNK, offset - response.position)))
            if not response.readinto(skipped):
                raise TemporaryError(f"the response ended at byte {response.position}")
        return response

    def _reaches(self, response: Any, offset: int) -> bool:
        """Return whether a byte can be read from a response without a new request."""
        return (
            # Bytes that a forked child took from the connection would be missing in its parent.
            response.process == os.getpid()
            and response.position <= offset < response.stop
            and (offset - response.position <= _LONGEST_GAP or not self.ranged)
        )

    def _request(self, offset: int, stop: int) -> Any:
        """Send a request for bytes [offset, stop), and check that its object is the same."""
        response = self._response = _scheme_of(self.path).request(self.path, offset, stop)
        self.ranged = response.ranged
        total = response.total
        if self.size < 0:
            if total is None:
                raise StorageError(
                    f"{self._shown}: the server does not send the size.",
                    "Make an index beside the shards and name the index.",
                )
            self.size = total
        if total not in (None, self.size):
            raise ShardError(
                f"{self._shown} has {total} bytes, its index says {self.size}: it was cut or "
                "changed.",
                "Copy it again, or make its index again: wdstrain index",
            )
        if self.tag and not response.is_version(self.tag):
            raise ShardError(
                f"{self._shown} changed while it was read.",
                "Start again; if it has an index, make the index again: wdstrain index",
            )
        self.version = self.version or response.version
        self.tag = self.version if self.tag is None else self.tag
        return response


class RemoteStream(io.RawIOBase):
    """A remote file, or its copy in the cache, as a raw binary stream."""

    def __init__(self, file: RemoteFile) -> None:
        self.file, self._position = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = max(0, offset + (0, self._position, self.file.size)[whence])
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        size = self.file.size
        count = max(0, min(len(buffer), size - self._position))
        if count:  # object stores refuse an empty range
            self.file.read_into(memoryview(buffer)[:count], self._position, last=size)
        self._position += count
        return count

    def close(self) -> None:
        self.file.close()
        super().close()


def gopen(url: str, mode: str = "rb", bufsize: int = _BUFFER, **_: Any) -> io.BufferedReader:
    """Return a file object for an address http(s)://, s3://, gs:// or az://.

    After this line all webdataset pipelines of the process read through this package:

        wds.gopen_schemes.update(dict.fromkeys(("http", "https", "s3"), wt.gopen))

    A dropped connection continues at the byte where it broke, and a shard that ends early is an
    error. webdataset itself reads from a pipe to curl, which takes a partial response for the whole
    shard. The signature is webdataset's. Raises UsageError for other addresses and modes. Reading
    raises ShardError or StorageError.
    """
    if mode != "rb":
        raise UsageError(
            f"{redacted(url)}: mode={mode!r} is not supported.",
            'Use mode="rb".',
        )
    if not is_remote(url):
        raise UsageError(
            f"{url}: not an address of a server.",
            "Use open() for a local file.",
        )
    return io.BufferedReader(RemoteStream(RemoteFile(url)), max(bufsize, _BUFFER))


def _read_object(path: str) -> bytes | None:
    """Return a small object, read in ranges; None if it does not exist."""
    with suppress(MissingError), RemoteFile(path, first_bytes=ALL_BYTES) as file:
        if file.size > memory() // 4:
            raise StorageError(
                f"{path} has {file.size} bytes, too many to hold at once.",
                "Check the address.",
            )
        return file.read(0, file.size)
    return None


SCHEMES = {
    **dict.fromkeys(("http://", "https://"), Scheme(HttpResponse, read_small)),
    **dict.fromkeys(PREFIXES, Scheme(ObjectResponse, _read_object)),
}
