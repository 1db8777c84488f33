"""Files on HTTP servers, read by position.

If a connection drops, stalls, ends early or the server fails for a time, reading continues at the
first missing byte. An object that changes between two requests is an error. Reading fails after a
time limit without a byte (`retries`).
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable
from contextlib import closing, suppress
from http.client import HTTPException
from urllib.parse import urlsplit

import urllib3
from urllib3.exceptions import HTTPError

from wdstrain.errors import ShardError, StorageError
from wdstrain.memory.scatter import ScatterList, as_scatter_list
from wdstrain.runtime.machine import memory
from wdstrain.storage.http_request import describe_error, get, redacted
from wdstrain.storage.http_response import (
    HttpResponse,
    TemporaryError,
    changed,
    check_head,
    check_status,
    has_version,
    strong_etag,
    version_of,
)
from wdstrain.storage.retries import Retries, silence_limit

_CHUNK = 256 << 10  # most bytes that are read at a time if they are not kept in place
_LONGEST_GAP = 4 << 20  # bytes; a longer gap is skipped by a new request
_HEAD_PATIENCE = 1.0  # seconds for the first byte of a body whose head is wrong
_RETRIED = (HTTPError, HTTPException, OSError)  # errors that a retry may fix
_MISSING = (403, 404, 410)  # status codes of an object that does not exist
_NEXT_PAGE = re.compile(r'<([^<>]*)>;\s*rel="?next"?')
_HEAD_ENDED = "the connection ended within the head of the response"


def is_http(path: str) -> bool:
    return path.startswith(("http://", "https://"))


class HttpFile:
    """An object on an HTTP server, read by position. Only `stop` may be called by other threads.

    A read that follows the last one continues with the same response.

    version: as the first response gives it: an ETag, weak or strong, or a modification time.
    tag: the version that later responses must have; None if the server gives none.
    ranged: False if the server answers a range request with the whole object.
    retries: failed attempts. fetched: bytes that were read. cached: 0.
    """

    cached = 0

    def __init__(
        self,
        path: str,
        size: int | None = None,
        tag: str | None = None,
        stopping: threading.Event | None = None,
        *,
        first_bytes: int | None = None,
        by_version: bool = False,
    ) -> None:
        """size: None sends a request for it. tag: None takes the strong ETag of the first response.

        stopping: set to end reading. first_bytes: bytes that the request for the size brings;
        None: the whole object. by_version: without a strong ETag, take any version as the tag.
        """
        self.path, self.tag, self.ranged = path, tag, True
        self.version: str | None = None
        self.retries = self.fetched = 0
        self._size, self._shown, self._by_version = size, redacted(path), by_version
        self._stopping = stopping or threading.Event()
        self._response: HttpResponse | None = None
        if size is None:
            self._request_size(first_bytes)

    @property
    def size(self) -> int:
        """Bytes of the object. Raises StorageError if the server did not send its size."""
        if self._size is None:
            raise StorageError(
                f"{self._shown}: the server does not send the size. Make an index beside the "
                f"shards and name the index."
            )
        return self._size

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes [offset, offset + length), fewer only at the end of the object."""
        data = bytearray(max(0, min(length, self.size - offset)))
        self.read_into([memoryview(data)], offset, last=self.size)
        return bytes(data)

    def read_into(
        self, target: ScatterList | Iterable[memoryview], offset: int, *, last: int | None = None
    ) -> None:
        """Fill the target with the bytes from offset on.

        last: end of the bytes that following reads will need. One request brings them all.
        Raises ShardError if the object changed, StorageError if the server does not recover.
        """
        target = as_scatter_list(target)
        stop = offset + target.left
        if stop > self.size:
            raise ShardError(
                f"{self._shown} ends at byte {self.size}, {stop - self.size} bytes before the "
                f"index says. Copy it again."
            )
        with self._new_retries() as retries:
            while target.left:
                try:
                    self._read_some(target, stop - target.left, max(stop, last or stop))
                    retries.progress()
                except _RETRIED as error:
                    self._wait(error, stop - target.left, retries)

    def stop(self) -> None:
        """End a read that another thread is in."""
        self._stopping.set()
        response = self._response
        if response is not None:
            with suppress(Exception):  # its reader may close it at the same time
                response.stop()

    def close(self) -> None:
        """Close the connection, or keep it for reuse if the response was read to its end."""
        if self._response is not None:
            self._response.close()
            self._response = None

    def __enter__(self) -> HttpFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _request_size(self, first_bytes: int | None) -> None:
        with self._new_retries() as retries:
            while self._response is None:
                try:
                    self._request(0, first_bytes)
                    retries.progress()
                except _RETRIED as error:
                    self._wait(error, 0, retries)

    def _read_some(self, target: ScatterList, offset: int, stop: int) -> None:
        """Fill some of the target from offset on. stop: end of the bytes that are requested."""
        response = self._response_at(offset, stop)
        count = response.read_into(target)
        if not count:
            raise HTTPException(
                f"the response ended at byte {response.position} instead of {response.part.stop}"
            )
        self._check_stopping()  # `stop` may have cut the connection
        self.fetched += count

    def _response_at(self, offset: int, stop: int) -> HttpResponse:
        """Return a response whose next byte is at offset."""
        self._check_stopping()
        response = self._response
        if response is None or not _reaches(response, offset):
            self.close()
            response = self._request(offset, stop)
        while response.position < offset:  # a gap, or a server without range requests
            skipped = memoryview(bytearray(min(_CHUNK, offset - response.position)))
            if not response.read_into(ScatterList.from_buffers([skipped])):
                raise HTTPException(f"the response ended at byte {response.position}")
        self._check_stopping()  # the memory of the target may be gone
        return response

    def _request(self, offset: int, stop: int | None) -> HttpResponse:
        """Send a request for bytes [offset, stop), and check the head of its response.

        stop: None requests the whole object if offset is 0. Raises `_RETRIED` errors if a retry
        may help, otherwise ShardError or StorageError.
        """
        headers = {"Accept-Encoding": "identity"}
        if offset or stop is not None:
            headers["Range"] = f"bytes={offset}-{'' if stop is None else stop - 1}"
        if (tag := strong_etag(self.tag)) is not None:
            headers["If-Match"] = tag
        raw = get(self.path, headers)
        response = self._response = HttpResponse(raw, silence_limit())
        try:
            check_status(raw)
            self._check(response, offset)
            # A cut head may lack the ETag or some digits of the size.
            if (self._size is None or self.tag is None) and not response.body_begins():
                raise HTTPException(_HEAD_ENDED)
        except (ShardError, StorageError):
            cut = response.status in (200, 206) and not response.body_begins(_HEAD_PATIENCE)
            self.close()
            if cut:
                raise HTTPException(_HEAD_ENDED) from None
            raise
        except BaseException:
            self.close()
            raise
        self._learn(response)
        if response.status == 200 and "Range" in headers:
            self.ranged = False
        return response

    def _check(self, response: HttpResponse, offset: int) -> None:
        """Raise ShardError or StorageError if a response is not for these bytes of this object."""
        check_head(response, self._shown, is_shard=self.path.split("?")[0].endswith(".tar"))
        response.locate(self._shown, offset)
        total = response.part.total
        if self._size is not None and total not in (None, self._size):
            raise ShardError(
                f"{self._shown} has {total} bytes, its index says {self._size}: it was cut or "
                f"changed. Copy it again, or make its index again: wdstrain index"
            )
        if self.tag is not None and not has_version(response.headers, self.tag):
            raise ShardError(changed(self._shown))

    def _learn(self, response: HttpResponse) -> None:
        """Take over size and version of the object from a response."""
        if self._size is None:
            self._size = response.part.total
        if self.version is None:
            self.version = version_of(response.headers)
        if self.tag is None:
            self.tag = (
                self.version if self._by_version else strong_etag(response.headers.get("ETag"))
            )

    def _new_retries(self) -> Retries:
        return Retries(self.path, self._shown, self._stopping)

    def _wait(self, error: Exception, offset: int, retries: Retries) -> None:
        """Wait before the next attempt to read the byte at offset."""
        self.close()
        self.retries += 1
        wait_for_server(self.path, error, f"byte {offset}", retries)

    def _check_stopping(self) -> None:
        if self._stopping.is_set():
            raise StorageError(f"{self._shown}: reading was stopped.")


