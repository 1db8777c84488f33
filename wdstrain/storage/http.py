"""HTTP, as if it were a disk: ranges of bytes that arrive whole, or an error that says why not.

A connection may drop at any byte, a server may stall, answer 503, close early or know no ranges: what arrived is kept and the
rest is asked for again from the byte where it broke, with growing pauses and jitter, so that many readers do not come back all
at once. An back all
at once. An object that changes between two requests is an error, never a mixture of both. What cannot be healed ends after
a time without a byte of progress (`outages`).

The road not taken is webdataset's pipe to curl: it starts a shard anew, or hides the failure.
"""

from __future__ import annotations

import base64
import logging
import os
import re
import threading
import time
import traceback
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import lru_cache
from http.client import HTTPException, HTTPMessage
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit
from urllib.request import getproxies, proxy_bypass

import urllib3
from urllib3.exceptions import HTTPError, LocationParseError
from urllib3.util.response import assert_header_parsing

from wdstrain.errors import ShardError, StorageError, UsageError
from wdstrain.memory.scatter import ScatterList, as_scatter_list
from wdstrain.runtime.machine import memory
from wdstrain.storage.http_body import Body, begins
from wdstrain.storage.outages import TIMEOUT, Retries, silence_limit

_CONNECT = 10.0  # seconds
_PATIENCE = 1.0  # seconds for the first byte after a head that cannot be
_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})  # what a server may get over
_OVER = 256 << 10  # bytes that are read over at a time, at most
_GAP = 4 << 20  # bytes that are read over rather than asked anew
_MODIFIED = "Last-Modified: "  # how a version begins that is no ETag
_HEADERS = "WDSTRAIN_HTTP_HEADERS"  # "Name: value" lines, sent with every request

_NUMBER = re.compile(
    r"[0-9]{1,18}"
)  # no more digits than any object's size has, and none of those that only Python knows
_SPAN = re.compile(rf"bytes ({_NUMBER.pattern})-({_NUMBER.pattern})/({_NUMBER.pattern}|\*)")


def is_http(path: str) -> bool:
    return path.startswith(("http://", "https://"))


def redacted(address: str) -> str:
    """An address as it may be shown: without user, password, query and fragment, where secrets are."""
    parts = urlsplit(address)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


@dataclass
class Answer:
    """A response that is being read: `at` is the byte of the object that comes next.

    process: which reads it. What a forked child took from its connection would be missing in its parent.
    """

    response: urllib3.BaseHTTPResponse
    body: Body
    at: int
    total: int | None = None
    process: int = field(default_factory=os.getpid)

    def read_into(self, pieces: ScatterList) -> int:
        """Fill what comes, one byte at least; 0 where the answer ends."""
        count = self.body.read_into(pieces)
        self.at += count
        return count

    def close(self) -> None:
        self.response.close()
        self.response.release_conn()


