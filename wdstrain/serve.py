"""A folder of shards over HTTP, for the machines of a lab.

aiohttp parses requests and sends files: ranges, HEAD, conditions, keep-alive, sendfile. This module
decides what a request may reach. There is no password and no encryption; put nginx before the
folder to serve it to the world.
"""

from __future__ import annotations

import asyncio
import errno
import html
import logging
import os
import re
import socket
import stat
import threading
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address
from itertools import islice
from typing import Any
from urllib.parse import quote, unquote_to_bytes

from wdstrain.errors import StorageError, UsageError

try:
    from aiohttp import hdrs, web
    from aiohttp.http_exceptions import HttpProcessingError
except ImportError:
    raise UsageError("serving needs aiohttp. Install it: pip install 'wdstrain[serve]'") from None

_log = logging.getLogger("wdstrain.serve")
_log.addFilter(lambda record: not _is_of_client(record.exc_info))

_GRACE = 2.0  # seconds that answers on their way are given at the end
_BACKLOG = 1024  # connections that wait to be accepted
_LISTED = 10_000  # names on the page of a folder
_LONGEST_PATH = 4096  # bytes, as Linux has it
_RANGE = re.compile(r"bytes=(?:(\d{1,18})-(\d{0,18})|-0*[1-9]\d{0,17})", re.IGNORECASE)
_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_OPEN_FILES = "/proc/self/fd"  # Linux: names of open files
# never a page, since readers refuse pages as shards
_TYPES = {".tar": "application/x-tar", ".json": "application/json"}
_STATUS = {
    **dict.fromkeys(
        [errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO], 404
    ),
    **dict.fromkeys([errno.EACCES, errno.EPERM], 403),
    **dict.fromkeys([errno.EMFILE, errno.ENFILE, errno.ENOMEM], 503),
}


def _is_of_client(exc_info: Any) -> bool:
    """Whether an error is that of a client that sent nonsense or has left."""
    error = exc_info[1] if isinstance(exc_info, tuple) else None
    return isinstance(error, (HttpProcessingError, ConnectionError))


class Server:
    """Server of a folder, from a thread of its own: `with Server("shards") as server: server.url`.

    The address is taken at once; port 0 is any free one. Raises UsageError for a folder or an
    address that does not exist, StorageError for a folder that cannot be read and a port that is
    taken.
    """

    def __init__(
        self, folder: str | os.PathLike[str], host: str = "127.0.0.1", port: int = 0
    ) -> None:
        self.folder = _checked_folder(folder)
        self.requests = self.bytes = 0  # answered requests, bytes of files that were sent
        self._socket = _listen(host, port)
        self._address = self._socket.getsockname()
        self._started, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="wdstrain server", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None

    @property
    def url(self) -> str:
        """The address, as this machine reaches it, with a slash at its end."""
        host, port = (str(part) for part in self._address[:2])
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/"

    @property
    def is_local(self) -> bool:
        """Whether no other machine reaches it."""
        return ip_address(str(self._address[0])).is_loopback

    def __enter__(self) -> Server:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self) -> None:
        """Return when the server has ended."""
        while not self._ended.wait(0.5):  # a signal that comes just before a wait is seen after it
            pass

    def close(self) -> None:
        """End the server: answers on their way are given two seconds."""
        loop, stop = self._loop, self._stop
        if loop is not None and stop is not None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(stop.set)
            self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        finally:
            self._started.set()
            self._ended.set()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        runner = web.AppRunner(app, access_log=None, logger=_log, shutdown_timeout=_GRACE)
        await runner.setup()
        try:
            await web.SockSite(runner, self._socket, backlog=_BACKLOG).start()
            self._started.set()
            await self._stop.wait()
        finally:
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        """Return the file or the page that a request names."""
        self.requests += 1
        names = names_of(request.raw_path)
        try:
            if names is None:
                raise FileNotFoundError(errno.ENOENT, "no such name")
            return await asyncio.to_thread(self._open, names)
        except OSError as error:
            status = _STATUS.get(error.errno or 0, 500)
            if status == 500:
                _log.error("%s", error)
            headers = {"Retry-After": "1"} if status == 503 else None
            return web.Response(status=status, text=f"{status}\n", headers=headers)

    def _open(self, names: list[str]) -> web.StreamResponse:
        descriptor = open_inside(self.folder, names)
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            opened = os.fdopen(descriptor, "rb", buffering=0)
            if names[-1]:
                return _FileAnswer(opened, names[-1], self)
            opened.close()
            raise FileNotFoundError(errno.ENOENT, "not a folder")
        try:
            if names[-1]:
                return web.Response(status=301, headers={"Location": f"{_path(names)}/"})
            page = _page(names, list_inside(self.folder, names, descriptor))
            return web.Response(body=page, content_type="text/html", charset="utf-8")
        finally:
            os.close(descriptor)


