"""A folder of shards over HTTP, for the machines of a lab.

Python's http.server parses requests; files are sent by the system (sendfile). This module decides
what a request may reach, and answers ranges and their conditions. There are no pages of folders, no
password and no encryption; put nginx before the folder to serve it to the world.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import sys
import threading
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler
from io import FileIO
from ipaddress import ip_address
from socketserver import ThreadingTCPServer
from typing import Any
from urllib.parse import unquote_to_bytes

from wdstrain.errors import StorageError, UsageError
from wdstrain.storage.files import regular

_RANGE = re.compile(r"bytes=(?:(\d{1,18})-(\d{0,18})|-(\d{1,18}))", re.IGNORECASE)
_SHOWN = re.compile(r"[^./\\\0][^/\\\0]*")  # a name; a backslash is a separator to some clients
# never a page, since readers refuse pages as shards
_TYPES = {".tar": "application/x-tar", ".json": "application/json"}
_STATUS = {errno.EACCES: 403, errno.EPERM: 403, errno.EMFILE: 503, errno.ENFILE: 503}  # else 404


class Server(ThreadingTCPServer):
    """Server of a folder, from threads of its own: `with Server("shards") as server: server.url`.

    requests, bytes: answered requests, bytes of files that were sent. It serves at once; port 0 is
    any free one. Raises UsageError for a folder that cannot be read, StorageError for an
    address at which it cannot listen.
    """

    daemon_threads, block_on_close = True, False
    allow_reuse_address, request_queue_size = True, 1024

    def __init__(
        self, folder: str | os.PathLike[str], host: str = "127.0.0.1", port: int = 0
    ) -> None:
        self.folder, self.requests, self.bytes = os.path.realpath(folder), 0, 0
        self.lock = threading.Lock()
        try:
            os.listdir(os.path.join(self.folder, os.curdir))  # needs the right to enter, too
        except OSError as error:
            raise UsageError(
                f"{os.fspath(folder)} cannot be served: {error.strerror}.",
                "Name a folder of shards that you can read.",
            ) from None
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Connection)
        except (OSError, UnicodeError, OverflowError) as error:
            raise StorageError(
                f"nothing can listen at {{host}}, {{port}}: {error}.",
                "Choose 127.0.0.1 or 0.0.0.0, and a port above 1023; 0 is any free one.",
                {"host": host, "port": port},
            ) from None
        self._thread = threading.Thread(
            target=self.serve_forever, args=(0.05,), name="wdstrain server", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """The address, as this machine reaches it, with a slash at its end."""
        own, port = (str(part) for part in self.server_address[:2])
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(own, own)
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/"

    @property
    def is_local(self) -> bool:
        """Whether no other machine reaches it."""
        return ip_address(str(self.server_address[0])).is_loopback

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self) -> None:
        """Return when the server has ended."""
        while self._thread.is_alive():  # a signal that comes just before a wait is seen after it
            self._thread.join(0.5)

    def close(self) -> None:
        """End the server. Clients that are connected are not waited for."""
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print an error of this program; clients may leave when they like."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class _Connection(BaseHTTPRequestHandler):
    """The requests of one connection."""

    server: Server
    protocol_version, server_version, sys_version = "HTTP/1.1", "wdstrain", ""
    timeout, disable_nagle_algorithm = 300, True  # timeout: seconds without a byte

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        """Answer with the file that a request names."""
        try:
            file = open_inside(self.server.folder, self.path)
        except OSError as error:
            self._send(_STATUS.get(error.errno or 0, 404))
        else:
            with file:
                self._send_file(file)

    do_HEAD = do_GET

    def _send_file(self, file: FileIO) -> None:
        """Send a file, or the part of it that is asked for.

        A client that knows another version of the file never gets a part of this one.
        """
        state, kind = os.fstat(file.fileno()), os.path.splitext(str(file.name))[1].lower()
        size, tag = state.st_size, f'"{state.st_mtime_ns:x}-{state.st_size:x}"'
        headers = {
            "Content-Type": _TYPES.get(kind, "application/octet-stream"),
            "X-Content-Type-Options": "nosniff",
            "ETag": tag,
            "Last-Modified": formatdate(state.st_mtime, usegmt=True),
            "Accept-Ranges": "bytes",
        }
        if not {tag, "*"}.intersection(self.headers.get("If-Match", tag).split(", ")):
            self._send(412, headers)
            return
        is_known = self.headers.get("If-Range", tag) in (tag, headers["Last-Modified"])
        asked = self.headers.get("Range", "") if is_known and self.command == "GET" else ""
        status, part, more = _part(_RANGE.fullmatch(asked.strip()), size)
        self._send(status, headers | more, len(part))
        if self.command == "GET" and part:
            # if the file shrank, end the connection, and never fill the answer up
            self.close_connection |= self.connection.sendfile(file, part.start, len(part)) < len(
                part
            )

    def _send(self, status: int, headers: dict[str, str] | None = None, length: int = 0) -> None:
        """Send the head of an answer. length: bytes of the body, which the caller sends."""
        with self.server.lock:  # before a client has the bytes, and ends the server
            self.server.requests += 1
            self.server.bytes += length if self.command == "GET" else 0
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(length)}.items():
            self.send_header(name, value)
        self.end_headers()


def _part(match: re.Match[str] | None, size: int) -> tuple[int, range, dict[str, str]]:
    """Return (status, bytes to send, header) for a range of a file, if one is asked for.

    A range that ends before it begins means the whole file.
    """
    first, last, suffix = match.groups() if match else ("0", "", "")
    wanted = slice(-int(suffix), None) if suffix else slice(int(first), int(last or size) + 1)
    part = range(size)[wanted]
    if match and part:
        return 206, part, {"Content-Range": f"bytes {part.start}-{part.stop - 1}/{size}"}
    if match and part.start == size:
        return 416, part, {"Content-Range": f"bytes */{size}"}
    return 200, range(size), {}


def open_inside(folder: str, target: str) -> FileIO:
    """Return a regular file below `folder`, a resolved path, that the target of a request names.

    Links are followed where they stay inside. The path is resolved first, so that nothing outside
    is opened. A folder on the way may be exchanged for a link meanwhile, so the system is asked
    afterwards which file was opened. Repeated slashes count as one, as nginx has it: people append
    "/index.json" to an address that ends with a slash. Raises OSError, also for hidden names.
    """
    path = re.sub("/+", "/", target.partition("?")[0]).removeprefix("/")
    names = [os.fsdecode(unquote_to_bytes(part)) for part in path.encode("latin-1").split(b"/")]
    if not all(map(_SHOWN.fullmatch, names)):
        raise FileNotFoundError(errno.ENOENT, "not shown", target)
    path = os.path.realpath(os.path.join(folder, *names))
    if _is_inside(folder, path):
        file = FileIO(path, opener=regular)
        if _is_inside(folder, os.readlink(f"/proc/self/fd/{file.fileno()}")):
            return file
        file.close()
    raise FileNotFoundError(errno.ENOENT, "not inside", target)


def _is_inside(folder: str, path: str) -> bool:
    return os.path.commonpath([folder, path]) == folder
