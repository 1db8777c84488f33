"""Index files: writing and reading them, and the check of all values in them.

Two files lie beside the shards. `index.json` is for people and other tools (a superset of
`wids-shard-index-v1`): name, split, samples, bytes and sha256 of each shard; fields, labels with
their classes, columns, and how the set was made. `index.arrow` is an Arrow IPC file, uncompressed and
memory-mapped, with one row per sample in shard order: key, shard, offset, size; for each field
NAME.offset, NAME.size and NAME.crc32 (null if the sample lacks the field; crc32 is also null if no
data was read); then one column per label or scalar. That of joined texts and lists holds rows of a
file that `value_files` writes.

Both files carry the same `id`. `index.arrow` holds a copy of the document, and `index.json` the
sha256 of `index.arrow`: `changed` compares them, and what one of the files lost is read from the
other (`remains`). `index.json` is written last. Until then its `id` differs and the copy counts, so
that a complete index, old or new, exists at any moment.

Files come from anywhere: each value is checked before it is used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from hashlib import blake2b, sha256
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from wdstrain.errors import ShardError
from wdstrain.runtime.machine import memory
from wdstrain.shards.columns import Column
from wdstrain.shards.index import Index, Shard
from wdstrain.shards.kinds import KINDS, ColumnInfo
from wdstrain.shards.offsets import (
    PARTS,
    Bools,
    Ints,
    Offsets,
    arrow_file,
    as_numpy,
    read_arrow_file,
    table_names,
)
from wdstrain.shards.value_files import VALUE_FILE, ValueFile, file_bytes, file_name
from wdstrain.storage.addresses import INDEX_NAME, beside, check_finished, folder_of
from wdstrain.storage.files import read_whole, state_of, write_whole
from wdstrain.storage.remote import is_remote, redacted, shown_path

TABLE_NAME = "index.arrow"
VERSION = 2  # of the format; version 1 had offsets in a file index.arrow

# Errors that reading a file of another format or a damaged one can raise.
FORMAT_ERRORS = (
    *(ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError),
    *(pa.ArrowException, IndexError),
)

# --- writing --------------------------------------------------------------------------------------


def save_index(index: Index, folder: str) -> None:
    """Write index.arrow and then index.json into `folder`, the folder of the shards."""
    table, document = _files(index, {})
    document["wdstrain"]["sha256"] = sha256(table).hexdigest()
    write_whole(os.path.join(folder, TABLE_NAME), table)
    write_whole(os.path.join(folder, INDEX_NAME), json_bytes(document, indent=1))


def json_bytes(document: Any, *, indent: int | None = None) -> bytes:
    """Return a JSON document as UTF-8 bytes that end with a newline.

    File names that are not UTF-8 become escapes, which `json.loads` restores.
    """
    return (json.dumps(document, indent=indent, ensure_ascii=False) + "\n").encode(
        "utf-8", "backslashreplace"
    )


def pack_part(index: Index, extra: dict[str, Any]) -> bytes:
    """Return an index as bytes for `unpack_part`. extra: JSON values stored with it."""
    return bytes(_files(index, {"extra": extra})[0])


def unpack_part(data: bytes, path: str) -> tuple[Index, dict[str, Any]]:
    """Return the index and `extra` that `pack_part` packed into `data`.

    path: of a file in the folder of the shards. Raises ShardError for other data.
    """
    with refusing(path):
        index, document = _of_table(path, None, path, data)
        return index, dict(document["extra"])


def _files(index: Index, extra: dict[str, Any]) -> tuple[pa.Buffer, dict[str, Any]]:
    """Return (index.arrow, document) of an index. extra: further values of the document."""
    batch, columns = index.batch(), [column.row for column in index.columns]
    shards = [
        {
            "url": s.name,
            "nsamples": s.samples,
            "filesize": s.bytes,
            "split": s.split,
            "sha256": s.sha256,
        }
        for s in index.shards
    ]
    own = {
        "version": VERSION,
        "id": _identity(batch, columns),
        "table": TABLE_NAME,
        "samples": len(index),
        "fields": list(index.fields),
        "labels": [label.row for label in index.labels],
        "columns": columns,
        "info": index.info,
    }
    document = {
        "__kind__": "wids-shard-index-v1",
        "wids_version": 1,
        "shardlist": shards,
        "wdstrain": own,
        **extra,
    }
    return arrow_file(batch, f"{own['id']}\n".encode() + json_bytes(document)), document


def _identity(batch: pa.RecordBatch, columns: Any) -> str:
    """Return a short hash of the rows of an index. columns: as index.json lists them."""
    files = "".join(column.get("file", "") for column in columns)
    return blake2b(arrow_file(batch, files.encode()), digest_size=8).hexdigest()


# --- reading --------------------------------------------------------------------------------------


def load(path: str) -> Index:
    """Return the index in the index.json at `path` and the index.arrow beside it.

    Raises ShardError for files that are missing, damaged or not of this package.
    """
    index = find_index(path)
    if index is None:
        raise ShardError(
            f"{shown_path(path)} is not there, or another program wrote it, or may not be read "
            "(the server answered 404, 410 or 403).",
            "Check the address. Shards without an index are named with braces: "
            "train-{000000..000041}.tar",
        )
    return index


def find_index(path: str) -> Index | None:
    """Return the index at `path`; None if there is none, or only another tool's list of shards.

    Raises ShardError for files that are damaged, and for an unfinished folder.
    """
    if not is_remote(path):
        check_finished(os.path.dirname(path))
    with refusing(path):
        document = _document(path)
        if document is None:
            return None
        version = document["wdstrain"]["version"]
        _require(version == VERSION, f"version {version!r}; this wdstrain reads version {VERSION}")
        return _of_table(beside(path, TABLE_NAME), document, path)[0]


def find_document(path: str) -> Index | None:
    """Return what an index.json says: an index whose samples are unknown.

    None if there is no file, or if it is another tool's list of shards, without offsets. Raises
    ShardError for a file that is damaged or cannot be read.
    """
    with refusing(path):
        document = _document(path)
        return None if document is None else _listed(document, path)


def remains(path: str) -> Index | None:
    """Return what is left of a damaged index at `path`, None if nothing is.

    The contents of an intact index.arrow, or else of index.json: an index whose samples are unknown.
    """
    with suppress(ShardError), refusing(path):
        return _of_table(beside(path, TABLE_NAME), None, path)[0]
    with suppress(ShardError):
        return find_document(path)
    return None


def changed(path: str) -> str:
    """Return how the index.json at `path` and its index.arrow differ from what was written, or "".

    The text goes on after the path. An index.json that is about to be replaced cannot be compared.
    Raises ShardError for files that cannot be read.
    """
    with refusing(path):
        document = parsed(read_whole(path) or b"")
        table = file_bytes(beside(path, TABLE_NAME))
        copy, own = parsed(read_arrow_file(table)[1].partition(b"\n")[2]), document["wdstrain"]
        for row in own["columns"]:
            if "file" in row and row["file"] != file_name(beside(path, row["file"])):
                return f"names {row['file']}, which was changed after it was written"
        is_older = own["id"] != copy["wdstrain"]["id"]
        own["id"] = copy["wdstrain"]["id"]
        if own.pop("sha256", "") != sha256(table).hexdigest() and not is_older:
            return f"and {TABLE_NAME} do not fit: one of them was changed after it was written"
        if (document == copy) == is_older:  # nothing else differs from an older index.json
            return f"was changed after it was written: {TABLE_NAME} has a copy with other contents"
    return ""


def check_sizes(index: Index, *, may_be_short: bool = False) -> Index:
    """Return the index with the current state of every local shard as its `tag`.

    may_be_short: accept shards that are smaller than in the index. Raises ShardError for a missing shard and
    for one of another size.
    """
    return replace(
        index, shards=tuple(check_size(shard, may_be_short=may_be_short) for shard in index.shards)
    )


def check_size(shard: Shard, *, may_be_short: bool = False) -> Shard:
    """Return one shard with its current state; see `check_sizes`.

    A remote shard is returned as it is: its size is checked with its first response.
    """
    if is_remote(shard.path):
        return shard
    try:
        status = os.stat(shard.path)
    except OSError as error:
        raise ShardError(
            f"{shard.path} is in the index but cannot be found: {error.strerror}.",
            "Copy it again.",
        ) from error
    size = status.st_size
    if size != shard.bytes and not (may_be_short and size < shard.bytes):
        raise ShardError(
            f"{shard.path} has {size} bytes, its index says {shard.bytes}: it was cut or changed.",
            "Copy or pack it again, or accept it as it is: wdstrain index "
            f"{os.path.dirname(shard.path) or '.'}",
        )
    return replace(shard, tag=state_of(status))


@contextmanager
def refusing(path: str) -> Iterator[None]:
    """Raise ShardError for errors of reading a file of an index."""
    try:
        yield
    except FORMAT_ERRORS as error:
        reason = (str(error).splitlines() or [""])[0][:200]
        raise ShardError(
            f"{redacted(path)} is not an index of this package ({type(error).__name__}: {reason}).",
            "Check the address, or remove it and make a new index: wdstrain index "
            f"{folder_of(path) or '.'}",
        ) from error
    except OSError as error:
        raise ShardError(
            f"{error.filename or path} cannot be read: {error.strerror}.",
            "Check its permissions.",
        ) from error


def parsed(data: bytes) -> Any:
    """Return a parsed JSON document.

    Raises ValueError for a document whose Python objects could fill memory: they take up to 48
    bytes for each byte of JSON.
    """
    most = memory() // 128
    _require(
        len(data) <= most,
        f"it has {len(data)} bytes of JSON; {most} is the limit for this machine's memory",
    )
    return json.loads(data)


def _document(path: str) -> Any:
    """Return the document in a file; None if it is missing or another tool's list of shards."""
    data = read_whole(path)
    document = {"shardlist": []} if data is None else parsed(data)
    return None if "shardlist" in document and "wdstrain" not in document else document


