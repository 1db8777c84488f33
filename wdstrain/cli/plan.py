"""The verb `plan`: what an epoch will do on every rank, and how well it is shuffled."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from wdstrain.cli.common import verb
from wdstrain.cli.flags import given
from wdstrain.errors import UsageError
from wdstrain.inspection.options import PlanOptions
from wdstrain.report.terminal import ProgressReporter, print_message, print_result


def add_plan(verbs: Any) -> None:
    """Add `plan` to the verbs of the command line."""
    verb(
        verbs,
        "plan",
        _plan,
        "show what an epoch will read, hold in memory and mix, without reading it",
        "plan shards/photos --batch-size 64 --world-size 8",
        PlanOptions,
        ("FILE.html", "also write a page with charts to this file"),
    )


def _plan(arguments: argparse.Namespace) -> int:
    if arguments.out is not None and not arguments.out.endswith((".html", ".htm")):
        raise UsageError(f"--out {arguments.out}: the file must end in .html.")
    options = PlanOptions(**given(arguments, PlanOptions))

    from wdstrain.inspection.epoch_preview.api import plan_epoch  # takes a second: torch
    from wdstrain.storage.files import write_whole

    with ProgressReporter() as reporter:

        def progress(done: int, total: int) -> None:
            reporter.step("reading labels", done, total, unit="labels")

        found = plan_epoch(**{**vars(options), "progress": progress})
    if arguments.json:
        print_result(json.dumps(found.as_dict(), ensure_ascii=False))
    else:
        wide = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
        for line in found.lines(ascii_only=not wide):
            print_result(line)
    if arguments.out is not None:
        write_whole(arguments.out, found.page().encode("utf-8", "replace"))
        print_message(f"written to {arguments.out}")
    return 0
