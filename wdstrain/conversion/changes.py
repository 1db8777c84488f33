"""Changes of a finished set: samples that are appended, `wt.remove`, and `wt.join`.

An appended set keeps its keys, classes, fields and columns. Samples that do not fit them are
refused. When samples are removed, only the shards that hold them are written again: the others of
such a shard are copied into a shard with a new number, which takes its place in the index. Readers
see the old set or the new one at any moment (`Staging`).

Columns are joined from a table, which is read as `convert table` reads one. A Parquet file is first
copied into a mapped Arrow file, batch by batch, so that no column enters memory as a whole.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from wdstrain.conversion.listing import BadSamples
from wdstrain.conversion.options import JoinOptions, RemoveOptions, TableOptions
from wdstrain.conversion.packing import write_samples
from wdstrain.conversion.sources.shards import ids_of_keys
from wdstrain.conversion.sources.table_data import read_table
from wdstrain.conversion.sources.table_files import find_files, open_parquet
from wdstrain.conversion.staging import Staging
from wdstrain.errors import SourceError, UsageError, logger
from wdstrain.order.rng import U64, bits, key
from wdstrain.runtime.options import refuse, takes
from wdstrain.shards.columns import Column
from wdstrain.shards.declare import class_counts, with_labels
from wdstrain.shards.formats import is_image
from wdstrain.shards.index import Index
from wdstrain.shards.index import join as join_indexes
from wdstrain.shards.joining import JoinCounts, as_cells, joined
from wdstrain.shards.kinds import NOT_A_COLUMN, ColumnInfo
from wdstrain.shards.offsets import Ints
from wdstrain.shards.resolve import open_index
from wdstrain.shards.where import matching
from wdstrain.storage.files import disk_errors
from wdstrain.storage.objects import is_object
from wdstrain.storage.remote import is_remote, redacted

_UNCHANGED = "Free some space. The set is unchanged."
_NUMBERED = re.compile(r"\d{9,}", re.ASCII)  # a key that a conversion made from a number

# --- append ---------------------------------------------------------------------------------------


def next_numbered_key(former: Index) -> int:
    """Return the number of the next sample without a key of its own."""
    keys = filter(_NUMBERED.fullmatch, former.keys(np.arange(len(former))))
    return max(map(int, keys), default=-1) + 1


def is_repeated(former: Index, new: Index) -> bool:
    """Return whether the last append to the set was of samples with the bytes of the new ones.

    Keys that were made from a number may differ: those of the new samples follow on the set's.
    """
    first = len(former) - len(new)
    if first < 0 or not former.info.get("appended"):
        return False
    pairs = ((former, np.arange(first, len(former))), (new, np.arange(len(new))))
    before, now = (_sample_hashes(index, ids) for index, ids in pairs)
    known, keys = (index.keys(ids) for index, ids in pairs)
    return np.array_equal(before, now) and all(map(_NUMBERED.fullmatch, {*keys} - {*known}))


def _sample_hashes(index: Index, ids: Ints) -> U64:
    """Return a hash of the fields and bytes of each sample, sorted.

    Members are not compared one by one: with other labels, the same images are other samples.
    """
    members = index.offsets.members_of(ids)
    names = np.array([key("field", name) for name in index.fields], np.uint64)[members.field]
    words = members.size.astype(np.uint64) << np.uint64(32) | members.crc.astype(np.uint64)
    return np.sort(np.add.reduceat(bits(names ^ words, "member"), members.first[:-1]))


def check_keys(former: Index, new: Iterable[str], out: str) -> None:
    """Raise UsageError if a new sample has a key of the set, upper or lower case."""
    known = {key.casefold(): key for key in former.keys(np.arange(len(former)))}
    keys = list(new)
    twice = [key for key in keys if key.casefold() in known]
    refuse(
        twice,
        f"{len(twice)} of {len(keys)} keys are in {out} already, such as "
        f"'{next(iter(twice), '')}'. A key names one sample.",
        "Remove these samples from the source, or from the set with: wdstrain remove",
    )


def check_labels(former: Index, labels: Sequence[ColumnInfo], out: str) -> None:
    """Raise UsageError unless the class numbers of the new samples mean the classes of the set.

    The new samples may have more classes, after those of the set.
    """
    known = {label.name: label for label in former.labels if not label.is_joined}
    new = {label.name: label for label in labels}
    for name in known | new:
        old, now = known.get(name), new.get(name)
        if old is None or now is None or not _are_alike(old, now):
            shown = [label.summary if label is not None else "missing" for label in (now, old)]
            kinds = {label.kind for label in (now, old) if label is not None}
            option = "mask_classes" if "mask" in kinds else "classes"
            raise UsageError(
                f"the label '{name}' is {shown[0]} in the new samples and {shown[1]} in {out}. A "
                "set keeps its labels and the numbers of its classes.",
                f"Number the new samples alike with {{{option}}}, new classes last, or convert them "
                "into another folder.",
                {option: ...},
            )


def _are_alike(old: ColumnInfo, new: ColumnInfo) -> bool:
    same = all(before == now for before, now in zip(old.classes, new.classes, strict=False))
    return same and replace(old, classes=()) == replace(new, classes=())


def appended(
    former: Index, new: Index, values: Sequence[Column], entry: dict[str, Any], out: str
) -> Index:
    """Return the index of the set with the new shards.

    values: of the new samples, also those that no column can hold. entry: the record of this
    append. Raises UsageError if the new samples have keys of the set, other fields, or other kinds
    of values in a column.
    """
    check_keys(former, new.keys(np.arange(len(new))), out)
    _check_fields(former, new, out)
    # A column would lack the values of the new samples: sizes of images, and what no column holds.
    lost = {column.place for column in values} - {column.place for column in new.columns}
    lost |= {c.place for c in former.columns if c.entry and is_image(c.field)}
    if dropped := [column.name for column in former.columns if column.place in lost]:
        logger.warning(
            "%s: the index has no columns %s any more, which lack the new samples. To make them "
            "again: wdstrain index %s --columns %s",
            *(out, ", ".join(dropped), out, ",".join(dropped)),
        )
        former = former.with_columns([c for c in former.columns if c.place not in lost])
    columns = {column.place: column for column in former.columns}
    # Without a column the set may still have values in its bytes, and nulls would hide them.
    known = [column for column in new.columns if column.place in columns]
    for column in known:
        pair = column, columns[column.place]
        kinds = {c.kind for c in pair if c.kind == NOT_A_COLUMN or c.stored.null_count < len(c)}
        refuse(
            len(kinds) > 1 and kinds != {"integer", "number"},
            f"the column '{column.name}' holds values of the kind {column.kind} in the new "
            f"samples, and {pair[1].kind} in {out}.",
            "Give them the same kind of values.",
        )
    by_name = {label.name: label for label in new.labels}
    labels = [
        max(label, by_name.get(label.name, label), key=lambda label: len(label.classes))
        for label in former.labels
    ]
    whole = join_indexes([with_labels(part, labels) for part in (former, new.with_columns(known))])
    info = {**former.info, "appended": [*former.info.get("appended", []), entry]}
    counts = {name: info.get(name) for name in ("listed", "skipped", "renamed")}
    info |= {name: n + entry[name] for name, n in counts.items() if isinstance(n, int)}
    return replace(whole, info=_counted(info, whole))


def _check_fields(former: Index, new: Index, out: str) -> None:
    extra = [name for name in new.fields if name not in former.fields]
    refuse(
        extra,
        f"the new samples have the field '{next(iter(extra), '')}', which {out} does not have. Its "
        f"fields are: {', '.join(former.fields)}.",
        "Drop the field, or convert into another folder.",
    )
    in_all, now = (
        [name for name in part.fields if not part.offsets.extents[name][0].null_count]
        for part in (former, new)
    )
    missing = [name for name in in_all if name not in now]
    refuse(
        missing,
        f"every sample of {out} has the field '{next(iter(missing), '')}', but not every new "
        "sample.",
        "Add the field, or convert into another folder.",
    )


def _counted(info: dict[str, Any], index: Index) -> dict[str, Any]:
    """Return the provenance of a set with the classes of its samples counted again."""
    return info | ({"samples": class_counts(index)} if "samples" in info else {})


# --- remove ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RemoveResult:
    """Counts of a removal. samples, bytes: of the set now. rewritten, deleted: shards."""

    folder: str
    removed: int
    samples: int
    bytes: int
    rewritten: int
    deleted: int


@takes(RemoveOptions)
def remove(options: RemoveOptions) -> RemoveResult:
    """Remove samples from a finished set, and return counts.

    A killed call is completed or started again by the same call. Raises UsageError for a set that
    is not on a disk or in a bucket, and if no sample would be left; SourceError for keys that no
    shard has; ShardError for a sample whose bytes have changed.
    """
    folder = folder_of_set(open_index(options.urls))
    with Staging(folder, change=True) as staging:
        index = staging.load()
        ids = _chosen(index, options)
        counts = index.counts
        left = counts - np.bincount(index.shard_of(ids), minlength=len(index.shards))
        refuse(
            not left.any(),
            f"no sample of {folder} would be left.",
            "Delete the folder if that is intended.",
        )
        if len(ids) and not options.dry_run:
            with disk_errors(folder, _UNCHANGED):
                index = _rewrite(staging, index, ids, options)
    rewritten, deleted = (left > 0) & (left < counts), (left == 0)
    return RemoveResult(
        folder,
        removed=len(ids),
        samples=int(left.sum()),
        bytes=sum(shard.bytes for shard in index.shards),
        rewritten=int(rewritten.sum()),
        deleted=int(deleted.sum()),
    )


def folder_of_set(index: Index) -> str:
    """Return the folder of these shards, on a disk or in a bucket."""
    folders = {os.path.dirname(shard.path) or "." for shard in index.shards}
    refuse(
        len(folders) != 1,
        f"these shards lie in {len(folders)} folders.",
        "Run this for each folder by itself.",
    )
    folder = folders.pop()
    refuse(
        is_remote(folder) and not is_object(folder),
        f"{redacted(folder)}: only a set on a disk or in a bucket can be changed.",
        "Download the set, change it, and upload it.",
    )
    return folder


def _chosen(index: Index, options: RemoveOptions) -> Ints:
    """Return the ids of the samples to remove, ascending.

    Raises SourceError for keys that none of the shards has.
    """
    named = {shard.name for shard in open_index(options.urls).shards}
    allowed = np.repeat([shard.name in named for shard in index.shards], index.counts)
    if options.keys is None:
        return np.flatnonzero(matching(index, options.where or "") & allowed)
    return ids_of_keys(index, np.flatnonzero(allowed), options.keys)


def _rewrite(staging: Staging, index: Index, ids: Ints, options: RemoveOptions) -> Index:
    """Write the changed shards without the samples `ids`, and put the new index in place."""
    folder, stays = staging.folder(), np.ones(len(index), bool)
    stays[ids] = False
    changed = set(index.shard_of(ids).tolist())
    total = int(index.counts[[*changed]].sum()) - len(ids)
    parts, copied = list[Index](), 0
    for number, shard in enumerate(index.shards):
        old, first = index.pick([number]), int(index.first[number])
        local = np.flatnonzero(stays[first : int(index.first[number + 1])])
        if number not in changed:
            parts.append(old)
        elif len(local):
            # Read forward, and compared with the crc32 of each member.
            samples = ((old.key(row), list(fields.items())) for row, fields in old.read(local))
            new = staging.add(write_samples(f"{folder}/{number:06d}", shard.split, samples))
            new = new.with_columns(old.take(local).columns)
            parts.append(replace(new, labels=index.labels))
            copied += len(local)
            if options.progress is not None:
                options.progress(copied, total)
    made = replace(join_indexes(parts), labels=index.labels)
    entry = {"count": len(ids), "where": options.where}
    info = {**index.info, "removed": [*index.info.get("removed", []), entry]}
    made = replace(made, info=_counted(info, made))
    staging.commit(made)
    return made


# --- join -----------------------------------------------------------------------------------------


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
    with Staging(folder, change=True) as staging, disk_errors(folder, _UNCHANGED):
        cells = _cells(options, staging.folder("table"))
        index, counts = joined(staging.load(), cells, options.on, staging.folder())
        staging.commit(index)
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