def _of_table(table: str, document: Any, base: str, data: Any = None) -> tuple[Index, Any]:
    """Return (index, document) of the index.arrow at `table`.

    data: its bytes, if they are known. document: the index.json; None if it is unknown. If it belongs to another table,
    the copy in the table counts: a set is changed by replacing its table, and its index.json after
    that. base: an address in the folder of the shards. Raises one of FORMAT_ERRORS for a table that
    is damaged.
    """
    batch, own = read_arrow_file(file_bytes(table) if data is None else data)
    identity, _, text = own.partition(b"\n")
    if document is None or document["wdstrain"]["id"].encode() != identity:
        document = parsed(text or b"null")
        _require(
            document and _identity(batch, document["wdstrain"]["columns"]).encode() == identity,
            f"{redacted(table)} belongs to another index.json",
        )
    index = _listed(document, base)
    with refusing(table):
        return _with_rows(index, batch), document


# --- checks ---------------------------------------------------------------------------------------


def _require(holds: Any, problem: str) -> None:
    """Raise ValueError with this problem of a file unless a rule holds."""
    if not holds:
        raise ValueError(problem)


def _listed(document: Any, path: str) -> Index:
    """Return the index without samples in a JSON document; its shards lie beside `path`.

    Raises one of FORMAT_ERRORS.
    """
    own = document["wdstrain"]
    columns = [
        Column(
            *(row["name"], row["kind"], row["field"], row["entry"]),
            is_label=False,
            files=_value_files(row, path),
            stored=pa.nulls(0, pa.int64() if "file" in row else KINDS[row["kind"]].arrow),
        )
        for row in own["columns"]
    ]
    labels, fields = tuple(map(ColumnInfo.of_row, own["labels"])), list(map(_word, own["fields"]))
    for info in (*columns, *labels):
        kind, entry = KINDS[info.kind], "" if info.entry is None else info.entry
        words = [info.name, info.field, entry]
        _require(
            (kind.can_be_label if info.is_label else kind.arrow is not None)
            and all(isinstance(word, str) for word in words),
            f"its column {words} has the kind {info.kind!r}",
        )
    _require(len(set(fields)) == len(fields), "its fields must be different names")
    kinds = [pa.large_binary(), pa.int64(), pa.int64(), *list(PARTS.values()) * len(fields)]
    offsets = Offsets.of_arrays(fields, [pa.nulls(0, kind) for kind in kinds], columns)
    shards = tuple(_shard(row, path) for row in document["shardlist"])
    return Index(shards, offsets, labels, dict(own["info"]))