class _FileAnswer(web.FileResponse):
    """A file that is open already, so that links that change meanwhile lead nowhere else."""

    def __init__(self, opened: Any, name: str, server: Server) -> None:
        kind = _TYPES.get(os.path.splitext(name)[1].lower(), "application/octet-stream")
        headers = {hdrs.CONTENT_TYPE: kind, "X-Content-Type-Options": "nosniff"}
        super().__init__(f"{_OPEN_FILES}/{opened.fileno()}", headers=headers)
        self._opened, self._server = opened, server

    async def prepare(self, request: Any) -> Any:
        """Send the file, or the part that is asked for."""
        with self._opened:
            before = os.fstat(self._opened.fileno())
            tag = f'"{before.st_mtime_ns:x}-{before.st_size:x}"'
            writer = await super().prepare(_with_plain_range(request, tag))
            after = os.fstat(self._opened.fileno())
            if after.st_size < before.st_size and request.transport is not None:
                request.transport.close()  # fewer bytes than were announced: never fill them up
            if request.method == "GET" and self.status in (200, 206):
                self._server.bytes += self.content_length or 0
            return writer


def _with_plain_range(request: web.Request, tag: str) -> web.Request:
    """Return the request without a Range that does not hold: the whole file is the answer then.

    aiohttp compares If-Range only as a date, and would give a part of another file for an old ETag.
    """
    ranges, known = request.headers.getall("Range", []), request.headers.get("If-Range", "")
    if not ranges:
        return request
    match = _RANGE.fullmatch(ranges[0].strip())
    is_plain = len(ranges) == 1 and match is not None and request.method == "GET"
    is_forward = match is None or not match[2] or int(match[1]) <= int(match[2])
    is_meant = known == "" or known.strip() == tag or "," in known  # a date has a comma
    if is_plain and is_forward and is_meant:
        return request
    headers = request.headers.copy()
    headers.popall("Range")
    return request.clone(headers=headers)


# --- what a request may reach ---------------------------------------------------------------------


def names_of(target: str) -> list[str] | None:
    """Return the names of folders and file in a request's target; the last is empty after a slash.

    Repeated slashes count as one, as nginx has it: people append "/index.json" to an address that
    ends with a slash. None for a name that is hidden or holds a separator once it is decoded.
    """
    path = target.partition("?")[0]
    if not path.startswith("/") or len(path) > 3 * _LONGEST_PATH:
        return None
    path = re.sub("/+", "/", path)
    parts = path[1:].encode("utf-8", "surrogateescape").split(b"/")
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
        real = os.readlink(f"{_OPEN_FILES}/{opened}")
        if not (_is_inside(real, folder) and _is_served(os.fstat(opened).st_mode)):
            raise FileNotFoundError(errno.ENOENT, "not inside", path)
    except BaseException:
        os.close(opened)
        raise
    return opened


def list_inside(folder: str, names: Sequence[str], opened: int) -> list[str]:
    """Return the names in an open folder that may be asked for; folders end with a slash."""
    with os.scandir(opened) as entries:
        shown = (e for e in entries if _is_shown(e.name) and _is_reached(folder, names, e))
        return sorted(entry.name + "/" * entry.is_dir() for entry in islice(shown, _LISTED))


def _is_reached(folder: str, names: Sequence[str], entry: os.DirEntry[str]) -> bool:
    path = os.path.join(folder, *names, entry.name)
    if entry.is_symlink() and not _is_inside(os.path.realpath(path), folder):
        return False
    try:
        return entry.is_dir() or entry.is_file()
    except OSError:  # a link to itself
        return False


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


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address."""
    if not 0 <= port <= 65535:
        raise UsageError(f"port={port}: must be 1 to 65535, or 0 for any free port.")
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = min(addresses, key=lambda entry: entry[0] != socket.AF_INET)
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except (OSError, UnicodeError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise StorageError(
                f"port={port} of {host} is taken. Choose another port, or port=0 for any free one."
            ) from None
        if isinstance(error, PermissionError):
            raise StorageError(
                f"port={port} is kept for the system. Choose one above 1023, or port=0."
            ) from None
        raise UsageError(
            f"host={host!r} is no address of this machine: {error}. Choose 127.0.0.1 or 0.0.0.0."
        ) from None
