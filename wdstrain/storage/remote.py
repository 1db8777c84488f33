"""Remote files: HTTP servers and object stores behind one set of functions."""

from __future__ import annotations

import os
import threading
from urllib.parse import unquote, urlsplit

from wdstrain.storage.http import HttpFile, is_http, read_small
from wdstrain.storage.http_request import check_address, redacted
from wdstrain.storage.object_store import ObjectFile, is_object, read_object

RemoteFile = HttpFile | ObjectFile

__all__ = [
    "RemoteFile",
    "check_address",
    "is_remote",
    "name_of",
    "open_remote",
    "read_remote",
    "redacted",
    "shown_path",
]


def is_remote(path: str) -> bool:
    return is_http(path) or is_object(path)


def shown_path(path: str) -> str:
    """Return a path or address for messages, without the secrets of an address."""
    return redacted(path) if is_remote(path) else path


def open_remote(
    path: str,
    size: int | None = None,
    tag: str | None = None,
    stopping: threading.Event | None = None,
    *,
    first_bytes: int | None = None,
    by_version: bool = False,
) -> RemoteFile:
    """Return a remote file to read from.

    size: None sends a request for it. tag: the version that the file must have; None: unknown.
    stopping: set to end reading. first_bytes: bytes that the request for the size brings; None: the
    whole file. by_version: without a strong ETag, compare any version that the server gives.
    """
    if is_object(path):
        return ObjectFile(path, size, tag, stopping)
    return HttpFile(path, size, tag, stopping, first_bytes=first_bytes, by_version=by_version)


def read_remote(path: str) -> bytes | None:
    """Return a small remote file; None if it does not exist."""
    return read_object(path) if is_object(path) else read_small(path)


def name_of(path: str) -> str:
    """Return the name of a file in its folder, local or remote."""
    if is_object(path):  # all characters of a key are literal
        return path.rpartition("/")[2]
    return os.path.basename(unquote(urlsplit(path).path) if is_http(path) else path)
