"""`cached_property` without a lock.

Before Python 3.12, `functools.cached_property` has one lock for all objects of a class. A process
that is forked while a thread holds the lock inherits it locked, and waits for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class cached_property(Generic[T]):
    """Property that is computed once and kept in the object's `__dict__`.

    Two threads may both compute it. Both get the value that was stored first.
    """

    def __init__(self, function: Callable[[Any], T]) -> None:
        self._function, self._name, self.__doc__ = function, function.__name__, function.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> cached_property[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> Any:
        if instance is None:
            return self
        return vars(instance).setdefault(self._name, self._function(instance))
