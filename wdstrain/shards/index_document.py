"""The document index.json: its contents, and the check of all values in it.

Files come from anywhere, so each value is checked before it is used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from wdstrain.errors import ShardError
from wdstrain.runtime.machine import memory
from wdstrain.shards.index_table import Shard
from wdstrain.shards.kinds import KINDS, ColumnInfo
from wdstrain.storage.addresses import beside
from wdstrain.storage.files import read_whole
from wdstrain.storage.remote import is_remote, redacted, shown_path

VERSION = 2  # of the format; version 1 had offsets in a file index.arrow

# Errors that reading a file of another format or a damaged one can raise.
FORMAT_ERRORS = (
    *(ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError),
    *(pa.ArrowException, IndexError),
)


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
