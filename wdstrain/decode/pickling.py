"""Whether what a user wrote can be sent to worker processes; asked before any is started, and answered in a sentence.

A forked worker has all that its parent has. One that is spawned is sent its parts by pickle, which sends functions and classes as names to
be imported: a lambda has none, and what was typed into a notebook has one that nobody else can import. The first fails here, in pickling; the
second would only fail in the worker, as a traceback from its start. So names that lead to `__main__` are noted while pickling, and refused
where a worker could not run that module again. A road not taken is to send code itself (cloudpickle): it takes along whatever globals the code
refers to, so that edits of one cell reach workers in parts.
"""

from __future__ import annotations

import functools
import io
import multiprocessing
import os
import sys
from collections.abc import Mapping
from multiprocessing import context as starting
from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import Any

from wdstrain.errors import UsageError

_BY_NAME = (
    FunctionType,
    type,
    functools._lru_cache_wrapper,
)  # pickled as the name of a module and a name in it


def check_picklable(
    fields: Mapping[str, object] | None,
    functions: Mapping[str, object],
    method: str | None,
    *,
    instead: str = "num_workers=0, ",
) -> None:
    """Raise UsageError if a field or one of these functions, by the name of its option, cannot be sent to processes of this start method (None: Python's own).

    instead: what works with such parts.
    """
    method = multiprocessing.get_context(method).get_start_method()
    if method == "fork":
        return
    for name, part in {
        **{f"fields[{name!r}]": field for name, field in (fields or {}).items()},
        **functions,
    }.items():
        reason = _hindrance(part)
        if reason:
            fork = (
                ", or multiprocessing_context='fork'"
                if "fork" in multiprocessing.get_all_start_methods()
                else ""
            )
            raise UsageError(
                f"{name} cannot be sent to worker processes, which {method} starts: {reason}. Use {instead}a function or class at "
                f"the top of a .py file that you import{fork}."
            )


def _hindrance(part: object) -> str:
    """Why an object cannot be sent; empty if it can."""
    pickler = _Noting(io.BytesIO())
    before = starting.get_spawning_popen()
    starting.set_spawning_popen(_Child())  # type: ignore[arg-type]
    try:
        pickler.dump(part)
    except Exception as error:  # what pickling raises depends on the object
        if pickler.nameless:
            return f"{_named(pickler.nameless[-1])} is not at the top of a module, from where they could import it"
        return str(error).rstrip(".") or type(error).__name__
    finally:
        starting.set_spawning_popen(before)
    if pickler.of_main and not _main_runs_again():
        return f"{_named(pickler.of_main[0])} is of a notebook, a prompt or python -c, from where they cannot import it"
    return ""


class _Noting(ForkingPickler):
    """Pickles as it is done for a process that is started, and notes what is sent by its name."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.of_main: list[Any] = []
        self.nameless: list[Any] = []

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, _BY_NAME):
            if obj.__module__ == "__main__":
                self.of_main.append(obj)
            if "<" in obj.__qualname__:  # <lambda>, <locals>
                self.nameless.append(obj)
        return NotImplemented


class _Child:
    """Stands for the process that is started: locks and shared memory may be sent to it, and none is kept open for it."""

    DupFd = staticmethod(int)

    def duplicate_for_child(self, handle: int) -> int:
        return handle


def _named(part: Any) -> str:
    name = part.__qualname__.rpartition("<locals>.")[2]
    if name == "<lambda>":
        return "a lambda"
    return f"the {'class' if isinstance(part, type) else 'function'} {name!r}"


def _main_runs_again() -> bool:
    """Whether a worker that is spawned has the names of `__main__`: multiprocessing runs it there under another name if it can."""
    main = sys.modules["__main__"]
    if main.__spec__ is not None:  # python -m; but not that of a package
        return main.__spec__.name.rpartition(".")[2] != "__main__"
    file = getattr(main, "__file__", None)
    return (
        file is not None
        and os.path.isfile(file)
        and os.path.splitext(os.path.basename(file))[0] != "ipython"
    )
