"""Texts that come from data, as they may be shown: what a shard says must not steer a terminal or break a page."""

from __future__ import annotations


def printable(text: str) -> str:
    """A text as one line that any terminal, font and file can hold: what cannot be printed is shown as a mark."""
    return "".join(one if one.isprintable() or one in "\u200c\u200d" else " " if one.isspace() else "\ufffd" for one in text)
