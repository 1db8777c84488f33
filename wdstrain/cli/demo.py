"""The verb `demo`: convert, verify and train on a small real data set."""

from __future__ import annotations

import argparse
from typing import Any

from wdstrain.cli.common import result, verb
from wdstrain.report.terminal import ProgressReporter, print_result


def add_demo(verbs: Any) -> None:
    """Add `demo` to the verbs of the command line."""
    demo = verb(
        verbs,
        "demo",
        _demo,
        "convert, verify and train on scans of handwritten digits",
        "demo --dir shards",
    )
    demo.add_argument(
        "--dir", default="shards", metavar="DIR", help="folder to work in (default: %(default)s)"
    )


def _demo(arguments: argparse.Namespace) -> int:
    from wdstrain.demo import demo, next_steps

    with ProgressReporter() as progress:
        rows = demo(arguments.dir, progress)
    result(arguments, dict(rows), rows)
    if not arguments.json:
        print_result("\nNext, with your own data:")
        for step in next_steps(arguments.dir):
            print_result(f"  {step}")
    return 0
