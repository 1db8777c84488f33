"""Making the index of a folder of shards: `wt.index` and `wdstrain index`.

Headers are read again. Splits, labels, provenance and, for shards with the same samples, checksums
and columns are kept from the index that is there.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from wdstrain.errors import ShardError, UsageError
from wdstrain.runtime.options import as_list, takes
from wdstrain.shards.declare import with_columns, with_label, with_labels
from wdstrain.shards.header_scans import is_unchanged, picked, scan
from wdstrain.shards.index import Index, join
from wdstrain.shards.index_document import Document, find_document
from wdstrain.shards.index_io import load, save_index
from wdstrain.shards.label_values import read_columns
from wdstrain.shards.offsets import Offsets
from wdstrain.shards.options import IndexOptions
from wdstrain.shards.resolve import is_newer, tars_of
from wdstrain.storage.addresses import (
    INDEX_NAME,
    check_finished,
    expand,
)
from wdstrain.storage.remote import is_remote

_log = logging.getLogger("wdstrain")


@takes(IndexOptions)
def index(options: IndexOptions) -> Index:
    """Make the index of all shards in a folder, write it there, and return it.

    Only headers are read, the chosen columns, and the columns of shards that the existing index does
    not list as they are. Splits, labels and provenance of an existing index are kept, and the
    checksums and columns of shards whose samples have the same offsets. Raises UsageError for shards
    of several folders, for a folder without shards, and for columns and labels that do not fit,
    ShardError for a shard that is cut or damaged.
    """
    listed = expand(options.urls)
    if any(map(is_remote, listed)):
        raise UsageError(
            "an index is written beside its shards, which is not possible on a server. "
            "Make it where the files are stored, then copy it to the server."
        )
    folders = {os.path.dirname(path) for path in listed}
    if len(folders) != 1:
        raise UsageError(
            f"these shards lie in {len(folders)} folders; an index lists the shards of one folder. Run this for each folder."
        )
    folder = folders.pop()
    check_finished(folder)
    paths = tars_of(folder)
    if not paths:
        raise UsageError(
            f"{folder or '.'}: this folder holds no .tar file. Name the folder of the shards."
        )
    index, index_path = scan(paths), os.path.join(folder, INDEX_NAME)
    changed = [shard.name for shard in index.shards if not is_unchanged(shard)]
    if changed:
        raise ShardError(
            f"{changed[0]} was written to while it was scanned. Run this again when it is complete."
        )
    document = find_document(index_path)
    if document is not None:
        index = _with_former(index, document, index_path)
    if options.columns:
        index = with_columns(index, as_list(options.columns))
    if options.label is not None:
        index = with_label(index, options.label, options.classes)
    save_index(index, folder)
    return index


def _with_former(index: Index, document: Document, index_path: str) -> Index:
    """Return `index` with what headers do not give, from the former index file at `index_path`.

    Splits, labels and provenance are kept; so are checksums of shards with unchanged samples.
    """
    splits, labels = {shard.name: shard.split for shard in document.shards}, document.labels
    info = {**document.info, **index.info}
    former = Index((), Offsets.of([]))
    with suppress(ShardError):
        former = load(index_path)
    places = dict.fromkeys(info.place for info in (*document.columns, *labels))
    parts, new = [], []
    for part in map(index.pick, ([number] for number in range(len(index.shards)))):
        (shard,), old = part.shards, picked(former, [part.shards[0].path])
        if old.shards and _is_same(old, part, {field for field, _ in places}):
            part = replace(old, shards=(replace(shard, sha256=old.shards[0].sha256),))
        else:
            new.append(shard.name)
            part = with_labels(read_columns(part, places), labels)
        parts.append(replace(part, labels=()))
    merged = replace(join(parts), labels=labels, info=info)
    shards = tuple(replace(s, split=splits.get(s.name, "")) for s in merged.shards)
    merged = replace(merged, shards=shards)
    if "samples" in info and (new or set(splits) - set(index.shard_numbers)):
        merged.info["samples"] = class_counts(merged)
    for label in labels if new else ():
        if label.is_class and label.entry is None:
            _log.warning(
                "new in this set: %s. Numbers in their %s are class numbers of this set: %s",
                ", ".join(new[:5]) + (f" and {len(new) - 5} more" if len(new) > 5 else ""),
                label.field,
                label.numbering,
            )
    return merged


def _is_same(old: Index, new: Index, fields: set[str]) -> bool:
    """Return whether one shard still holds the samples that its former index lists.

    fields: those of its columns. They are compared by checksums if the shard is newer than the index.
    """
    if old.shards[0].bytes != new.shards[0].bytes or old.offsets.differences(new.offsets):
        return False
    if not is_newer(new.shards[0]):
        return True
    with suppress(ShardError):
        for _ in old.read(np.arange(len(old)), fields):
            pass
        return old.offsets.has_checksums
    return False


def class_counts(index: Index) -> dict[str, dict[str, int]]:
    """Return the number of samples of each class, by split, from the column of the first label.

    Samples without a value count as the class "".
    """
    label = next((label for label in index.labels if label.is_class), None)
    columns = [column for column in index.columns if label and column.place == label.place]
    values = columns[0].values if columns else pa.nulls(len(index))
    places = {name: place for place, name in enumerate(label.classes if label is not None else ())}
    by_split = {split: Counter[str]() for split in index.splits}
    for shard, first in zip(index.shards, index.first.tolist(), strict=False):
        for row in pc.value_counts(values.slice(first, shard.samples)).to_pylist():
            name = "" if row["values"] is None else str(row["values"])
            by_split[shard.split][name] += row["counts"]
    return {
        split: dict(sorted(counts.items(), key=lambda n: (places.get(n[0], len(places)), n[0])))
        for split, counts in by_split.items()
    }
