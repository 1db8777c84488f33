"""The verb `remove`: remove samples from a finished set."""

from __future__ import annotations

import argparse
from typing import Any

from wdstrain.cli.common import result, urls, verb, where
from wdstrain.report.terminal import ProgressReporter


def add_remove(verbs: Any) -> None:
    """Add `remove` to the verbs of the command line."""
    remove = verb(
        verbs,
        "remove",
        _remove,
        "remove samples from a set of shards",
        "remove shards/photos --where \"label == 'blurred'\"",
    )
    urls(remove)
    where(remove)
    remove.add_argument(
        "--keys", metavar="FILE", help="file with the keys of the samples to remove, one a line"
    )
    remove.add_argument(
        "--dry-run", action="store_true", help="count the samples and shards, and change nothing"
    )


def _remove(arguments: argparse.Namespace) -> int:
    from wdstrain.conversion.remove import remove

    with ProgressReporter() as reporter:
        done = remove(
            arguments.urls,
            where=arguments.where,
            keys=arguments.keys,
            dry_run=arguments.dry_run,
            progress=lambda copied, total: reporter.step("copying", copied, total, "", "samples"),
        )
    would = "would be " if arguments.dry_run else ""
    shards = f"{done.rewritten} rewritten, {done.deleted} deleted"
    rows = [
        ("removed", f"{done.removed} samples {would}removed"),
        ("left", f"{done.samples} samples"),
        ("shards", f"{would}{shards}" if would else shards),
        ("set", done.folder),
    ]
    result(arguments, done.report(), rows)
    return 0
