"""Requests to servers: responses, pauses before retries, the time limit, and limits on requests.

The environment variable WDSTRAIN_NETWORK_TIMEOUT sets the time limit of all servers: seconds
without a byte. WDSTRAIN_RETRY_PAUSE sets the seconds before the first retry.

A wait that a server asks for is neither a failure nor silence. All processes of this machine obey
it: the modification time of a small file, in a folder of this user, says when the next request may
be sent. Without such a folder each process knows its own waits only.

The header `RateLimit: "name";r=50;t=30` says that 50 requests are left for 30 s, and
`RateLimit-Policy: "name";q=3000;w=300` that 3000 are allowed in 300 s. A server that refuses
requests by status 429 may do so for longer than silence lasts.
"""

from __future__ import annotations

import os
import random
import re
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from http.client import HTTPException
from typing import Any, TypeVar
from urllib.parse import urlsplit

from urllib3 import Retry
from urllib3.exceptions import HTTPError, InvalidHeader

from wdstrain.errors import StorageError, logger
from wdstrain.runtime.options import seconds_setting
from wdstrain.storage.secrets import describe_error, redacted

TIMEOUT = "WDSTRAIN_NETWORK_TIMEOUT"
PAUSE = "WDSTRAIN_RETRY_PAUSE"
MODIFIED = "Last-Modified: "  # start of a version that is no ETag
REFUSAL_PATIENCE = 5.0  # network timeouts that status 429 may last: quotas hold for some minutes
RETRIED = (HTTPError, HTTPException, OSError)  # errors that another attempt may fix

_FIRST_PAUSE = 0.1  # seconds before the first retry
_GROWTH = 100  # the longest pause divided by the first
_DEFAULT_TIMEOUT = 120.0  # seconds
_LONGEST_SILENCE = 20.0  # seconds
_UNLOGGED = 1.0  # seconds of waiting that are not logged: most faults are over by then
_BETWEEN_LINES = 30.0  # seconds
_LONGEST_WAIT = 86_400.0  # seconds after which a server is asked again, whatever it asks for
_RESERVE = 32  # requests of a quota that are not sent: so many may be in flight, or a tenth of it
_NUMBERS = re.compile(r";\s*([rtqw])=([0-9]{1,9})(?![0-9])")

Result = TypeVar("Result")

_jitter = random.SystemRandom()  # unseeded, so that readers with one seed do not retry together
_next_line: dict[str, float] = {}  # server -> time before which the log does not name it again
_next_request: dict[str, float] = {}  # server -> time of the next request, as this process knows


def _do_nothing() -> None:
    """Do nothing."""


@dataclass
class Response:
    """Response to a range request: bytes [start, stop) of an object, which are read forward.

    body: `body.readinto` fills a buffer with the next bytes, and returns how many; 0 at the end.
    total: bytes of the object, None if unknown. version: to recognize the object later, None if it
    cannot be. tag, modified: ETag and modification time, None if unknown. ranged: the server sent a
    range and not the whole object. close: ends the response. interrupt: ends a read that another
    thread is in. process: that reads the body.
    """

    body: Any
    start: int
    stop: int
    total: int | None
    version: str | None = None
    tag: str | None = None
    modified: str | None = None
    ranged: bool = True
    close: Callable[[], None] = _do_nothing
    interrupt: Callable[[], None] = _do_nothing
    process: int = field(default_factory=os.getpid)

    def is_version(self, version: str) -> bool:
        """Return False if the response says that the object has another version."""
        stated = self.modified if version.startswith(MODIFIED) else self.tag
        return stated in (None, version)


class TemporaryError(HTTPError):
    """A failure that another attempt may fix.

    wait: seconds that the server asks for. patience: how often the network timeout passes until it
    is an error.
    """

    def __init__(self, problem: str, wait: float = 0.0, patience: float = 1.0) -> None:
        super().__init__(problem)
        self.wait, self.patience = wait, patience


def network_timeout() -> float:
    """Return the seconds without a byte after which reading from a server fails.

    Raises UsageError if the environment variable is not a number of seconds.
    """
    return seconds_setting(TIMEOUT, _DEFAULT_TIMEOUT)


def silence_limit() -> float:
    """Return the seconds without a byte after which a request is sent again.

    Several requests fit into the network timeout.
    """
    return min(_LONGEST_SILENCE, max(0.05, network_timeout() / 4))