@dataclass
class HttpFile:
    """An object on a server, read by position. Not shared between threads.

    size: as the index says, or None, then it is asked for, with `first` bytes or all of it on their way. A read that follows the last one goes on with the same response.
    """

    path: str
    known_size: int | None = None
    tag: str | None = (
        None  # of the object as it was first seen: a strong ETag, or a version that was given
    )
    stopping: threading.Event = field(default_factory=threading.Event, repr=False)
    ranged: bool = True  # False: the server answers a range with the whole object
    retries: int = 0
    fetched: int = 0  # bytes that were asked for and came
    cached: int = 0
    first: int | None = None
    by_version: bool = False  # of no strong ETag, the version is the tag
    version: str | None = (
        None  # what the first answer says: an ETag, a weak one too, or when it was modified
    )
    _answer: Answer | None = field(default=None, repr=False)
    _stop: int = 0  # where the response in hand ends

    def __post_init__(self) -> None:
        with Retries(self.path) as retries:
            while self.known_size is None and self._answer is None:
                try:
                    self._ask(0, self.first)
                    retries.progress()
                except (HTTPError, HTTPException, OSError) as error:
                    self._pause(error, 0, retries)

    @property
    def size(self) -> int:
        if self.known_size is None:
            raise StorageError(
                f"{redacted(self.path)}: the server does not say how large it is. Make an index beside the shards and name it."
            )
        return self.known_size

    def read(self, offset: int, length: int) -> bytes:
        """Bytes [offset, offset + length), fewer only at the end of the object."""
        length = max(0, min(length, self.size - offset))
        found = bytearray(length)
        self.read_into([memoryview(found)], offset, last=self.size)
        return bytes(found)

    def read_into(
        self, pieces: ScatterList | Iterable[memoryview], offset: int, *, last: int | None = None
    ) -> None:
        """Fill the pieces, one after another, with the bytes from offset on.

        last: how far the bytes will be wanted that follow, for one request to bring them. Raises ShardError where the object
        is not what it was, StorageError where the server gives up.
        """
        todo = as_scatter_list(pieces)
        stop = offset + todo.left
        if stop > self.size:
            raise ShardError(
                f"{redacted(self.path)} ends at byte {self.size}, {stop - self.size} bytes before the index says. Copy it again."
            )
        with Retries(self.path) as retries:
            while todo.left:
                try:
                    answer = self._at(stop - todo.left, max(stop, last or stop))
                    count = answer.read_into(todo)
                    if not count:
                        raise HTTPException(
                            f"the answer ended at byte {answer.at} where {self._stop} was promised"
                        )
                    if self.stopping.is_set():  # what came last may be anything
                        raise StorageError(f"{redacted(self.path)}: reading was stopped.")
                    self.fetched += count
                    retries.progress()
                except (HTTPError, HTTPException, OSError) as error:
                    self._pause(error, stop - todo.left, retries)

    def stop(self) -> None:
        """End a read that another thread is in."""
        self.stopping.set()
        answer = self._answer
        if answer is not None:
            with suppress(Exception):  # it may be closed meanwhile
                answer.body.stop()

    def close(self) -> None:
        if self._answer is not None:
            self._answer.close()
            self._answer = None

    def __enter__(self) -> HttpFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- parts -------------------------------------------------------------------------------------------------------

    def _at(self, offset: int, stop: int) -> Answer:
        """A response whose next byte is this one."""
        if self.stopping.is_set():
            raise StorageError(f"{redacted(self.path)}: reading was stopped.")
        answer = self._answer
        follows = (
            answer is not None and answer.at <= offset < self._stop and offset - answer.at <= _GAP
        )
        if answer is None or not follows or answer.process != os.getpid():
            self.close()
            answer = self._ask(offset, stop)
        while answer.at < offset:  # a gap, or a server that knows no ranges
            over = ScatterList.from_buffers([memoryview(bytearray(min(_OVER, offset - answer.at)))])
            if not answer.read_into(over):
                raise HTTPException(f"the answer ended at byte {answer.at}")
        if self.stopping.is_set():  # where the bytes are for may be gone
            raise StorageError(f"{redacted(self.path)}: reading was stopped.")
        return answer

    def _ask(self, offset: int, stop: int | None) -> Answer:
        """A new request for the bytes from offset on. Raises what a retry may heal as urllib3's errors, the rest as ours."""
        headers = {"Accept-Encoding": "identity", **_sent(self.path)}
        if offset or stop is not None:
            headers["Range"] = f"bytes={offset}-{'' if stop is None else stop - 1}"
        if self.tag is not None and _strong(self.tag) is not None:
            headers["If-Match"] = self.tag
        try:
            response = _get(self.path, headers)
        except LocationParseError as error:
            raise StorageError(f"{redacted(self.path)} is no address ({error}).") from None
        answer = self._answer = Answer(response, Body(response, silence_limit()), offset)
        try:
            self._check(answer, offset, headers)
        except (ShardError, StorageError):
            # what is wrong with a head may be that half of it is missing
            ended = response.status in (200, 206) and not begins(response, _PATIENCE)
            self.close()
            if ended:
                raise HTTPException("the connection ended within the head of the answer") from None
            raise
        except BaseException:
            self.close()
            raise
        return answer

    def _check(self, answer: Answer, offset: int, sent: Mapping[str, str]) -> None:
        response, shown = answer.response, redacted(self.path)
        if response.status in _AGAIN:
            raise _Busy(response.status, response.headers)
        if response.status == 412:
            raise ShardError(
                f"{shown} changed while it was read. Start again; its index may have to be made anew."
            )
        if response.status not in (200, 206):
            raise StorageError(
                f"{shown}: the server answered {response.status} {response.reason or ''}. Check the address."
            )
        if response.status == 206:
            span = _SPAN.fullmatch(response.headers.get("Content-Range", ""))
            if span is None or int(span[1]) != offset:
                raise StorageError(
                    f"{shown}: the server was asked for byte {offset} and gave {response.headers.get('Content-Range')!r}."
                )
            stop = int(span[2]) + 1
            answer.total = None if span[3] == "*" else int(span[3])
        else:
            answer.at = 0
            length = response.headers.get("Content-Length", "")
            answer.total = int(length) if _NUMBER.fullmatch(length) else None
            stop = answer.total if answer.total is not None else 1 << 62
        if response.headers.get("Content-Type", "").startswith("text/html") and self.path.split(
            "?"
        )[0].endswith(".tar"):
            raise StorageError(
                f"{shown}: the server gave a page (text/html) where a shard should be. Check the address."
            )
        coding = response.headers.get("Transfer-Encoding", "chunked")
        if coding.lower() not in (
            "chunked",
            "identity",
        ):  # http.client would give what is coded for the object's bytes
            raise StorageError(
                f"{shown}: the server answered in the transfer coding {coding[:80]!r}, which cannot be read."
            )
        if self.known_size is not None and answer.total not in (None, self.known_size):
            raise ShardError(
                f"{shown} has {answer.total} bytes, its index says {self.known_size}: it was cut or changed. Copy it again, or "
                f"make its index anew."
            )
        tag = response.headers.get("ETag")
        if self.tag is not None and not _is_still(self.tag, response.headers):
            raise ShardError(
                f"{shown} changed while it was read. Start again; its index may have to be made anew."
            )
        if (self.known_size is None or self.tag is None) and not begins(
            response
        ):  # before anything of it is believed
            raise HTTPException("the connection ended within the head of the answer")
        self._stop, self.ranged = (
            stop,
            self.ranged and (response.status == 206 or "Range" not in sent),
        )
        self.known_size = answer.total if self.known_size is None else self.known_size
        self.version = version_of(response.headers) if self.version is None else self.version
        if self.tag is None:
            self.tag = self.version if self.by_version else _strong(tag)

    def _pause(self, error: Exception, offset: int, retries: Retries) -> None:
        """Wait before the next try. Raises StorageError when the server was waited for long enough."""
        self.close()
        self.retries += 1
        reason = _words(error, self.path)
        if "CERTIFICATE_VERIFY_FAILED" in reason:  # no time heals that
            raise StorageError(
                f"{redacted(self.path)}: {reason}. Check the address; SSL_CERT_FILE names certificates to trust."
            ) from None
        pause = retries.pause(reason, error.after if isinstance(error, _Busy) else None)
        if pause is None:
            raise StorageError(
                f"{redacted(self.path)} gave no byte {offset} in {retries.tries} attempts over {retries.seconds:.0f} s, the last: "
                f"{reason}. Check the server and the network; {TIMEOUT} sets for how many seconds a server is waited for."
            ) from None
        self.stopping.wait(pause)
        if self.stopping.is_set():
            raise StorageError(f"{redacted(self.path)}: reading was stopped.")


