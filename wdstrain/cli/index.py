"""The verb `index`: make or refresh the index of shards, and add label columns."""

from __future__ import annotations

import argparse
from typing import Any

from wdstrain.cli.common import facts, label_options, result, summary, urls, verb
from wdstrain.runtime.options import parse_list


def add_index(verbs: Any) -> None:
    """Add `index` to the verbs of the command line."""
    index = verb(
        verbs,
        "index",
        _index,
        "make or refresh the index of shards",
        "index shards/photos --columns cls,json.kind",
    )
    urls(index)
    index.add_argument(
        "--columns",
        metavar="NAME[,NAME...]",
        type=parse_list,
        default=[],
        help="read these fields and entries of JSON into columns, such as cls,json.kind",
    )
    label_options(index)


def _index(arguments: argparse.Namespace) -> int:
    from wdstrain.shards.declare import column_rows, read_classes
    from wdstrain.shards.resolve import make_index

    classes = None if arguments.classes is None else read_classes(arguments.classes)
    index = make_index(
        arguments.urls, columns=arguments.columns, label=arguments.label, classes=classes
    )
    result(arguments, facts(index), [*summary(index), *column_rows(index)])
    return 0
