"""Index files: writing, reading, and making an index from tar headers.

Two files lie beside the shards. `index.json` is for people and other tools (a superset of
`wids-shard-index-v1`): name, split, samples, bytes and sha256 of each shard; fields, labels with
their classes, and how the set was made. `index.bin` holds the arrays of the table, little-endian
and memory-mapped.

Both files carry the same `id`; a pair with different ids is refused. `index.json` is written last.
Until then the offsets of the old `index.json` are kept under a hidden name, so that a complete
index, old or new, exists at any moment.

Files are not trusted: arrays are checked against each other and against the sizes of the shards
before they are used.
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

from wdstrain.errors import ShardError, WdstrainError
from wdstrain.runtime.machine import memory
from wdstrain.shards.index import ARRAYS, Index, Label, Shard, Table
from wdstrain.shards.tar import Walk, samples
from wdstrain.storage.addresses import INDEX_NAME, beside
from wdstrain.storage.files import read_whole, regular, write_whole
from wdstrain.storage.local import open_source, state_of
from wdstrain.storage.remote import is_remote, redacted

BIN_NAME = "index.bin"
_FORMER = f".{BIN_NAME}.former"  # offsets of the old index.json while both files are replaced
_MAGIC = b"WDSTRAIN-INDEX-1\n"
# Errors that reading a file of another format or a damaged one can raise.
_FORMAT_ERRORS = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)


def save_index(index: Index, folder: str) -> None:
    """Write index.bin and then index.json into `folder`, the folder of the shards."""
    head, body = _dump(index.table)
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
            "version": 1,
            "id": head["id"],
            "offsets": BIN_NAME,
            "samples": len(index),
            "fields": list(index.fields),
            "labels": [asdict(label) for label in index.labels],
            "info": index.info,
        },
    }
    _keep_former(folder)
    write_whole(os.path.join(folder, BIN_NAME), _head_line(head) + body)
    write_whole(os.path.join(folder, INDEX_NAME), json_bytes(document, indent=1))
    with suppress(OSError):
        os.unlink(os.path.join(folder, _FORMER))


def json_bytes(document: Any, *, indent: int | None = None) -> bytes:
    """Return a JSON document as UTF-8 bytes that end with a newline.

    File names that are not UTF-8 become escapes, which `json.loads` restores.
    """
    return (json.dumps(document, indent=indent, ensure_ascii=False) + "\n").encode(
        "utf-8", "backslashreplace"
    )


def _keep_former(folder: str) -> None:
    """Give the offsets of the index.json in `folder` a second, hidden name.

    If index.bin belongs to another index.json, the hidden file of an interrupted call is kept.
    """
    offsets, former = os.path.join(folder, BIN_NAME), os.path.join(folder, _FORMER)
    with suppress(OSError, ShardError, ValueError, KeyError, TypeError):  # no index to keep
        _map(
            offsets, read_document(os.path.join(folder, INDEX_NAME))["wdstrain"]["id"], former=None
        )
        with suppress(FileNotFoundError):
            os.unlink(former)
        os.link(offsets, former)


def pack_part(index: Index, extra: dict[str, Any]) -> bytes:
    """Return an index as bytes for `unpack_part`. extra: JSON values stored with it."""
    head, body = _dump(index.table)
    shards = [asdict(shard) | {"path": shard.name} for shard in index.shards]
    return _head_line({**head, "shards": shards, "fields": index.fields, "extra": extra}) + body


def unpack_part(data: bytes, path: str) -> tuple[Index, dict[str, Any]]:
    """Return the index and `extra` that `pack_part` packed into `data`.

    path: of the file with `data`; the shards lie in its folder. Raises ShardError for other data.
    """
    try:
        head, table = _arrays(data, path)
        if (
            blake2b(data[data.find(b"\n", len(_MAGIC)) + 1 :], digest_size=8).hexdigest()
            != head["id"]
        ):
            raise ValueError("its bytes differ from what was written")
        shards = tuple(
            Shard(
                _beside(path, row["path"]),
                _size(row["samples"]),
                _size(row["bytes"]),
                _word(row["split"]),
                _word(row["sha256"]),
                _word(row["tag"]),
            )
            for row in head["shards"]
        )
        index, extra = Index(shards, _fields(head["fields"]), table), dict(head["extra"])
    except _FORMAT_ERRORS as error:
        raise ShardError(
            f"{path} is damaged or not a file of a wdstrain conversion ({type(error).__name__}: "
            f"{error}). Remove it and run the conversion again."
        ) from error
    _check_table(index, path)
    return index, extra


def load(path: str, *, base: str | None = None) -> Index:
    """Return the index in the index.json at `path` and the index.bin beside it.

    base: the folder of the shards, if it is another one. Raises ShardError for files that are
    missing, damaged or not of this package.
    """
    document = read_document(path)
    listed = path
    if base is not None:
        listed = beside(base, INDEX_NAME) if is_remote(base) else os.path.join(base, INDEX_NAME)
    try:
        part = document["wdstrain"]
        index = Index(
            shards=tuple(
                Shard(
                    _beside(listed, row["url"]),
                    _size(row["nsamples"]),
                    _size(row["filesize"]),
                    _word(row["split"] or ""),
                    _word(row["sha256"]),
                )
                for row in document["shardlist"]
            ),
            fields=_fields(part["fields"]),
            table=_map(beside(path, BIN_NAME), part["id"], former=beside(path, _FORMER)),
            labels=labels_of(document),
            info=info_of(document),
        )
    except _FORMAT_ERRORS as error:
        raise _no_index(path, error) from error
    except OSError as error:
        unread = error.filename or path
        raise ShardError(
            f"{unread} cannot be read: {error.strerror}. Check its permissions."
        ) from error
    _check_table(index, path)
    return index


def scan(paths: Iterable[str], failed: list[WdstrainError] | None = None) -> Index:
    """Return an index made from the headers of tar shards, without checksums and labels.

    failed: a list that receives the errors of bad shards, which are then left out; None: the first
    error is raised.
    """
    fields: list[str] = []
    shards, tables, walk = [], [Table.of([], fields)], Walk()
    for path in paths:
        try:
            with open_source(path) as source:
                rows = list(samples(source.read, source.size, _shown(path), walk))
                tables.append(Table.of(rows, fields))
                shards.append(Shard(path, len(rows), source.size, tag=source.version or ""))
        except WdstrainError as error:
            if failed is None:
                raise
            failed.append(error)
    info = {"made": "walked over headers", **({"ignored": walk.ignored} if walk.ignored else {})}
    return Index(tuple(shards), tuple(fields), Table.join(tables), info=info)


def read_document(path: str) -> dict[str, Any]:
    """Return the document of an index.json that wdstrain wrote. Raises ShardError for others."""
    try:
        data = read_whole(path)
        if data is None:
            reason = ""
            if is_remote(path):
                reason = ", or may not be read (the server answered 404, 410 or 403)"
            raise ShardError(f"{_shown(path)} is not there{reason}. Check the address.")
        document: dict[str, Any] = _parsed(data)
        labels_of(document)
        splits_of(document)
        info_of(document)
        return document
    except _FORMAT_ERRORS as error:
        raise _no_index(path, error) from error
    except OSError as error:
        raise ShardError(
            f"{path} cannot be read: {error.strerror}. Check its permissions."
        ) from error


def is_wdstrain_index(path: str) -> bool:
    """Return False if an index.json is another tool's list of shards, without offsets.

    True also for a file that is unreadable or damaged: `load` raises its error.
    """
    try:
        document = _parsed(read_whole(path) or b"")
    except (OSError, ValueError, RecursionError):
        return True
    return not (
        isinstance(document, dict) and "shardlist" in document and "wdstrain" not in document
    )


def _parsed(data: bytes) -> Any:
    """Return a parsed JSON document.

    Raises ValueError for a document whose Python objects could fill memory: they take up to 48
    bytes for each byte of JSON.
    """
    if len(data) > (most := memory() // 128):
        raise ValueError(
            f"it has {len(data)} bytes of JSON; {most} is the limit for this machine's memory"
        )
    return json.loads(data)


def labels_of(document: dict[str, Any]) -> tuple[Label, ...]:
    """Return the labels in an index.json."""
    return tuple(map(_label, document["wdstrain"]["labels"]))


def splits_of(document: dict[str, Any]) -> dict[str, str]:
    """Return the split of each shard in an index.json, by the shard's name."""
    return {_word(row["url"]): _word(row["split"] or "") for row in document["shardlist"]}


