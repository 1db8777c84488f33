"""What the two files of an index hold, and the check of all values in them.

index.json is a document: shards, fields, labels, columns, and how the set was made. index.arrow is a
table with one row per sample in shard order: key, shard, offset, size; for each field NAME.offset,
NAME.size and NAME.crc32 (null if the sample lacks the field; crc32 is also null if no data was
read); then one column per label or scalar.

Files come from anywhere: each value is checked before it is used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from wdstrain.errors import ShardError
from wdstrain.report.printing import printable
from wdstrain.runtime.machine import memory
from wdstrain.shards.columns import Column
from wdstrain.shards.kinds import KINDS, ColumnInfo
from wdstrain.shards.offsets import PARTS, Bools, Ints, Offsets, firsts
from wdstrain.storage.addresses import beside
from wdstrain.storage.files import read_whole
from wdstrain.storage.remote import is_remote, name_of, redacted, shown_path

VERSION = 2  # of the format; version 1 had offsets in a file index.arrow

# Errors that reading a file of another format or a damaged one can raise.
FORMAT_ERRORS = (
    *(ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError),
    *(pa.ArrowException, IndexError),
)
Info = TypeVar("Info", bound=ColumnInfo)

_BASE = ("key", "shard", "offset", "size")
_SHARD = pa.dictionary(pa.int32(), pa.string())


@dataclass(frozen=True)
class Shard:
    """One tar shard: address, number of samples, size in bytes and split.

    sha256: of its bytes; empty if only its headers were read. tag: its state when it was last
    examined: the server's ETag (empty if there is none), or `storage.local.state_of` for a file.
    """

    path: str
    samples: int
    bytes: int
    split: str = ""
    sha256: str = ""
    tag: str = field(default="", compare=False)

    @property
    def name(self) -> str:
        return name_of(self.path)

    @property
    def shown(self) -> str:
        """The path for messages: without secrets in an address, and with printable characters."""
        return printable(shown_path(self.path))


@dataclass(frozen=True)
class Document:
    """The contents of an index.json; identity: of the index.arrow that belongs to it.

    shards: with the paths beside the file. columns: without classes. info: how the set was made.
    """

    identity: str
    shards: tuple[Shard, ...]
    fields: tuple[str, ...]
    labels: tuple[ColumnInfo, ...]
    columns: tuple[ColumnInfo, ...]
    info: dict[str, Any]
    version: int = VERSION

    @classmethod
    def of(cls, document: Any, path: str) -> Document:
        """Return the contents of a JSON document at `path`. Raises one of FORMAT_ERRORS."""
        own = document["wdstrain"]
        columns = (
            ColumnInfo(row["name"], row["kind"], row["field"], row["entry"], is_label=False)
            for row in own["columns"]
        )
        made = cls(
            identity=_word(own["id"]),
            shards=tuple(_shard(row, path) for row in document["shardlist"]),
            fields=tuple(map(_word, own["fields"])),
            labels=tuple(map(_checked, map(ColumnInfo.of_row, own["labels"]))),
            columns=tuple(map(_checked, columns)),
            info=dict(own["info"]),
            version=own["version"],
        )
        if len(set(made.fields)) < len(made.fields):
            raise ValueError("its fields must be different names")
        return made


def read_document(path: str) -> Document:
    """Return the contents of an index.json that wdstrain wrote. Raises ShardError for others."""
    document = find_document(path)
    if document is None:
        reason, advice = ", or another program wrote it", "Check the address."
        if is_remote(path):
            reason += ", or may not be read (the server answered 404, 410 or 403)"
            advice += " Shards without an index are named with braces: train-{000000..000041}.tar"
        raise ShardError(f"{shown_path(path)} is not there{reason}. {advice}")
    return document


def find_document(path: str) -> Document | None:
    """Return the contents of an index.json.

    None if there is no file, or if it is another tool's list of shards, without offsets. Raises
    ShardError for a file that is damaged or cannot be read.
    """
    with refusing(path):
        data = read_whole(path)
        if data is None:
            return None
        document = parsed(data)
        is_foreign = "shardlist" in document and "wdstrain" not in document
        return None if is_foreign else Document.of(document, path)


def parsed(data: bytes) -> Any:
    """Return a parsed JSON document.

    Raises ValueError for a document whose Python objects could fill memory: they take up to 48
    bytes for each byte of JSON.
    """
    if len(data) > (most := memory() // 128):
        raise ValueError(
            f"it has {len(data)} bytes of JSON; {most} is the limit for this machine's memory"
        )
    return json.loads(data)


@contextmanager
def refusing(path: str) -> Iterator[None]:
    """Raise ShardError for errors of reading a file of an index."""
    try:
        yield
    except FORMAT_ERRORS as error:
        reason = (str(error).splitlines() or [""])[0][:200]
        folder = os.path.dirname(path) or "."
        advice = f"Remove it and make a new index: wdstrain index {folder}"
        if is_remote(path):
            path, advice = redacted(path), "Check the address."
        raise ShardError(
            f"{path} is not an index of this package ({type(error).__name__}: {reason}). {advice}"
        ) from error
    except OSError as error:
        raise ShardError(
            f"{error.filename or path} cannot be read: {error.strerror}. Check its permissions."
        ) from error


# --- table ----------------------------------------------------------------------------------------


def to_batch(shards: Sequence[Shard], offsets: Offsets) -> pa.RecordBatch:
    """Return the table of an index, as one record batch."""
    key, *others = offsets.rows.columns
    with suppress(pa.ArrowInvalid):  # some key is not UTF-8, and the column stays binary
        key = key.cast(pa.large_string())
    return pa.RecordBatch.from_arrays(
        [key, shard_words(shards, "name"), *others], names=_names(offsets.fields, offsets.infos)
    )


def named_columns(fields: Sequence[str], columns: Iterable[Info]) -> dict[str, Info]:
    """Return the label columns by their names in the table, in order. fields: of the samples.

    A name that is taken gets a prefix: `size` becomes `label.size`.
    """
    taken, named = {*_BASE, *_part_names(fields)}, dict[str, Info]()
    for column in columns:
        name = column.name
        while name in taken or name in named:
            name = f"label.{name}"
        named[name] = column
    return named


def from_batch(
    batch: pa.RecordBatch,
    shards: Sequence[Shard],
    fields: Sequence[str],
    infos: Sequence[ColumnInfo],
) -> Offsets:
    """Return the rows of an index file.

    infos: of the label columns, as index.json lists them. Raises ValueError for rows that do not
    fit the shards, or that lead outside a shard.
    """
    batch.validate(full=True)
    key, kinds = pa.large_string(), [KINDS[info.kind].arrow for info in infos]
    if batch.schema.types[:1] == [pa.large_binary()]:
        key = pa.large_binary()
    types = [key, _SHARD, pa.int64(), pa.int64(), *list(PARTS.values()) * len(fields), *kinds]
    if (batch.schema.names, batch.schema.types) != (_names(fields, infos), types):
        raise ValueError("its columns are not the ones of index.json")
    if any(column.null_count for column in batch.columns[: len(_BASE)]):
        raise ValueError("a column of its samples has empty cells")
    keys, _, *others = batch.columns  # `_check_extents` tells samples of other shards
    if sum(shard.samples for shard in shards) != len(batch):
        raise ValueError("its number of samples is not the one of index.json")
    last = len(others) - len(infos)
    columns = [Column.of(*pair) for pair in zip(infos, others[last:], strict=True)]
    arrays = [keys.cast(pa.large_binary()), *others[:last]]
    offsets = Offsets.of_arrays(fields, arrays, columns)
    _check_extents(offsets, shards)
    return offsets


def shard_words(shards: Sequence[Shard], attribute: str) -> pa.DictionaryArray:
    """Return the name, or another attribute, of the shard of each sample."""
    words = pa.array([utf8_text(getattr(shard, attribute)) for shard in shards], pa.string())
    counts = [shard.samples for shard in shards]
    places = np.repeat(np.arange(len(shards), dtype=np.int32), counts)
    return words.dictionary_encode().take(pa.array(places))


def utf8_text(text: str) -> str:
    """Return a name as Arrow can hold it: bytes that are not UTF-8 are written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


