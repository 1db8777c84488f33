"""Operating system calls: recorded, or replaced by a fault at a chosen call."""

from __future__ import annotations

import os
import re
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


class ProcessEndedError(Exception):
    """Raised in place of a call at which the process would end. The package does not expect it."""


def path_of(argument: Any) -> str:
    """Return the path of an argument of a call: a path, or the descriptor of an open file."""
    if isinstance(argument, int):
        return os.readlink(f"/proc/self/fd/{argument}")
    return os.fspath(argument) if isinstance(argument, str | os.PathLike) else ""


@contextmanager
def watched_calls(
    name: str, pattern: str, before: Callable[[], object], module: Any = os
) -> Iterator[None]:
    """Call `before` whenever an OS function gets a path that matches.

    name: of the function in `module`. pattern: regular expression for the end of the file's path;
    the new name if the function renames.
    """
    original = getattr(module, name)

    def watched(*arguments: Any, **named: Any) -> Any:
        others = [argument for argument in arguments[1:2] if not isinstance(argument, int)]
        paths = [path for path in map(path_of, [*arguments[:1], *others]) if path]
        if paths and re.search(f"(?:{pattern})$", paths[-1]):
            before()
        return original(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, watched)
        yield


def bytes_read() -> int:
    """Return the bytes that this process has read from files, in compiled code too."""
    return int(Path("/proc/self/io").read_text().split()[1])


@contextmanager
def recorded_reads(pattern: str = "") -> Iterator[list[tuple[str, int, int]]]:
    """Record the (path, offset, length) of reads by Python code.

    Reads of compiled code are not recorded. pattern: regular expression for the end of the paths.
    """
    reads: list[tuple[str, int, int]] = []

    def recorded(function: Callable[..., bytes]) -> Callable[..., bytes]:
        def call(fd: int, length: int, *offset: int) -> bytes:
            path = path_of(fd)
            if re.search(f"(?:{pattern})$", path):
                place = offset[0] if offset else os.lseek(fd, 0, os.SEEK_CUR)
                reads.append((path, place, length))
            return function(fd, length, *offset)

        return call

    preadv = os.preadv

    def recorded_preadv(fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
        count = preadv(fd, buffers, offset, flags)
        if re.search(f"(?:{pattern})$", path_of(fd)):
            reads.append((path_of(fd), offset, count))
        return count

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", recorded_preadv)
        patch.setattr(os, "read", recorded(os.read))
        patch.setattr(os, "pread", recorded(os.pread))
        yield reads


@contextmanager
def ended_at(name: str, pattern: str) -> Iterator[None]:
    """Expect that the block ends at such a call, which is not made. Arguments: `watched_calls`."""

    def end() -> None:
        raise ProcessEndedError

    with watched_calls(name, pattern, end), pytest.raises(ProcessEndedError):
        yield


@contextmanager
def small_files(limit: int) -> Iterator[None]:
    """Let writes beyond this size of a file fail, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
