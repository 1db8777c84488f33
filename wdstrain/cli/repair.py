"""The verb `repair`: copy the intact samples of damaged shards."""

from __future__ import annotations

import argparse
import time
import warnings
from typing import TYPE_CHECKING, Any

from wdstrain.cli.common import result, step_bytes, verb
from wdstrain.cli.flags import given
from wdstrain.inspection.options import RepairOptions
from wdstrain.report.terminal import ProgressReporter, print_error, print_message
from wdstrain.runtime.byte_sizes import format_size

if TYPE_CHECKING:
    from wdstrain.loader.stats import Finding

_MOST = 20  # shards whose losses are printed one by one
_NAMED = 3  # lost samples of one shard that are named


def add_repair(verbs: Any) -> None:
    """Add `repair` to the verbs of the command line."""
    verb(
        verbs,
        "repair",
        _repair,
        "copy the intact samples of damaged shards",
        "repair shards/photos -o shards/saved",
        RepairOptions,
    )


def _repair(arguments: argparse.Namespace) -> int:
    from wdstrain.inspection.repair.api import repair

    warnings.filterwarnings("ignore", module=r"PIL\.")  # of images that it can decode
    start = time.monotonic()
    with ProgressReporter() as reporter:
        done = repair(
            **given(arguments, RepairOptions),
            progress=lambda read, total: step_bytes(reporter, "repairing", read, total, ""),
        )
    seconds = time.monotonic() - start
    lost = f"at least {done.lost}" if any(not one.key for one in done.findings) else str(done.lost)
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
    for one in done.findings:
        shards.setdefault(one.shard, []).append(one)
    for shard, findings in list(shards.items())[:_MOST]:
        _print_lost(shard, findings)
    if len(shards) > _MOST:
        print_error(f"{len(shards) - _MOST} more shards lost samples. To list all: --json")
    return 0 if done.ok else 1


def _print_lost(shard: str, findings: list[Finding]) -> None:
    """Print what one shard lost: samples in one sentence, then byte ranges."""
    lost = [one for one in findings if one.key]
    if lost:
        named = "; ".join(
            f"'{one.key}' ({f'field {one.field} ' if one.field else ''}at offset {one.offset}: {one.reason})"
            for one in lost[:_NAMED]
        )
        more = f"; and {len(lost) - _NAMED} more" if len(lost) > _NAMED else ""
        print_error(f"{shard}: {len(lost)} sample{'s' * (len(lost) != 1)} lost: {named}{more}.")
    for one in [one for one in findings if not one.key][:_NAMED]:
        print_error(one.sentence)
