"""A folder of shards over HTTP, for the machines of a lab.

Python's http.server parses requests; files are sent by the system (sendfile). This module decides
what a request may reach, and answers ranges and conditions. There is no password and no encryption;
put nginx before the folder to serve it to the world.
"""

from __future__ import annotations

import errno
import html
import os
import re
import socket
import stat
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler
from ipaddress import ip_address
from socketserver import ThreadingTCPServer
from typing import Any
from urllib.parse import quote, unquote_to_bytes

from wdstrain.errors import StorageError, UsageError

_PATIENCE = 300  # seconds without a byte after which a connection is closed
_RANGE = re.compile(r"bytes=(?:(\d{1,18})-(\d{0,18})|-(\d{1,18}))", re.IGNORECASE)
_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
# never a page, since readers refuse pages as shards
_TYPES = {".tar": "application/x-tar", ".json": "application/json"}
_STATUS = {errno.EACCES: 403, errno.EPERM: 403, errno.EMFILE: 503, errno.ENFILE: 503}  # else 404


class Server(ThreadingTCPServer):
    """Server of a folder, from threads of its own: `with Server("shards") as server: server.url`.

    requests, bytes: answered requests, bytes of files that were sent. The address is taken at once;
    port 0 is any free one. Raises UsageError for a folder that cannot be read, StorageError for an
    address at which it cannot listen.
    """

    daemon_threads, block_on_close = True, False
    allow_reuse_address, request_queue_size = True, 1024

    def __init__(
        self, folder: str | os.PathLike[str], host: str = "127.0.0.1", port: int = 0
    ) -> None:
        self.folder, self.requests, self.bytes = os.path.realpath(folder), 0, 0
        self.lock, self.connections = threading.Lock(), set[socket.socket]()
        try:
            os.listdir(self.folder)
            os.stat(os.path.join(self.folder, os.curdir))  # the right to enter, not only to list
        except OSError as error:
            raise UsageError(
                f"{os.fspath(folder)} cannot be served: {error.strerror}. "
                f"Name a folder of shards that you can read."
            ) from None
        try:
            if port > 65535:
                raise OverflowError("ports end at 65535")  # socket would take the rest of it
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            self.address_family, _, _, _, address = min(
                found, key=lambda entry: entry[0] != socket.AF_INET
            )
            super().__init__(address[:2], _Connection)  # type: ignore[arg-type]
        except (OSError, UnicodeError, OverflowError) as error:
            raise StorageError(
                f"nothing can listen at host={host!r}, port={port}: {error}. Choose 127.0.0.1 or "
                f"0.0.0.0, and a port above 1023; 0 is any free one."
            ) from None
        self._thread = threading.Thread(
            target=self.serve_forever, args=(0.05,), name="wdstrain server", daemon=True
        )

    @property
    def url(self) -> str:
        """The address, as this machine reaches it, with a slash at its end."""
        host, port = (str(part) for part in self.server_address[:2])
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/"

    @property
    def is_local(self) -> bool:
        """Whether no other machine reaches it."""
        return ip_address(str(self.server_address[0])).is_loopback

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self) -> None:
        """Return when the server has ended."""
        while self._thread.is_alive():  # a signal that comes just before a wait is seen after it
            self._thread.join(0.5)

    def close(self) -> None:
        """End the server and its connections. Answers on their way are cut."""
        if self._thread.is_alive():
            self.shutdown()
        self.server_close()
        with self.lock:
            for connection in self.connections:
                with suppress(OSError):  # the client has left
                    connection.shutdown(socket.SHUT_RDWR)

    def count(self, *, requests: int = 0, sent: int = 0) -> None:
        """Add to the totals."""
        with self.lock:
            self.requests += requests
            self.bytes += sent

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print an error of this program; clients may leave when they like."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class _Connection(BaseHTTPRequestHandler):
    """The requests of one connection."""

    server: Server
    protocol_version, server_version, sys_version = "HTTP/1.1", "wdstrain", ""
    timeout, disable_nagle_algorithm = _PATIENCE, True

    def handle(self) -> None:
        """Answer the requests of the connection until it ends."""
        with self.server.lock:
            self.server.connections.add(self.connection)
        try:
            super().handle()
        finally:
            with self.server.lock:
                self.server.connections.discard(self.connection)

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def send_error(self, code: int, message: object = None, explain: object = None) -> None:
        """Answer a request that http.server does not take, and end its connection."""
        self.close_connection = True
        self._send(code, {}, b"")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        """Answer with the file or the page that a request names."""
        self.server.count(requests=1)
        names = names_of(self.path)
        try:
            opened = open_inside(self.server.folder, names)
        except OSError as error:
            self._send(_STATUS.get(error.errno or 0, 404), {}, b"")
            return
        try:
            is_folder = stat.S_ISDIR(os.fstat(opened).st_mode)
            if is_folder and names[-1]:
                self._send(301, {"Location": f"{_path(names)}/"}, b"")
            elif is_folder:
                page = _page(names, list_inside(self.server.folder, names, opened))
                self._send(200, {"Content-Type": "text/html; charset=utf-8"}, page)
            elif names[-1]:
                self._send_file(names[-1], opened)
            else:
                self._send(404, {}, b"")
        finally:
            os.close(opened)

    def _send_file(self, name: str, opened: int) -> None:
        state = os.fstat(opened)
        size, tag = state.st_size, f'"{state.st_mtime_ns:x}-{state.st_size:x}"'
        kind = _TYPES.get(os.path.splitext(name)[1].lower(), "application/octet-stream")
        headers = {
            "Content-Type": kind,
            "X-Content-Type-Options": "nosniff",
            "ETag": tag,
            "Last-Modified": formatdate(state.st_mtime, usegmt=True),
            "Accept-Ranges": "bytes",
        }
        if status := self._condition(tag):
            self._send(status, headers, b"")
            return
        part = self._range(tag, headers["Last-Modified"], size)
        start, stop = part or (0, size)
        if part is not None and start >= size:
            self._send(416, {"Content-Range": f"bytes */{size}"}, b"")
            return
        if part is not None:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        self._send(200 if part is None else 206, {**headers, "Content-Length": str(stop - start)})
        if self.command == "GET" and stop > start:
            self.server.count(sent=stop - start)  # before a client has them, and ends the server
            with open(opened, "rb", buffering=0, closefd=False) as file:
                sent = self.connection.sendfile(file, start, stop - start)
            self.close_connection |= sent < stop - start  # the file shrank: never fill it up

    def _range(self, tag: str, modified: str, size: int) -> tuple[int, int] | None:
        """Return (start, stop) of the part that is asked for; None for the whole file.

        A client that knows another version of the file gets the whole one.
        """
        match = _RANGE.fullmatch(self.headers.get("Range", "").strip())
        is_known = self.headers.get("If-Range", tag) in (tag, modified)
        if match is None or not is_known or self.command != "GET":
            return None
        first, last, suffix = match.groups()
        if suffix:
            return max(0, size - int(suffix)), size
        start, stop = int(first), min(size, int(last or size) + 1)
        return None if last and int(last) < start else (start, stop)

    def _condition(self, tag: str) -> int:
        """Return the status for a condition on the ETag that does not hold; 0 if all hold."""
        for name, status in (("If-Match", 412), ("If-None-Match", 304)):
            tags = re.findall(r'"[^"]*"|\*', self.headers.get(name, ""))
            if tags and (tag in tags or "*" in tags) == (status == 304):
                return status
        return 0

    def _send(self, status: int, headers: dict[str, str], body: bytes | None = None) -> None:
        """Send an answer; without a body, its headers. The answer to HEAD has none."""
        self.send_response(status)
        if body is not None and status != 304:
            headers["Content-Length"] = str(len(body))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if body and self.command != "HEAD":
            self.wfile.write(body)


