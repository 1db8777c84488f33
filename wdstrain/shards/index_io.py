"""Index files: writing, reading, and making an index from tar headers.

Two files lie beside the shards. `index.json` is for people and other tools (a superset of
`wids-shard-index-v1`): name, split, samples, bytes and sha256 of each shard; fields, labels with
their classes, and how the set was made. `index.arrow` is an Arrow IPC file with one row per sample
(`index_table`), uncompressed and memory-mapped.

Both files carry the same `id`; a pair with different ids is refused. `index.json` is written last.
Until then the table of the old `index.json` is kept under a hidden name, so that a complete index,
old or new, exists at any moment.

Files are not trusted: the table is checked against the sizes of the shards before it is used.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, replace
from hashlib import blake2b
from typing import Any

import numpy as np
import pyarrow as pa

from wdstrain.errors import ShardError
from wdstrain.shards.index import Index, Shard
from wdstrain.shards.index_document import (
    FORMAT_ERRORS,
    VERSION,
    described_columns,
    fields_of,
    find_document,
    first_line,
    info_of,
    labels_of,
    no_index,
    parsed,
    read_document,
    shard_beside,
    size,
    word,
)
from wdstrain.shards.index_table import from_batch
from wdstrain.shards.offsets import key_parts, one_batch
from wdstrain.storage.addresses import INDEX_NAME, beside
from wdstrain.storage.files import read_whole, regular, sync_folder, write_whole
from wdstrain.storage.local import state_of
from wdstrain.storage.remote import is_remote, redacted, shown_path

TABLE_NAME = "index.arrow"
FORMER_TABLE = f".{TABLE_NAME}.former"  # table of the old index.json while both files are replaced
_METADATA = b"wdstrain"  # key in the metadata of the Arrow file: its id, or the head of a part


def save_index(index: Index, folder: str) -> None:
    """Write index.arrow and then index.json into `folder`, the folder of the shards."""
    table = index.table
    identity = _identity(index)
    document = {
        "__kind__": "wids-shard-index-v1",
        "wids_version": 1,
        "shardlist": [
            {
                "url": s.name,
                "nsamples": s.samples,
                "filesize": s.bytes,
                "split": s.split,
                "sha256": s.sha256,
            }
            for s in index.shards
        ],
        "wdstrain": {
            "version": VERSION,
            "id": identity,
            "table": TABLE_NAME,
            "samples": len(index),
            "fields": list(index.fields),
            "labels": [label.row for label in index.labels],
            "columns": [column.row for column in index.columns],
            "info": index.info,
        },
    }
    _keep_former(folder)
    write_whole(os.path.join(folder, TABLE_NAME), _arrow_file(table, identity.encode()))
    write_whole(os.path.join(folder, INDEX_NAME), json_bytes(document, indent=1))
    with suppress(OSError):
        os.unlink(os.path.join(folder, FORMER_TABLE))


def move_index(source: str, folder: str) -> None:
    """Move index.arrow and index.json from the folder `source`. May be repeated after a kill."""
    _keep_former(folder)
    for name in (TABLE_NAME, INDEX_NAME):
        with suppress(FileNotFoundError):  # moved by an interrupted call
            os.replace(os.path.join(source, name), os.path.join(folder, name))
            sync_folder(folder)
    with suppress(OSError):
        os.unlink(os.path.join(folder, FORMER_TABLE))


def json_bytes(document: Any, *, indent: int | None = None) -> bytes:
    """Return a JSON document as UTF-8 bytes that end with a newline.

    File names that are not UTF-8 become escapes, which `json.loads` restores.
    """
    return (json.dumps(document, indent=indent, ensure_ascii=False) + "\n").encode(
        "utf-8", "backslashreplace"
    )


def _keep_former(folder: str) -> None:
    """Give the table of the index.json in `folder` a second, hidden name.

    If index.arrow belongs to another index.json, the hidden file of an interrupted call is kept.
    """
    table, former = os.path.join(folder, TABLE_NAME), os.path.join(folder, FORMER_TABLE)
    with suppress(OSError, ShardError, *FORMAT_ERRORS):  # no index to keep
        document = read_document(os.path.join(folder, INDEX_NAME))
        _mapped_batch(table, document["wdstrain"]["id"], former=None)
        with suppress(FileNotFoundError):
            os.unlink(former)
        os.link(table, former)


def pack_part(index: Index, extra: dict[str, Any]) -> bytes:
    """Return an index as bytes for `unpack_part`. extra: JSON values stored with it."""
    head = {
        "id": _identity(index),
        "shards": [asdict(shard) | {"path": shard.name} for shard in index.shards],
        "fields": index.fields,
        "columns": [column.row for column in index.columns],
        "extra": extra,
    }
    data: bytes = _arrow_file(index.table, json.dumps(head).encode()).to_pybytes()
    return data


def unpack_part(data: bytes, path: str) -> tuple[Index, dict[str, Any]]:
    """Return the index and `extra` that `pack_part` packed into `data`.

    path: of the file with `data`; the shards lie in its folder. Raises ShardError for other data.
    """
    try:
        batch, text = _batch(data)
        head = parsed(text)
        shards = _shards(path, head["shards"], ("path", "samples", "bytes"))
        fields = fields_of(head["fields"])
        offsets, columns = from_batch(batch, shards, fields, described_columns(head["columns"]))
        index = Index(shards, offsets, columns=columns)
        if _identity(index) != head["id"]:
            raise ValueError("its bytes differ from what was written")
        return index, dict(head["extra"])
    except FORMAT_ERRORS as error:
        raise ShardError(
            f"{path} is damaged or not a file of a wdstrain conversion ({type(error).__name__}: "
            f"{first_line(error)}). Remove it and run the conversion again."
        ) from error


def load(path: str, *, base: str | None = None) -> Index:
    """Return the index in the index.json at `path` and the index.arrow beside it.

    base: the folder of the shards, if it is another one. Raises ShardError for files that are
    missing, damaged or not of this package.
    """
    return _load(path, read_document(path), base)


def find_index(path: str) -> Index | None:
    """Return the index at `path`; None if there is none, or only another tool's list of shards.

    Raises ShardError for files that are damaged.
    """
    document = find_document(path)
    return None if document is None else _load(path, document)


def _load(path: str, document: dict[str, Any], base: str | None = None) -> Index:
    listed = path
    if base is not None:
        listed = beside(base, INDEX_NAME) if is_remote(base) else os.path.join(base, INDEX_NAME)
    try:
        part = document["wdstrain"]
        if part["version"] != VERSION:
            raise ValueError(f"version {part['version']!r}; this wdstrain reads version {VERSION}")
        shards = _shards(listed, document["shardlist"], ("url", "nsamples", "filesize"))
        fields, labels, info = fields_of(part["fields"]), labels_of(document), info_of(document)
        batch = _mapped_batch(
            beside(path, TABLE_NAME), part["id"], former=beside(path, FORMER_TABLE)
        )
    except FORMAT_ERRORS as error:
        raise no_index(path, error) from error
    except OSError as error:
        unread = error.filename or path
        raise ShardError(
            f"{unread} cannot be read: {error.strerror}. Check its permissions."
        ) from error
    try:
        offsets, columns = from_batch(batch, shards, fields, described_columns(part["columns"]))
    except FORMAT_ERRORS as error:
        folder = os.path.dirname(path) or "."
        raise ShardError(
            f"{beside(shown_path(path), TABLE_NAME)} is damaged: {first_line(error)}. "
            f"Make it again: wdstrain index {folder}"
        ) from error
    return Index(shards, offsets, labels, info, columns=columns)


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
            f"{shard.path} is in the index but cannot be found: {error.strerror}. Copy it again."
        ) from error
    size = status.st_size
    if size != shard.bytes and not (may_be_short and size < shard.bytes):
        folder = os.path.dirname(shard.path) or "."
        raise ShardError(
            f"{shard.path} has {size} bytes, its index says {shard.bytes}: it was cut or changed. "
            f"Copy or pack it again, or accept it as it is: wdstrain index {folder}"
        )
    return replace(shard, tag=state_of(status))


# --- parts ----------------------------------------------------------------------------------------


def _shards(
    path: str, rows: Iterable[dict[str, Any]], names: tuple[str, str, str]
) -> tuple[Shard, ...]:
    """Return the shards in the rows of an index at `path`. Raises ValueError for other values.

    names: of the entries for the file name, the number of samples and of bytes.
    """
    name, samples, length = names
    return tuple(
        Shard(
            shard_beside(path, row[name]),
            size(row[samples]),
            size(row[length]),
            word(row["split"] or ""),
            word(row["sha256"]),
            word(row.get("tag", "")),
        )
        for row in rows
    )


def _identity(index: Index) -> str:
    """Return a short hash of the offsets and columns."""
    offsets, digest = index.offsets, blake2b(digest_size=8)
    members, crc = offsets.members, offsets.members.crc[: None if offsets.has_checksums else 0]
    edges, letters = key_parts(offsets.rows.column(0))
    extents = (offsets.start, offsets.stop, edges, members.first)
    for array in (*extents, members.field, members.offset, members.size, crc, letters):
        digest.update(np.ascontiguousarray(array).data)
    if index.columns:
        names = [column.row for column in index.columns]
        digest.update(json.dumps(names).encode())
        values = pa.table([column.values for column in index.columns], names=[""] * len(names))
        digest.update(_arrow_file(values, b""))
    return digest.hexdigest()


def _arrow_file(table: pa.Table, metadata: bytes) -> pa.Buffer:
    """Return an Arrow IPC file of one record batch, so that its columns are mapped in one piece."""
    table = table.combine_chunks().replace_schema_metadata({_METADATA: metadata})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_batch(one_batch(table))
    return sink.getvalue()


def _mapped_batch(path: str, wanted: str, *, former: str | None) -> pa.RecordBatch:
    """Return the rows in the file at `path`, whose id must be `wanted`.

    former: path of the kept table, which is used if the id differs. Raises ValueError for a file
    that is missing, damaged or has another id.
    """
    data: bytes | mmap.mmap | None
    if is_remote(path):
        data = read_whole(path)
        if data is None:
            raise ValueError(f"{redacted(path)} is not there")
    else:
        with open(path, "rb", opener=regular) as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    batch, identity = _batch(data)
    if identity != wanted.encode():
        if former is not None:
            with suppress(OSError, *FORMAT_ERRORS):
                return _mapped_batch(former, wanted, former=None)
        raise ValueError(f"{path} belongs to another index.json")
    return batch


def _batch(data: bytes | mmap.mmap) -> tuple[pa.RecordBatch, bytes]:
    """Return (rows, metadata) of an Arrow IPC file with one record batch."""
    try:
        reader = pa.ipc.open_file(pa.BufferReader(data))
        if reader.num_record_batches != 1:
            raise ValueError(f"it has {reader.num_record_batches} record batches, not 1")
        return reader.get_batch(0), (reader.schema.metadata or {})[_METADATA]
    except OSError as error:  # pyarrow's error for damaged files
        raise ValueError(first_line(error)) from error
