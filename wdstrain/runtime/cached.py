"""`cached_property` without a lock.

Before Python 3.12, `functools.cached_property` has one lock for all objects of a class. A process
that is forked while a thread holds the lock inherits it locked, and waits for ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the types are those of Python's
    from functools import cached_property as cached_property
else:

    class cached_property:
        """Property that is computed once and kept in the object's `__dict__`.

        Two threads may both compute it. Both get the value that was stored first.
        """

        def __init__(self, function):
            self._function, self._name, self.__doc__ = function, function.__name__, function.__doc__

        def __get__(self, instance, owner):
            if instance is None:
                return self
            return vars(instance).setdefault(self._name, self._function(instance))
