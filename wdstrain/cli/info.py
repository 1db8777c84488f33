"""The verb `info`: what shards hold, as tables of 80 columns or as JSON."""

from __future__ import annotations

import argparse
import json
from shutil import get_terminal_size
from textwrap import fill
from typing import Any

from wdstrain.cli.common import verb
from wdstrain.cli.flags import given
from wdstrain.inspection.options import InfoOptions
from wdstrain.report.terminal import (
    ProgressReporter,
    print_grid,
    print_message,
    print_result,
    print_table,
)

_BAR = 30  # characters of the longest bar
_NAME = 24  # of a class's name


def add_info(verbs: Any) -> None:
    """Add `info` to the verbs of the command line."""
    verb(
        verbs,
        "info",
        _info,
        "count what shards hold: samples, sizes, images, labels",
        "info shards/photos",
        InfoOptions,
    )


def _info(arguments: argparse.Namespace) -> int:
    from wdstrain.inspection.info.api import info
    from wdstrain.inspection.info.result import FIELD_HEAD

    with ProgressReporter() as reporter:
        found = info(
            **given(arguments, InfoOptions),
            note=reporter.line,
            progress=lambda work, done, total: reporter.step(work, done, total, unit="samples"),
        )
    if arguments.json:
        print_result(json.dumps(found.as_dict(), ensure_ascii=False))
    else:
        print_table(found.summary())
        if found.contents:
            print_grid(FIELD_HEAD, found.field_rows())
            print_table((one.name, one.text()) for one in found.contents)
        for column in found.charted():
            line = f"{column.name}: {'; '.join(column.notes())}"
            print_result(f"\n{fill(line, get_terminal_size().columns)}")
            if column.numbers is not None:
                print_table(column.facts())
            _print_bars(column.bars(), exact=column.exact)
        if others := found.other_columns():
            head = ("column", "kind", "missing", "values")
            print_grid(head, others, left=(0, 1, 3))
    for finding in found.findings:
        print_message(finding)
    return 0 if found.ok else 1


def _print_bars(counts: dict[str, int], *, exact: bool) -> None:
    """Print a line for each class or interval: name, bar, samples, share."""
    most, total = max([1, *counts.values()]), max(1, sum(counts.values()))
    width = min(_NAME, max(map(len, counts), default=0))
    about = "" if exact else "~"
    digits = len(f"{about}{most}")
    for name, count in counts.items():
        shown = name if len(name) <= _NAME else f"{name[: _NAME - 3]}..."
        bar = "█" * round(_BAR * count / most) or "▏" * (count > 0)
        number = f"{about}{count}"
        line = f"  {shown:<{width}}  {bar:<{_BAR}}  {number:>{digits}}  {count / total:6.1%}"
        print_result(line)
