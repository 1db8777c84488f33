"""Check that a user's functions and fields can be sent to worker processes, before any is started.

A forked worker inherits everything. A spawned worker receives its parts by pickle, which sends
functions and classes as names to import. A lambda has no such name: pickling fails. A function of
a notebook has one that a worker cannot import: only the worker's start would fail, with a
traceback. Names in `__main__` are therefore noted while pickling, and refused if a worker cannot
run that module again.

Code itself is not sent (cloudpickle): it would take along the globals that it refers to, so that
workers could get parts of different states of a notebook.
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

# pickled as a name in a module
_PICKLED_BY_NAME = (FunctionType, type, type(functools.cache(len)))


def check_picklable(
    fields: Mapping[str, object] | None,
    functions: Mapping[str, object],
    method: str | None,
    *,
    instead: str = "num_workers=0, ",
) -> None:
    """Raise UsageError if a field or function cannot be sent to worker processes.

    functions: by the name of their option. method: start method; None for Python's default.
    instead: alternative that the message suggests.
    """
    method = multiprocessing.get_context(method).get_start_method()
    if method == "fork":
        return
    parts = {f"fields[{name!r}]": field for name, field in (fields or {}).items()} | {**functions}
    for name, part in parts.items():
        reason = _obstacle(part)
        if not reason:
            continue
        has_fork = "fork" in multiprocessing.get_all_start_methods()
        fork = ", or multiprocessing_context='fork'" if has_fork else ""
        raise UsageError(
            f"{name} cannot be sent to worker processes, which {method} starts: {reason}. "
            f"Use {instead}a function or class at the top of a .py file that you import{fork}."
        )


def _obstacle(part: object) -> str:
    """Return why an object cannot be sent; empty if it can."""
    pickler = _RecordingPickler(io.BytesIO())
    before = starting.get_spawning_popen()
    starting.set_spawning_popen(_FakeProcess())  # type: ignore[arg-type]
    try:
        pickler.dump(part)
    except Exception as error:  # pickling runs code of the object, which may raise anything
        if pickler.local:
            name = _described(pickler.local[-1])
            return f"{name} is not at the top of a module, from where they could import it"
        return str(error).rstrip(".") or type(error).__name__
    finally:
        starting.set_spawning_popen(before)
    if pickler.in_main and not _can_import_main():
        name = _described(pickler.in_main[0])
        return f"{name} is of a notebook, a prompt or python -c, from where they cannot import it"
    return ""


class _RecordingPickler(ForkingPickler):
    """Pickles as for a started process, and records objects that are sent by name."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.in_main: list[Any] = []  # objects of `__main__`
        self.local: list[Any] = []  # lambdas, and objects defined within a function

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, _PICKLED_BY_NAME):
            if obj.__module__ == "__main__":
                self.in_main.append(obj)
            if "<" in obj.__qualname__:  # <lambda>, <locals>
                self.local.append(obj)
        return NotImplemented


class _FakeProcess:
    """Process that is being started, for pickling: locks and shared memory can be sent to it."""

    DupFd = staticmethod(int)

    def duplicate_for_child(self, handle: int) -> int:
        return handle


def _described(part: Any) -> str:
    name = part.__qualname__.rpartition("<locals>.")[2]
    if name == "<lambda>":
        return "a lambda"
    return f"the {'class' if isinstance(part, type) else 'function'} {name!r}"


def _can_import_main() -> bool:
    """Return whether multiprocessing can import `__main__` in a spawned worker."""
    main = sys.modules["__main__"]
    if main.__spec__ is not None:  # python -m; the __main__ of a package is not imported
        return main.__spec__.name.rpartition(".")[2] != "__main__"
    file = getattr(main, "__file__", None)
    return (
        file is not None
        and os.path.isfile(file)
        and os.path.splitext(os.path.basename(file))[0] != "ipython"
    )
