"""The verb `plan`: what an epoch would do on every rank, and how well it would be shuffled, before any of it is read."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, get_args

from wdstrain.cli.common import selected, urls, verb, where
from wdstrain.order.plan import Tail
from wdstrain.report.terminal import ProgressReporter, print_message, print_result


def add_plan(verbs: Any) -> None:
    """Add the verb to those of the command line."""
    plan = verb(
        verbs,
        "plan",
        _plan,
        "what an epoch would do, and how well it is shuffled",
        "plan shards/photos --batch-size 64 --world-size 8",
    )
    urls(plan)
    where(plan)
    plan.add_argument(
        "--batch-size",
        type=int,
        default=64,
        metavar="N",
        help="of each rank (default: %(default)s)",
    )
    plan.add_argument(
        "--world-size", type=int, default=1, metavar="N", help="ranks (default: %(default)s)"
    )
    plan.add_argument(
        "--lanes",
        type=int,
        metavar="N",
        help="forward runs through the shards (default: one for each rank)",
    )
    plan.add_argument(
        "--shuffle-buffer", type=int, metavar="N", help="samples (default: 256 MB of them)"
    )
    plan.add_argument(
        "--no-shuffle", dest="shuffle", action="store_false", help="the order on disk"
    )
    plan.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the order (default: %(default)s)"
    )
    plan.add_argument(
        "--epoch",
        type=int,
        default=0,
        metavar="N",
        help="which epoch, from 0 on (default: %(default)s)",
    )
    plan.add_argument(
        "--tail",
        choices=get_args(Tail),
        default="drop",
        help="samples that fill no whole step (default: %(default)s)",
    )
    plan.add_argument(
        "--label",
        metavar="NAME",
        help="label whose classes are looked at (default: the only one of classes)",
    )
    plan.add_argument(
        "-o", "--out", metavar="FILE.html", help="write it as a page with figures, too"
    )


def _plan(arguments: argparse.Namespace) -> int:
    from wdstrain.errors import UsageError
    from wdstrain.inspection.epoch_preview.api import plan_epoch
    from wdstrain.inspection.epoch_preview.render import lines, page
    from wdstrain.storage.files import write_whole

    if arguments.out is not None and not arguments.out.endswith((".html", ".htm")):
        raise UsageError(f"{arguments.out}: the file must end in .html.")
    with ProgressReporter() as reporter:
        found = plan_epoch(
            selected(arguments),
            batch_size=arguments.batch_size,
            world_size=arguments.world_size,
            lanes=arguments.lanes,
            shuffle=arguments.shuffle,
            shuffle_buffer=arguments.shuffle_buffer,
            seed=arguments.seed,
            epoch=arguments.epoch,
            tail=arguments.tail,
            label=arguments.label,
            progress=lambda done, total: reporter.step(
                "reading labels", done, total, unit="labels"
            ),
        )
    if arguments.json:
        print_result(json.dumps(found.as_dict(), ensure_ascii=False))
    else:
        wide = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
        for line in lines(found, ascii_only=not wide):
            print_result(line)
    if arguments.out is not None:
        write_whole(arguments.out, page(found).encode("utf-8", "replace"))
        print_message(f"written to {arguments.out}")
    return 0
