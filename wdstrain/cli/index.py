"""The verb `index`: make or refresh the index of shards, and add label columns."""

from __future__ import annotations

import argparse
from typing import Any

from wdstrain.cli.common import facts, result, summary, verb
from wdstrain.cli.flags import given
from wdstrain.shards.options import IndexOptions


def add_index(verbs: Any) -> None:
    """Add `index` to the verbs of the command line."""
    verb(
        verbs,
        "index",
        _index,
        "make or refresh the index of shards, and add columns to it",
        "index shards/photos --columns cls,json.kind",
        IndexOptions,
    )


def _index(arguments: argparse.Namespace) -> int:
    from wdstrain.shards.declare import column_rows
    from wdstrain.shards.make_index import index

    made = index(**given(arguments, IndexOptions))
    result(arguments, facts(made), [*summary(made), *column_rows(made)])
    return 0
