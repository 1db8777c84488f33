"""Secrets of addresses, which errors, output and logs never show.

They are the user and password, the query (signed addresses) and the fragment of an address.
"""

from __future__ import annotations

import logging
import re

_USER = re.compile(r"//[^/\s?#]*@")
_QUERY = re.compile(r"[?#]\S*")


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


def _without_secrets(record: logging.LogRecord) -> bool:
    """Remove the secrets of addresses from a log record. Returns True: it is logged."""
    text = record.getMessage()
    if (shown := scrubbed(text)) != text:
        record.msg, record.args, record.exc_info = shown, (), None
    return True


for _module in ("connection", "connectionpool", "util.retry", "poolmanager"):
    logging.getLogger(f"urllib3.{_module}").addFilter(_without_secrets)
