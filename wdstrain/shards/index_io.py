"""Indexes on disk: written, opened, and made by walking over headers where there is none.

Two files beside the shards. `index.json` is for people and other tools (a superset of the `wids-shard-index-v1` list):
per shard its name, split, samples, bytes and sha256; per set the fields, labels with their classes, and how it was made.
`index.bin` holds the arrays of the table, little-endian, memory-mapped, so that a million samples open in milliseconds.
Both carry one `id`, and a pair that does not belong together is refused. The JSON is written last; until then the offsets
that it speaks of are kept under a hidden name, so that at any moment the old index is there or the new one.

Nothing in a file is trusted: what the arrays say is checked against each other and the shards' sizes before it is used.
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
from wdstrain.storage.local import INDEX_NAME, beside, open_source, read_whole, regular, state_of, write_whole
from wdstrain.storage.remote import is_remote, redacted

BIN_NAME = "index.bin"
_FORMER = f".{BIN_NAME}.former"  # the offsets that index.json still speaks of, while both are replaced
_MAGIC = b"WDSTRAIN-INDEX-1\n"
_NOT_OURS = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)  # what reading anything raises


def save_index(index: Index, folder: str) -> None:
    """Write index.bin and then index.json into the folder of the shards."""
    head, body = _dump(index.table)
    document = {
        "__kind__": "wids-shard-index-v1",
        "wids_version": 1,
        "shardlist": [
            {"url": s.name, "nsamples": s.samples, "filesize": s.bytes, "split": s.split, "sha256": s.sha256}
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
    """A line of JSON, or lines, that anybody can read; names of files that are no UTF-8 are escapes in it, and come back."""
    return (json.dumps(document, indent=indent, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def _keep_former(folder: str) -> None:
    """Give the offsets that an index.json here speaks of a second name; what a kill left under that name may be they already."""
    offsets, former = os.path.join(folder, BIN_NAME), os.path.join(folder, _FORMER)
    with suppress(OSError, ShardError, ValueError, KeyError, TypeError):  # there is no index, or none to keep
        _map(offsets, read_document(os.path.join(folder, INDEX_NAME))["wdstrain"]["id"], former=None)
        with suppress(FileNotFoundError):
            os.unlink(former)
        os.link(offsets, former)


def pack_part(index: Index, extra: dict[str, Any]) -> bytes:
    """An index as one run of bytes, with whatever else is to be remembered of it (JSON-able)."""
    head, body = _dump(index.table)
    shards = [asdict(shard) | {"path": shard.name} for shard in index.shards]
    return _head_line({**head, "shards": shards, "fields": index.fields, "extra": extra}) + body


def unpack_part(data: bytes, path: str) -> tuple[Index, dict[str, Any]]:
    """What `pack_part` packed; shards lie in the folder of `path`. Raises ShardError for anything else."""
    try:
        head, table = _arrays(data, path)
        if blake2b(data[data.find(b"\n", len(_MAGIC)) + 1 :], digest_size=8).hexdigest() != head["id"]:
            raise ValueError("its bytes are not those that were written")
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
    except _NOT_OURS as error:
        raise ShardError(f"{path} was left by no conversion of this package ({type(error).__name__}: {error}).") from error
    _check_table(index, path)
    return index, extra


def load(path: str, *, base: str | None = None) -> Index:
    """Read an index.json and map the offsets beside it. `base`: the folder of the shards, if they lie elsewhere."""
    document = read_document(path)
    try:
        ours = document["wdstrain"]
        index = Index(
            shards=tuple(
                Shard(
                    _beside(
                        path
                        if base is None
                        else beside(base, INDEX_NAME)
                        if is_remote(base)
                        else os.path.join(base, INDEX_NAME),
                        row["url"],
                    ),
                    _size(row["nsamples"]),
                    _size(row["filesize"]),
                    _word(row["split"] or ""),
                    _word(row["sha256"]),
                )
                for row in document["shardlist"]
            ),
            fields=_fields(ours["fields"]),
            table=_map(beside(path, BIN_NAME), ours["id"], former=beside(path, _FORMER)),
            labels=labels_of(document),
            info=info_of(document),
        )
    except _NOT_OURS as error:
        raise _no_index(path, error) from error
    except OSError as error:
        raise ShardError(f"{error.filename or path} cannot be read: {error.strerror}.") from error
    _check_table(index, path)
    return index


def scan(paths: Iterable[str], failed: list[WdstrainError] | None = None) -> Index:
    """An index made by walking over the headers of tars; nothing is known of checksums and labels.

    failed: takes what is wrong with shards, which are then left away; None: the first that is wrong is raised.
    """
    fields: list[str] = []
    shards, tables, walk = [], [Table.of([], fields)], Walk()
    for path in paths:
        try:
            with open_source(path) as source:
                found = list(samples(source.read, source.size, _shown(path), walk))
                tables.append(Table.of(found, fields))
                shards.append(Shard(path, len(found), source.size, tag=source.version or ""))
        except WdstrainError as error:
            if failed is None:
                raise
            failed.append(error)
    info = {"made": "walked over headers", **({"ignored": walk.ignored} if walk.ignored else {})}
    return Index(tuple(shards), tuple(fields), Table.join(tables), info=info)


def read_document(path: str) -> dict[str, Any]:
    """An index.json as it is, known to have our part. Raises ShardError for another."""
    try:
        data = read_whole(path)
        if data is None:
            more = ", or may not be read (the server answered 404, 410 or 403)" if is_remote(path) else ""
            raise ShardError(f"{_shown(path)} is not there{more}. Check the address.")
        document: dict[str, Any] = _parsed(data)
        labels_of(document)
        splits_of(document)
        info_of(document)
        return document
    except _NOT_OURS as error:
        raise _no_index(path, error) from error
    except OSError as error:
        raise ShardError(f"{path} cannot be read: {error.strerror}.") from error


def is_ours(path: str) -> bool:
    """Whether an index.json says where its offsets are; False for another tool's list of shards."""
    try:
        document = _parsed(read_whole(path) or b"")
    except (OSError, ValueError, RecursionError):
        return True  # unreadable or damaged: whoever reads it says so
    return not (isinstance(document, dict) and "shardlist" in document and "wdstrain" not in document)


