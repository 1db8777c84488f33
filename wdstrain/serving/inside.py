"""A file inside a folder, whatever names and links say.

Links are followed as long as they lead to something inside: a set may be made of links into a store beside it. A path is
resolved first, so that nothing outside is ever opened (opening a device can do something), then opened without following a link
or waiting for a pipe. Between the two a folder on the way may have been exchanged for a link, so the system is asked what it is
that was opened. A walk from folder to folder by descriptor would need no such question, and a call for each.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from itertools import islice

from wdstrain.serving.asking import is_shown

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_OPENED = "/proc/self/fd"  # where Linux says what an open file is called


def open_inside(folder: str, names: Sequence[str]) -> int:
    """A descriptor of the regular file or folder of this name. Raises OSError; FileNotFoundError where it is outside or else.

    folder: a resolved path.
    """
    path = os.path.realpath(os.path.join(folder, *names))
    if not (_is_inside(path, folder) and _is_served(os.lstat(path).st_mode)):
        raise FileNotFoundError(errno.ENOENT, "not inside", path)
    opened = os.open(path, _FLAGS)
    try:
        real = (
            os.readlink(f"{_OPENED}/{opened}") if os.path.isdir(_OPENED) else os.path.realpath(path)
        )
        if not (_is_inside(real, folder) and _is_served(os.fstat(opened).st_mode)):
            raise FileNotFoundError(errno.ENOENT, "not inside", path)
    except BaseException:
        os.close(opened)
        raise
    return opened


def list_inside(folder: str, names: Sequence[str], opened: int, count: int) -> list[str]:
    """Names of an opened folder that may be asked for, in order, folders with a slash behind them; at most so many."""
    with os.scandir(opened) as entries:
        shown = (
            entry for entry in entries if is_shown(entry.name) and _is_reached(folder, names, entry)
        )
        return sorted(entry.name + "/" * entry.is_dir() for entry in islice(shown, count))


def _is_reached(folder: str, names: Sequence[str], entry: os.DirEntry[str]) -> bool:
    if entry.is_symlink() and not _is_inside(
        os.path.realpath(os.path.join(folder, *names, entry.name)), folder
    ):
        return False
    try:
        return entry.is_dir() or entry.is_file()
    except OSError:  # a link to itself
        return False


def _is_inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _is_served(mode: int) -> bool:
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)
