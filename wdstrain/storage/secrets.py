"""Secrets of addresses, which errors, output and logs never show, and which may expire.

They are the user and password, the query (signed addresses) and the fragment of an address.

Signed addresses that expired are renewed by a function or a command of the user. Those with one
server and one query expire together, and are renewed by one call. The environment variable
WDSTRAIN_RENEW_COMMAND names a command that reads the expired address from its standard input, and
prints a fresh one.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import subprocess
import threading
import time
from collections.abc import Callable
from functools import partial
from urllib.parse import SplitResult, urlsplit

from wdstrain.errors import StorageError

_USER = re.compile(r"//[^/\s?#]*@")
_QUERY = re.compile(r"[?#]\S*")
_COMMAND = "WDSTRAIN_RENEW_COMMAND"
_LONGEST_RUN = 120.0  # seconds of the command

_function: Callable[[str], str] | None = None
# By server and query of expired addresses: parts of the fresh one, and when it was there.
_renewed: dict[tuple[str, str], tuple[SplitResult, float]] = {}
_lock = threading.RLock()


def redacted(address: str) -> str:
    """Return an address, valid or not, without user, password, query and fragment."""
    return _USER.sub("//", address.partition("?")[0].partition("#")[0], count=1)


def without_user(address: str) -> str:
    """Return an address without user, password and fragment."""
    return _USER.sub("//", address.partition("#")[0], count=1)


def scrubbed(text: str) -> str:
    """Return a text without the secrets of the addresses in it."""
    return _USER.sub("//", _QUERY.sub("?...", text))


def describe_error(error: Exception) -> str:
    """Return the type and text of an error, without secrets."""
    text = " ".join(scrubbed(str(error)).split()) or type(error).__name__
    return f"{type(error).__name__}: {text[:200]}"


def renew_addresses(function: Callable[[str], str] | None) -> None:
    """Call a function for a fresh address when a server says that a signed address has expired.

    It gets the address as it was named first, and returns that of the same file with a new
    signature. It is called once for all addresses with the same server and query, while their
    readers wait. None: no function is called, only WDSTRAIN_RENEW_COMMAND, if that is set. Each
    process of a job needs the call.
    """
    global _function
    _function = function


def current_address(address: str) -> str:
    """Return an address with its newest signature."""
    old = urlsplit(address)
    fresh = _renewed.get((old.netloc, old.query))
    return address if fresh is None else fresh[0]._replace(path=old.path).geturl()


def renew(address: str, sent: float) -> bool:
    """Return whether there is a fresh address in place of one that a server refused as expired.

    sent: time of the request (monotonic). Raises StorageError if the user's function or command
    fails.
    """
    old, command = urlsplit(address), os.environ.get(_COMMAND, "")
    function = _function or (command and partial(_run, command))
    if not function:
        return False
    key = old.netloc, old.query
    with _lock:
        if key not in _renewed or _renewed[key][1] < sent:
            try:
                fresh = urlsplit(function(address))
                if fresh.path != old.path:
                    raise ValueError("it returned the address of another file")
            except Exception as error:
                raise StorageError(
                    f"{redacted(address)} has expired, and its renewal failed: "
                    f"{describe_error(error)}. Check the function of wt.renew_addresses, or {_COMMAND}."
                ) from error
            _renewed[key] = fresh, time.monotonic()
    return True


def _run(command: str, address: str) -> str:
    """Return the line that a command prints for an address."""
    done = subprocess.run(
        shlex.split(command),
        input=f"{address}\n",
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=_LONGEST_RUN,
    )
    return done.stdout.strip()


def _without_secrets(record: logging.LogRecord) -> bool:
    """Remove the secrets of addresses from a log record. Returns True: it is logged."""
    text = record.getMessage()
    if (shown := scrubbed(text)) != text:
        record.msg, record.args, record.exc_info = shown, (), None
    return True


for _module in ("connection", "connectionpool", "util.retry", "poolmanager"):
    logging.getLogger(f"urllib3.{_module}").addFilter(_without_secrets)
