"""What is not on a disk of this machine: HTTP servers and object stores, behind one set of functions."""

from __future__ import annotations

import os
import threading
from urllib.parse import unquote, urlsplit

from wdstrain.storage.http import HttpFile, check_address, is_http, read_small, redacted
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
]


def is_remote(path: str) -> bool:
    return is_http(path) or is_object(path)


def open_remote(
    path: str,
    size: int | None = None,
    tag: str | None = None,
    stopping: threading.Event | None = None,
    first: int | None = None,
    by_version: bool = False,
) -> RemoteFile:
    """An object to read from. size and tag: as they are known; stopping: set when reading is to end.

    by_version: without a strong ETag, whatever else its server says tells it from another, as while it was read first.
    first: bytes that are wanted of its beginning, if nothing else is sure to be; the answer that tells the size brings no more.
    """
    event = stopping or threading.Event()
    return (
        ObjectFile(path, size, tag, event)
        if is_object(path)
        else HttpFile(path, size, tag, event, first=first, by_version=by_version)
    )


def read_remote(path: str) -> bytes | None:
    """A small object as a whole; None if it is not there."""
    return read_object(path) if is_object(path) else read_small(path)


def name_of(path: str) -> str:
    """The name of a file in its folder, here or elsewhere."""
    if is_object(path):  # a key is what it is, with all its characters
        return path.rpartition("/")[2]
    return os.path.basename(unquote(urlsplit(path).path) if is_http(path) else path)
