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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler
from ipaddress import ip_address
from itertools import islice
from socketserver import ThreadingTCPServer
from typing import Any
from urllib.parse import quote, unquote_to_bytes

from wdstrain.errors import StorageError, UsageError, WdstrainError

_BACKLOG = 1024  # connections that wait to be accepted
_PATIENCE = 300  # seconds without a byte after which a connection is closed
_LISTED = 10_000  # names on the page of a folder
_LONGEST_PATH = 4096  # bytes, as Linux has it
_RANGE = re.compile(r"bytes=(?:(\d{1,18})-(\d{0,18})|-(\d{1,18}))", re.IGNORECASE)
_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
# never a page, since readers refuse pages as shards
_TYPES = {".tar": "application/x-tar", ".json": "application/json"}
_MISSING = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO)
_STATUS = {
    **dict.fromkeys(_MISSING, 404),
    **dict.fromkeys([errno.EACCES, errno.EPERM], 403),
    **dict.fromkeys([errno.EMFILE, errno.ENFILE, errno.ENOMEM], 503),
}


class Server(ThreadingTCPServer):
    """Server of a folder, from threads of its own: `with Server("shards") as server: server.url`.

    requests, bytes: answered requests, bytes of files that were sent. The address is taken at once;
    port 0 is any free one. Raises UsageError for a folder or an address that does not exist,
    StorageError for a folder that cannot be read and a port that is taken.
    """

    daemon_threads, block_on_close = True, False
    allow_reuse_address, request_queue_size = True, _BACKLOG

    def __init__(
        self, folder: str | os.PathLike[str], host: str = "127.0.0.1", port: int = 0
    ) -> None:
        self.folder = _checked_folder(folder)
        self.requests = self.bytes = 0
        self.lock = threading.Lock()  # of the counts and the connections
        self.connections = set[socket.socket]()
        if not 0 <= port <= 65535:
            raise UsageError(f"port={port}: must be 1 to 65535, or 0 for any free port.")
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            self.address_family, _, _, _, address = min(
                found, key=lambda entry: entry[0] != socket.AF_INET
            )
            super().__init__(address[:2], _Connection)  # type: ignore[arg-type]
        except (OSError, UnicodeError, OverflowError) as error:
            raise _no_address(host, port, error) from None
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

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print an error of this program; clients may leave when they like."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class _Connection(BaseHTTPRequestHandler):
    """The requests of one connection."""

    server: Server
    protocol_version, server_version, sys_version = "HTTP/1.1", "wdstrain", ""
    timeout, disable_nagle_algorithm = _PATIENCE, True

    def setup(self) -> None:
        super().setup()
        with self.server.lock:
            self.server.connections.add(self.connection)

    def finish(self) -> None:
        with self.server.lock:
            self.server.connections.discard(self.connection)
        super().finish()

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def send_error(self, code: int, message: object = None, explain: object = None) -> None:
        """Answer a request that http.server does not take, and end its connection."""
        self.close_connection = True
        code = 405 if code == 501 else code
        self._send(code, {"Allow": "GET,HEAD"} if code == 405 else {}, f"{code}\n".encode())

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        """Answer with the file or the page that a request names."""
        self._count(requests=1)
        opened, names = -1, names_of(self.path)
        try:
            if names is None:
                raise FileNotFoundError(errno.ENOENT, "no such name")
            opened = open_inside(self.server.folder, names)
            if stat.S_ISDIR(os.fstat(opened).st_mode):
                self._send_folder(names, opened)
            elif names[-1]:
                self._send_file(names[-1], opened)
            else:
                raise FileNotFoundError(errno.ENOENT, "not a folder")
        except (ConnectionError, TimeoutError):
            raise
        except OSError as error:
            status = _STATUS.get(error.errno or 0, 500)
            self._send(status, {"Retry-After": "1"} if status == 503 else {}, b"")
        finally:
            if opened >= 0:
                os.close(opened)

    def _send_folder(self, names: Sequence[str], opened: int) -> None:
        if names[-1]:
            self._send(301, {"Location": f"{_path(names)}/"}, b"")
            return
        page = _page(names, list_inside(self.server.folder, names, opened))
        self._send(200, {"Content-Type": "text/html; charset=utf-8"}, page)

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
        if part is not None:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        if part is not None and start >= size:
            self._send(416, {"Content-Range": f"bytes */{size}"}, b"")
            return
        self._send(200 if part is None else 206, {**headers, "Content-Length": str(stop - start)})
        if self.command == "GET" and stop > start:
            self._count(bytes=stop - start)  # before a client can have them, and end the server
            with open(opened, "rb", buffering=0, closefd=False) as file:
                sent = self.connection.sendfile(file, start, stop - start)
            self.close_connection |= sent < stop - start  # the file shrank: never fill it up

    def _range(self, tag: str, modified: str, size: int) -> tuple[int, int] | None:
        """Return (start, stop) of the part that is asked for; None for the whole file.

        A client that knows another version of the file gets the whole one.
        """
        ranges = self.headers.get_all("Range", [])
        match = _RANGE.fullmatch(ranges[0].strip()) if len(ranges) == 1 else None
        is_known = self.headers.get("If-Range", tag) in (tag, modified)
        if match is None or not is_known or self.command != "GET":
            return None
        first, last, suffix = match.groups()
        if suffix:
            return max(0, size - int(suffix)), size
        if last and int(last) < int(first):
            return None
        return int(first), min(size, int(last or size) + 1)

    def _condition(self, tag: str) -> int:
        """Return the status for a condition on the ETag that does not hold; 0 if all hold."""
        for name, status in (("If-Match", 412), ("If-None-Match", 304)):
            tags = re.findall(r'"[^"]*"|\*', self.headers.get(name, ""))
            is_one = tag in tags or "*" in tags
            if tags and is_one == (status == 304):
                return status
        return 0

    def _send(self, status: int, headers: Mapping[str, str], body: bytes | None = None) -> None:
        """Send an answer; without a body, its headers. The answer to HEAD has none."""
        self.send_response(status)
        if body is not None and status != 304:
            headers = {**headers, "Content-Length": str(len(body))}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if body and self.command != "HEAD":
            self.wfile.write(body)

    def _count(self, **counts: int) -> None:
        with self.server.lock:
            for name, count in counts.items():
                setattr(self.server, name, getattr(self.server, name) + count)


