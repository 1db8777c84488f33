"""Errors as the shell shows them: `error: ...` and `hint: ...`, with flags for keyword arguments."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Mapping
from typing import Any

from wdstrain.report.terminal import print_error, print_result

# first words of a sentence that says what to do next
_ADVICE = (
    "Accept|Add|Change|Check|Choose|Continue|Convert|Copy|Correct|Delete|Did you mean|Divide|Download|Drop|Fix|Free|Give|"
    "Install|Keep|Leave|List|Look|Lower|Make|Mend|Move|Name|Number|Omit|Only|Pack|Pass|Put|Raise|Remove|Rename|Repack|"
    "Repair|Request|Resume|Rerun|Run|Save|Say|See|Set|Shorten|Start|State|Store|Take|Try|Unpack|Unset|Use|Wait|Write"
)
_HINT = re.compile(rf"(?<=[.?!)\]]) (?=(?:{_ADVICE})\b)")
_VALUE = r"""\.\.\.|\{[^{}]*\}|\[[^\[\]]*\]|\([^()]*\)|"[^"]*"|'[^']*'|[\w./:+-]*\w"""


def report_error(message: str, flags: Mapping[str, str], *, as_json: bool) -> None:
    """Print an error for people to stderr, and with `as_json` as an object to stdout."""
    error, hint = split_hint(with_flags(message, flags))
    print_error(f"error: {error}" + (f"\nhint: {hint}" if hint else ""))
    if as_json:
        print_result(json.dumps({"error": error, "hint": hint or None}, ensure_ascii=False))


def split_hint(message: str) -> tuple[str, str]:
    """Return the problem, and the advice that follows it; empty if there is none."""
    parts = _HINT.split(message, maxsplit=1)
    return (parts[0], parts[1]) if len(parts) == 2 else (message, "")


def with_flags(message: str, flags: Mapping[str, str]) -> str:
    """Return a message with `--name value` for each `name=value` of a keyword argument.

    flags: {keyword argument: flag}.
    """
    if not flags:
        return message
    names = "|".join(map(re.escape, flags))
    message = re.sub(
        rf"(?<![\w./=-])({names})=({_VALUE})",
        lambda match: _as_flag(flags[match[1]], match[2]),
        message,
    )
    unmistakable = "|".join(re.escape(name) for name in flags if "_" in name)
    if not unmistakable:
        return message
    return re.sub(
        rf"(?<![\w./-])({unmistakable})(?![\w=/-]|\.\w)", lambda match: flags[match[1]], message
    )


def _as_flag(flag: str, text: str) -> str:
    if text == "...":
        return f"{flag} ..."
    try:
        value: Any = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    if value is True:
        return flag
    if value is False or value is None:
        return f"--no-{flag.removeprefix('--').removeprefix('no-')}" if value is False else flag
    if isinstance(value, dict):
        value = ",".join(f"{key}={item}" for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        value = ",".join(map(str, value))
    return f"{flag} {shlex.quote(str(value))}"
