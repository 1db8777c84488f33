"""Verbs that look at shards or measure them: info, show, verify, repair, plan, bench."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from wdstrain.cli.common import Shown, Verb, calling, is_utf8, print_json
from wdstrain.inspection.options import (
    InfoOptions,
    PeekOptions,
    PlanOptions,
    RepairOptions,
    VerifyOptions,
)
from wdstrain.inspection.result import text_of
from wdstrain.report.terminal import print_message, print_result, table_text
from wdstrain.runtime.options import option
from wdstrain.tuning.options import BenchOptions

_BAR = 30  # characters of the longest bar
_NAME = 24  # characters of a class's name
_SHOWN = 24  # samples of `show`, unless --limit is given
_WIDTH = 80  # columns of the bars
_MOST = 20  # bars


def _rows(done: Any, seconds: float) -> Shown:
    return done.as_dict(), done.rows(), ""


def _with_bars(done: Any, seconds: float) -> Shown:
    bars = "".join(
        f"\n\n{column.name}:\n{_bars(column.bars(_MOST))}"
        for column in done.columns
        if column.is_label
    )
    return done.as_dict(), done.rows(), bars


def _bars(counts: dict[str, int]) -> str:
    """Return a line for each class or interval: name, bar, samples, share."""
    most, total = max([1, *counts.values()]), max(1, sum(counts.values()))
    full, thin = "█▏" if is_utf8() else "##"
    rows = [
        (
            f"  {name:.{_NAME}}",
            full * round(_BAR * count / most) or thin * (count > 0),
            f"{count:>9}",
            f"{count / total:6.1%}",
        )
        for name, count in counts.items()
    ]
    return table_text(rows, width=_WIDTH)


def _timed(done: Any, seconds: float) -> Shown:
    return (
        {**done.as_dict(), "seconds": seconds},
        [*done.rows(), ("seconds", text_of(seconds))],
        "",
    )


@dataclass(frozen=True, kw_only=True)
class _ShowOptions(PeekOptions):
    out: str | None = option(
        None,
        "contact sheet to write (default: print a table)",
        metavar="FILE.png",
        flag="-o --out",
    )


def _show(arguments: argparse.Namespace, given: dict[str, Any]) -> int:
    file = given.pop("out", None)
    options = PeekOptions(**{"n": _SHOWN, **given})

    from wdstrain.inspection.show import peek  # only now: it loads torch, which takes a second

    peeked = peek(**vars(options))
    if file:
        peeked.save(file)
    for view in peeked.bad:
        print_message(f"{view.shard}: '{view.key}' at offset {view.offset}: {view.error}")
    if arguments.json:
        print_json({**peeked.as_dict(), "file": file})
    else:
        print_result(f"{peeked.title}\n{file}" if file else repr(peeked))
    return 0


_TRAINING = "'shards/photos/train-*.tar'"
VERBS = {
    "info": Verb(InfoOptions, "info shards/photos", calling("inspection.info:info", _with_bars)),
    "show": Verb(_ShowOptions, "show shards/photos -o sheet.png --random", _show),
    "verify": Verb(
        VerifyOptions,
        "verify shards/photos --decode",
        calling("inspection.verify:verify", _timed),
    ),
    "repair": Verb(
        RepairOptions,
        "repair shards/photos -o shards/saved",
        calling("inspection.repair:repair", _timed),
    ),
    "plan": Verb(
        PlanOptions,
        f"plan {_TRAINING} --batch-size 16 --world-size 2",
        calling("inspection.plan:plan_epoch", _rows),
    ),
    "bench": Verb(BenchOptions, f"bench {_TRAINING} --tune", calling("tuning.bench:bench", _rows)),
}