def read_small(address: str) -> bytes | None:
    """Return a small object; None if it does not exist (404, 410, and 403 as S3 answers).

    Raises StorageError for an object that would fill a quarter of the memory, also when it is
    decompressed.
    """
    return _read_retried(address, _MISSING)[0]


def read_listing(address: str) -> tuple[bytes | None, str | None]:
    """Return (page of a list, address of the next page); both None if it does not exist.

    The next page is that of the header `Link: <...>; rel="next"`. A server that hides objects from
    users without access answers 401.
    """
    return _read_retried(address, (*_MISSING, 401))


def _read_retried(address: str, missing: tuple[int, ...]) -> tuple[bytes | None, str | None]:
    with Retries(address, redacted(address)) as retries:
        while True:
            try:
                page = _read_once(address, missing)
                retries.progress()
                return page
            except _RETRIED as error:
                wait_for_server(address, error, "byte 0", retries)


def _read_once(address: str, missing: tuple[int, ...]) -> tuple[bytes | None, str | None]:
    with closing(get(address)) as response:
        check_status(response)
        if response.status == 200 and not HttpResponse(response, silence_limit()).body_begins():
            raise HTTPException(_HEAD_ENDED)
        data = _read_all(response, address)
    is_page = response.headers.get("Content-Type", "").startswith("text/html")
    # Some servers send a page with status 200 for a missing object.
    if response.status in missing or (is_page and urlsplit(address).path.endswith(".json")):
        return None, None
    if response.status != 200:
        raise StorageError(
            f"{redacted(address)}: the server answered {response.status} {response.reason or ''}. "
            f"Check the address."
        )
    following = _NEXT_PAGE.search(response.headers.get("Link", ""))
    return data, following[1] if following else None


def _read_all(response: urllib3.BaseHTTPResponse, address: str) -> bytes:
    """Return a body. Memory grows with the bytes that arrive, not with the claimed length."""
    data, most = bytearray(), memory() // 4
    for chunk in response.stream(_CHUNK):
        data += chunk
        if len(data) > most:
            raise StorageError(
                f"{redacted(address)} has more than {most} bytes, too many to hold at once. "
                f"Check the address."
            )
    return bytes(data)


def _reaches(response: HttpResponse, offset: int) -> bool:
    """Return whether a byte can be read from a response without a new request."""
    return (
        response.process == os.getpid()
        and response.position <= offset < response.part.stop
        and offset - response.position <= _LONGEST_GAP
    )


def wait_for_server(address: str, error: Exception, missing: str, retries: Retries) -> None:
    """Wait before the next attempt. Raises StorageError if no retry can help."""
    reason = describe_error(error, address)
    if "CERTIFICATE_VERIFY_FAILED" in reason:
        raise StorageError(
            f"{redacted(address)}: {reason}. Check the address; SSL_CERT_FILE names certificates "
            f"to trust."
        ) from None
    retry_after = error.retry_after if isinstance(error, TemporaryError) else None
    retries.wait(reason, missing, retry_after)
