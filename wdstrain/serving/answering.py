"""A connection: request after request, bodies by sendfile.

http.server reads the words (its limits hold: 64 KB a line, 100 headers; HEAD bounds all of them), everything else is
decided here. Headers of which another program on the way may understand something else, such as where the request ends, are
refused, and the connection ends. What is refused is said in a plain line and costs no connection, unless the client is still sending: what it sends is then read for a moment, since
closing on unread bytes would reset the connection and take the answer with it.
"""

from __future__ import annotations

import errno
import html
import io
import os
import re
import select
import socket
import stat
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from email.utils import formatdate
from http import HTTPStatus
from http.client import LineTooLong
from http.server import BaseHTTPRequestHandler
from itertools import accumulate
from typing import Any
from urllib.parse import quote

from wdstrain.serving.asking import answer_instead, names_of, part_holds, span_of
from wdstrain.serving.inside import list_inside, open_inside
from wdstrain.serving.places import LITTLE, Places

PATIENCE = (
    60.0  # seconds: for the next request to come whole, and for a client to take more of its answer
)
LINGER = 2.0  # seconds that a client is listened to after its last answer
HEAD = 64 << 10  # bytes of the headers of a request, at most
FEW = 32  # clients at a time, up to which requests may come together: some hundred of such clients would let nobody else in
LISTED, PAGE = 10_000, 1 << 20  # names on a folder's page, and bytes of it, at most

_MOST = 1 << 30  # bytes that the system is asked to send at once
_NO_SENDFILE, _PIECE = (
    (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP),
    1 << 20,
)  # file systems that know none are read
_TYPES = {
    ".tar": "application/x-tar",
    ".json": "application/json",
}  # never a page: our readers refuse pages as shards
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # of a header
_BREAK = re.compile("[\r\n\0]")  # a header over several lines, which not everybody reads as one
_STATUSES = {
    **dict.fromkeys(
        [errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO],
        HTTPStatus.NOT_FOUND,
    ),
    **dict.fromkeys([errno.EACCES, errno.EPERM], HTTPStatus.FORBIDDEN),
    **dict.fromkeys([errno.EMFILE, errno.ENFILE, errno.ENOMEM], HTTPStatus.SERVICE_UNAVAILABLE),
}


