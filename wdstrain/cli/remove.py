"""The verb `remove`: remove samples from a finished set."""

from __future__ import annotations

import argparse
from typing import Any

from wdstrain.cli.common import result, verb
from wdstrain.cli.flags import given
from wdstrain.conversion.source_options import RemoveOptions
from wdstrain.report.terminal import ProgressReporter


def add_remove(verbs: Any) -> None:
    """Add `remove` to the verbs of the command line."""
    verb(
        verbs,
        "remove",
        _remove,
        "remove samples from a set of shards",
        "remove shards/photos --where \"label == 'blurred'\"",
        RemoveOptions,
    )


def _remove(arguments: argparse.Namespace) -> int:
    from wdstrain.conversion.remove import remove

    options = RemoveOptions(**given(arguments, RemoveOptions))
    with ProgressReporter() as reporter:
        done = remove(
            **given(arguments, RemoveOptions),
            progress=lambda copied, total: reporter.step("copying", copied, total, "", "samples"),
        )
    would = "would be " if options.dry_run else ""
    shards = f"{done.rewritten} rewritten, {done.deleted} deleted"
    rows = [
        ("removed", f"{done.removed} samples {would}removed"),
        ("left", f"{done.samples} samples"),
        ("shards", f"{would}{shards}" if would else shards),
        ("set", done.folder),
    ]
    result(arguments, done.report(), rows)
    return 0