def info_of(document: dict[str, Any]) -> dict[str, Any]:
    """Return what an index.json records about how its set was made."""
    return dict(document["wdstrain"]["info"])


def check_sizes(index: Index, *, cut: bool = False) -> Index:
    """Return the index with the current state of every local shard as its `tag`.

    cut: accept shards that are smaller than in the index. Raises ShardError for a missing shard and
    for one of another size.
    """
    return replace(index, shards=tuple(check_size(shard, cut=cut) for shard in index.shards))


def check_size(shard: Shard, *, cut: bool = False) -> Shard:
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
    if size != shard.bytes and not (cut and size < shard.bytes):
        folder = os.path.dirname(shard.path) or "."
        raise ShardError(
            f"{shard.path} has {size} bytes, its index says {shard.bytes}: it was cut or changed. "
            f"Copy or pack it again, or accept it as it is: wdstrain index {folder}"
        )
    return replace(shard, tag=state_of(status))


# --- parts ----------------------------------------------------------------------------------------


def _shown(path: str) -> str:
    """Return a path for messages, without the secrets of an address."""
    return redacted(path) if is_remote(path) else path


def _no_index(path: str, error: Exception) -> ShardError:
    """Return the error for a file that is not an index of this package."""
    if is_remote(path):
        return ShardError(
            f"{redacted(path)} is no index of this package ({type(error).__name__}). Check the address."
        )
    folder = os.path.dirname(path) or "."
    return ShardError(
        f"{path} is no index of this package ({type(error).__name__}: {error}). "
        f"Remove it and make a new index: wdstrain index {folder}"
    )


