"""Index files: writing, reading, and making an index from tar headers.

Two files lie beside the shards. `index.json` is for people and other tools (a superset of
`wids-shard-index-v1`): name, split, samples, bytes and sha256 of each shard; fields, labels with
their classes, and how the set was made. `index.arrow` is an Arrow IPC file with one row per sample
(`index_document`), uncompressed and memory-mapped.

Both files carry the same `id`. `index.arrow` holds a copy of the document, and `index.json` the
sha256 of `index.arrow`: `changed` compares them, and what one of the files lost is read from the
other (`remains`). `index.json` is written last. Until then its `id` differs and the copy counts, so
that a complete index, old or new, exists at any moment.

Files are not trusted: the table is checked against the sizes of the shards before it is used.
"""

from __future__ import annotations

import json
import mmap
import os
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b, sha256
from typing import Any

import pyarrow as pa

from wdstrain.errors import ShardError
from wdstrain.shards.index import Index, Shard
from wdstrain.shards.index_document import (
    VERSION,
    Document,
    find_document,
    from_batch,
    parsed,
    read_document,
    refusing,
    to_batch,
)
from wdstrain.shards.offsets import Offsets, arrow_file, read_arrow_file
from wdstrain.storage.addresses import INDEX_NAME, beside
from wdstrain.storage.files import read_whole, regular, sync_folder, write_whole
from wdstrain.storage.local import state_of
from wdstrain.storage.remote import is_remote, redacted

TABLE_NAME = "index.arrow"


def save_index(index: Index, folder: str) -> None:
    """Write index.arrow and then index.json into `folder`, the folder of the shards."""
    table, document = _files(index)
    document["wdstrain"]["sha256"] = sha256(table).hexdigest()
    write_whole(os.path.join(folder, TABLE_NAME), table)
    write_whole(os.path.join(folder, INDEX_NAME), json_bytes(document, indent=1))


def move_index(source: str, folder: str) -> None:
    """Move index.arrow and index.json from the folder `source`. May be repeated after a kill."""
    for name in (TABLE_NAME, INDEX_NAME):
        with suppress(FileNotFoundError):  # moved by an interrupted call
            os.replace(os.path.join(source, name), os.path.join(folder, name))
            sync_folder(folder)


def save_table(index: Index, path: str) -> None:
    """Write an index as one file for `load_table`."""
    write_whole(path, _files(index)[0])


def load_table(path: str, folder: str) -> Index:
    """Return the index in such a file, or in an index.arrow. folder: of its shards.

    Raises OSError or one of FORMAT_ERRORS for a file that is damaged.
    """
    batch, _, text = _read_table(path)
    return _index(Document.of(parsed(text), folder), batch)


def json_bytes(document: Any, *, indent: int | None = None) -> bytes:
    """Return a JSON document as UTF-8 bytes that end with a newline.

    File names that are not UTF-8 become escapes, which `json.loads` restores.
    """
    return (json.dumps(document, indent=indent, ensure_ascii=False) + "\n").encode(
        "utf-8", "backslashreplace"
    )


def pack_part(index: Index, extra: dict[str, Any]) -> bytes:
    """Return an index as bytes for `unpack_part`. extra: JSON values stored with it."""
    batch, document = _parts(index)
    data: bytes = arrow_file(batch, json_bytes(document | {"extra": extra})).to_pybytes()
    return data


def unpack_part(data: bytes, path: str) -> tuple[Index, dict[str, Any]]:
    """Return the index and `extra` that `pack_part` packed into `data`.

    path: of the file with `data`; the shards lie in its folder. Raises ShardError for other data.
    """
    with refusing(path):
        batch, text = read_arrow_file(data)
        document = parsed(text)
        listed = Document.of(document, path)
        if _identity(batch) != listed.identity:
            raise ValueError("its bytes differ from what was written")
        return _index(listed, batch), dict(document["extra"])


def changed(path: str) -> str:
    """Return how the index.json at `path` and its index.arrow differ from what was written, or "".

    The text goes on after the path. Files of earlier versions cannot be compared, nor an index.json
    that is about to be replaced. Raises ShardError for files that cannot be read.
    """
    with refusing(path):
        document = parsed(read_whole(path) or b"")
        table = _table_bytes(beside(path, TABLE_NAME))
        written = _read_table(table)[2]
        if not written:
            return ""
        copy, own = parsed(written), document["wdstrain"]
        is_older = own["id"] != copy["wdstrain"]["id"]
        own["id"] = copy["wdstrain"]["id"]
        if own.pop("sha256", "") != sha256(table).hexdigest() and not is_older:
            return f"and {TABLE_NAME} do not fit: one of them was changed after it was written"
        if (document == copy) == is_older:  # nothing else differs from an older index.json
            return f"was changed after it was written: {TABLE_NAME} has a copy with other contents"
    return ""


