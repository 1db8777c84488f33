"""How long a silent or failing server is waited for, the pauses between tries, and what the log says of it.

One setting for all servers and processes: the environment variable WDSTRAIN_NETWORK_TIMEOUT, seconds without a byte.
"""

from __future__ import annotations

import logging
import math
import os
import random
import threading
import time
from types import TracebackType
from urllib.parse import urlsplit

from wdstrain.errors import UsageError

TIMEOUT = "WDSTRAIN_NETWORK_TIMEOUT"
_DEFAULT = 120.0  # seconds
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0
_LONGEST_ASKED = 30.0  # seconds that a server may ask for (Retry-After)
_LONGEST_SILENCE = 20.0
_QUIET = 1.0  # seconds of waiting that are not logged: most faults are over by then

_JITTER = random.SystemRandom()  # not seeded, so that readers of one seed do not come back together
_log = logging.getLogger("wdstrain")
_lock = threading.Lock()
_waiting: dict[str, float] = {}  # by server: when the waiting that was logged began


def network_timeout() -> float:
    """Return the seconds without a byte after which a server is given up. Raises UsageError for another value than a number."""
    text = os.environ.get(TIMEOUT, "")
    try:
        seconds = float(text) if text.strip() else _DEFAULT
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= threading.TIMEOUT_MAX:
        raise UsageError(
            f"{TIMEOUT}={text!r}: must be a number of seconds >= 0. Unset it for {_DEFAULT:g} s."
        )
    return seconds


def silence_limit() -> float:
    """Return the seconds without a byte after which a request is made anew: several fit into the network timeout."""
    return min(_LONGEST_SILENCE, max(0.05, network_timeout() / 4))


def server_of(address: str) -> str:
    """Return the scheme and host of an address, without user and password."""
    parts = urlsplit(address)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


class Retries:
    """The tries of one read, from the last byte that came. Used as a context, so that what it logged of a server ends with it."""

    def __init__(self, address: str) -> None:
        self.tries, self._server, self._since = 0, server_of(address), time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since the last byte."""
        return time.monotonic() - self._since

    def progress(self) -> None:
        """A byte came."""
        if self.tries and (begun := _forget(self._server)) is not None:
            _log.warning("%s answers again after %.1f s", self._server, time.monotonic() - begun)
        self.tries, self._since = 0, time.monotonic()

    def pause(self, reason: str, asked: float | None = None) -> float | None:
        """Return the seconds to wait before the next try, None when the time is over. asked: seconds that the server wishes."""
        self.tries += 1
        limit, spent = network_timeout(), self.seconds
        if spent >= limit:
            return None
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** min(self.tries - 1, 20)) * (
            0.5 + _JITTER.random()
        )
        pause = min(max(pause, min(asked or 0.0, _LONGEST_ASKED)), limit - spent)
        if spent + pause >= _QUIET:
            self._log_waiting(reason, limit)
        return pause

    def _log_waiting(self, reason: str, limit: float) -> None:
        with _lock:
            if self._server in _waiting:
                return
            _waiting[self._server] = self._since
        _log.warning(
            "%s does not answer (%s): waiting for it for up to %g s (%s)",
            self._server,
            reason,
            limit,
            TIMEOUT,
        )

    def __enter__(self) -> Retries:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.tries:
            _forget(self._server)


def _forget(server: str) -> float | None:
    with _lock:
        return _waiting.pop(server, None)