def _beside(path: str, name: str) -> str:
    """Return the path of the shard `name` beside the index at `path`.

    Raises ValueError for a name with a folder, which could lead to files elsewhere.
    """
    if (
        not isinstance(name, str)
        or os.path.basename(name) != name
        or name in ("", ".", "..")
        or "\0" in name
    ):
        raise ValueError(
            f"its shard {name!r} is not a plain file name; shards lie beside their index"
        )
    os.fsencode(name)  # raises ValueError for characters that no file name can have
    return beside(path, name)


def _label(row: dict[str, Any]) -> Label:
    label = Label(**{**row, "classes": tuple(map(_word, row["classes"]))})
    if label.kind not in ("class", "number", "multi") or not (
        label.column is None or isinstance(label.column, str)
    ):
        raise ValueError(f"its label has the kind {label.kind!r} and the column {label.column!r}")
    return replace(label, name=_word(label.name), field=_word(label.field))


def _fields(names: object) -> tuple[str, ...]:
    if not isinstance(names, list) or len(set(map(_word, names))) < len(names):
        raise ValueError("its fields must be a list of different names")
    return tuple(names)


def _word(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} must be a string")
    return value


def _size(value: object) -> int:
    if not isinstance(value, int) or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r} must be an integer >= 0 and < 2**62")
    return value


def _dump(table: Table) -> tuple[dict[str, Any], bytes]:
    """Return the head of a table (id and array lengths) and the bytes of its arrays."""
    arrays = {
        name: np.ascontiguousarray(getattr(table, name), dtype) for name, dtype in ARRAYS.items()
    }
    body = b"".join(array.tobytes() for array in arrays.values())
    lengths = {name: len(array) for name, array in arrays.items()}
    return {"id": blake2b(body, digest_size=8).hexdigest(), "lengths": lengths}, body


def _head_line(head: dict[str, Any]) -> bytes:
    line = json.dumps(head).encode() + b"\n"
    # Pad to 64 bytes, so that the arrays are aligned in the mapping.
    return _MAGIC + line[:-1] + b" " * (-(len(_MAGIC) + len(line)) % 64) + b"\n"


def _map(path: str, wanted: str, *, former: str | None) -> Table:
    """Return the table in the file at `path`, whose id must be `wanted`.

    former: path of the kept offsets, which are used if the id differs. Raises ValueError for a file
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
    head, table = _arrays(data, path)
    if head["id"] != wanted:
        if former is not None and not is_remote(former) and os.path.exists(former):
            with suppress(OSError, ValueError):
                return _map(former, wanted, former=None)
        raise ValueError(f"{path} belongs to another index.json")
    return table


def _arrays(data: bytes | mmap.mmap, path: str) -> tuple[dict[str, Any], Table]:
    """Return (head, table) of an index.bin. Raises ValueError if its format or size is wrong."""
    end = data.find(b"\n", len(_MAGIC))
    if data[: len(_MAGIC)] != _MAGIC or end < 0:
        raise ValueError(f"{path} does not start with the signature of an index")
    head = _parsed(data[len(_MAGIC) : end])
    arrays, offset = {}, end + 1
    for name, dtype in ARRAYS.items():
        arrays[name] = np.frombuffer(data, dtype, _size(head["lengths"][name]), offset)
        offset += arrays[name].nbytes
    if offset != len(data):
        raise ValueError(f"{path} has {len(data)} bytes; its head gives {offset}")
    return head, Table(**arrays)


def _check_table(index: Index, path: str) -> None:
    """Raise ShardError for a table that would lead outside a shard or an array.

    Numbers from a file are not trusted. Each count is checked before their sum, which may wrap.
    """
    t, n = index.table, len(index.table)
    sound = bool((index.counts <= n).all()) and int(index.counts.sum()) == n
    sound = sound and n == len(t.stop) == len(t.key_first) - 1 == len(t.member_first) - 1
    for firsts, length in ((t.key_first, len(t.keys)), (t.member_first, len(t.member_field))):
        sound = (
            sound and firsts[0] == 0 and firsts[-1] == length and bool((np.diff(firsts) >= 0).all())
        )
    sound = sound and len(t.member_offset) == len(t.member_size) == len(t.member_field)
    sound = sound and len(t.member_crc) in (0, len(t.member_field))
    if sound and n:
        size = np.repeat(np.array([s.bytes for s in index.shards], np.int64), index.counts)
        members = np.diff(t.member_first)
        low, high = np.repeat(t.start, members), np.repeat(t.stop, members)
        sound = bool((t.start >= 0).all() and (t.start < t.stop).all() and (t.stop <= size).all())
        same_shard = np.diff(np.repeat(np.arange(len(index.counts)), index.counts)) == 0
        sound = sound and bool((t.start[1:] >= t.stop[:-1])[same_shard].all())
        sound = sound and bool((t.member_size >= 0).all() and (t.member_offset >= low).all())
        sound = sound and bool((t.member_size <= high - t.member_offset).all())
        sound = sound and bool((t.member_field < len(index.fields)).all())
    if not sound:
        folder = os.path.dirname(path) or "."
        raise ShardError(
            f"{path} is damaged: its offsets do not fit its shards. Make it again: wdstrain index {folder}"
        )