def _value_files(row: dict[str, Any], path: str) -> tuple[ValueFile, ...]:
    """Return the file of a joined column that lies beside the index. Raises ValueError."""
    name = row.get("file", "")
    _require(not name or VALUE_FILE.fullmatch(name), f"its file {name!r:.80} is no column")
    return (ValueFile(beside(path, name), row["rows"]),) if name else ()


def _shard(row: dict[str, Any], path: str) -> Shard:
    """Return a shard beside the index at `path`.

    Raises ValueError for a name with a folder, which could lead to files elsewhere.
    """
    name, counts = _word(row["url"]), (row["nsamples"], row["filesize"])
    _require(
        os.path.basename(name) == name and name not in ("", ".", "..") and "\0" not in name,
        f"its shard {name!r} is not a plain file name; shards lie beside their index",
    )
    os.fsencode(name)  # raises ValueError for characters that no file name can have
    _require(
        all(isinstance(number, int) and 0 <= number < 1 << 62 for number in counts),
        f"{counts} must be integers >= 0 and < 2**62",
    )
    return Shard(beside(path, name), *counts, _word(row["split"] or ""), _word(row["sha256"]))


def _word(value: Any) -> str:
    _require(isinstance(value, str), f"{value!r} must be a string")
    return str(value)


def _with_rows(index: Index, batch: pa.RecordBatch) -> Index:
    """Return the index of a document with the rows of its table.

    Raises ValueError for rows that do not fit the document, or that lead outside a shard.
    """
    batch.validate(full=True)
    (key, shard, *types), expected = batch.schema.types, index.offsets.rows.schema
    _require(
        key in (pa.large_string(), pa.large_binary())
        and shard == KINDS["class"].arrow
        and types == expected.types[1:]
        and batch.schema.names == table_names(index.fields, index.columns),
        "its columns are not the ones of index.json",
    )
    _require(
        not any(column.null_count for column in batch.columns[:4]),
        "a column of its samples has empty cells",
    )
    _require(
        sum(shard.samples for shard in index.shards) == len(batch),
        "its number of samples is not the one of index.json",
    )
    keys, _, *others = batch.columns  # `_check_extents` finds samples of other shards
    arrays = [keys.cast(pa.large_binary()), *others]
    rows = pa.RecordBatch.from_arrays(arrays, names=expected.names)
    index = replace(index, offsets=replace(index.offsets, rows=rows))
    classes = {label.place: label.classes for label in index.labels if label.classes}
    for column in index.columns:
        _require(
            not column.classes or column.classes == classes.get(column.place, column.classes),
            f"the classes of {column.name!r} are others in index.arrow",
        )
        for file in column.files:
            # Opened now, so that a running loader keeps it.
            count = file.count if is_remote(file.path) else len(file.chunks)
            _require(
                (as_numpy(column.stored.drop_null()).view(np.uint64) < count).all(),
                f"a value of {column.name!r} lies outside its file",
            )
    _check_extents(index)
    return index


def _check_extents(index: Index) -> None:
    """Raise ValueError for numbers that lead outside a shard, and for samples that overlap."""
    extents = index.offsets.extents.values()
    _require(
        all(offset.is_valid().equals(size.is_valid()) for offset, size, _ in extents),
        "a field has an offset without a size",
    )
    for shard, (first, stop) in zip(index.shards, pairwise(index.first.tolist()), strict=True):
        own = slice(first, stop)
        low, extent = index.offsets.start[own], index.offsets.size[own]
        high = low + extent
        _require(
            (_lies_in(low, extent, 0, shard.bytes) & (extent > 0)).all(),
            "a sample lies outside its shard",
        )
        _require(
            not (low[1:] < high[:-1]).any(),
            "its samples overlap or are not in the order of their shard",
        )
        for start, length, _, has in index.offsets.views:
            _require(
                (_lies_in(start[own], length[own], low, high) | ~has[own]).all(),
                "a field lies outside its sample",
            )


def _lies_in(offset: Ints, size: Ints, low: Ints | int, high: Ints | int) -> Bools:
    """Return whether [offset, offset + size) lies in [low, high), where low >= 0. Sums may wrap."""
    return (offset >= low) & (size >= 0) & (size <= high - offset)