# --- what a request may reach ---------------------------------------------------------------------


def names_of(target: str) -> list[str] | None:
    """Return the names of folders and file in a request's target; the last is empty after a slash.

    Repeated slashes count as one, as nginx has it: people append "/index.json" to an address that
    ends with a slash. None for a name that is hidden or holds a separator once it is decoded.
    """
    path = target.partition("?")[0]
    if not path.startswith("/") or len(path) > 3 * _LONGEST_PATH:
        return None
    parts = re.sub("/+", "/", path)[1:].encode("latin-1").split(b"/")
    names = [os.fsdecode(unquote_to_bytes(part)) for part in parts]
    if not all(map(_is_shown, names[:-1])) or not (names[-1] == "" or _is_shown(names[-1])):
        return None
    return names if sum(map(len, names)) + len(names) < _LONGEST_PATH else None


def open_inside(folder: str, names: Sequence[str]) -> int:
    """Return a descriptor of a regular file or folder below `folder`, a resolved path.

    Links are followed where they stay inside. The path is resolved first, so that nothing outside
    is ever opened. A folder on the way may be exchanged for a link meanwhile, so the system is
    asked afterwards which file was opened. Raises OSError.
    """
    path = os.path.realpath(os.path.join(folder, *names))
    if not (_is_inside(path, folder) and _is_served(os.lstat(path).st_mode)):
        raise FileNotFoundError(errno.ENOENT, "not inside", path)
    opened = os.open(path, _OPEN_FLAGS)
    try:
        real = os.readlink(f"/proc/self/fd/{opened}")
        if not (_is_inside(real, folder) and _is_served(os.fstat(opened).st_mode)):
            raise FileNotFoundError(errno.ENOENT, "not inside", path)
    except BaseException:
        os.close(opened)
        raise
    return opened


def list_inside(folder: str, names: Sequence[str], opened: int) -> list[str]:
    """Return the names in an open folder that may be asked for; folders end with a slash."""
    listed = []
    for name in islice(sorted(filter(_is_shown, os.listdir(opened))), _LISTED):
        with suppress(OSError):
            found = open_inside(folder, [*names, name])
            listed.append(name + "/" * stat.S_ISDIR(os.fstat(found).st_mode))
            os.close(found)
    return listed


def _is_shown(name: str) -> bool:
    """Whether a name can be asked for. A backslash is a separator to some clients."""
    return name != "" and not name.startswith(".") and not any(c in name for c in "/\\\0")


def _is_inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _is_served(mode: int) -> bool:
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


# --- pages and addresses --------------------------------------------------------------------------


def _path(names: Sequence[str]) -> str:
    return "/" + "/".join(quote(os.fsencode(name), safe="") for name in names)


def _page(names: Sequence[str], listed: Sequence[str]) -> bytes:
    """Return a page with links to what a folder holds."""
    title = html.escape("/" + "/".join(names))
    rows = ['<li><a href="../">../</a>'] if len(names) > 1 else []
    for name in listed:  # ./ before a name, since "a:b" would be an address
        link = f".{_path([name.rstrip('/')])}{'/' * name.endswith('/')}"
        rows.append(f'<li><a href="{link}">{html.escape(name)}</a>')
    if len(listed) == _LISTED:
        rows.append(f"<li>only {_LISTED} names are shown")
    head = ["<!doctype html>", f"<title>{title}</title>", f"<h1>{title}</h1>", "<ul>"]
    return "\n".join([*head, *rows, "</ul>", ""]).encode("utf-8", "replace")


def _checked_folder(folder: str | os.PathLike[str]) -> str:
    """Return the resolved path of a folder that can be listed and entered."""
    path = os.path.realpath(folder)
    try:
        os.scandir(path).close()
        os.stat(os.path.join(path, os.curdir))  # needs the right to enter, which listing does not
    except (FileNotFoundError, NotADirectoryError):
        problem = "this is no folder" if os.path.exists(path) else "there is no such folder"
        raise UsageError(
            f"{os.fspath(folder)}: {problem}. Name the folder that holds the shards."
        ) from None
    except OSError as error:
        raise StorageError(
            f"{os.fspath(folder)} cannot be read: {error.strerror}. Check the permissions of the "
            f"folder and of those above it."
        ) from error
    return path


def _no_address(host: str, port: int, error: Exception) -> WdstrainError:
    """Return the error for an address at which no server can listen."""
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return StorageError(
            f"port={port} of {host} is taken. Choose another port, or port=0 for any free one."
        )
    if isinstance(error, PermissionError):
        return StorageError(
            f"port={port} is kept for the system. Choose one above 1023, or port=0."
        )
    return UsageError(
        f"host={host!r} is no address of this machine: {error}. Choose 127.0.0.1 or 0.0.0.0."
    )
