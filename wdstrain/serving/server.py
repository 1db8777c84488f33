"""The address of a folder: threads that answer there, and their end.

Loopback unless told otherwise: there is no password. Ends without leaving a client in doubt: who rests is hung up on, answers on
their way are given a moment, and what is cut off is shorter than its Content-Length said.
"""

from __future__ import annotations

import errno
import os
import resource
import socket
import socketserver
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from ipaddress import ip_address
from typing import Any

from wdstrain.errors import StorageError, UsageError
from wdstrain.serving.answering import Connection
from wdstrain.serving.places import Places

CONNECTIONS = 480  # at a time: with a file each they stay below the 1024 descriptors that a process usually has
SPARE = 64  # descriptors that are left for everything else where a process has fewer
BACKLOG = 1024  # connections that wait for a place
GRACE = 2.0  # seconds that answers on their way are given at the end

_FULL, _PAUSE = (
    {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM},
    0.05,
)  # nothing can be opened; seconds
_LEFT = {
    errno.ENOTCONN,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.ENETDOWN,
}  # as ConnectionError: the client has gone


class Server:
    """Serves a folder while it is entered, from threads of its own: `with Server("shards") as server: ... server.url`.

    The address is taken at once; port 0 is any free one. Raises UsageError for a folder or host that cannot be meant,
    StorageError for a folder that cannot be read or a port that cannot be had.
    """

    def __init__(
        self, folder: str | os.PathLike[str], host: str = "127.0.0.1", port: int = 0
    ) -> None:
        self.folder = os.path.realpath(folder)
        try:
            os.scandir(self.folder).close()
            os.stat(
                os.path.join(self.folder, os.curdir)
            )  # needs the right to look names up, which a list of names does not
        except (FileNotFoundError, NotADirectoryError):
            what = "this is no folder" if os.path.exists(self.folder) else "there is no such folder"
            raise UsageError(
                f"{os.fspath(folder)}: {what}. Name the folder that holds the shards."
            ) from None
        except OSError as error:
            raise StorageError(
                f"{os.fspath(folder)} cannot be read: {error.strerror}. Check the permissions of the folder and of those above it."
            ) from error
        if not 0 <= port <= 65535:
            raise UsageError(f"port {port} is none: ports go from 1 to 65535, 0 is any free one.")
        self.places = Places(_connections())
        self._listener = _listen(self.folder, self.places, host, port)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="wdstrain server", daemon=True)

    @property
    def url(self) -> str:
        """The address, as this machine reaches it, with a slash at its end."""
        host, port = (str(part) for part in self._listener.server_address[:2])
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/"

    @property
    def is_local(self) -> bool:
        """Whether no other machine reaches it."""
        return ip_address(str(self._listener.server_address[0])).is_loopback

    @property
    def requests(self) -> int:
        """Requests that were answered."""
        return self.places.requests

    @property
    def bytes(self) -> int:
        """Bytes of files that were sent."""
        return self.places.bytes

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait(self) -> None:
        """Return when it has ended."""
        while not self._ended.wait(0.5):  # a signal that comes just before a wait is seen after it
            pass

    def stop(self) -> None:
        """Take no more requests, give answers on their way GRACE seconds, and end."""
        self.places.close()
        with suppress(OSError):
            self._listener.socket.shutdown(
                socket.SHUT_RDWR
            )  # wakes the thread; and a forked child may hold the socket, too
        if self._thread.ident is not None:
            self._listener.shutdown()
            self._thread.join()
        self._listener.server_close()
        self.places.empty(GRACE)

    def _serve(self) -> None:
        try:
            self._listener.serve_forever()
        finally:
            self._ended.set()


class _Listener(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True
    allow_reuse_address = True  # a server that has just ended leaves connections in TIME_WAIT
    request_queue_size = BACKLOG

    def __init__(
        self, family: socket.AddressFamily, address: Any, folder: str, places: Places
    ) -> None:
        self.address_family, self.places = family, places
        super().__init__(address, partial(Connection, folder, places))

    def process_request(self, request: Any, client_address: Any) -> None:
        self.places.take(request)
        super().process_request(request, client_address)

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in _FULL:
                time.sleep(_PAUSE)  # it would be asked again at once
            raise

    def close_request(self, request: Any) -> None:
        super().close_request(request)
        self.places.leave(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients leave when they like; whatever else goes wrong is ours, and told."""
        error = sys.exc_info()[1]
        if isinstance(error, (ConnectionError, TimeoutError)) or (
            isinstance(error, OSError) and error.errno in _LEFT
        ):
            return
        if isinstance(error, OSError):
            sys.stderr.write(f"wdstrain: {error}\n")
        else:
            super().handle_error(request, client_address)


def _connections() -> int:
    """At a time, as many as the descriptors of this process are enough for."""
    found = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        CONNECTIONS
        if found == resource.RLIM_INFINITY
        else max(1, min(CONNECTIONS, (found - SPARE) // 2))
    )


def _listen(folder: str, places: Places, host: str, port: int) -> _Listener:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = min(
            found, key=lambda one: one[0] != socket.AF_INET
        )  # localhost: 127.0.0.1 before ::1
        return _Listener(family, address, folder, places)
    except (OSError, UnicodeError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise StorageError(
                f"port {port} of {host} is taken. Choose another port, or 0 for any free one."
            ) from None
        if isinstance(error, PermissionError):
            raise StorageError(
                f"port {port} is kept for the system. Choose one above 1023, or 0 for any free one."
            ) from None
        raise UsageError(
            f"{host!r} with port {port} is no address of this machine: {error}. Leave --host away, or name one."
        ) from None
