"""Retry policy for all servers: pauses, time limit and log messages.

The environment variable WDSTRAIN_NETWORK_TIMEOUT sets the time limit of all servers: seconds
without a byte. WDSTRAIN_RETRY_PAUSE sets the seconds before the first retry. A wait that a server
asks for is no silence.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from http.client import HTTPException
from typing import TypeVar
from urllib.parse import urlsplit

from urllib3.exceptions import HTTPError

from wdstrain.errors import StorageError
from wdstrain.runtime.options import seconds_setting
from wdstrain.storage.secrets import describe_error, redacted

TIMEOUT = "WDSTRAIN_NETWORK_TIMEOUT"
PAUSE = "WDSTRAIN_RETRY_PAUSE"
RETRIED = (HTTPError, HTTPException, OSError)  # errors that another attempt may fix

_FIRST_PAUSE = 0.1  # seconds before the first retry
_GROWTH = 100  # the longest pause divided by the first
_DEFAULT_TIMEOUT = 120.0  # seconds
_LONGEST_SILENCE = 20.0  # seconds
_LONGEST_WAIT = 86_400.0  # seconds after which a server is asked again, whatever it asks for
_UNLOGGED = 1.0  # seconds of waiting that are not logged: most faults are over by then

Result = TypeVar("Result")

_jitter = random.SystemRandom()  # unseeded, so that readers with one seed do not retry together
_log = logging.getLogger("wdstrain")
_lock = threading.Lock()
_silent: dict[str, float] = {}  # server -> begin of its silence, once the log names it


class TemporaryError(HTTPError):
    """A failure that another attempt may fix. wait: seconds that the server asks for."""

    def __init__(self, problem: str, wait: float = 0.0) -> None:
        super().__init__(problem)
        self.wait = wait


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


class Retries:
    """Repeats failed requests for one address. failed: number of failed attempts."""

    def __init__(self, address: str, stopping: threading.Event | None = None) -> None:
        """stopping: set to end the waiting."""
        self.failed = 0
        self._server, self._shown = server_of(address), redacted(address)
        self._stopping = stopping or threading.Event()

    def run(self, attempt: Callable[[], Result], missing: str) -> Result:
        """Return the result of an attempt, repeated while its error is one of `RETRIED`.

        missing: what the server should send, as "byte 0". Raises StorageError if no byte arrives
        within the time limit, or if reading is to stop.
        """
        begun, attempts = time.monotonic(), 0
        while True:
            try:
                result = attempt()
                break
            except RETRIED as error:
                problem, asked = describe_error(error), getattr(error, "wait", 0.0)
            attempts += 1
            self.failed += 1
            if "CERTIFICATE_VERIFY_FAILED" in problem:
                raise StorageError(
                    f"{self._shown}: {problem}. Check the address; SSL_CERT_FILE names "
                    f"certificates to trust."
                )
            self._wait(problem, missing, attempts, begun, asked)
            if asked:
                begun = time.monotonic()
        if attempts and (since := _end_of_silence(self._server)) is not None:
            _log.warning("%s answers again after %.1f s", self._server, time.monotonic() - since)
        return result

    def _wait(self, problem: str, missing: str, attempts: int, begun: float, asked: float) -> None:
        """Wait before the next attempt. asked: seconds that the server asks for, or 0."""
        limit, silent = network_timeout(), time.monotonic() - begun
        if silent >= limit and not asked:
            _end_of_silence(self._server)
            raise StorageError(
                f"{self._shown}: {missing} did not arrive in {attempts} attempts over "
                f"{silent:.0f} s; last error: {problem}. Check the server, the network and the "
                f"credentials; {TIMEOUT} sets after how many seconds without a byte reading fails."
            )
        pause = seconds_setting(PAUSE, _FIRST_PAUSE) * min(_GROWTH, 2.0 ** min(attempts - 1, 20))
        pause = min(pause * (0.5 + _jitter.random()), max(0.0, limit - silent))
        pause += min(asked, _LONGEST_WAIT)
        if silent + pause >= _UNLOGGED:
            self._log_silence(problem, begun, asked, limit)
        if self._stopping.wait(pause):
            raise StorageError(f"{self._shown}: reading was stopped.")

    def _log_silence(self, problem: str, begun: float, asked: float, limit: float) -> None:
        with _lock:
            if self._server in _silent:
                return
            _silent[self._server] = begun
        if asked:
            _log.warning("%s asks to wait %g s (%s)", self._server, asked, problem)
        else:
            text = "%s does not answer (%s); retrying for up to %g s (%s)"
            _log.warning(text, self._server, problem, limit, TIMEOUT)


def _end_of_silence(server: str) -> float | None:
    with _lock:
        return _silent.pop(server, None)
