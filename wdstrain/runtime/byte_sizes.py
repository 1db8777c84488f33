"""Sizes in bytes as people write them: 256MB, 256M, 4GiB, 1000."""

from __future__ import annotations

_UNITS = {
    "": 1,
    "B": 1,
    "K": 10**3,
    "KB": 10**3,
    "M": 10**6,
    "MB": 10**6,
    "G": 10**9,
    "GB": 10**9,
    "T": 10**12,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def parse_size(text: str) -> int:
    """Return the number of bytes that a text states. Raises ValueError if it is not a size."""
    number = text.strip().upper().rstrip("BIKMGT")
    try:
        return int(float(number) * _UNITS[text.strip().upper()[len(number) :].strip()])
    except (KeyError, ValueError, OverflowError):
        raise ValueError(f"{text!r} is not a size; write for example 256MB") from None


def as_bytes(size: int | str) -> int:
    """Return a size that may be written as text, in bytes. Raises ValueError if it is not a size."""
    return parse_size(size) if isinstance(size, str) else size


def format_size(size: float) -> str:
    """Return a number of bytes as short text: 512 B, 7.3 KB, 94.1 MB."""
    for unit in ("B", "KB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.0f} B" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.4g} TB"