def server_of(address: str) -> str:
    """Return scheme and host of an address."""
    parts = urlsplit(address)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def retry(
    address: str,
    attempt: Callable[[], Result],
    missing: str,
    stopping: threading.Event | None = None,
) -> Result:
    """Return the result of an attempt, repeated while its error is one of `RETRIED`.

    missing: what the server should send, as "byte 0". stopping: set to end the waiting. Raises
    StorageError if no byte arrives within the time limit, or if reading is to stop.
    """
    stopping = stopping or threading.Event()
    begun, attempts, pause = time.monotonic(), 0, 0.0
    while True:
        if stopping.wait(pause):
            raise StorageError(f"{redacted(address)}: reading was stopped.")
        try:
            return attempt()
        except RETRIED as error:
            problem, asked = describe_error(error), getattr(error, "wait", 0.0)
            limit = network_timeout() * getattr(error, "patience", 1.0)
        silent = time.monotonic() - begun
        attempts += not asked
        if "CERTIFICATE_VERIFY_FAILED" in problem:
            raise StorageError(
                f"{redacted(address)}: {problem}.",
                "Check the address; SSL_CERT_FILE names certificates to trust.",
            )
        if silent >= limit and not asked:
            raise StorageError(
                f"{redacted(address)}: {missing} did not arrive in {attempts} attempts over "
                f"{silent:.0f} s; last error: {problem}.",
                f"Check the server, the network and the credentials; {TIMEOUT} sets after how "
                "many seconds without a byte reading fails.",
            )
        pause = seconds_setting(PAUSE, _FIRST_PAUSE) * min(_GROWTH, 2.0 ** min(attempts - 1, 20))
        pause = asked + min(pause * (0.5 + _jitter.random()), max(0.0, limit - silent))
        if silent + pause >= _UNLOGGED:
            state = f"asks to wait {asked:g} s ({problem})"
            if not asked:
                state = f"does not answer ({problem}); retrying for up to {limit:g} s ({TIMEOUT})"
            _log_state(server_of(address), state)
        begun = time.monotonic() + asked if asked else begun


def _log_state(server: str, state: str) -> None:
    """Log the state of a server, not more often than each half minute in all threads."""
    now = time.monotonic()
    if now > _next_line.get(server, 0.0):
        _next_line[server] = now + _BETWEEN_LINES
        logger.warning("%s %s", server, state)


def seconds_to_wait(client: str) -> float:
    """Return how long no request may be sent; 0 if one may. client: see `note_limit`."""
    begin = _next_request.get(client, 0.0)
    with suppress(OSError):
        begin = max(begin, os.stat(_file_of(client)).st_mtime)
    wait = begin - time.time()
    return wait if 0 < wait <= _LONGEST_WAIT else 0.0  # the clock may have been set


def note_limit(client: str, status: int, headers: Mapping[str, str]) -> float:
    """Note the limit that a response states; return the seconds that it asks to wait, or 0.

    client: text that identifies the server and the credentials.
    """
    items = (headers.get(name, "").partition(",")[0] for name in ("RateLimit", "RateLimit-Policy"))
    stated = {name: int(number) for name, number in _NUMBERS.findall(";".join(items))}
    wait = float(stated.get("t", 0))
    with suppress(InvalidHeader, ValueError, OverflowError):
        wait = Retry().parse_retry_after(headers.get("Retry-After", "")) or wait
    is_refused = status in (429, 503)
    is_used_up = "r" in stated and stated["r"] <= min(_RESERVE, stated.get("q", 0) // 10)
    if not (wait and (is_refused or is_used_up)):
        return 0.0
    wait = min(wait, _LONGEST_WAIT)
    begin = _next_request[client] = time.time() + wait
    with suppress(OSError):
        os.close(os.open(_file_of(client), os.O_CREAT | os.O_NOFOLLOW, 0o600))
        os.utime(_file_of(client), (begin, begin))
    return wait if is_refused else 0.0


def _file_of(client: str) -> str:
    """Return the path of the file that all processes share. Raises OSError if it cannot be used."""
    folder = os.path.join(tempfile.gettempdir(), f"wdstrain-{os.getuid()}")
    os.makedirs(folder, 0o700, exist_ok=True)
    if os.lstat(folder).st_uid != os.getuid():
        raise PermissionError(folder)
    return os.path.join(folder, blake2b(client.encode(), digest_size=16).hexdigest())
