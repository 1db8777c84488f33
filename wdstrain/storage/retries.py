"""Retry policy for servers: pauses, time limit and log messages.

The environment variable WDSTRAIN_NETWORK_TIMEOUT sets the time limit of all servers: seconds
without a byte. WDSTRAIN_RETRY_PAUSE sets the seconds before the first retry.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from urllib.parse import urlsplit

from wdstrain.errors import StorageError
from wdstrain.runtime.options import seconds_setting

TIMEOUT = "WDSTRAIN_NETWORK_TIMEOUT"
PAUSE = "WDSTRAIN_RETRY_PAUSE"

_FIRST_PAUSE = 0.1  # seconds before the first retry
_GROWTH = 100  # the longest pause divided by the first
_DEFAULT_TIMEOUT = 120.0  # seconds
_LONGEST_RETRY_AFTER = 30.0  # seconds that a server may ask for
_LONGEST_SILENCE = 20.0  # seconds
_UNLOGGED = 1.0  # seconds of waiting that are not logged: most faults are over by then

_jitter = random.SystemRandom()  # unseeded, so that readers with one seed do not retry together
_log = logging.getLogger("wdstrain")
_lock = threading.Lock()
_logged: dict[str, float] = {}  # server -> time of its last byte, while the log says it is silent


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


class Retries:
    """Attempts of one read, counted from the last byte that arrived.

    Use it as a context manager: at its end the log entry about a silent server is closed.
    attempts: failed attempts since the last byte.
    """

    def __init__(self, address: str, shown: str, stopping: threading.Event | None = None) -> None:
        """shown: the address without secrets, for errors. stopping: set to end the waiting."""
        parts = urlsplit(address)
        self._server = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        self._shown, self._stopping = shown, stopping or threading.Event()
        self.attempts, self._last_byte = 0, time.monotonic()

    def progress(self) -> None:
        """Record that bytes arrived."""
        if self.attempts and (since := _close_log_entry(self._server)) is not None:
            _log.warning("%s answers again after %.1f s", self._server, time.monotonic() - since)
        self.attempts, self._last_byte = 0, time.monotonic()

    def wait(self, reason: str, missing: str, retry_after: float | None = None) -> None:
        """Record a failed attempt, and wait before the next one.

        reason: the error, for messages. missing: what the server should send, as "byte 0".
        retry_after: seconds that the server asks for.
        Raises StorageError if the time limit has passed, or if reading is to stop.
        """
        self.attempts += 1
        limit, silent = network_timeout(), time.monotonic() - self._last_byte
        if silent >= limit:
            raise StorageError(
                f"{self._shown}: {missing} did not arrive in {self.attempts} attempts over "
                f"{silent:.0f} s; last error: {reason}. Check the server, the network and the "
                f"credentials; {TIMEOUT} sets after how many seconds without a byte reading fails."
            ) from None
        pause = min(self._backoff(retry_after), limit - silent)
        if silent + pause >= _UNLOGGED:
            self._log_silence(reason, limit)
        if self._stopping.wait(pause):
            raise StorageError(f"{self._shown}: reading was stopped.") from None

    def _backoff(self, retry_after: float | None) -> float:
        """Return the seconds of a pause: they double with each attempt, with jitter."""
        first = seconds_setting(PAUSE, _FIRST_PAUSE)
        pause = first * min(_GROWTH, 2.0 ** min(self.attempts - 1, 20))
        return max(pause * (0.5 + _jitter.random()), min(retry_after or 0.0, _LONGEST_RETRY_AFTER))

    def _log_silence(self, reason: str, limit: float) -> None:
        with _lock:
            if self._server in _logged:
                return
            _logged[self._server] = self._last_byte
        _log.warning(
            "%s does not answer (%s); retrying for up to %g s (%s)",
            self._server,
            reason,
            limit,
            TIMEOUT,
        )

    def __enter__(self) -> Retries:
        return self

    def __exit__(self, *_: object) -> None:
        if self.attempts:
            _close_log_entry(self._server)


def _close_log_entry(server: str) -> float | None:
    with _lock:
        return _logged.pop(server, None)
