"""The command line: its verbs, errors and exit statuses.

Results go to stdout, as one JSON object with --json. Progress, notes and errors go to stderr. Exit
status 0: done; 1: the work failed or found damage; 2: wrong usage; 130: interrupted.
"""

from __future__ import annotations

import argparse
import ast
import logging
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from wdstrain import __version__
from wdstrain.cli.common import Parser, UsageProblem, print_json
from wdstrain.errors import UsageError, WdstrainError
from wdstrain.report.terminal import flush_results, print_error, quiet

_VERBS = {  # the module that adds a verb, and what it does
    "convert": ("sets", "convert a data set into shards"),
    "index": ("sets", "make or refresh the index of shards, and add columns to it"),
    "info": ("inspection", "count what shards hold: samples, sizes, images, labels"),
    "show": ("inspection", "print samples as a table, or draw them as a contact sheet"),
    "verify": ("inspection", "read every byte of shards and compare it with their index"),
    "repair": ("inspection", "copy the intact samples of damaged shards"),
    "remove": ("sets", "remove samples from a set of shards"),
    "plan": (
        "inspection",
        "show what an epoch will read, hold in memory and mix, without reading it",
    ),
    "bench": ("inspection", "measure each stage of loading, and name the bottleneck"),
    "train": ("train", "train a model on shards"),
    "evaluate": ("train", "evaluate a checkpoint on shards"),
    "predict": ("train", "predict the labels of images, as a table"),
    "export": ("train", "export a trained model for other programs"),
    "serve": ("sets", "let other programs and machines read a folder of shards over HTTP"),
    "demo": ("train", "convert, verify and train on scans of handwritten digits"),
}

# first words of a sentence that says what to do next
_ADVICE = (
    "Accept|Add|Change|Check|Choose|Continue|Convert|Copy|Correct|Delete|Did you mean|Divide|"
    "Download|Drop|Fix|Free|Give|Install|Keep|Leave|List|Look|Lower|Make|Mend|Move|Name|Number|"
    "Omit|Only|Pack|Pass|Put|Raise|Remove|Rename|Repack|Repair|Request|Resume|Rerun|Run|Save|Say|"
    "See|Set|Shorten|Start|State|Store|Take|Try|Unpack|Unset|Use|Wait|Write"
)
_HINT = re.compile(rf"(?<=[.?!)\]]) (?=(?:{_ADVICE})\b)")
_VALUE = r"""\.\.\.|\{[^{}]*\}|\[[^\[\]]*\]|\([^()]*\)|"[^"]*"|'[^']*'|[\w./:+-]*\w"""


def main(words: Sequence[str]) -> int:
    """Run one command, and return its exit status."""
    try:
        if words[:1] == ["convert"]:
            words = import_module("wdstrain.cli.sets").with_kind(words)
        arguments, unknown = _parser(words).parse_known_args(words)
        if unknown:
            raise UsageProblem(arguments.parser, f"unrecognized option {unknown[0]!r}")
    except UsageProblem as problem:
        report_error(_usage_error(problem), {}, words, as_json="--json" in words)
        return 2
    except UsageError as error:
        report_error(str(error), {}, words, as_json="--json" in words)
        return error.exit_code
    with quiet(arguments.quiet), _log_messages(arguments):
        return _run(arguments, words)


def _run(arguments: argparse.Namespace, words: Sequence[str]) -> int:
    flags = {**_flags(arguments.parser), **getattr(arguments, "flags", {})}
    try:
        status = int(arguments.verb(arguments))
        flush_results()
        return status
    except WdstrainError as error:
        if arguments.debug:
            raise
        report_error(str(error), flags, words, as_json=arguments.json)
        return error.exit_code
    except KeyboardInterrupt:
        report_error(f"interrupted. {arguments.interrupted}", {}, (), as_json=arguments.json)
        return 130
    except BrokenPipeError:  # the reader of our output has ended, which is no error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


