"""Addresses without their secrets, for errors, output and logs.

Secrets are the user and password, the query (signed addresses) and the fragment of an address.
"""

from __future__ import annotations

import logging
import re
from urllib.parse import urlsplit, urlunsplit

_hidden: set[str] = set()  # secrets of all addresses that were requested


def redacted(address: str) -> str:
    """Return an address without user, password, query and fragment."""
    parts = urlsplit(address)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def redacted_invalid(address: str) -> str:
    """Return the same for an address that cannot be parsed."""
    return re.sub(r"//[^/]*@", "//", address.split("?")[0])


def without_user(address: str) -> str:
    """Return an address without user, password and fragment."""
    parts = urlsplit(address)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, parts.query, ""))


def describe_error(error: Exception, address: str) -> str:
    """Return the type and text of an error without secrets.

    They may be those of the address or of an address that it redirected to.
    """
    error = getattr(error, "reason", None) or error  # the connection's error, not the request's
    text = re.sub(r"\s+", " ", str(error)) or type(error).__name__
    for secret in {address, without_user(address), *_secrets(address)}:
        text = text.replace(secret, "...")
    text = re.sub(r"//[^/\s]*@", "//", re.sub(r"\?[^\s'\")]+", "?...", text))
    return f"{type(error).__name__}: {text[:200]}"


def hide_in_logs(address: str) -> None:
    """Replace the secrets of an address in urllib3's log records from now on."""
    _hidden.update(_secrets(address))


def _secrets(address: str) -> list[str]:
    parts = urlsplit(address)
    return [secret for secret in (parts.query, parts.netloc.rpartition("@")[0]) if secret]


class _SecretFilter(logging.Filter):
    """Log filter that replaces hidden secrets."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        secrets = [secret for secret in tuple(_hidden) if secret in text]  # other threads add some
        for secret in secrets:
            text = text.replace(secret, "...")
        if secrets:
            record.msg, record.args, record.exc_info = text, (), None
        return True


for _module in ("connection", "connectionpool", "util.retry", "poolmanager"):
    logging.getLogger(f"urllib3.{_module}").addFilter(_SecretFilter())
