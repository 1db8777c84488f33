"""Parsers, flags from option dataclasses, chosen samples, results, and the summary of an index."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NoReturn

from wdstrain.errors import UsageError
from wdstrain.report.terminal import Reporter, print_result, table_text
from wdstrain.runtime.options import REQUIRED, choices_of, help_text, parse_list, types_of

if TYPE_CHECKING:
    from wdstrain.shards.index import Index

Verb = Callable[[argparse.Namespace], int]

_Field = dataclasses.Field[Any]
_PLAIN = (int, float, str)


class Parser(argparse.ArgumentParser):
    """Parser without abbreviations, whose errors are UsageErrors."""

    def __init__(self, **words: Any) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(allow_abbrev=False, formatter_class=formatter, **words)

    def error(self, message: str) -> NoReturn:
        """Raise UsageError, with the option or verb that the words resemble."""
        message = message.removeprefix("argument ")
        for kind, name in (("int", "an integer"), ("float", "a number")):
            message = re.sub(rf"invalid {kind} value: (.*)", rf"\1 is not {name}", message)
        known: list[str] = []
        word = ""
        if choice := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            known, word = re.findall(r"[\w-]+", choice[2]), choice[1]
        elif message.startswith("unrecognized"):
            known, word = list(self.flags().values()), message.split("'")[1].partition("=")[0]
        near = get_close_matches(word, known, 1, 0.5)
        raise UsageError(
            f"{message}.", f"Did you mean {near[0]}?" if near else f"Run: {self.prog} --help"
        )

    def flags(self) -> dict[str, str]:
        """Return the flags by the names of the keyword arguments that they stand for."""
        flags = re.findall(r"--[a-z][a-z-]*|-[a-z]\b", self.format_usage())
        return {flag.lstrip("-").replace("-", "_"): flag for flag in flags}


def verb(
    parent: Any,
    name: str,
    run: Verb,
    text: str,
    example: str,
    options: type[Any] | None = None,
    out: tuple[str, str] | None = None,
) -> argparse.ArgumentParser:
    """Add a verb with the flags that all have, and return its parser.

    run: does the work and returns the exit status. text: what it does. example: its words after
    `wdstrain`. options: dataclass whose fields are its other flags. out: metavar and help
    of --out.
    """
    parser: argparse.ArgumentParser = parent.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=_example(example),
    )
    if options is not None:
        add_options(parser, options)
    if out is not None:
        parser.add_argument("-o", "--out", metavar=out[0], help=out[1])
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.add_argument("-q", "--quiet", action="store_true", help="print no progress and no notes")
    parser.add_argument("-v", "--verbose", action="store_true", help="print log messages")
    parser.add_argument("--debug", action="store_true", help="print the traceback of an error")
    parser.set_defaults(
        parser=parser, verb=run, interrupted="Run the same command again to start anew."
    )
    return parser


def add_verb(
    run: Verb,
    options: type[Any],
    example: str,
    verbs: Any,
    text: str,
    out: tuple[str, str] | None = None,
) -> None:
    """Add a verb, the first word of its example, to the verbs of the command line."""
    verb(verbs, example.split()[0], run, text, example, options, out)


def _example(words: str) -> str:
    """Return an example, on two lines if it is too long for one."""
    line = f"example: wdstrain {words}"
    if len(line) > 78:
        cut = line.rindex(" ", 0, 76)
        line = f"{line[:cut]} \\\n        {line[cut:]}"
    return line


def urls(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "urls",
        nargs="+",
        metavar="URL",
        help="folder, index.json, tar, glob or brace pattern of shards",
    )


def where(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--where",
        metavar="EXPR",
        help="only samples for which this holds, such as \"kids and label != 'Other'\"; "
        "names are the columns of the index",
    )


def selected(arguments: argparse.Namespace) -> list[str] | Index:
    """Return the addresses, or with --where the index of the chosen samples of one split."""
    addresses: list[str] = arguments.urls
    if arguments.where is None:
        return addresses
    from wdstrain.shards.resolve import open_shards

    return open_shards(addresses).where(arguments.where)


def result(
    arguments: argparse.Namespace, report: dict[str, Any], rows: list[tuple[str, str]]
) -> None:
    if arguments.json:
        print_json(report)
    else:
        print_result(table_text(rows))


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


def step_bytes(reporter: Reporter, title: str, done: int, total: int | None, text: str) -> None:
    """Report progress in megabytes. done, total: bytes."""
    megabytes = None if total is None else total // 10**6
    reporter.step(title, done // 10**6, megabytes, text, "MB")


def facts(index: Index) -> dict[str, Any]:
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
            {**column.row, "missing": column.values.null_count} for column in index.columns
        ],
    }


def summary(index: Index) -> list[tuple[str, str]]:
    known = facts(index)
    rows = [
        ("samples", str(known["samples"])),
        ("shards", str(known["shards"])),
        ("MB", f"{known['bytes'] / 1e6:.1f}"),
    ]
    if any(index.splits):
        rows.append(
            ("splits", ", ".join(f"{name} {count}" for name, count in known["splits"].items()))
        )
    rows.append(("fields", ", ".join(index.fields)))
    return rows + [(f"label {label.name}", label.summary) for label in index.labels]


# --- flags, made from the fields of option dataclasses -------------------------------------------


def add_options(
    parser: argparse.ArgumentParser,
    options: type[Any],
    groups: Mapping[str, Collection[str]] | None = None,
) -> None:
    """Add a positional word or a flag for each field of a dataclass.

    groups: {title: names of the fields that are listed below it}. Values that are not given are
    absent from the parsed arguments, so that the defaults are those of the dataclass.
    """
    made = {title: parser.add_argument_group(title) for title in groups or {}}
    group_of = {name: made[title] for title, names in (groups or {}).items() for name in names}
    hints, flags = types_of(options), _flags_of(options)
    fields = {field.name: field for field in dataclasses.fields(options)}
    for name, names in flags.items():
        target: Any = group_of.get(name, parser)
        if names:
            _add_flag(target, fields[name], names, hints[name])
        else:
            _add_positional(target, fields[name])
    known = {name: names[-1] for name, names in flags.items() if names}
    parser.set_defaults(flags={**(parser.get_default("flags") or {}), **known})


def _flags_of(options: type[Any]) -> dict[str, list[str]]:
    """Return the names of the flag of each option, and none for a positional word.

    Positional words come first. Options of Python only are left out.
    """
    flags = {}
    for field in sorted(dataclasses.fields(options), key=attrgetter("kw_only")):
        own = field.metadata["flag"]
        default = f"--{field.name.replace('_', '-')}" if field.kw_only else ""
        if own is not None:
            flags[field.name] = (own or default).split()
    return flags


def given(arguments: argparse.Namespace, options: type[Any]) -> dict[str, Any]:
    """Return the options that were given, by the names of their keyword arguments."""
    names = [field.name for field in dataclasses.fields(options)]
    values = {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
    return {name: dict(value) if _is_pairs(value) else value for name, value in values.items()}


def _is_pairs(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, tuple) for v in value)


def _add_positional(target: Any, field: _Field) -> None:
    several = {"nargs": "+"} if field.metadata["several"] else {}
    target.add_argument(
        field.name,
        metavar=field.metadata["metavar"] or field.name.upper(),
        help=_escaped(help_text(field)),
        **several,
    )


def _add_flag(target: Any, field: _Field, names: list[str], hint: Any) -> None:
    about, flag = field.metadata, names[-1]
    words: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS}
    if hint is bool:
        no_flag = f"--no-{flag.removeprefix('--')}"
        if field.default is True:
            words["help"] = _escaped(about["no_help"] or f"{about['help']} (default)")
            target.add_argument(no_flag, action="store_false", **words)
            return
        words["help"] = _escaped(help_text(field))
        negatable = argparse.BooleanOptionalAction if about["negatable"] else "store_true"
        target.add_argument(flag, action=negatable, **words)
        return
    if switches := about.get("switches"):
        group = target.add_mutually_exclusive_group()
        for value, text in switches.items():
            group.add_argument(f"--{value}", action="store_const", const=value, help=text, **words)
        return
    words |= {
        "help": _escaped(help_text(field)),
        "required": field.default is REQUIRED,
        "type": _converter(about["parse"], hint),
    }
    if choices := choices_of(field, hint):
        words["choices"] = choices
    else:
        words["metavar"] = about["metavar"] or None
    if about["several"] or about["parse"] is parse_list:
        words["action"] = "extend" if about["parse"] is parse_list else "append"
    target.add_argument(*names, **words)


def _converter(parse: Callable[[str], Any] | None, hint: Any) -> Callable[[str], Any]:
    """Return a function that parses a text, with an error that argparse prints."""
    if parse is None:
        return next((kind for kind in _PLAIN if kind in _parts(hint)), str)

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except (ValueError, UsageError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def _parts(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def _escaped(text: str) -> str:
    """Return a help text as argparse takes it, which formats it."""
    return text.replace("%", "%%")
