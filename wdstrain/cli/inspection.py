"""Verbs that look at shards or measure them: info, show, verify, repair, plan, bench."""

from __future__ import annotations

import argparse
from typing import Any

from wdstrain.cli.common import FunctionVerb, Shown, add_options, given, is_utf8, result, verb
from wdstrain.inspection.options import (
    InfoOptions,
    PeekOptions,
    PlanOptions,
    RepairOptions,
    VerifyOptions,
)
from wdstrain.inspection.result import text_of
from wdstrain.report.terminal import print_message, print_result, table_text
from wdstrain.tuning.options import BenchOptions

_BAR = 30  # characters of the longest bar
_NAME = 24  # characters of a class's name
_SHOWN = 24  # samples of `show`, unless --limit is given
_WIDTH = 80  # columns of the bars
_MOST = 20  # bars


def _rows(done: Any, seconds: float) -> Shown:
    return done.as_dict(), done.rows(), ""


def _with_bars(done: Any, seconds: float) -> Shown:
    labels = [column for column in done.columns if column.is_label]
    bars = "".join(f"\n\n{column.name}:\n{_bars(column.bars(_MOST))}" for column in labels)
    return done.as_dict(), done.rows(), bars


def _bars(counts: dict[str, int]) -> str:
    """Return a line for each class or interval: name, bar, samples, share."""
    most, total = max([1, *counts.values()]), max(1, sum(counts.values()))
    full, thin = "█▏" if is_utf8() else "##"
    rows = []
    for name, count in counts.items():
        bar = full * round(_BAR * count / most) or thin * (count > 0)
        rows.append((f"  {name:.{_NAME}}", bar, f"{count:>9}", f"{count / total:6.1%}"))
    return table_text(rows, width=_WIDTH)


def _timed(done: Any, seconds: float) -> Shown:
    took = [("seconds", text_of(seconds))]
    return {**done.as_dict(), "seconds": seconds}, [*done.rows(), *took], ""


_TRAINING = "'shards/photos/train-*.tar'"
FUNCTIONS = {
    "info": FunctionVerb(InfoOptions, "inspection.info.info", "info shards/photos", _with_bars),
    "verify": FunctionVerb(
        VerifyOptions, "inspection.verify.verify", "verify shards/photos --decode", _timed
    ),
    "repair": FunctionVerb(
        RepairOptions, "inspection.repair.repair", "repair shards/photos -o shards/saved", _timed
    ),
    "plan": FunctionVerb(
        PlanOptions,
        "inspection.plan.plan_epoch",
        f"plan {_TRAINING} --batch-size 16 --world-size 2",
        _rows,
    ),
    "bench": FunctionVerb(BenchOptions, "tuning.bench.bench", f"bench {_TRAINING} --tune", _rows),
}


def add_show(verbs: Any, text: str) -> None:
    """Add `show`."""
    parser = verb(verbs, "show", _show, text, "show shards/photos -o sheet.png --random")
    add_options(parser, PeekOptions)
    about = "contact sheet to write (default: print a table)"
    parser.add_argument("-o", "--out", metavar="FILE.png", help=about)


def _show(arguments: argparse.Namespace) -> int:
    options = PeekOptions(**{"n": _SHOWN, **given(arguments, PeekOptions)})

    from wdstrain.inspection.show import peek  # only now: it loads torch, which takes a second

    peeked, file = peek(**vars(options)), arguments.out
    if file:
        peeked.save(file)
    elif not arguments.json:
        print_result(repr(peeked))
        return 0
    for view in peeked.bad:
        print_message(f"{view.shard}: '{view.key}' at offset {view.offset}: {view.error}")
    for note in peeked.notes:
        print_message(note)
    rows = [("shown", peeked.title), ("broken", str(len(peeked.bad))), ("file", file or "")]
    result(arguments, {**peeked.as_dict(), "file": file}, rows)
    return 0
