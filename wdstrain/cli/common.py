"""Parsers, verbs of one function, flags from option dataclasses, results, and a set's summary."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import time
import typing
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from operator import attrgetter
from pkgutil import resolve_name
from textwrap import wrap
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from wdstrain.errors import UsageError
from wdstrain.report.terminal import print_error, print_message, print_result, table_text
from wdstrain.runtime.options import (
    REQUIRED,
    choices_of,
    help_text,
    parse_list,
    parse_pair,
    types_of,
)

if TYPE_CHECKING:
    from wdstrain.shards.index import Index

Run = Callable[[argparse.Namespace, dict[str, Any]], int]
Rows = Sequence[tuple[str, ...]]
Shown = tuple[dict[str, Any], Rows, str]  # as JSON, as rows of a table, as text below the table

_PLAIN = (int, float, str)
_MOST_FINDINGS = 20  # that are printed one by one


class Parser(argparse.ArgumentParser):
    """Parser without abbreviations, whose errors are UsageErrors."""

    def __init__(self, **words: Any) -> None:
        super().__init__(
            allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **words
        )

    def error(self, message: str) -> NoReturn:
        """Raise UsageError, with the option or verb that the words resemble."""
        message = message.removeprefix("argument ")
        for kind, name in (("int", "an integer"), ("float", "a number")):
            message = re.sub(rf"invalid {kind} value: (.*)", rf"\1 is not {name}", message)
        known, word = list[str](), ""
        if choice := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            known, word = re.findall(r"[\w-]+", choice[2]), choice[1]
        elif message.startswith("unrecognized"):
            known = re.findall(r"--[a-z][a-z-]*", self.format_usage())
            word = message.split("'")[1].partition("=")[0]
        near = get_close_matches(word, known, 1, 0.5)
        raise UsageError(
            f"{message}.", f"Did you mean {near[0]}?" if near else f"Run: {self.prog} --help"
        )


class Verb(NamedTuple):
    """A verb of the command line.

    options: dataclass, whose fields are the words and flags of the verb. example: words after
    `wdstrain`. run: does the work with the options that were given, and returns the exit status.
    interrupted: hint after Ctrl-C. groups: {title: names of the fields that are listed below it}.
    """

    options: type[Any]
    example: str
    run: Run
    interrupted: str = "Run the same command again to start anew."
    groups: Mapping[str, Collection[str]] = MappingProxyType({})


def add_verb(parent: Any, name: str, verb: Verb, text: str) -> None:
    """Add a verb with its own options and the flags of all verbs. text: its help."""
    lines = wrap(
        f"example: wdstrain {verb.example}", 76, subsequent_indent=" " * 8, break_on_hyphens=False
    )
    parser: argparse.ArgumentParser = parent.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=" \\\n".join(lines),
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.add_argument("-q", "--quiet", action="store_true", help="print no progress and no notes")
    parser.add_argument("-v", "--verbose", action="store_true", help="print log messages")
    parser.add_argument("--debug", action="store_true", help="print the traceback of an error")
    flags = _add_options(parser, verb.options, verb.groups)
    parser.set_defaults(parser=parser, verb=verb, flags=flags)


def calling(function: str, shown: Callable[[Any, float], Shown]) -> Run:
    """Return what runs a verb that calls one function and prints its result.

    function: MODULE:NAME below the package. shown: function of the result and of the seconds that it
    took.
    """
    return partial(_call, function, shown)


def _call(
    function: str,
    shown: Callable[[Any, float], Shown],
    arguments: argparse.Namespace,
    given: dict[str, Any],
) -> int:
    options = arguments.verb.options(**given)  # checked before torch is imported
    warnings.filterwarnings("ignore", module=r"PIL\.")  # of images that it can decode
    begun = time.monotonic()
    done = resolve_name(f"wdstrain.{function}")(**vars(options))
    result(arguments, *shown(done, round(time.monotonic() - begun, 3)))
    for note in getattr(done, "notes", ()):
        print_message(f"note: {note}")
    findings = getattr(done, "findings", ())
    _print_findings(findings)
    return 1 if findings else 0


def _print_findings(findings: Sequence[Any]) -> None:
    """Print findings; many of them by kind, with the first of each."""
    kinds: dict[Any, list[Any]] = {}
    for finding in findings:
        is_one_of_many = len(findings) > _MOST_FINDINGS and bool(getattr(finding, "key", ""))
        kind = (finding.field, finding.kind) if is_one_of_many else finding
        kinds.setdefault(kind, []).append(finding)
    for same in sorted(kinds.values(), key=len, reverse=True):
        print_error(f"{len(same)} x {same[0]}" if len(same) > 1 else str(same[0]))
    if len(findings) > _MOST_FINDINGS:
        print_error(f"{len(findings)} findings of {len(kinds)} kinds. To list all: --json")


def result(
    arguments: argparse.Namespace, report: dict[str, Any], rows: Rows, below: str = ""
) -> None:
    """Print a result: `report` with --json, else a table of the rows and the text below it."""
    if arguments.json:
        print_json(report)
    else:
        print_result(table_text(rows) + below)


def print_json(report: dict[str, Any]) -> None:
    """Print a JSON object to stdout, as ASCII where stdout or a terminal would change its texts.

    JSON has no infinite and no undefined numbers; they become null.
    """
    text = json.dumps(report, ensure_ascii=False)
    print_result(
        json.dumps(
            json.loads(text, parse_constant=lambda _: None),
            ensure_ascii=not (is_utf8() and text.isprintable()),
        )
    )


def is_utf8() -> bool:
    """Return whether stdout takes every character."""
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"


def facts(index: Index) -> dict[str, Any]:
    """Return what verbs that make an index print of it as JSON."""
    return {
        "samples": len(index),
        "shards": len(index.shards),
        "bytes": sum(shard.bytes for shard in index.shards),
        "splits": {
            split: sum(shard.samples for shard in index.shards if shard.split == split)
            for split in index.splits
        },
        "fields": list(index.fields),
        "labels": [label.row for label in index.labels],
        "columns": [
            {**column.row, "missing": column.stored.null_count} for column in index.columns
        ],
    }


def summary(index: Index) -> list[tuple[str, str]]:
    """Return the same as rows for people."""
    known = facts(index)
    splits = ", ".join(f"{name} {count}" for name, count in known["splits"].items())
    return [
        ("samples", str(known["samples"])),
        ("shards", str(known["shards"])),
        ("MB", f"{known['bytes'] / 1e6:.1f}"),
        *([("splits", splits)] if any(index.splits) else []),
        ("fields", ", ".join(index.fields)),
        *((f"label {label.name}", label.summary) for label in index.labels),
    ]


# --- flags, made from the fields of option dataclasses -------------------------------------------


def _add_options(
    parser: argparse.ArgumentParser, options: type[Any], groups: Mapping[str, Collection[str]]
) -> dict[str, str]:
    """Add a positional word or a flag for each field, and return the flags by names of fields.

    Values that are not given are absent from the parsed arguments, so that the defaults are those
    of the dataclass. Options of Python only are left out.
    """
    made = {title: parser.add_argument_group(title) for title in groups}
    group_of = {name: made[title] for title, names in groups.items() for name in names}
    hints, flags = types_of(options), dict[str, str]()
    for field in sorted(dataclasses.fields(options), key=attrgetter("kw_only")):
        target, own = group_of.get(field.name, parser), field.metadata["flag"]
        if own is None:
            continue
        if own or field.kw_only:
            names = (own or f"--{field.name.replace('_', '-')}").split()
            _add_flag(target, field, names, hints[field.name])
            flags[field.name] = names[-1]
        else:
            _add_positional(target, field)
    return flags


def given(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options that were given, by the names of their keyword arguments."""
    fields = arguments.verb.options.__dataclass_fields__
    values = {name: value for name, value in vars(arguments).items() if name in fields}
    pairs = [name for name in values if fields[name].metadata["parse"] is parse_pair]
    return values | {name: dict(values[name]) for name in pairs}