class _Busy(HTTPError):
    """An answer that a server may get over. `after`: seconds it asked to wait."""

    def __init__(self, status: int, headers: Mapping[str, str]) -> None:
        super().__init__(f"status {status}")
        text = headers.get("Retry-After", "")
        self.after: float | None = float(text) if _NUMBER.fullmatch(text) else None
        if text and self.after is None:
            try:
                self.after = max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
            except (
                TypeError,
                ValueError,
                IndexError,
                OverflowError,
            ):  # the parser's own, of what is no date
                self.after = None


def read_small(address: str) -> bytes | None:
    """A small object as a whole; None if the server says that there is none (404, 410, and 403 as S3 says it).

    Raises StorageError for one that would fill a quarter of memory: what has no end, or grows when it is unpacked, is no index.
    """
    with Retries(address) as retries:
        return _read_small(address, retries)


def _read_small(address: str, retries: Retries) -> bytes | None:
    source = HttpFile(address, 0)
    while True:
        try:
            with closing(_get(address, _sent(address))) as response:
                if response.status in _AGAIN:
                    raise _Busy(response.status, response.headers)
                if response.status == 200 and not begins(response):
                    raise HTTPException("the connection ended within the head of the answer")
                data = _read_all(response, address)
            retries.progress()
            if response.status in (403, 404, 410):
                return None
            if response.headers.get("Content-Type", "").startswith("text/html") and urlsplit(
                address
            ).path.endswith(".json"):
                return None  # a page for people, of a server that answers so for what it has not
            if response.status != 200:
                raise StorageError(
                    f"{redacted(address)}: the server answered {response.status} {response.reason or ''}."
                )
            return data
        except (HTTPError, HTTPException, OSError) as error:
            source._pause(error, 0, retries)


