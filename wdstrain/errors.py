"""Every error this package raises on purpose.

    WdstrainError
    ├── UsageError        what was asked for cannot be meant (exit code 2)
    │   └── PlanError     sizes that do not fit together: samples, ranks, batches, lanes
    ├── SourceError       the input of a conversion is missing or wrong
    ├── ShardError        a shard or its index is missing, damaged or changed
    ├── SampleError       one sample cannot be made into an example
    └── StorageError      bytes could not be read or written

A message is one sentence or two: the value, the rule, the next step. It carries shard, key and offset in its own
text, and every class takes exactly one string, because torch rebuilds the error of a worker process from one string.
"""


class WdstrainError(Exception):
    """Base of all errors of this package. `exit_code` is what a shell command ends with."""

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(message)


class UsageError(WdstrainError):
    """The call itself is wrong: an argument, a name, an address."""

    exit_code = 2


class PlanError(UsageError):
    """Samples, ranks, batch size and lanes do not fit together."""


class SourceError(WdstrainError):
    """The input of a conversion is missing, empty or malformed."""


class ShardError(WdstrainError):
    """A shard or its index is missing, damaged or no longer what it was."""


class SampleError(WdstrainError):
    """One sample cannot be made into an example."""


class StorageError(WdstrainError):
    """Bytes could not be read from or written to where they live."""
