"""The verb info: what is in some shards, as tables of 80 columns or as JSON."""

from __future__ import annotations

import argparse
import json
from shutil import get_terminal_size
from textwrap import fill
from typing import Any

from wdstrain.cli.words import selected, urls, verb, where
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
    """Add the verb to those of the command line."""
    info = verb(
        verbs,
        "info",
        _info,
        "what is in shards: samples, sizes, pictures, labels",
        "info shards/photos",
    )
    urls(info)
    where(info)
    info.add_argument(
        "--exact",
        action="store_true",
        help="walk over every header of shards that have no index, which is remembered, and read every label",
    )


def _info(arguments: argparse.Namespace) -> int:
    from wdstrain.inspecting.doors import info
    from wdstrain.inspecting.facts import SIZES, told
    from wdstrain.inspecting.histograms import notes, shown, spread

    with ProgressReporter() as teller:
        found = info(
            selected(arguments, one_split=False),
            exact=arguments.exact,
            note=teller.line,
            progress=lambda title, done, total: teller.step(title, done, total, unit="labels"),
        )
    if arguments.json:
        print_result(json.dumps(found.as_dict(), ensure_ascii=False))
    else:
        print_table(found.summary())
        if found.contents:
            print_grid(
                ["field", *SIZES], [[one.name, *found.sizes_of(one)] for one in found.contents]
            )
            print_table((one.name, told(one)) for one in found.contents)
        for one in found.histograms:
            line = f"{one.label}: {'; '.join(notes(one))}"
            print_result(f"\n{fill(line, get_terminal_size().columns)}")
            if one.classes:
                _bars(shown(one), about=not one.exact)
            else:
                print_table(spread(one))
    for sentence in found.findings:
        print_message(sentence)
    return 0 if found.ok else 1


def _bars(counts: dict[str, int], *, about: bool) -> None:
    """A line for each class: name, bar, samples, share."""
    most, whole = max(1, *counts.values()), max(1, sum(counts.values()))
    width = min(_NAME, max(map(len, counts)))
    digits = len(str(most)) + about
    for name, count in counts.items():
        cut = name if len(name) <= _NAME else f"{name[: _NAME - 3]}..."
        bar = "█" * round(_BAR * count / most) or "▏" * (count > 0)
        print_result(
            f"  {cut:<{width}}  {bar:<{_BAR}}  {'~' * about + str(count):>{digits}}  {count / whole:6.1%}"
        )