@contextmanager
def _log_messages(arguments: argparse.Namespace) -> Iterator[None]:
    """Print the package's log messages meanwhile: all with --verbose, only errors with --quiet."""
    log, handler = logging.getLogger("wdstrain"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    level, added = log.level, bool(arguments.verbose)
    if arguments.verbose or arguments.quiet:
        log.setLevel(logging.DEBUG if arguments.verbose else logging.ERROR)
    if added:
        log.addHandler(handler)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(handler)


def _usage_error(problem: UsageProblem) -> str:
    """Return the message for words that do not parse, with the option or verb they resemble."""
    message, parser = str(problem), problem.parser
    message = re.sub(
        r"invalid (int|float) value: (.*)",
        lambda match: f"{match[2]} is not {'an integer' if match[1] == 'int' else 'a number'}",
        message,
    )
    choice = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
    if choice:
        known, word = re.findall(r"[\w-]+", choice[2]), choice[1]
    elif message.startswith("unrecognized"):
        known, word = list(_flags(parser).values()), message.split("'")[1].partition("=")[0]
    else:
        known, word = [], ""
    near = get_close_matches(word, known, 1, 0.5)
    hint = f"Did you mean {near[0]}?" if near else f"Run: {parser.prog} --help"
    return f"{message}. {hint}"


def _flags(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return the flags of a parser by the names of the keyword arguments that they stand for."""
    flags = re.findall(r"--[a-z][a-z-]*|-[a-z]\b", parser.format_usage())
    return {flag.lstrip("-").replace("-", "_"): flag for flag in flags}


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser for a command line. Only the named verb has its options: that is fast."""
    parser = Parser(
        prog="wdstrain",
        description="Convert data sets to WebDataset tar shards, look at them, and train on them.",
        epilog="example: wdstrain convert folder photos/ shards/photos",
    )
    parser.add_argument("--version", action="version", version=f"wdstrain {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True, parser_class=Parser)
    named = next((word for word in words if not word.startswith("-")), "")
    for name, (module, text) in _VERBS.items():
        if name == named:
            getattr(import_module(f"wdstrain.cli.{module}"), f"add_{name}")(verbs, text)
        else:
            verbs.add_parser(name, help=text)
    return parser


# --- errors as the shell shows them --------------------------------------------------------------


def report_error(
    message: str, flags: Mapping[str, str], words: Sequence[str], *, as_json: bool
) -> None:
    """Print an error for people to stderr, and with `as_json` as an object to stdout.

    words: of the command line. Names in them stay as they are in the message: while flags and hint
    are looked for, a letter of Linear A stands for each name that looks like an option or advice.
    """
    names = {name for word in words for name in (word, *re.split("[,=]", word))}
    changed = [name for name in names if split_hint(with_flags(name, flags)) != (name, "")]
    letters = dict(enumerate(sorted(changed, key=len, reverse=True), 0x10600))
    for letter, name in letters.items():
        message = re.sub(rf"(?<!\w){re.escape(name)}(?![\w=])", chr(letter), message)
    error, hint = (part.translate(letters) for part in split_hint(with_flags(message, flags)))
    print_error(f"error: {error}".replace("\n", " ") + (f"\nhint: {hint}" if hint else ""))
    if as_json:
        print_json({"error": error, "hint": hint or None})


def split_hint(message: str) -> tuple[str, str]:
    """Return the problem, and the advice that follows it; empty if there is none."""
    parts = _HINT.split(message, maxsplit=1)
    return (parts[0], parts[1]) if len(parts) == 2 else (message, "")


def with_flags(message: str, flags: Mapping[str, str]) -> str:
    """Return a message with `--name value` for each `name=value` of a keyword argument.

    flags: {keyword argument: flag}.
    """
    names = "|".join(map(re.escape, flags)) or "(?!)"  # without flags, a pattern of nothing
    unmistakable = "|".join(re.escape(name) for name in flags if "_" in name) or "(?!)"
    return re.sub(
        rf"""(?<![\w./='"-])(?:({names})=({_VALUE})|({unmistakable})(?![\w=/'"-]|\.\w))""",
        lambda match: _as_flag(flags[match[1]], match[2]) if match[1] else flags[match[3]],
        message,
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
