"""Verbs that look at shards or measure them: info, show, verify, repair, plan, bench."""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Sequence
from shutil import get_terminal_size
from textwrap import fill
from typing import TYPE_CHECKING, Any

from wdstrain.cli.common import given, is_utf8, result, step_bytes, verb
from wdstrain.inspection.options import (
    InfoOptions,
    PeekOptions,
    PlanOptions,
    RepairOptions,
    VerifyOptions,
    check_ending,
)
from wdstrain.report.terminal import (
    Reporter,
    print_error,
    print_grid,
    print_message,
    print_result,
    print_table,
)
from wdstrain.runtime.options import format_size
from wdstrain.tuning.options import BenchOptions

if TYPE_CHECKING:
    from wdstrain.loader.stats import Finding

_BAR = 30  # characters of the longest bar
_NAME = 24  # characters of a class's name
_SHOWN = (
    24  # samples of `show`, unless --limit is given; of each class that is named, a third of it
)
_MOST = 20  # findings, or shards with losses, that are printed one by one
_NAMED = 3  # lost samples of one shard that are named

# --- info -----------------------------------------------------------------------------------------


def add_info(verbs: Any, text: str) -> None:
    """Add `info` to the verbs of the command line."""
    verb(
        verbs,
        "info",
        _info,
        text,
        "info shards/photos",
        InfoOptions,
    )


def _info(arguments: argparse.Namespace) -> int:
    from wdstrain.inspection.info import COLUMN_HEAD, FIELD_HEAD, info

    with Reporter() as reporter:
        known = info(
            **given(arguments, InfoOptions),
            note=reporter.line,
            progress=lambda work, done, total: reporter.step(work, done, total, unit="samples"),
        )
    result(arguments, known.as_dict(), known.summary())
    if not arguments.json:
        if known.contents:
            print_grid(FIELD_HEAD, known.field_rows())
            print_table((field.name, field.content.what) for field in known.contents)
        for column in known.columns:
            if column.is_label:
                line = f"{column.name}: {'; '.join(column.notes())}"
                print_result(f"\n{fill(line, get_terminal_size().columns)}")
                _print_bars(column.bars())
        if others := known.column_rows():
            print_grid(COLUMN_HEAD, others, left=(0, 1, 3))
    for finding in known.findings:
        print_message(finding)
    return 0 if known.ok else 1


def _print_bars(counts: dict[str, int]) -> None:
    """Print a line for each class or interval: name, bar, samples, share."""
    most, total = max([1, *counts.values()]), max(1, sum(counts.values()))
    width = min(_NAME, max(map(len, counts), default=0))
    full, thin = "█▏" if is_utf8() else "##"
    digits = len(str(most))
    for name, count in counts.items():
        shown = name if len(name) <= _NAME else f"{name[: _NAME - 3]}..."
        bar = full * round(_BAR * count / most) or thin * (count > 0)
        line = f"  {shown:<{width}}  {bar:<{_BAR}}  {count:>{digits}}  {count / total:6.1%}"
        print_result(line)


# --- show ----------------------------------------------------------------------------------------


def add_show(verbs: Any, text: str) -> None:
    """Add `show` to the verbs of the command line."""
    verb(
        verbs,
        "show",
        _show,
        text,
        "show shards/photos -o sheet.png --random",
        PeekOptions,
        ("FILE.png", "contact sheet to write (default: print a table)"),
    )


