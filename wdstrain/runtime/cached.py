"""A property that is computed once, without a lock.

Before Python 3.12 that of functools has a lock, one for all objects of a class. A process that is forked while a thread holds it, such as
a reader's that plans, inherits it locked and waits for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class cached_property(Generic[T]):
    """Kept in the object's `__dict__`. Two threads may both compute it, and both have the value that was there first."""

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
