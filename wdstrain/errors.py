"""The exceptions that this package raises on purpose.

    WdstrainError
    ├── UsageError        wrong argument, option, name or path (exit code 2)
    │   └── PlanError     samples, ranks, batch size and lanes that do not fit together
    ├── SourceError       empty or malformed input of a conversion
    ├── ShardError        missing, damaged or replaced shard or index
    │   └── DamageError   sample whose bytes have another crc32 than the index says
    ├── SampleError       sample that cannot become an example
    └── StorageError      bytes that cannot be read or written

A message states the problem with the value, the rule and the next step, with shard, key and offset
where there is one. Every class takes exactly one string: torch rebuilds the exception of a worker
process from one string.
"""


class WdstrainError(Exception):
    """Base class of all exceptions of this package. exit_code: of a command that ends with it."""

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(message)


class UsageError(WdstrainError):
    """An argument, option, name, path or address is wrong."""

    exit_code = 2


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
