"""The exceptions that this package raises on purpose, and its logger.

    WdstrainError
    ├── UsageError        wrong argument, option, name or path (exit code 2)
    │   └── PlanError     samples, ranks, batch size and lanes that do not fit together
    ├── SourceError       empty or malformed input of a conversion
    ├── ShardError        missing, damaged or replaced shard or index
    │   └── DamageError   sample whose bytes have another crc32 than the index says
    ├── SampleError       sample that cannot become an example
    └── StorageError      bytes that cannot be read or written

A problem states the value and the rule, with shard, key and offset where there is one; a hint says
what to do next. Where they name an option they hold {name}, so that Python shows it as a keyword
argument and the command line as a flag. The text of an exception is both, in the words of Python.
One string is enough to make each of them: torch rebuilds the exception of a worker process from its
text.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

logger = logging.getLogger("wdstrain")


def as_keyword(name: str, value: Any) -> str:
    """Return an option as a keyword argument; without its value, if that is `...`."""
    return f"{name}=" if value is ... else f"{name}={value!r}"


class WdstrainError(Exception):
    """Base class of all exceptions of this package. exit_code: of a command that ends with it.

    options: values of the options that the problem and the hint name as {name}; `...` for the name
    alone. {resume} and {overwrite} need no value.
    """

    exit_code = 1

    def __init__(
        self, problem: str, hint: str = "", options: Mapping[str, Any] | None = None
    ) -> None:
        self._texts = problem, hint
        self.options = {"resume": True, "overwrite": True, **(options or {})}
        self.problem, self.hint = self.texts(as_keyword)
        super().__init__(f"{self.problem} {self.hint}" if hint else self.problem)

    def texts(self, words: Callable[[str, Any], str]) -> list[str]:
        """Return the problem and the hint with each option as `words` writes its name and value."""
        written = {name: words(name, value) for name, value in self.options.items()}
        return [
            re.sub(r"\{(\w+)\}", lambda match: written.get(match[1], match[0]), text)
            for text in self._texts
        ]


class UsageError(WdstrainError):
    """An argument, option, name, path or address is wrong.

    option, value: the keyword argument that breaks the rule, and its value.
    """

    exit_code = 2

    def __init__(
        self,
        rule: str,
        hint: str = "",
        options: Mapping[str, Any] | None = None,
        *,
        option: str = "",
        value: Any = None,
    ) -> None:
        self.rule, self.option, self.value = rule, option, value
        super().__init__(
            f"{{{option}}}: {rule}" if option else rule, hint, {**(options or {}), option: value}
        )


class PlanError(UsageError):
    """Samples, ranks, batch size and lanes do not fit together."""


class SourceError(WdstrainError):
    """The input of a conversion is empty or malformed."""


class ShardError(WdstrainError):
    """A shard or its index is missing, damaged or replaced."""


class DamageError(ShardError):
    """The bytes of one sample of a shard have another crc32 than its index says."""


class SampleError(WdstrainError):
    """A sample cannot become an example."""


class StorageError(WdstrainError):
    """Bytes cannot be read from a file or server, or written to it."""
