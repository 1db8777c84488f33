"""Remote files on HTTP servers and in object stores, read by position.

If a connection drops, stalls, ends early or the server fails for a time, reading continues at the
first missing byte (`retries`). An object that changes between two requests is an error.

The environment variable WDSTRAIN_RANGE_SIZE sets the most bytes of a range request.
"""

from __future__ import annotations

import io
import os
import threading
from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import unquote, urlsplit

from wdstrain.errors import ShardError, StorageError, UsageError
from wdstrain.report.printing import printable
from wdstrain.runtime.machine import memory
from wdstrain.runtime.options import size_setting
from wdstrain.storage import http, objects
from wdstrain.storage.http import check_address, is_http, renew_addresses
from wdstrain.storage.objects import MissingError
from wdstrain.storage.retries import RETRIED, Response, TemporaryError, retry
from wdstrain.storage.secrets import redacted

__all__ = [
    "ALL_BYTES",
    "MOST_RANGE",
    "SCHEMES",
    "File",
    "MissingError",
    "RemoteFile",
    "Response",
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

RANGE_BYTES = 4 << 20  # of the range requests for the first batch
# A server that allows 3,000 requests in 5 minutes then sends 300 MB/s, and some small ranges at first.
MOST_RANGE = 36_000_000
ALL_BYTES = 1 << 62  # for `first_bytes`: a range ends with the file
_CHUNK = 256 << 10  # most bytes that are read at a time; an error loses the bytes of one chunk
_BUFFER = 1 << 20  # bytes that a file object reads; tar readers ask for 512 at a time
_LONGEST_GAP = 4 << 20  # bytes; a longer gap is skipped by a new request


def is_remote(path: str) -> bool:
    return path.startswith(tuple(SCHEMES))


def shown_path(path: str) -> str:
    """Return a path or address for messages: printable, without the secrets of an address."""
    return printable(redacted(path) if is_remote(path) else path)


def name_of(path: str) -> str:
    """Return the name of a file in its folder, local or remote."""
    # In addresses that are not http all characters are literal.
    return os.path.basename(unquote(urlsplit(path).path) if is_http(path) else path)


def range_size(delivered: float = ALL_BYTES) -> int:
    """Return the most bytes of a range request.

    delivered: bytes that the loop gets before it needs this range. Early ranges are small, so that
    they come soon. Later ones are larger, because some servers limit the number of requests.
    """
    grown = min(MOST_RANGE, max(RANGE_BYTES, int(delivered) // 4))
    return size_setting("WDSTRAIN_RANGE_SIZE", grown)


def read_remote(path: str) -> bytes | None:
    """Return a small remote file; None if it does not exist."""
    if is_http(path):  # its server may compress it, or not send the size
        return http.read_page(path)[0]
    with suppress(MissingError), RemoteFile(path, first_bytes=ALL_BYTES) as file:
        if file.size > memory() // 4:
            raise StorageError(
                f"{path} has {file.size} bytes, too many to hold at once.",
                "Check the address.",
            )
        return file.bytes_at(0, file.size)
    return None


class File(io.RawIOBase):
    """A shard, local or remote, that is read by position or as a stream. Not shared between threads.

    path: its address. size: in bytes. tag: version that all reads must see; "" for any. version:
    that of the first read, None if unknown. ranged: False if a server answers a range request with
    the whole object. fetched: bytes that came from a server. cached: bytes that came from the cache.
    retries: failed attempts. cached_path: where the whole file is kept in the cache; "" if it is not.
    """

    path: str
    size: int
    tag: str | None
    version: str | None
    ranged, fetched, cached, retries, cached_path = True, 0, 0, 0, ""

    @abstractmethod
    def read_into(self, target: memoryview, offset: int, *, last: int | None = None) -> None:
        """Fill the target with the bytes from offset on. Raises ShardError or StorageError.

        last: end of the bytes that following reads will need. One request brings them all.
        """

    def bytes_at(self, offset: int, length: int) -> bytes:
        """Return bytes [offset, offset + length), fewer only at the end of the file."""
        data = bytearray(max(0, min(length, self.size - offset)))
        self.read_into(memoryview(data), offset, last=self.size)
        return bytes(data)

    def counts(self) -> dict[str, int]:
        """Return `fetched`, `cached` and `retries`."""
        return {"fetched": self.fetched, "cached": self.cached, "retries": self.retries}

    def stop(self) -> None:
        """End a read that another thread is in, if it waits for a server."""


class RemoteFile(File):
    """A file of a server. Only `stop` may be called by other threads.

    A read that follows the last one continues with the same response.
    """

    _next = 0  # position of the stream

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
        self._shown, self._stopping = redacted(path), stopping or threading.Event()
        self.version, self._position = None, 0
        self._response: Any = None
        if size is None:
            attempt = partial(self._read_some, memoryview(bytearray()), 0, first_bytes)
            retry(path, attempt, "byte 0", self._stopping)
            if first_bytes == 1 and self.ranged:
                self._end_response()

    def read_into(self, target: memoryview, offset: int, *, last: int | None = None) -> None:
        """Fill the target with the bytes from offset on.

        Raises ShardError if the object changed, StorageError if the server does not recover.
        """
        stop = offset + len(target)
        if stop > self.size:
            raise ShardError(
                f"{self._shown} ends at byte {self.size}, {stop - self.size} bytes before the "
                f"index says.",
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
        super().close()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._next = max(0, offset + (0, self._next, self.size)[whence])
        return self._next

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self.size - self._next))
        if count:  # object stores refuse an empty range
            self.read_into(memoryview(buffer)[:count], self._next, last=self.size)
        self._next += count
        return count

    def _end_response(self) -> None:
        """End the response, which a read continues. A subclass may have more to close."""
        # In a forked child the connection is its parent's.
        if self._response is not None and self._response.process == os.getpid():
            self._response.close()
        self._response = None

    def _read_some(self, view: memoryview, offset: int, stop: int) -> int:
        """Fill the beginning of a view. Returns the number of bytes. stop: end of a new request."""
        try:
            response = self._response_at(offset, stop)
            while self._position < offset:  # a gap, or a server without range requests
                self._take(response, memoryview(bytearray(min(_CHUNK, offset - self._position))))
            return self._take(response, view[:_CHUNK]) if view else 0
        except BaseException as error:
            self._end_response()
            self.retries += isinstance(error, RETRIED) and not getattr(error, "wait", 0.0)
            raise

    def _take(self, response: Response, view: memoryview) -> int:
        """Fill the beginning of a view with the next bytes of a response; return how many."""
        if self._stopping.is_set():  # the memory of the view may be gone
            raise StorageError(f"{self._shown}: reading was stopped.")
        count: int = response.body.readinto(view)
        if not count:
            raise TemporaryError(
                f"the response ended at byte {self._position} instead of {response.stop}"
            )
        self._position += count
        self.fetched += count
        return count

    def _response_at(self, offset: int, stop: int) -> Response:
        """Return a response that has the byte at offset ahead. stop: end of a new request."""
        response: Response | None = self._response
        if (
            response is not None
            # Bytes that a forked child took from the connection would be missing in its parent.
            and response.process == os.getpid()
            and self._position <= offset < response.stop
            and (offset - self._position <= _LONGEST_GAP or not self.ranged)
        ):
            return response
        self._end_response()
        request = next(row for prefix, row in SCHEMES.items() if self.path.startswith(prefix))
        response = self._response = request(self.path, offset, stop)
        self.ranged, self._position, total = response.ranged, response.start, response.total
        if self.size < 0:
            if total is None:
                raise StorageError(
                    f"{self._shown}: the server does not send the size.",
                    "Make an index beside the shards and name the index.",
                )
            self.size = total
        if total not in (None, self.size):
            raise ShardError(
                f"{self._shown} has {total} bytes, its index says {self.size}: it was cut or changed.",
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
    return io.BufferedReader(RemoteFile(url), max(bufsize, _BUFFER))


# Function that sends a range request, by the beginning of an address. It takes an address, start and
# stop, and raises MissingError for a file that does not exist.
SCHEMES: dict[str, Callable[[str, int, int], Response]] = {
    **dict.fromkeys(("http://", "https://"), http.request),
    **dict.fromkeys(objects.PREFIXES, objects.request),
}