def _read_all(response: urllib3.BaseHTTPResponse, address: str) -> bytes:
    """Piece by piece: a length that is claimed is no reason for memory."""
    found, most = bytearray(), memory() // 4
    for piece in response.stream(_OVER):
        found += piece
        if len(found) > most:
            raise StorageError(
                f"{redacted(address)} has more than {most} bytes, too many to hold at once. Check the address."
            )
    return bytes(found)


def _strong(tag: str | None) -> str | None:
    """An ETag that If-Match may be given; weak ones say less than byte for byte."""
    return tag if tag and not tag.startswith(("W/", _MODIFIED)) else None


def version_of(headers: Mapping[str, str]) -> str | None:
    """What tells an object from a later one of the same size: its ETag, else when it was modified last; None if nothing does.

    The time has a resolution of one second, so one that is not older than the answer by more than that is no version.
    """
    tag, modified = headers.get("ETag"), headers.get("Last-Modified")
    if tag or not modified:
        return tag or None
    try:
        age = parsedate_to_datetime(headers.get("Date", "")) - parsedate_to_datetime(modified)
    except (
        TypeError,
        ValueError,
        IndexError,
        OverflowError,
    ):  # the parser's own, of what is no date
        return None
    return _MODIFIED + modified if age.total_seconds() > 1 else None


def _is_still(version: str, headers: Mapping[str, str]) -> bool:
    """Whether an answer is of the object of this version, as far as it says."""
    if version.startswith(_MODIFIED):
        return headers.get("Last-Modified") in (None, version.removeprefix(_MODIFIED))
    tag = headers.get("ETag")
    return tag in (None, version) or (
        version.startswith("W/") and tag == version.removeprefix("W/")
    )


def _words(error: Exception, address: str) -> str:
    """What an error says, without the address or one that it led to, which may hold a secret."""
    error = (
        getattr(error, "reason", None) or error
    )  # of a failed connection, not of the request around it
    text = re.sub(r"\s+", " ", str(error)) or type(error).__name__
    for secret in {
        address,
        _bare(address),
        urlsplit(address).query,
        urlsplit(address).netloc.rpartition("@")[0],
    }:
        text = text.replace(secret, "...") if secret else text
    text = re.sub(r"//[^/\s]*@", "//", re.sub(r"\?[^\s'\")]+", "?...", text))
    return f"{type(error).__name__}: {text[:200]}"


def _bare(address: str) -> str:
    """The address without user and password, which travel in a header."""
    parts = urlsplit(address)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, parts.query, ""))


def _sent(address: str) -> dict[str, str]:
    """Headers that go with every request: those of the environment, and user and password of the address."""
    found = {}
    for line in os.environ.get(_HEADERS, "").splitlines():
        name, colon, value = line.partition(":")
        if colon:
            found[name.strip()] = value.strip()
    if not all(text.isascii() and text.isprintable() for pair in found.items() for text in pair):
        raise UsageError(
            f"{_HEADERS} holds what no header can: other than printable ASCII. Correct it."
        )
    user = urlsplit(address).netloc.rpartition("@")[0]
    if user:
        found["Authorization"] = "Basic " + base64.b64encode(unquote(user).encode()).decode()
    return found