# --- parts ----------------------------------------------------------------------------------------


def _shard(row: dict[str, Any], path: str) -> Shard:
    """Return a shard beside the index at `path`.

    Raises ValueError for a name with a folder, which could lead to files elsewhere.
    """
    name, samples, size = _word(row["url"]), row["nsamples"], row["filesize"]
    if os.path.basename(name) != name or name in ("", ".", "..") or "\0" in name:
        raise ValueError(
            f"its shard {name!r} is not a plain file name; shards lie beside their index"
        )
    os.fsencode(name)  # raises ValueError for characters that no file name can have
    for number in (samples, size):
        if not isinstance(number, int) or not 0 <= number < 1 << 62:
            raise ValueError(f"{number!r} must be an integer >= 0 and < 2**62")
    return Shard(beside(path, name), samples, size, _word(row["split"] or ""), _word(row["sha256"]))


def _checked(info: ColumnInfo) -> ColumnInfo:
    """Return a label or column. Raises ValueError for one that cannot be."""
    kind = KINDS[info.kind]
    words = [info.name, info.field, *([] if info.entry is None else [info.entry])]
    is_known = kind.can_be_label if info.is_label else kind.arrow is not None
    if not is_known or not all(isinstance(word, str) for word in words):
        raise ValueError(f"its column {words} has the kind {info.kind!r}")
    return info


def _word(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} must be a string")
    return value


def _names(fields: Sequence[str], infos: Iterable[ColumnInfo]) -> list[str]:
    """Return the names of all columns of the table."""
    return [*_BASE, *_part_names(fields), *named_columns(fields, infos)]


def _part_names(fields: Iterable[str]) -> list[str]:
    """Return the names of the columns of fields."""
    return [f"{utf8_text(name)}.{part}" for name in fields for part in PARTS]


def _check_extents(offsets: Offsets, shards: Sequence[Shard]) -> None:
    """Raise ValueError for numbers that lead outside a shard, and for samples that overlap."""
    for offset, size, _ in offsets.extents.values():
        if not offset.is_valid().equals(size.is_valid()):
            raise ValueError("a field has an offset without a size")
    edges = firsts([shard.samples for shard in shards]).tolist()
    for shard, (first, stop) in zip(shards, pairwise(edges), strict=True):
        own = slice(first, stop)
        low, extent = offsets.start[own], offsets.size[own]
        high = low + extent
        if not (_lies_in(low, extent, 0, shard.bytes) & (extent > 0)).all():
            raise ValueError("a sample lies outside its shard")
        if (low[1:] < high[:-1]).any():
            raise ValueError("its samples overlap or are not in the order of their shard")
        for start, length, _, has in offsets.views:
            if not (_lies_in(start[own], length[own], low, high) | ~has[own]).all():
                raise ValueError("a field lies outside its sample")


def _lies_in(offset: Ints, size: Ints, low: Ints | int, high: Ints | int) -> Bools:
    """Return whether [offset, offset + size) lies in [low, high), where low >= 0. Sums may wrap."""
    return (offset >= low) & (size >= 0) & (size <= high - offset)
