"""`wt.join`: new columns for a finished set, from a table, without packing it again.

The table is read as `convert table` reads one. A Parquet file is first copied into a mapped Arrow
file, batch by batch, so that no column enters memory as a whole. The columns are put beside the
index by the commit of `Staging`: a reader sees the old index or the new one.
"""

from __future__ import annotations

import os
from typing import Any

import pyarrow as pa

from wdstrain.conversion.changes import folder_of_set
from wdstrain.conversion.listing import BadSamples
from wdstrain.conversion.options import JoinOptions, TableOptions
from wdstrain.conversion.sources.table_files import find_files
from wdstrain.conversion.sources.table_read import open_parquet, read_table
from wdstrain.conversion.staging import Staging
from wdstrain.errors import SourceError
from wdstrain.runtime.options import takes
from wdstrain.shards.joining import JoinCounts, as_cells, joined
from wdstrain.shards.resolve import open_index
from wdstrain.storage.files import disk_errors


@takes(JoinOptions)
def join(options: JoinOptions) -> JoinCounts:
    """Add the columns of a table to the index of a set, or replace them, and return counts.

        wt.join("shards/photos", "captions.parquet", on="key")

    A row belongs to the sample whose key, or value in another unique column, it names. Samples
    without a row have no value. Columns of texts, numbers, true and false, lists of names and lists
    of numbers are then like those that were packed. A running loader keeps the columns that it
    opened. Raises UsageError for keys that are doubled or all unknown, for values that no column
    holds, for names that the samples use, and for a set that cannot be changed.
    """
    folder = folder_of_set(open_index(options.urls))
    with Staging(folder, change=True) as staging:
        try:
            with disk_errors(folder, "Free some space. The set is unchanged."):
                cells = _cells(options, staging.folder("table"))
                index, counts = joined(staging.load(), cells, options.on, staging.folder())
                staging.commit(index)
        finally:
            staging.discard()
    return counts


def _cells(options: JoinOptions, folder: str) -> dict[str, Any]:
    """Return the columns of the table as Arrow arrays. folder: of temporary files."""
    table, bad = options.table, BadSamples(collect=True)
    if not isinstance(table, (str, os.PathLike)):
        return as_cells(table)
    if str(table).endswith(".parquet") and not os.path.isdir(table):
        return _mapped(os.fspath(table), os.path.join(folder, "table.arrow"))
    read = read_table(TableOptions(table, "", image=""), bad)
    if bad.bad:
        raise SourceError(bad.bad[0].sentence, "Fix or remove this row.")
    return as_cells({name: read.column(name, written=name == options.on) for name in read.columns})


def _mapped(path: str, place: str) -> dict[str, Any]:
    """Return the columns of a Parquet file as views of an Arrow file at `place`."""
    with (
        find_files(path).reading(path),
        open_parquet(path) as file,
        pa.ipc.new_file(place, file.schema_arrow) as writer,
    ):
        for batch in file.iter_batches():
            writer.write_batch(batch)
    return as_cells(pa.ipc.open_file(pa.memory_map(place)).read_all())
