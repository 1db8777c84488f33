"""The command line: its verbs, errors and exit statuses.

Results go to stdout, as one JSON object with --json. Progress, notes and errors go to stderr. Exit
status 0: done; 1: the work failed or found damage; 2: wrong usage; 130: interrupted.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches

from wdstrain import __version__
from wdstrain.cli.bench import add_bench
from wdstrain.cli.common import Parser, UsageProblem
from wdstrain.cli.convert import add_convert
from wdstrain.cli.demo import add_demo
from wdstrain.cli.errors import report_error
from wdstrain.cli.index import add_index
from wdstrain.cli.info import add_info
from wdstrain.cli.plan import add_plan
from wdstrain.cli.remove import add_remove
from wdstrain.cli.repair import add_repair
from wdstrain.cli.serve import add_serve
from wdstrain.cli.show import add_show
from wdstrain.cli.train import add_training
from wdstrain.cli.verify import add_verify
from wdstrain.errors import WdstrainError
from wdstrain.report.terminal import flush_results, quiet

_VERBS = (
    add_convert,
    add_index,
    add_info,
    add_show,
    add_verify,
    add_repair,
    add_remove,
    add_plan,
    add_bench,
    add_training,
    add_serve,
    add_demo,
)


def main(words: Sequence[str]) -> int:
    """Run one command, and return its exit status."""
    try:
        arguments, unknown = _parser().parse_known_args(words)
        if unknown:
            raise UsageProblem(arguments.parser, f"unrecognized option {unknown[0]!r}")
    except UsageProblem as problem:
        report_error(_usage_error(problem), {}, as_json="--json" in words)
        return 2
    with quiet(arguments.quiet), _log_messages(arguments):
        return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    flags = {**_flags(arguments.parser), **getattr(arguments, "flags", {})}
    try:
        status = int(arguments.verb(arguments))
        flush_results()
        return status
    except WdstrainError as error:
        if arguments.debug:
            raise
        report_error(str(error), flags, as_json=arguments.json)
        return error.exit_code
    except KeyboardInterrupt:
        report_error(f"interrupted. {arguments.interrupted}", {}, as_json=arguments.json)
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
    message = re.sub(r"invalid int value: (.*)", r"\1 is not an integer", message)
    message = re.sub(r"invalid float value: (.*)", r"\1 is not a number", message)
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


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="wdstrain",
        description="Convert data sets to WebDataset tar shards, look at them, and train on them.",
        epilog="example: wdstrain convert folder photos/ shards/photos",
    )
    parser.add_argument("--version", action="version", version=f"wdstrain {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True, parser_class=Parser)
    for add in _VERBS:
        add(verbs)
    return parser