class Connection(BaseHTTPRequestHandler):
    """One client's."""

    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"  # so that what cannot be read is answered with a head, too
    disable_nagle_algorithm = True  # a small body would wait until its head was acknowledged

    def __init__(self, folder: str, places: Places, *words: Any) -> None:
        self.folder, self.places = folder, places
        super().__init__(*words)

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(PATIENCE)
        self.incoming = _Incoming(self.connection)
        self.rfile.close()
        self.rfile = self.lines = _Lines(self.incoming)
        self.unread = False  # the client may be sending what nobody will read
        self.answered = False
        self.headers, self.command = self.MessageClass(), ""

    def handle_one_request(self) -> None:
        self.incoming.until, self.lines.left = time.monotonic() + PATIENCE, None
        self.incoming.asked = False
        self.places.rest(self.connection, answered=self.answered)
        super().handle_one_request()
        self.answered = True

    def parse_request(self) -> bool:
        self.headers = (
            self.MessageClass()
        )  # not those of the last request, where this one cannot be read
        self.lines.left = HEAD
        if not super().parse_request():
            return False
        self.places.work(self.connection)
        # it came with the one before
        self.unread |= self.answered and not self.incoming.asked and len(self.places) > FEW
        odd = (
            self.headers.defects
            or self.headers.get_payload()
            or not all(map(_NAME.fullmatch, self.headers))
        )
        if odd or any(_BREAK.search(value) for value in self.headers.values()):
            self.send_error(HTTPStatus.BAD_REQUEST)
            return False
        return True

    def handle_expect_100(self) -> bool:
        """The answer itself says that no body is wanted."""
        return True

    def finish(self) -> None:
        if self.unread:
            end = self.incoming.until = time.monotonic() + LINGER
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_WR)
                while time.monotonic() < end and self.rfile.read1():
                    pass
        super().finish()

    # --- answers -----------------------------------------------------------------------------------------------------

    def do_GET(self) -> None:
        names = names_of(self.path)
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 and self.request_version != "HTTP/1.0":
            self._refuse(HTTPStatus.BAD_REQUEST)
        elif names is None:
            self._refuse(HTTPStatus.NOT_FOUND)
        else:
            try:
                opened = open_inside(self.folder, names)
            except OSError as error:
                self._fail(error)
                return
            try:
                self._answer(names, opened)
            finally:
                os.close(opened)

    do_HEAD = do_GET

    def _answer(self, names: list[str], opened: int) -> None:
        found = os.fstat(opened)
        if stat.S_ISDIR(found.st_mode) and names[-1]:
            self._refuse(HTTPStatus.MOVED_PERMANENTLY, {"Location": f"{_path(names)}/"})
        elif stat.S_ISDIR(found.st_mode):
            try:
                page = _page(names, list_inside(self.folder, names, opened, LISTED))
            except OSError as error:
                self._fail(error)
                return
            self._begin(HTTPStatus.OK, {"Content-Type": "text/html; charset=utf-8"}, len(page))
            if self.command != "HEAD":
                self.wfile.write(page)
        elif not names[-1]:
            self._refuse(HTTPStatus.NOT_FOUND)
        else:
            self._answer_file(names[-1], opened, found)

    def _answer_file(self, name: str, opened: int, found: os.stat_result) -> None:
        size, modified = found.st_size, max(0, min(int(found.st_mtime), int(time.time())))
        tag = f'"{found.st_ino:x}-{found.st_mtime_ns:x}-{size:x}"'
        headers = {
            "ETag": tag,
            "Last-Modified": formatdate(modified, usegmt=True),
            "Accept-Ranges": "bytes",
        }
        instead = answer_instead(self.headers, tag, modified)
        if instead == HTTPStatus.NOT_MODIFIED:
            self._begin(instead, headers, None)
            return
        if instead is not None:
            self._refuse(instead, headers)
            return
        span = None
        if self.command == "GET" and part_holds(self.headers, tag, modified):
            span = span_of(self.headers.get_all("Range", []), size)
        start, stop = span or (0, size)
        if span and start >= stop:
            self._refuse(
                HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
                {**headers, "Content-Range": f"bytes */{size}"},
            )
            return
        headers["Content-Type"] = _TYPES.get(
            os.path.splitext(name)[1].lower(), "application/octet-stream"
        )
        if span:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        self._begin(HTTPStatus.PARTIAL_CONTENT if span else HTTPStatus.OK, headers, stop - start)
        if self.command != "HEAD" and start < stop:
            self._send_file(opened, start, stop)

    # --- words -------------------------------------------------------------------------------------------------------

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What http.server refuses: words it cannot read, after which it does not know where the next request begins, and
        methods that are not here."""
        if code == HTTPStatus.NOT_IMPLEMENTED:
            self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, {"Allow": "GET, HEAD"})
        else:
            self.unread = True
            self._refuse(HTTPStatus(code))

    def _refuse(self, status: HTTPStatus, headers: Mapping[str, str] | None = None) -> None:
        text = f"{status.value} {status.phrase}\n".encode()
        self._begin(
            status, {**(headers or {}), "Content-Type": "text/plain; charset=utf-8"}, len(text)
        )
        if self.command != "HEAD":
            self.wfile.write(text)

    def _fail(self, error: OSError) -> None:
        """What the system does not give. Raises what is the disk's trouble, for it to be told."""
        status = _STATUSES.get(error.errno or 0, HTTPStatus.INTERNAL_SERVER_ERROR)
        self._refuse(
            status, {"Retry-After": "1"} if status == HTTPStatus.SERVICE_UNAVAILABLE else {}
        )
        if status == HTTPStatus.INTERNAL_SERVER_ERROR:
            raise error

    def _begin(self, status: HTTPStatus, headers: Mapping[str, str], length: int | None) -> None:
        """The head of an answer."""
        lengths = self.headers.get_all("Content-Length", [])
        if any(one.strip() != "0" for one in lengths) or "Transfer-Encoding" in self.headers:
            self.unread = True
        words = ",".join(self.headers.get_all("Connection", [])).lower().split(",")
        if not self.places.may_stay() or self.unread or "close" in map(str.strip, words):
            self.close_connection = True
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.send_header("X-Content-Type-Options", "nosniff")
        if self.close_connection or self.request_version == "HTTP/1.0":
            self.send_header("Connection", "close" if self.close_connection else "keep-alive")
        self.end_headers()

    def _send_file(self, opened: int, start: int, stop: int) -> None:
        """Bytes [start, stop); fewer, and the end of the connection, where the file has shrunk."""
        at = told = start
        ready = select.poll()
        ready.register(self.connection, select.POLLOUT)
        try:
            while at < stop:
                try:
                    count = os.sendfile(self.connection.fileno(), opened, at, min(stop - at, _MOST))
                except BlockingIOError:
                    if at - told >= LITTLE:
                        self.places.sent(self.connection, at - told)
                        told = at
                    if not ready.poll(PATIENCE * 1000):
                        raise TimeoutError("nothing more is taken") from None
                    continue
                except OSError as error:
                    if error.errno not in _NO_SENDFILE:
                        raise
                    piece = os.pread(opened, _PIECE, at)[: stop - at]
                    self.connection.sendall(piece)
                    count = len(piece)
                if not count:
                    break
                at += count
        finally:  # also where the client has left
            self.places.sent(self.connection, at - told)
            self.close_connection |= at != stop

    def version_string(self) -> str:
        return "wdstrain"

    def log_message(self, *_: Any) -> None:
        """Nothing is said of a request; the server counts."""


