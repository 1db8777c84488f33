"""Text from data that is safe to show: it cannot steer a terminal or break a page."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return a text as one line without control characters.

    Whitespace becomes a space. Other characters that cannot be printed become U+FFFD. Zero-width
    joiners stay, because scripts and emoji need them.
    """
    return "".join(
        char
        if char.isprintable() or char in "\u200c\u200d"
        else " "
        if char.isspace()
        else "\ufffd"
        for char in text
    )


def counted(count: int, name: str) -> str:
    """Return a number of things, such as "1 shard", "3 shards" or "2 classes"."""
    several = f"{name}es" if name.endswith(("s", "tch")) else f"{name}s"
    return f"{count} {name if count == 1 else several}"
