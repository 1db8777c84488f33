"""The verb `bench`: rates of a loader and its stages, and the bottleneck."""

from __future__ import annotations

import argparse
from typing import Any

from wdstrain.cli.common import result, selected, size, urls, verb, where
from wdstrain.errors import UsageError
from wdstrain.report.terminal import ProgressReporter
from wdstrain.shards.index import Index


def add_bench(verbs: Any) -> None:
    """Add `bench` to the verbs of the command line."""
    bench = verb(
        verbs,
        "bench",
        _bench,
        "rate of each stage of loading, and the bottleneck",
        "bench shards/photos --tune",
    )
    urls(bench)
    where(bench)
    bench.add_argument(
        "--batch-size",
        type=int,
        default=64,
        metavar="N",
        help="samples per batch (default: %(default)s)",
    )
    bench.add_argument(
        "--num-workers",
        type=int,
        default=0,
        metavar="N",
        help="decoding processes; 0: threads (default: %(default)s)",
    )
    bench.add_argument(
        "--image-size",
        type=int,
        default=224,
        metavar="N",
        help="side of the images in pixels (default: %(default)s)",
    )
    bench.add_argument(
        "--augment",
        default="rrc+flip",
        metavar="WORDS",
        help="augmentation, as in training (default: %(default)s)",
    )
    bench.add_argument("--bytes", action="store_true", help="deliver bytes, decode nothing")
    bench.add_argument(
        "--tune", action="store_true", help="run other settings, and print those that pay"
    )
    bench.add_argument(
        "--cold", action="store_true", help="drop local shards from the page cache first"
    )
    bench.add_argument(
        "--seconds",
        type=float,
        default=1.5,
        metavar="S",
        help="seconds of each measurement (default: %(default)s)",
    )
    bench.add_argument("--cache-dir", metavar="DIR", help="folder for copies of remote shards")
    bench.add_argument(
        "--cache-limit",
        type=size,
        metavar="SIZE",
        help="size of the cache, such as 200GB (default: no limit)",
    )


def _bench(arguments: argparse.Namespace) -> int:
    from wdstrain.loader.planning import open_shards
    from wdstrain.tuning.bench import bench, usual_fields

    given = selected(arguments)
    index = given if isinstance(given, Index) else open_shards(given)
    fields = (
        None if arguments.bytes else usual_fields(index, arguments.image_size, arguments.augment)
    )
    if fields is None and not arguments.bytes and len(index):
        raise UsageError(
            f"these shards hold no images and no arrays, but {', '.join(index.fields)}. Use --bytes, "
            "or wt.bench with your own fields."
        )
    with ProgressReporter() as progress:
        measured = bench(
            index,
            fields,
            batch_size=arguments.batch_size,
            num_workers=arguments.num_workers,
            seconds=arguments.seconds,
            tune=arguments.tune,
            cold=arguments.cold,
            note=lambda what, done, total: progress.step("measuring", done, total, what, ""),
            cache_dir=arguments.cache_dir,
            cache_limit=arguments.cache_limit,
        )
    result(arguments, measured.as_dict(), measured.rows())
    return 0