class _Lines(io.BufferedReader):
    """What a client sends, line by line, of which no more than `left` bytes may come; None: as many as one line has."""

    left: int | None = None

    def readline(self, size: int | None = -1, /) -> bytes:
        line = super().readline(size)
        if self.left is not None:
            self.left -= len(line)
            if self.left < 0:
                raise LineTooLong("head")  # http.server answers with 431
        return line


class _Incoming(io.RawIOBase):
    """What a client sends, which has to come `until` then, however slowly its single bytes do."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.until, self.asked = connection, 0.0, False

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        try:
            self.asked = True
            self.connection.settimeout(max(1e-3, self.until - time.monotonic()))
            return self.connection.recv_into(into)
        finally:
            self.connection.settimeout(PATIENCE)


def _path(names: Sequence[str]) -> str:
    return "/" + "/".join(quote(os.fsencode(name), safe="") for name in names)


def _page(names: Sequence[str], listed: Sequence[str]) -> bytes:
    """A folder for people to look around in."""
    title = html.escape("/" + "/".join(names))
    # ./ before a name: "a:b" would be an address of its own
    rows = ['<li><a href="../">../</a>'] if len(names) > 1 else []
    links = [
        f'<li><a href=".{_path([name.rstrip("/")])}{"/" * name.endswith("/")}">{html.escape(name)}</a>'
        for name in listed
    ]
    shown = sum(room <= PAGE for room in accumulate(map(len, links)))
    rows += links[:shown]
    rows += (
        [f"<li>and others: only {shown} are shown"]
        if len(listed) == LISTED or shown < len(links)
        else []
    )
    lines = [
        "<!doctype html>",
        f"<title>{title}</title>",
        f"<h1>{title}</h1>",
        "<ul>",
        *rows,
        "</ul>",
        "",
    ]
    return "\n".join(lines).encode("utf-8", "replace")
