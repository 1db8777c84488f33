"""Check that a user's functions and fields can be sent to worker processes, before any is started.

A forked worker inherits everything. A spawned worker receives its parts by pickle, which sends
functions and classes as names to import. A lambda has no such name. A function of a notebook has
one that a worker cannot import: only the worker's start would fail, with a traceback.

Code itself is not sent (cloudpickle): it would take along the globals that it refers to, so that
workers could get parts of different states of a notebook.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
from collections.abc import Mapping
from multiprocessing import context as starting
from multiprocessing.reduction import ForkingPickler
from pickle import PicklingError
from types import FunctionType
from typing import Any

import torch

from wdstrain.errors import UsageError

# pickled as a name in a module
_PICKLED_BY_NAME = (FunctionType, type, type(functools.cache(len)))


def check_picklable(
    fields: Mapping[str, object] | None,
    functions: Mapping[str, object],
    method: str | None,
) -> None:
    """Raise UsageError if a field or function cannot be sent to worker processes.

    functions: by the name of their option. method: start method; None for Python's default.
    """
    method = multiprocessing.get_context(method).get_start_method()
    if method == "fork":
        return
    parts = {f"fields[{name!r}]": field for name, field in (fields or {}).items()} | {**functions}
    starting.set_spawning_popen(_NoProcess())  # type: ignore[arg-type]
    try:
        with open(os.devnull, "wb") as nowhere:
            for name in parts:
                # Protocol 5 hands the buffers of large arrays over instead of copying them.
                _CheckingPickler(nowhere, 5, True, lambda _: None).dump(parts[name])
    except Exception as error:  # pickling runs code of the object, which may raise anything
        reason = str(error).rstrip(".") or type(error).__name__
        raise UsageError(
            f"{name} cannot be sent to worker processes, which {method} starts: {reason}. Use "
            f"num_workers=0, a function or class at the top of a .py file that you import, or "
            f"multiprocessing_context='fork'."
        ) from None
    finally:
        starting.set_spawning_popen(None)


class _CheckingPickler(ForkingPickler):
    """Pickler that refuses names which workers cannot import, and leaves out tensors."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):  # torch would move it to shared memory
            return int, ()
        is_by_name = isinstance(obj, _PICKLED_BY_NAME) and obj.__module__ == "__main__"
        if is_by_name and not _can_import_main():
            name = f"the {'class' if isinstance(obj, type) else 'function'} {obj.__name__!r}"
            raise PicklingError(
                f"{'a lambda' if obj.__name__ == '<lambda>' else name} is of a notebook, a prompt or "
                f"python -c, from where they cannot import it"
            )
        return NotImplemented


class _NoProcess:
    """Process that is being started, for pickling: locks and shared memory can be sent to it."""

    DupFd = staticmethod(int)
    duplicate_for_child = staticmethod(int)


def _can_import_main() -> bool:
    """Return whether multiprocessing can import `__main__` in a spawned worker."""
    main = sys.modules["__main__"]
    if main.__spec__ is not None:  # python -m; the __main__ of a package is not imported
        return main.__spec__.name.rpartition(".")[2] != "__main__"
    file = getattr(main, "__file__", None) or ""
    return os.path.isfile(file) and os.path.basename(file) not in ("ipython", "ipython.exe")
