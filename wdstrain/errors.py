"""The exceptions that this package raises on purpose.

    WdstrainError
    ├── UsageError        wrong argument, option, name or path (exit code 2)
    │   └── PlanError     samples, ranks, batch size and lanes that do not fit together
    ├── SourceError       empty or malformed input of a conversion
    ├── ShardError        missing, damaged or replaced shard or index
    │   └── DamageError   sample whose bytes have another crc32 than the index says
    ├── SampleError       sample that cannot become an example
    └── StorageError      bytes that cannot be read or written

A problem states the value and the rule, with shard, key and offset where there is one; a hint says
what to do next. The text of an exception is both, in the words of Python; the command line shows
them in the words of the shell. One string is enough to make each of them: torch rebuilds the
exception of a worker process from its text.
"""

from __future__ import annotations

from typing import Any


class WdstrainError(Exception):
    """Base class of all exceptions of this package. exit_code: of a command that ends with it."""

    exit_code = 1

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(f"{problem} {hint}" if hint else problem)
        self.problem, self.hint = problem, hint

    def __reduce__(self) -> tuple[type[WdstrainError], tuple[str, str]]:
        return type(self), (self.problem, self.hint)


class UsageError(WdstrainError):
    """An argument, option, name, path or address is wrong.

    option, value: the keyword argument that breaks the rule, and its value.
    """

    exit_code = 2

    def __init__(self, rule: str, hint: str = "", *, option: str = "", value: Any = None) -> None:
        super().__init__(f"{option}={value!r}: {rule}" if option else rule, hint)
        self.rule, self.option, self.value = rule, option, value


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
