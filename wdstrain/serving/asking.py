"""What a request asks of a folder of files: names, a part of a file, conditions. Pure functions, by RFC 9110.

What a request may name is decided here on words alone, before any file is looked at: a name that is hidden, empty, or holds a
separator once it is decoded is no name. A `Range` that this server does not know (several parts, other units, nonsense) is
passed over, as the RFC allows, and the whole is given; only a part that lies behind the end is refused.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from email.message import Message
from email.utils import mktime_tz, parsedate_tz
from http import HTTPStatus
from urllib.parse import unquote_to_bytes

_LONGEST = 4096  # bytes of a path, as Linux knows them; each may be written as three
_SPAN = re.compile(r"bytes=([0-9]*)-([0-9]*)", re.IGNORECASE)
_DIGITS = 18  # of a byte's number: more than any file has, and quick to read
_TAG = re.compile(r'(W/)?("[^"]*")')


def names_of(target: str) -> list[str] | None:
    """The names of folders and file that a request's target means, the last one empty where it ends with a slash.

    target: as http.server reads it, in latin-1. None if nothing can be called so.
    """
    path = target.partition("?")[0]
    if not path.startswith("/") or len(path) > 3 * _LONGEST:
        return None
    names = [os.fsdecode(unquote_to_bytes(part.encode("latin-1"))) for part in path[1:].split("/")]
    if any(not is_shown(name) for name in names[:-1]) or not (
        names[-1] == "" or is_shown(names[-1])
    ):
        return None
    return names if sum(map(len, names)) + len(names) < _LONGEST else None


def is_shown(name: str) -> bool:
    """Whether a file of this name can be asked for. A backslash is a separator to some clients, so it is none of ours."""
    return name != "" and not name.startswith(".") and not any(one in name for one in "/\\\0")


def span_of(ranges: Sequence[str], size: int) -> tuple[int, int] | None:
    """Bytes [start, stop) that the Range headers ask for; None: all. Empty where the file has no such byte."""
    found = _SPAN.fullmatch(ranges[0].strip()) if len(ranges) == 1 else None
    if found is None or found[1] == found[2] == "":
        return None
    if not found[1]:
        length = _number(found[2])
        return (
            None if length and not size else (max(0, size - length), size)
        )  # the end of nothing is all of it
    start, stop = (
        _number(found[1]),
        _number(found[2]) + 1 if found[2] else max(size, _number(found[1]) + 1),
    )
    return (start, min(stop, size)) if start < stop else None


def answer_instead(headers: Message, tag: str, modified: int) -> HTTPStatus | None:
    """What is answered in place of a file with this ETag and time: 412, 304, or None where its conditions hold."""
    wanted = headers.get_all("If-Match")
    if wanted is not None:
        if not _names_tag(wanted, tag, weak=False):
            return HTTPStatus.PRECONDITION_FAILED
    elif modified > _date(headers.get("If-Unmodified-Since"), modified):
        return HTTPStatus.PRECONDITION_FAILED
    known = headers.get_all("If-None-Match")
    if known is not None:
        return HTTPStatus.NOT_MODIFIED if _names_tag(known, tag, weak=True) else None
    return (
        HTTPStatus.NOT_MODIFIED if modified <= _date(headers.get("If-Modified-Since"), -1) else None
    )


def part_holds(headers: Message, tag: str, modified: int) -> bool:
    """Whether the part may be given that is asked for: If-Range is absent or means this file.

    A time says which file it was only once its second is over.
    """
    text = headers.get("If-Range")
    return (
        text is None
        or text.strip() == tag
        or (_date(text, -1) == modified and time.time() >= modified + 1)
    )


def _number(digits: str) -> int:
    digits = digits.lstrip("0") or "0"
    return int(digits) if len(digits) <= _DIGITS else 10**_DIGITS


def _names_tag(lines: Sequence[str], tag: str, *, weak: bool) -> bool:
    text = ",".join(lines)
    return text.strip() == "*" or any(
        one[2] == tag and (weak or not one[1]) for one in _TAG.finditer(text)
    )


def _date(text: str | None, default: int) -> int:
    """Seconds since 1970; the default where there is no date, or none that can be read."""
    try:
        parsed = parsedate_tz(text or "")
        return int(mktime_tz(parsed)) if parsed else default
    except (ValueError, TypeError, IndexError, OverflowError):
        return default
