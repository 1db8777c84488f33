"""Faults of the operating system: a process that ends, or a file that changes, at a chosen call."""

from __future__ import annotations

import os
import re
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
    """Call `before` whenever a function of the system gets a path that matches.

    name: of the function in `module`. pattern: regular expression for the end of the path of the
    file; the new name if the function renames.
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
def ended_at(name: str, pattern: str) -> Iterator[None]:
    """Expect that the block ends at such a call, which is not made. Arguments: `watched_calls`."""

    def end() -> None:
        raise ProcessEndedError

    with watched_calls(name, pattern, end), pytest.raises(ProcessEndedError):
        yield
