"""The command line: its verbs, errors and exit statuses.

Results go to stdout, as one JSON object with --json. Progress, notes and errors go to stderr. Exit
status 0: done; 1: the work failed or found damage; 2: wrong usage; 130: interrupted.
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from wdstrain import __version__
from wdstrain.cli.common import Parser, add_verb, given, print_json
from wdstrain.errors import UsageError, WdstrainError, as_keyword
from wdstrain.report.terminal import print_error, quiet

_VERBS = {  # the module that adds a verb, and what it does
    "convert": ("sets", "convert a data set into shards"),
    "index": ("sets", "make or refresh the index of shards, and add columns to it"),
    "join": ("sets", "add columns of a table to the index of shards, without packing them again"),
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
    "compare": ("train", "compare runs: their results, and the options that differ"),
    "predict": ("train", "predict the labels of images, as a table"),
    "export": ("train", "export a trained model for other programs"),
    "serve": ("sets", "let other programs and machines read a folder of shards over HTTP"),
    "demo": ("train", "convert, verify and train on cuts of ten photographs"),
}


def main(words: Sequence[str]) -> int:
    """Run one command, and return its exit status."""
    try:
        if words[:1] == ["convert"]:
            words = import_module("wdstrain.cli.sets").with_kind(words)
        arguments, unknown = _parser(words).parse_known_args(words)
        if unknown:
            arguments.parser.error(f"unrecognized option {unknown[0]!r}")
    except UsageError as error:
        report_error(error, {}, as_json="--json" in words)
        return error.exit_code
    with quiet(arguments.quiet), _log_messages(arguments):
        return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    try:
        return int(arguments.verb.run(arguments, given(arguments)))
    except WdstrainError as error:
        if arguments.debug:
            raise
        report_error(error, arguments.flags, as_json=arguments.json)
        return error.exit_code
    except KeyboardInterrupt:
        interrupted = WdstrainError("interrupted.", arguments.verb.interrupted)
        report_error(interrupted, {}, as_json=arguments.json)
        return 130
    except BrokenPipeError:  # the reader of our output has ended, which is no error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


@contextmanager
def _log_messages(arguments: argparse.Namespace) -> Iterator[None]:
    """Print the package's log messages meanwhile: all with --verbose, only errors with --quiet."""
    log, handler = logging.getLogger("wdstrain"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    level = log.level
    log.setLevel(
        logging.DEBUG if arguments.verbose else logging.ERROR if arguments.quiet else level
    )
    if arguments.verbose:
        log.addHandler(handler)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(handler)


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
    for name, (place, text) in _VERBS.items():
        if name != named:
            verbs.add_parser(name, help=text)
            continue
        module = import_module(f"wdstrain.cli.{place}")
        if name == "convert":
            module.add_convert(verbs, text)
        else:
            add_verb(verbs, name, module.VERBS[name], text)
    return parser


# --- errors as the shell shows them --------------------------------------------------------------


def report_error(error: WdstrainError, flags: Mapping[str, str], *, as_json: bool) -> None:
    """Print an error for people to stderr, and with `as_json` as an object to stdout.

    flags: {keyword argument: flag}.
    """

    def words(name: str, value: Any) -> str:
        return _as_words(flags[name], value) if name in flags else as_keyword(name, value)

    problem, hint = error.texts(words)
    for kind, text in (("error", problem), ("hint", hint)):
        if text:
            print_error(f"{kind}: {text}".replace("\n", " "))
    if as_json:
        print_json({"error": problem, "hint": hint or None})


def _as_words(flag: str, value: Any) -> str:
    """Return the words of a command line that give an option its value; the flag, if it is `...`."""
    if value is ... or value is True:
        return flag
    if value is False:
        return f"--no-{flag.removeprefix('--').removeprefix('no-')}"
    if isinstance(value, Mapping):
        value = [f"{key}={item}" for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        value = ",".join(map(str, value))
    return f"{flag} {shlex.quote(str(value))}"
