"""What verbs share: parsers and flags, chosen samples, results, and the summary of an index."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NoReturn

from wdstrain.cli.flags import add_options
from wdstrain.report.terminal import ProgressReporter, print_result, print_table
from wdstrain.shards.index import Index
from wdstrain.shards.resolve import open_index, require_one_split

Verb = Callable[[argparse.Namespace], int]


class UsageProblem(Exception):
    """Words that argparse cannot take. `parser` is the one that refused them."""

    def __init__(self, parser: argparse.ArgumentParser, message: str) -> None:
        super().__init__(message)
        self.parser = parser


class Parser(argparse.ArgumentParser):
    """Parser without abbreviations, whose errors are exceptions."""

    def __init__(self, **words: Any) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(allow_abbrev=False, formatter_class=formatter, **words)

    def error(self, message: str) -> NoReturn:
        """Raise UsageProblem."""
        raise UsageProblem(self, message.removeprefix("argument "))


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
    return require_one_split(open_index(addresses), addresses).where(arguments.where)


def result(
    arguments: argparse.Namespace, found: dict[str, Any], rows: list[tuple[str, str]]
) -> None:
    if arguments.json:
        print_result(json.dumps(found, ensure_ascii=False))
    else:
        print_table(rows)


def step_bytes(
    reporter: ProgressReporter, title: str, done: int, total: int | None, text: str
) -> None:
    """Report progress in megabytes. done, total: bytes."""
    megabytes = None if total is None else total // 10**6
    reporter.step(title, done // 10**6, megabytes, text, "MB")


def facts(index: Index) -> dict[str, Any]:
    return {
        "samples": len(index),
        "shards": len(index.shards),
        "bytes": sum(shard.bytes for shard in index.shards),
        "splits": _splits(index),
        "fields": list(index.fields),
        "labels": [asdict(label) for label in index.labels],
        "columns": [
            {**column.described, "missing": column.values.null_count} for column in index.columns
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
    for label in index.labels:
        some = ", ".join(label.classes[:10]) + (", ..." if len(label.classes) > 10 else "")
        plural = "es" if len(label.classes) != 1 else ""
        several = "any of " if label.kind == "multi" else ""
        what = (
            "a number"
            if label.kind == "number"
            else f"{several}{len(label.classes)} class{plural}: {some}"
        )
        rows.append((f"label {label.name}", what))
    return rows


def _splits(index: Index) -> dict[str, int]:
    return {
        split: sum(shard.samples for shard in index.shards if shard.split == split)
        for split in index.splits
    }