def check_address(address: str) -> None:
    """Raise UsageError for an address that no request can be made of."""
    try:
        parts = urlsplit(address)
        _ = parts.port
        host = (parts.hostname or "").encode("idna")
    except ValueError as error:
        raise UsageError(
            f"{_shown(address)} is no address ({error}). Check its host and port."
        ) from None
    if not host:
        raise UsageError(
            f"{_shown(address)} is no address: it names no host. Write for example http://host/shards"
        )


def _shown(address: str) -> str:
    """What can be shown of an address that cannot be taken apart."""
    return re.sub(r"//[^/]*@", "//", address.split("?")[0])


def _get(address: str, headers: Mapping[str, str]) -> urllib3.BaseHTTPResponse:
    """The answer to a request whose body is not read. What may be secret is not told another host, and not logged."""
    _SECRETS.update(
        part
        for part in (urlsplit(address).query, urlsplit(address).netloc.rpartition("@")[0])
        if part
    )
    ours = [name for name in headers if name not in ("Range", "If-Match", "Accept-Encoding")]
    retries = urllib3.Retry(
        5,
        connect=0,
        read=0,
        redirect=5,
        status=0,
        other=0,
        raise_on_redirect=False,
        remove_headers_on_redirect=[*urllib3.Retry.DEFAULT_REMOVE_HEADERS_ON_REDIRECT, *ours],
    )
    try:
        silence = silence_limit()
        response = _pool(address).request(
            "GET",
            _bare(address),
            headers=dict(headers),
            preload_content=False,
            retries=retries,
            timeout=urllib3.Timeout(connect=min(_CONNECT, silence), read=silence),
        )
    except Exception as error:
        _let_go(error)
        raise
    message = getattr(getattr(response, "_fp", None), "msg", None)
    if isinstance(message, HTTPMessage):
        try:
            assert_header_parsing(
                message
            )  # headers behind a line that is none are passed over, and urllib3 only logs it
        except HTTPError:
            response.close()
            raise
    return response


def _let_go(error: BaseException | None) -> None:
    """Empty urllib3's frames that an error came through: one of them keeps it, and so itself and, by the frames above, all that is to
    be filled, until a collection: hundreds of megabytes of a loader that was closed."""
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_globals.get("__name__", "").startswith("urllib3."):
                with suppress(
                    RuntimeError
                ):  # one that still runs, of a program that calls us from there
                    frame.clear()
        error = error.__context__


@lru_cache(maxsize=4)
def _pool_of(process: int, proxy: str) -> urllib3.PoolManager:
    options: Any = {"num_pools": 16, "maxsize": 128}
    return urllib3.ProxyManager(proxy, **options) if proxy else urllib3.PoolManager(**options)


def _pool(address: str) -> urllib3.PoolManager:
    """Connections of this process, those of a parent are not used by a fork; through a proxy where the environment names one."""
    parts = urlsplit(address)
    told = (
        f"{parts.scheme}_proxy",
        f"{parts.scheme}_proxy".upper(),
        "no_proxy",
        "NO_PROXY",
        "REQUEST_METHOD",
    )
    return _pool_of(
        os.getpid(), _proxy(parts.scheme, parts.hostname or "", tuple(map(os.environ.get, told)))
    )


@lru_cache(maxsize=64)
def _proxy(scheme: str, host: str, told: tuple[str | None, ...]) -> str:
    """Through which a host is asked; "" if through none. told: what the environment says about it. Python's own way goes through all of
    the environment, twice, and for a request of 4 MB that was a tenth of what it takes."""
    return "" if proxy_bypass(host) else getproxies().get(scheme, "")


class _Unsaid(logging.Filter):
    """Takes secrets of addresses out of what urllib3 logs."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        found = [
            secret for secret in tuple(_SECRETS) if secret in text
        ]  # a copy: other threads add to it
        if found:
            for secret in found:
                text = text.replace(secret, "...")
            record.msg, record.args, record.exc_info = text, (), None
        return True


_SECRETS: set[str] = set()
for _name in (
    "urllib3.connection",
    "urllib3.connectionpool",
    "urllib3.util.retry",
    "urllib3.poolmanager",
):
    logging.getLogger(_name).addFilter(_Unsaid())
