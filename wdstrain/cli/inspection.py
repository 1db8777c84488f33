"""Verbs that look at shards or measure them: info, show, verify, repair, plan, bench."""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from wdstrain.cli.common import add_verb, given, is_utf8, result
from wdstrain.inspection.options import (
    InfoOptions,
    PeekOptions,
    PlanOptions,
    RepairOptions,
    VerifyOptions,
    check_ending,
)
from wdstrain.inspection.result import Size, rows_of
from wdstrain.report.terminal import (
    Reporter,
    print_error,
    print_message,
    print_result,
    table_text,
)
from wdstrain.tuning.options import BenchOptions

if TYPE_CHECKING:
    from wdstrain.loader.stats import Finding

_BAR = 30  # characters of the longest bar
_NAME = 24  # characters of a class's name
_SHOWN = 24  # samples of `show`, unless --limit is given
_WIDTH = 80  # columns of the bars
_MOST = 20  # findings that are printed one by one, and bars


def _info(arguments: argparse.Namespace) -> int:
    from wdstrain.inspection.info import info

    with Reporter() as reporter:
        known = info(**given(arguments, InfoOptions), note=reporter.line)
    result(arguments, known.as_dict(), [row for row in known.rows() if row[0] != "findings"])
    for column in known.columns:
        if column.is_label and not arguments.json:
            print_result(f"\n{column.name}:\n{_bars(column.bars(_MOST))}")
    for finding in known.findings:
        print_message(finding)
    return 0 if known.ok else 1


def _bars(counts: dict[str, int]) -> str:
    """Return a line for each class or interval: name, bar, samples, share."""
    most, total = max([1, *counts.values()]), max(1, sum(counts.values()))
    full, thin = "█▏" if is_utf8() else "##"
    rows = []
    for name, count in counts.items():
        bar = full * round(_BAR * count / most) or thin * (count > 0)
        rows.append((f"  {name:.{_NAME}}", bar, f"{count:>9}", f"{count / total:6.1%}"))
    return table_text(rows, width=_WIDTH)


def _show(arguments: argparse.Namespace) -> int:
    options = PeekOptions(**{"n": _SHOWN, **given(arguments, PeekOptions)})
    if arguments.out:
        check_ending(arguments.out)

    from wdstrain.inspection.show import peek  # only now: it loads torch, which takes a second

    peeked = peek(**vars(options))
    file = peeked.save(arguments.out) if arguments.out else None
    if not arguments.json and file is None:
        print_result(repr(peeked))
        return 0
    bad = [view for view in peeked if view.error]
    notes = [f"{view.shard}: '{view.key}' at offset {view.offset}: {view.error}" for view in bad]
    for note in [*notes, *peeked.notes]:
        print_message(note)
    rows = [("shown", peeked.title), ("broken", str(len(bad))), ("file", file or "")]
    result(arguments, {**peeked.as_dict(), "file": file}, rows)
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from wdstrain.inspection.verify import verify

    return _read_all(arguments, VerifyOptions, verify)


def _repair(arguments: argparse.Namespace) -> int:
    from wdstrain.inspection.repair import repair

    return _read_all(arguments, RepairOptions, repair)


def _read_all(arguments: argparse.Namespace, options: type[Any], work: Callable[..., Any]) -> int:
    """Do work that reads whole shards, and print its result and its findings."""
    warnings.filterwarnings("ignore", module=r"PIL\.")  # of images that it can decode
    start = time.monotonic()
    done = work(**given(arguments, options))
    seconds = round(time.monotonic() - start, 3)
    report = {**done.report(), "seconds": seconds}
    rows = {**report, "bytes": Size(done.bytes), "findings": len(done.findings), "notes": ""}
    result(arguments, report, rows_of(rows))
    for note in done.notes:
        print_message(f"note: {note}")
    _print_findings(done.findings)
    return 0 if done.ok else 1


def _print_findings(findings: Sequence[Finding]) -> None:
    """Print findings; many of them by kind, with the first of each."""
    kinds: dict[tuple[object, ...], list[Finding]] = {}
    for finding in findings:
        is_one_of_many = len(findings) > _MOST and finding.key
        kind = (finding.field, finding.kind) if is_one_of_many else finding
        kinds.setdefault(kind, []).append(finding)
    for same in sorted(kinds.values(), key=len, reverse=True):
        print_error(f"{len(same)} x {same[0].sentence}" if len(same) > 1 else same[0].sentence)
    if len(findings) > _MOST:
        print_error(f"{len(findings)} findings of {len(kinds)} kinds. To list all: --json")


def _plan(arguments: argparse.Namespace) -> int:
    options = PlanOptions(**given(arguments, PlanOptions))

    from wdstrain.inspection.plan import plan_epoch  # only now: it loads torch

    preview = plan_epoch(**vars(options))
    result(arguments, preview.as_dict(), preview.rows())
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    options = BenchOptions(**given(arguments, BenchOptions))

    from wdstrain.tuning.bench import bench  # only now: it loads torch, which takes a second

    with Reporter() as progress:

        def note(measurement: str, done: int, total: int) -> None:
            progress.step("measuring", done, total, measurement, "")

        measured = bench(**{**vars(options), "note": note})
    result(arguments, measured.as_dict(), measured.rows())
    return 0


_SHEET = ("FILE.png", "contact sheet to write (default: print a table)")
add_info = partial(add_verb, _info, InfoOptions, "info shards/photos")
add_show = partial(
    add_verb, _show, PeekOptions, "show shards/photos -o sheet.png --random", out=_SHEET
)
add_verify = partial(add_verb, _verify, VerifyOptions, "verify shards/photos --decode")
add_repair = partial(add_verb, _repair, RepairOptions, "repair shards/photos -o shards/saved")
_TRAINING = "'shards/photos/train-*.tar'"
add_plan = partial(add_verb, _plan, PlanOptions, f"plan {_TRAINING} --batch-size 16 --world-size 2")
add_bench = partial(add_verb, _bench, BenchOptions, f"bench {_TRAINING} --tune")
