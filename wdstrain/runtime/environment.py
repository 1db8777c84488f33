"""Settings in environment variables. They are read when they are used."""

from __future__ import annotations

import math
import os
import threading

from wdstrain.errors import UsageError
from wdstrain.runtime.byte_sizes import parse_size


def seconds(name: str, default: float) -> float:
    """Return a number of seconds from the environment. Raises UsageError for another value."""
    text = os.environ.get(name, "")
    try:
        value = float(text) if text.strip() else default
    except ValueError:
        value = math.nan
    if not 0 <= value <= threading.TIMEOUT_MAX:
        raise UsageError(
            f"{name}={text!r}: must be a number of seconds >= 0. Unset it for {default:g} s."
        )
    return value


def size(name: str, default: int) -> int:
    """Return a number of bytes from the environment. Raises UsageError for another value."""
    text = os.environ.get(name, "").strip()
    try:
        value = parse_size(text) if text else default
    except ValueError:
        value = 0
    if value < 1:
        raise UsageError(f"{name}={text!r}: must be a size of at least 1 byte, such as 4MiB.")
    return value
