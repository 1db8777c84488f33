"""Operating system calls: recorded, or replaced by a fault at a chosen call."""

from __future__ import annotations

import os
import re
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def recorded_reads(pattern: str = "") -> Iterator[list[tuple[str, int, int]]]:
    """Record the (path, offset, length) of reads by Python code.

    Reads of compiled code are not recorded. pattern: regular expression for the end of the paths.
    """
    reads: list[tuple[str, int, int]] = []

    def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(fd: int, wanted: Any, *more: int) -> Any:
            place = more[0] if more else os.lseek(fd, 0, os.SEEK_CUR)
            result = function(fd, wanted, *more)
            if re.search(f"(?:{pattern})$", path_of(fd)):
                reads.append((path_of(fd), place, wanted if isinstance(wanted, int) else result))
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("preadv", "read", "pread"):
            patch.setattr(os, name, recorded(getattr(os, name)))
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