def _parsed(data: bytes) -> Any:
    """JSON. Raises ValueError for so much of it that Python's objects, up to 48 bytes for each of its own, would fill memory."""
    if len(data) > (most := memory() // 128):
        raise ValueError(
            f"{len(data)} bytes of JSON, and {most} are the most that this machine's memory is asked to take apart"
        )
    return json.loads(data)


def labels_of(document: dict[str, Any]) -> tuple[Label, ...]:
    """The labels that an index.json speaks of."""
    return tuple(map(_label, document["wdstrain"]["labels"]))


def splits_of(document: dict[str, Any]) -> dict[str, str]:
    """The split of each shard that an index.json speaks of, by the shard's name."""
    return {_word(row["url"]): _word(row["split"] or "") for row in document["shardlist"]}


def info_of(document: dict[str, Any]) -> dict[str, Any]:
    """What an index.json says of how its set was made."""
    return dict(document["wdstrain"]["info"])


def check_sizes(index: Index, *, cut: bool = False) -> Index:
    """An index of shards that are as they are found now. Raises ShardError for one that is not there or has another size than
    its index says. cut: it may be smaller."""
    return replace(index, shards=tuple(check_size(shard, cut=cut) for shard in index.shards))


def check_size(shard: Shard, *, cut: bool = False) -> Shard:
    """The same for one shard; that of a server is compared when its first byte comes."""
    if is_remote(shard.path):
        return shard
    try:
        found = os.stat(shard.path)
    except OSError as error:
        raise ShardError(f"{shard.path} is in the index but cannot be found: {error.strerror}. Copy it again.") from error
    size = found.st_size
    if size != shard.bytes and not (cut and size < shard.bytes):
        folder = os.path.dirname(shard.path) or "."
        raise ShardError(
            f"{shard.path} has {size} bytes, its index says {shard.bytes}: it was cut or changed. Copy or pack it again, "
            f"or accept it as it is: wdstrain index {folder}"
        )
    return replace(shard, tag=state_of(found))


# --- parts -----------------------------------------------------------------------------------------------------------


def _shown(path: str) -> str:
    return redacted(path) if is_remote(path) else path


def _no_index(path: str, error: Exception) -> ShardError:
    if is_remote(path):
        return ShardError(f"{redacted(path)} is no index of this package ({type(error).__name__}). Check the address.")
    folder = os.path.dirname(path) or "."
    what = f"{type(error).__name__}: {error}"
    return ShardError(f"{path} is no index of this package ({what}). Remove it and make one: wdstrain index {folder}")


def _beside(path: str, name: str) -> str:
    if not isinstance(name, str) or os.path.basename(name) != name or name in ("", ".", "..") or "\0" in name:
        raise ValueError(f"a shard named {name!r}; shards lie beside their index")
    os.fsencode(name)  # raises for what no file can be called
    return beside(path, name)


def _label(row: dict[str, Any]) -> Label:
    label = Label(**{**row, "classes": tuple(map(_word, row["classes"]))})
    if label.kind not in ("class", "number", "multi") or not (label.column is None or isinstance(label.column, str)):
        raise ValueError(f"a label of the kind {label.kind!r} in the column {label.column!r}")
    return replace(label, name=_word(label.name), field=_word(label.field))


def _fields(names: object) -> tuple[str, ...]:
    if not isinstance(names, list) or len(set(map(_word, names))) < len(names):
        raise ValueError("its fields are no list of different names")
    return tuple(names)


def _word(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value


def _size(value: object) -> int:
    if not isinstance(value, int) or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r} is no size")
    return value


def _dump(table: Table) -> tuple[dict[str, Any], bytes]:
    """What is said of the arrays of a table before them, and their bytes."""
    arrays = {name: np.ascontiguousarray(getattr(table, name), dtype) for name, dtype in ARRAYS.items()}
    body = b"".join(array.tobytes() for array in arrays.values())
    lengths = {name: len(array) for name, array in arrays.items()}
    return {"id": blake2b(body, digest_size=8).hexdigest(), "lengths": lengths}, body


def _head_line(head: dict[str, Any]) -> bytes:
    line = json.dumps(head).encode() + b"\n"
    return _MAGIC + line[:-1] + b" " * (-(len(_MAGIC) + len(line)) % 64) + b"\n"  # arrays start aligned for the mapping


def _map(path: str, wanted: str, *, former: str | None) -> Table:
    """The table in a file, if it belongs to the index.json with this id, or in the one that is kept while both are replaced."""
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
    end = data.find(b"\n", len(_MAGIC))
    if data[: len(_MAGIC)] != _MAGIC or end < 0:
        raise ValueError(f"{path} does not start as an index")
    head = _parsed(data[len(_MAGIC) : end])
    arrays, offset = {}, end + 1
    for name, dtype in ARRAYS.items():
        arrays[name] = np.frombuffer(data, dtype, _size(head["lengths"][name]), offset)
        offset += arrays[name].nbytes
    if offset != len(data):
        raise ValueError(f"{path} has {len(data)} bytes where {offset} were promised")
    return head, Table(**arrays)


def _check_table(index: Index, path: str) -> None:
    """Refuse offsets that would read outside a shard or an array; numbers from a file are not trusted."""
    t, n = index.table, len(index.table)
    sound = bool((index.counts <= n).all()) and int(index.counts.sum()) == n  # each: sums of larger ones wrap around
    sound = sound and n == len(t.stop) == len(t.key_first) - 1 == len(t.member_first) - 1
    for firsts, length in ((t.key_first, len(t.keys)), (t.member_first, len(t.member_field))):
        sound = sound and firsts[0] == 0 and firsts[-1] == length and bool((np.diff(firsts) >= 0).all())
    sound = sound and len(t.member_offset) == len(t.member_size) == len(t.member_field)
    sound = sound and len(t.member_crc) in (0, len(t.member_field))
    if sound and n:
        size = np.repeat(np.array([s.bytes for s in index.shards], np.int64), index.counts)
        members = np.diff(t.member_first)
        low, high = np.repeat(t.start, members), np.repeat(t.stop, members)
        sound = bool((t.start >= 0).all() and (t.start < t.stop).all() and (t.stop <= size).all())
        follows = np.diff(np.repeat(np.arange(len(index.counts)), index.counts)) == 0  # one more of the same shard
        sound = sound and bool((t.start[1:] >= t.stop[:-1])[follows].all())
        sound = sound and bool((t.member_size >= 0).all() and (t.member_offset >= low).all())
        sound = sound and bool((t.member_size <= high - t.member_offset).all())
        sound = sound and bool((t.member_field < len(index.fields)).all())
    if not sound:
        folder = os.path.dirname(path) or "."
        raise ShardError(
            f"{path} says what cannot be true of its shards; it is damaged. Make it again: wdstrain index {folder}"
        )