def _show(arguments: argparse.Namespace) -> int:
    words = given(arguments, PeekOptions)
    words.setdefault("n", _SHOWN // 3 if words.get("classes") else _SHOWN)
    options = PeekOptions(**words)
    if arguments.out:
        check_ending(arguments.out)

    from wdstrain.inspection.show import peek  # only now: it loads torch, which takes a second

    peeked = peek(**vars(options))
    file = peeked.save(arguments.out) if arguments.out else None
    if not arguments.json and file is None:
        print_result(repr(peeked))
        return 0
    for view in peeked:
        if view.error:
            print_message(f"{view.shard}: '{view.key}' at offset {view.offset}: {view.error}")
    for note in peeked.notes:
        print_message(note)
    report: dict[str, Any] = {
        "title": peeked.title,
        "notes": list(peeked.notes),
        "shown": len(peeked),
        "broken": peeked.broken,
        "file": file,
        "samples": [view.as_dict() for view in peeked],
    }
    broken = str(peeked.broken) if peeked.broken else "none"
    rows = [("shown", peeked.title), ("with an error", broken), ("written to", file or "")]
    result(arguments, report, rows)
    return 0


# --- verify --------------------------------------------------------------------------------------


def add_verify(verbs: Any, text: str) -> None:
    """Add `verify` to the verbs of the command line."""
    verb(
        verbs,
        "verify",
        _verify,
        text,
        "verify shards/photos --decode",
        VerifyOptions,
    )


def _verify(arguments: argparse.Namespace) -> int:
    from wdstrain.inspection.verify import Verification, verify

    warnings.filterwarnings("ignore", module=r"PIL\.")  # of images that it can decode
    start = time.monotonic()
    with Reporter() as reporter:

        def progress(so_far: Verification, total: int | None) -> None:
            text = f"{so_far.shards} shards, {len(so_far.findings)} findings"
            step_bytes(reporter, "verifying", so_far.bytes, total, text)

        options = given(arguments, VerifyOptions)
        done = verify(**options, progress=progress)
    seconds = time.monotonic() - start
    rate = done.bytes / 1e6 / max(1e-9, seconds)
    rows = [
        ("shards", str(done.shards)),
        ("samples", str(done.samples)),
        ("size", format_size(done.bytes)),
        ("fields", _counts(done.fields)),
    ]
    if done.columns:
        rows.append(("columns compared", _counts(done.columns)))
    if done.groups:
        rows.append(("groups compared", _counts(done.groups)))
    if done.unindexed:
        text = f"{done.unindexed} of {done.shards} shards: only their structure was checked"
        rows.append(("no checksums", text))
    if options.get("decode"):
        rows.append(("decoded", _counts(done.decoded) or "nothing"))
    if done.not_decoded:
        text = f"{_counts(done.not_decoded)} (unknown types, or more than 1 GiB)"
        rows.append(("not decoded", text))
    if done.ignored:
        ignored = (f"{count} x {reason}" for reason, count in sorted(done.ignored.items()))
        rows.append(("ignored members", ", ".join(ignored)))
    if done.repeated:
        rows.append(("repeated keys", f"{done.repeated} samples, with different bytes"))
    rows.append(("findings", str(len(done.findings)) if done.findings else "none"))
    rows.append(("time", f"{seconds:.1f} s, {rate:.0f} MB/s"))
    result(arguments, {**done.report(), "seconds": round(seconds, 3)}, rows)
    for note in done.notes:
        print_message(f"note: {note}")
    _print_findings(done.findings)
    return 0 if done.ok else 1


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _print_findings(findings: Sequence[Finding]) -> None:
    """Print findings; many of them by kind, with the first of each."""
    if len(findings) <= _MOST:
        for finding in findings:
            print_error(finding.sentence)
        return
    kinds: dict[tuple[bool, str, str], list[Finding]] = {}
    for finding in findings:
        kind = (
            (True, finding.field, finding.kind)
            if finding.key
            else (False, finding.shard, finding.reason)
        )
        kinds.setdefault(kind, []).append(finding)
    for same in sorted(kinds.values(), key=len, reverse=True):
        print_error(f"{len(same)} x {same[0].sentence}" if len(same) > 1 else same[0].sentence)
    print_error(f"{len(findings)} findings of {len(kinds)} kinds. To list all: --json")


# --- repair --------------------------------------------------------------------------------------


def add_repair(verbs: Any, text: str) -> None:
    """Add `repair` to the verbs of the command line."""
    verb(
        verbs,
        "repair",
        _repair,
        text,
        "repair shards/photos -o shards/saved",
        RepairOptions,
    )


def _repair(arguments: argparse.Namespace) -> int:
    from wdstrain.inspection.repair import repair

    warnings.filterwarnings("ignore", module=r"PIL\.")  # of images that it can decode
    start = time.monotonic()
    with Reporter() as reporter:
        done = repair(
            **given(arguments, RepairOptions),
            progress=lambda read, total: step_bytes(reporter, "repairing", read, total, ""),
        )
    seconds = time.monotonic() - start
    lost = (
        f"at least {done.lost}"
        if any(not finding.key for finding in done.findings)
        else str(done.lost)
    )
    rows = [
        ("shards", str(done.shards)),
        ("samples copied", str(done.samples)),
        ("samples lost", lost),
        ("size", format_size(done.bytes)),
        ("time", f"{seconds:.1f} s"),
        ("written to", done.out),
    ]
    result(arguments, {**done.report(), "seconds": round(seconds, 3)}, rows)
    for note in done.notes:
        print_message(f"note: {note}")
    shards: dict[str, list[Finding]] = {}
    for finding in done.findings:
        shards.setdefault(finding.shard, []).append(finding)
    for shard, findings in list(shards.items())[:_MOST]:
        _print_lost(shard, findings)
    if len(shards) > _MOST:
        print_error(f"{len(shards) - _MOST} more shards lost samples. To list all: --json")
    return 0 if done.ok else 1


def _print_lost(shard: str, findings: list[Finding]) -> None:
    """Print what one shard lost: samples in one sentence, then byte ranges."""
    lost = [finding for finding in findings if finding.key]
    if lost:
        named = "; ".join(
            f"'{finding.key}' ({f'field {finding.field} ' if finding.field else ''}at offset "
            f"{finding.offset}: {finding.reason})"
            for finding in lost[:_NAMED]
        )
        more = f"; and {len(lost) - _NAMED} more" if len(lost) > _NAMED else ""
        print_error(f"{shard}: {len(lost)} sample{'s' * (len(lost) != 1)} lost: {named}{more}.")
    for finding in [finding for finding in findings if not finding.key][:_NAMED]:
        print_error(finding.sentence)


# --- plan ----------------------------------------------------------------------------------------


def add_plan(verbs: Any, text: str) -> None:
    """Add `plan` to the verbs of the command line."""
    verb(
        verbs,
        "plan",
        _plan,
        text,
        "plan 'shards/photos/train-*.tar' --batch-size 16 --world-size 2",
        PlanOptions,
    )


def _plan(arguments: argparse.Namespace) -> int:
    options = PlanOptions(**given(arguments, PlanOptions))

    from wdstrain.inspection.plan import (
        plan_epoch,
    )  # only now: it loads torch, which takes a second

    preview = plan_epoch(**vars(options))
    result(arguments, preview.as_dict(), preview.rows())
    return 0


# --- bench ---------------------------------------------------------------------------------------


def add_bench(verbs: Any, text: str) -> None:
    """Add `bench` to the verbs of the command line."""
    verb(
        verbs,
        "bench",
        _bench,
        text,
        "bench 'shards/photos/train-*.tar' --tune",
        BenchOptions,
    )


def _bench(arguments: argparse.Namespace) -> int:
    options = BenchOptions(**given(arguments, BenchOptions))

    from wdstrain.tuning.bench import bench  # only now: it loads torch, which takes a second

    with Reporter() as progress:

        def note(measurement: str, done: int, total: int) -> None:
            progress.step("measuring", done, total, measurement, "")

        measured = bench(**{**vars(options), "note": note})
    result(arguments, measured.as_dict(), measured.rows())
    return 0