# --- what a request may reach ---------------------------------------------------------------------


def names_of(target: str) -> list[str]:
    """Return the names of folders and file in a request's target; the last is empty after a slash.

    Repeated slashes count as one, as nginx has it: people append "/index.json" to an address that
    ends with a slash.
    """
    path = re.sub("/+", "/", target.partition("?")[0]).removeprefix("/")
    return [os.fsdecode(unquote_to_bytes(part)) for part in path.encode("latin-1").split(b"/")]


def open_inside(folder: str, names: Sequence[str]) -> int:
    """Return a descriptor of a regular file or folder below `folder`, a resolved path.

    Links are followed where they stay inside. The path is resolved first, so that nothing outside
    is ever opened. A folder on the way may be exchanged for a link meanwhile, so the system is
    asked afterwards which file was opened. Raises OSError, also for names that are not shown.
    """
    if not all(_is_shown(name) for name in names if name) or "" in names[:-1]:
        raise FileNotFoundError(errno.ENOENT, "not shown", "/".join(names))
    path = os.path.realpath(os.path.join(folder, *names))
    _check_served(folder, path, os.lstat(path))
    opened = os.open(path, _OPEN_FLAGS)
    try:
        _check_served(folder, os.readlink(f"/proc/self/fd/{opened}"), os.fstat(opened))
    except BaseException:
        os.close(opened)
        raise
    return opened


def list_inside(folder: str, names: Sequence[str], opened: int) -> list[str]:
    """Return the names in an open folder that may be asked for; folders end with a slash."""
    listed = []
    for name in sorted(os.listdir(opened)):
        with suppress(OSError):
            found = open_inside(folder, [*names[:-1], name])
            listed.append(name + "/" * stat.S_ISDIR(os.fstat(found).st_mode))
            os.close(found)
    return listed


def _is_shown(name: str) -> bool:
    """Whether a name can be asked for. A backslash is a separator to some clients."""
    return not name.startswith(".") and not any(character in name for character in "/\\\0")


def _check_served(folder: str, path: str, state: os.stat_result) -> None:
    """Raise FileNotFoundError for a path that is not inside the folder, and for devices."""
    is_inside = path == folder or path.startswith(folder.rstrip("/") + "/")
    if not is_inside or not (stat.S_ISREG(state.st_mode) or stat.S_ISDIR(state.st_mode)):
        raise FileNotFoundError(errno.ENOENT, "not inside", path)


# --- pages ----------------------------------------------------------------------------------------


def _path(names: Sequence[str]) -> str:
    return "/" + "/".join(quote(os.fsencode(name), safe="") for name in names)


def _page(names: Sequence[str], listed: Sequence[str]) -> bytes:
    """Return a page with links to what a folder holds."""
    title = html.escape("/" + "/".join(names))
    # "./" before a name, since "a:b" would be an address
    rows = [
        f'<li><a href=".{_path([name.rstrip("/")])}{"/" * name.endswith("/")}">'
        f"{html.escape(name)}</a>"
        for name in listed
    ]
    head = ["<!doctype html>", f"<title>{title}</title>", f"<h1>{title}</h1>", "<ul>"]
    return "\n".join([*head, *rows, "</ul>", ""]).encode("utf-8", "replace")