def remains(path: str) -> Index | None:
    """Return what is left of a damaged index at `path`, None if nothing is.

    The contents of an intact index.arrow, or else of index.json: an index whose samples are unknown.
    """
    with suppress(ShardError), refusing(path):
        return _of_table(path, None)
    with suppress(ShardError):
        document = find_document(path)
        if document is not None:
            return Index(document.shards, Offsets.of([]), document.labels, document.info)
    return None


def load(path: str, *, base: str | None = None) -> Index:
    """Return the index in the index.json at `path` and the index.arrow beside it.

    base: an address in the folder of the shards, if it is another one. Raises ShardError for files
    that are missing, damaged or not of this package.
    """
    index = _load(path, read_document(path))
    if base is None:
        return index
    shards = (replace(shard, path=beside(base, shard.name)) for shard in index.shards)
    return replace(index, shards=tuple(shards))


def find_index(path: str) -> Index | None:
    """Return the index at `path`; None if there is none, or only another tool's list of shards.

    Raises ShardError for files that are damaged.
    """
    document = find_document(path)
    return None if document is None else _load(path, document)


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


def _load(path: str, document: Document) -> Index:
    with refusing(path):
        if document.version != VERSION:
            raise ValueError(f"version {document.version!r}; this wdstrain reads version {VERSION}")
        return _of_table(path, document)


def _of_table(path: str, document: Document | None) -> Index:
    """Return the index in the index.arrow beside `path`.

    document: the index.json; None if it is unknown. If it belongs to another table, the copy in the
    table counts: a set is changed by replacing its table, and its index.json after that. Raises one
    of FORMAT_ERRORS for a table that is damaged.
    """
    table = beside(path, TABLE_NAME)
    batch, identity, text = _read_table(table)
    if document is None or document.identity.encode() != identity:
        if not text or _identity(batch).encode() != identity:
            raise ValueError(f"{redacted(table)} belongs to another index.json")
        document = Document.of(parsed(text), path)
    with refusing(table):
        return _index(document, batch)


def _index(document: Document, batch: pa.RecordBatch) -> Index:
    """Return the index of checked files. Raises ValueError for rows that do not fit."""
    offsets = from_batch(batch, document.shards, document.fields, document.columns)
    classes = {label.place: label.classes for label in document.labels if label.classes}
    for column in offsets.columns:
        if column.classes and column.classes != classes.get(column.place, column.classes):
            raise ValueError(f"the classes of {column.name!r} are others in index.arrow")
    return Index(document.shards, offsets, document.labels, document.info)


def _parts(index: Index) -> tuple[pa.RecordBatch, dict[str, Any]]:
    """Return (rows, document) of the files of an index."""
    batch = to_batch(index.shards, index.offsets)
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
        "id": _identity(batch),
        "table": TABLE_NAME,
        "samples": len(index),
        "fields": list(index.fields),
        "labels": [label.row for label in index.labels],
        "columns": [column.row for column in index.columns],
        "info": index.info,
    }
    kind = {"__kind__": "wids-shard-index-v1", "wids_version": 1}
    return batch, {**kind, "shardlist": shards, "wdstrain": own}


def _identity(batch: pa.RecordBatch) -> str:
    """Return a short hash of the rows of an index."""
    return blake2b(arrow_file(batch), digest_size=8).hexdigest()


def _files(index: Index) -> tuple[pa.Buffer, dict[str, Any]]:
    """Return the contents of index.arrow, and the document of index.json."""
    batch, document = _parts(index)
    return arrow_file(batch, f"{_identity(batch)}\n".encode() + json_bytes(document)), document


def _read_table(table: Any) -> tuple[pa.RecordBatch, bytes, bytes]:
    """Return (rows, id, document or nothing) of an index.arrow. table: its bytes, or its path."""
    batch, own = read_arrow_file(_table_bytes(table) if isinstance(table, str) else table)
    identity, _, text = own.partition(b"\n")
    return batch, identity, text


def _table_bytes(path: str) -> Any:
    """Return the bytes of an index.arrow; a local file is mapped."""
    if not is_remote(path):
        with open(path, "rb", opener=regular) as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    data = read_whole(path)
    if data is None:
        raise ValueError(f"{redacted(path)} is not there")
    return data