def _add_positional(target: Any, field: dataclasses.Field[Any]) -> None:
    target.add_argument(
        field.name,
        metavar=field.metadata["metavar"] or field.name.upper(),
        help=help_text(field),
        nargs=("+" if field.default is REQUIRED else "*") if field.metadata["several"] else None,
    )


def _add_flag(target: Any, field: dataclasses.Field[Any], names: list[str], hint: Any) -> None:
    about = field.metadata
    words: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS}
    if switches := about.get("switches"):
        group = target.add_mutually_exclusive_group()
        for value, text in switches.items():
            group.add_argument(f"--{value}", action="store_const", const=value, help=text, **words)
        return
    words["help"] = help_text(field)
    if hint is bool:
        has_both = about["negatable"] or field.default is True
        words["action"] = argparse.BooleanOptionalAction if has_both else "store_true"
    else:
        words |= {"required": field.default is REQUIRED, "nargs": about.get("nargs")}
        words["type"] = _converter(about["parse"], hint)
        choices = choices_of(hint)
        words |= {"choices": choices} if choices else {"metavar": about["metavar"] or None}
        if about["several"] or about["parse"] is parse_list:
            words["action"] = "extend" if about["parse"] is parse_list else "append"
    target.add_argument(*names, **words)


def _converter(parse: Callable[[str], Any] | None, hint: Any) -> Callable[[str], Any]:
    """Return a function that parses a text, with an error that argparse prints."""
    if parse is None:
        kinds = typing.get_args(hint) or (hint,)  # of a union, or the type itself
        return next((kind for kind in _PLAIN if kind in kinds), str)

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except (ValueError, UsageError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert
