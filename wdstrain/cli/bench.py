"""The verb `bench`: rates of a loader and its stages, and the bottleneck."""

from __future__ import annotations

import argparse
from typing import Any

from wdstrain.cli.common import result, verb
from wdstrain.cli.flags import given
from wdstrain.report.terminal import ProgressReporter
from wdstrain.tuning.options import BenchOptions


def add_bench(verbs: Any) -> None:
    """Add `bench` to the verbs of the command line."""
    verb(
        verbs,
        "bench",
        _bench,
        "measure each stage of loading, and name the bottleneck",
        "bench shards/photos --tune",
        BenchOptions,
    )


def _bench(arguments: argparse.Namespace) -> int:
    options = BenchOptions(**given(arguments, BenchOptions))

    from wdstrain.tuning.bench import bench  # only now: it loads torch, which takes a second

    with ProgressReporter() as progress:

        def note(measurement: str, done: int, total: int) -> None:
            progress.step("measuring", done, total, measurement, "")

        measured = bench(**{**vars(options), "note": note})
    result(arguments, measured.as_dict(), measured.rows())
    return 0
