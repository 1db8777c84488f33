"""The document index.json: reading it, and checking the values in it.

Files come from anywhere, so each value is checked before it is used.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pyarrow as pa

from wdstrain.errors import ShardError
from wdstrain.runtime.machine import memory
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


def read_document(path: str) -> dict[str, Any]:
    """Return the document of an index.json that wdstrain wrote. Raises ShardError for others."""
    document = find_document(path)
    if document is None:
        reason, advice = ", or another program wrote it", "Check the address."
        if is_remote(path):
            reason += ", or may not be read (the server answered 404, 410 or 403)"
            advice += " Shards without an index are named with braces: train-{000000..000041}.tar"
        raise ShardError(f"{shown_path(path)} is not there{reason}. {advice}")
    return document


def find_document(path: str) -> dict[str, Any] | None:
    """Return the document of an index.json.

    None if there is no file, or if it is another tool's list of shards, without offsets. Raises
    ShardError for a file that is damaged or cannot be read.
    """
    try:
        data = read_whole(path)
        if data is None:
            return None
        document = parsed(data)
        if "shardlist" in document and "wdstrain" not in document:
            return None
        labels_of(document)
        splits_of(document)
        info_of(document)
        return dict(document)
    except FORMAT_ERRORS as error:
        raise no_index(path, error) from error
    except OSError as error:
        raise ShardError(
            f"{path} cannot be read: {error.strerror}. Check its permissions."
        ) from error


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


def labels_of(document: dict[str, Any]) -> tuple[ColumnInfo, ...]:
    """Return the labels in an index.json."""
    return tuple(map(_label, document["wdstrain"]["labels"]))


def splits_of(document: dict[str, Any]) -> dict[str, str]:
    """Return the split of each shard in an index.json, by the shard's name."""
    return {word(row["url"]): word(row["split"] or "") for row in document["shardlist"]}


def info_of(document: dict[str, Any]) -> dict[str, Any]:
    """Return what an index.json records about how its set was made."""
    return dict(document["wdstrain"]["info"])


def no_index(path: str, error: Exception) -> ShardError:
    """Return the error for a file that is not an index of this package."""
    if is_remote(path):
        return ShardError(
            f"{redacted(path)} is not an index of this package ({type(error).__name__}: "
            f"{first_line(error)}). Check the address."
        )
    folder = os.path.dirname(path) or "."
    return ShardError(
        f"{path} is not an index of this package ({type(error).__name__}: {first_line(error)}). "
        f"Remove it and make a new index: wdstrain index {folder}"
    )


def shard_beside(path: str, name: str) -> str:
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


def _label(row: dict[str, Any]) -> ColumnInfo:
    label = ColumnInfo.of_row(row)
    word(label.name), word(label.field)
    known = label.kind in KINDS and KINDS[label.kind].can_be_label
    if not known or not (label.entry is None or isinstance(label.entry, str)):
        raise ValueError(f"its label has the kind {label.kind!r} and the column {label.entry!r}")
    return label


def fields_of(names: object) -> tuple[str, ...]:
    if not isinstance(names, list) or len(set(map(word, names))) < len(names):
        raise ValueError("its fields must be a list of different names")
    return tuple(names)


def word(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} must be a string")
    return value


def size(value: object) -> int:
    if not isinstance(value, int) or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r} must be an integer >= 0 and < 2**62")
    return value


def described_columns(rows: object) -> list[dict[str, Any]]:
    """Return the list of label columns in an index.json, checked."""
    if not isinstance(rows, list):
        raise ValueError("its columns must be a list")
    for row in rows:
        word(row["name"]), word(row["field"])
        has_type = row["kind"] in KINDS and KINDS[row["kind"]].arrow is not None
        if not has_type or not (row["entry"] is None or isinstance(row["entry"], str)):
            raise ValueError(f"its column {row['name']!r} has the kind {row['kind']!r}")
    return rows


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:200]
