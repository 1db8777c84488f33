"""What is not on a disk of this machine: HTTP servers and object stores, behind one set of functions."""

from __future__ import annotations

import threading

from wdstrain.http import HttpFile, is_http, read_small, redacted
from wdstrain.objects import ObjectFile, is_object, read_object

RemoteFile = HttpFile | ObjectFile

__all__ = ["RemoteFile", "is_remote", "open_remote", "read_remote", "redacted"]


def is_remote(path: str) -> bool:
    return is_http(path) or is_object(path)


def open_remote(
    path: str, size: int | None = None, tag: str | None = None, stopping: threading.Event | None = None
) -> RemoteFile:
    """An object to read from. size and tag: as they are known; stopping: set when reading is to end."""
    event = stopping or threading.Event()
    return ObjectFile(path, size, tag, event) if is_object(path) else HttpFile(path, size, tag, event)


def read_remote(path: str) -> bytes | None:
    """A small object as a whole; None if it is not there."""
    return read_object(path) if is_object(path) else read_small(path)
